"""The registration of the ops: opcheck, fake against real outputs, torch.compile, devices."""

import shutil

import pytest
import torch

import flash_cuda
from flash_cuda.kernel_names import gradient_kernel
from tests.cases import CAUSAL, DEVICES, FEW, FULL, Case
from tests.conftest import gradients_of, make_inputs

FWD = torch.ops.flash_cuda.fwd.default
BWD = torch.ops.flash_cuda.bwd.default
BACKENDS = ["aot_eager", "inductor"]
OPCHECK_CASES = [
    Case(17, 33, 4, 2, 32, *CAUSAL, torch.float16),
    Case(33, 17, 2, 2, 59, 3, 2, torch.bfloat16),
    Case(0, 17, 2, 2, 64, *FULL, torch.float16),
]


def op_options(case):
    return {**case.window, "scale": 0.3, "kernel_name": "auto"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", OPCHECK_CASES, ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_fwd(device, case, requires_grad):
    q, k, v = (t.requires_grad_(requires_grad) for t in make_inputs(case, device)[:3])
    torch.library.opcheck(FWD, (q, k, v), op_options(case), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", OPCHECK_CASES, ids=str)
@pytest.mark.parametrize("options", [{}, {"need_dk": False, "deterministic": True}], ids=str)
def test_opcheck_bwd(device, case, options):
    q, k, v, dout, dlse = make_inputs(case, device)
    out, lse = FWD(q, k, v, **op_options(case))
    options = {**op_options(case), **options}
    torch.library.opcheck(BWD, (dout, q, k, v, out, lse, dlse), options, atol=1e-2, rtol=1e-2)


def _layout(t):
    return t.shape, t.stride(), t.dtype, t.device


@pytest.mark.parametrize("device, kernel, case", FEW)
@pytest.mark.parametrize("transposed", [False, True])
def test_fake_outputs_are_as_real_ones(device, kernel, case, transposed):
    """Shape, strides and dtype, also for head dims that are padded inside and transposed inputs."""
    q, k, v, dout, dlse = make_inputs(case, device)
    if transposed:
        q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, dout))
    forward = {**case.window, "kernel_name": kernel}
    backward = {**case.window, "kernel_name": gradient_kernel(kernel), "need_dv": False}

    def both(q, k, v, dout, dlse):
        out, lse = FWD(q, k, v, **forward)
        return out, lse, *BWD(dout, q, k, v, out, lse, dlse, **backward)

    real = both(q, k, v, dout, dlse)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = both(*map(mode.from_tensor, (q, k, v, dout, dlse)))
    assert list(map(_layout, fake)) == list(map(_layout, real))


def test_meta():
    q = torch.empty(2, 5, 4, 64, device="meta", dtype=torch.float16)
    out, lse = flash_cuda.attention(q, q, q, causal=True, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 5) and lse.dtype == torch.float32


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "inductor" and shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", ["attention", "deterministic", "fwd", "drop-in"])
def test_compile(device, backend, path):
    case = Case(33, 65, 4, 2, 59, *CAUSAL, torch.bfloat16)
    q, k, v, dout, dlse = make_inputs(case, device)

    def function(q, k, v):
        if path == "fwd":
            return flash_cuda.fwd(q, k, v, window_right=0)
        if path == "drop-in":
            return flash_cuda.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]
        deterministic = path == "deterministic"
        return flash_cuda.attention(
            q, k, v, causal=True, deterministic=deterministic, return_lse=True
        )

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for actual, expected in (
        (compiled(q, k, v), function(q, k, v)),
        (gradients_of(compiled, q, k, v, dout, dlse), gradients_of(function, q, k, v, dout, dlse)),
    ):
        for a, e in zip(actual, expected, strict=True):
            assert a.stride() == e.stride()
            torch.testing.assert_close(a, e, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_compile_without_grad_under_autocast(device):
    q, k, v, _, _ = make_inputs(Case(33, 65, 4, 2, 64, *CAUSAL, torch.float32), device)
    torch._dynamo.reset()
    compiled = torch.compile(flash_cuda.attention, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(compiled(q, k, v), flash_cuda.attention(q, k, v))


@pytest.mark.parametrize("device", DEVICES)
def test_compile_with_dynamic_lengths(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        flash_cuda.attention, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for sq in (17, 33, 65):
        q, k, v, _, _ = make_inputs(Case(sq, 2 * sq, 4, 2, 32, *CAUSAL, torch.bfloat16), device)
        actual = compiled(q, k, v, causal=True)
        assert torch.equal(actual, flash_cuda.attention(q, k, v, causal=True))


@pytest.mark.parametrize("device", DEVICES)
def test_export(device):
    q, k, v, _, _ = make_inputs(Case(17, 33, 4, 2, 32, *CAUSAL, torch.bfloat16), device)

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_cuda.attention(q, k, v, causal=True)

    program = torch.export.export(Module(), (q, k, v))
    assert any("flash_cuda.fwd" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(q, k, v), Module()(q, k, v))


def test_names():
    assert set(flash_cuda.__all__) <= set(dir(flash_cuda))
    assert isinstance(flash_cuda.__version__, str)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", ["auto", "v2"])
def test_vmap_keeps_the_gradients(device, kernel):
    """Of tensors outside too: inside vmap no tensor says that it requires gradients."""
    if device == "cpu" and kernel != "auto":
        pytest.skip("runs on CUDA tensors")
    case = Case(17, 33, 4, 2, 32, *CAUSAL, torch.float16)
    stacks = [torch.stack([t, 2 * t]) for t in make_inputs(case, device)[:3]]

    def loss(q, k, v):
        out, lse = flash_cuda.attention(
            q, k, v, causal=True, deterministic=True, kernel=kernel, return_lse=True
        )
        return out.float().square().sum() + lse.sin().sum() + (q.float() * out.float()).sum()

    def total(run):
        leaves = [t.detach().requires_grad_() for t in stacks]
        run(*leaves).sum().backward()
        return [leaf.grad for leaf in leaves]

    mine = total(torch.vmap(loss))
    theirs = total(lambda *t: torch.stack([loss(*sample) for sample in zip(*t, strict=True)]))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    # An input that the samples share, and none that requires gradients.
    q, k, v = (t[0] for t in stacks)
    shared = torch.vmap(lambda q: flash_cuda.attention(q, k, v, kernel=kernel))(stacks[0])
    assert torch.equal(shared[0], flash_cuda.attention(q, k, v, kernel=kernel))


def test_derivatives_that_would_be_lost_are_refused():
    q = torch.randn(1, 4, 1, 8)
    out, lse = flash_cuda.fwd(q, q, q)

    def backward(q, k, v):
        return flash_cuda.bwd(out, q, k, v, out, lse)[0]

    for function in (flash_cuda.attention, lambda *t: flash_cuda.fwd(*t)[0], backward):
        with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
            torch.func.jvp(lambda t, f=function: f(t, q, q), (q,), (q,))
        with pytest.raises(NotImplementedError, match="gradient transforms of torch.func"):
            torch.func.grad(lambda t, f=function: f(t, q, q).sum())(q)
        with pytest.raises(NotImplementedError, match="gradient transforms of torch.func"):
            torch.func.grad(lambda t, f=function: torch.vmap(f)(t, t, t).sum())(q[None])
