"""The backward: dq, dk, dv through out and lse against float64, subsets, strides, repeats."""

import pytest
import torch

import flash_cuda
from flash_cuda import kernel_names
from flash_cuda.reference import naive
from tests.cases import (
    BACKWARD,
    CAUSAL,
    DEVICES,
    FEW,
    FEW_BACKWARD,
    FEW_CASES,
    FULL,
    ISOLATION_BACKWARD,
    TILE_HEAD_DIMS,
    Case,
    with_kernels,
)
from tests.conftest import close_enough, gradients_of, make_inputs, poison, reference_gradients

NAMES = ("dq", "dk", "dv")
REPEATS = [
    Case(257, 513, 4, heads_k, head_dim, *CAUSAL, torch.bfloat16)
    for head_dim in TILE_HEAD_DIMS
    for heads_k in (4, 1)
]


def gradients(case, kernel, q, k, v, dout, dlse=None, **options):
    """(dq, dk, dv) of the op itself, from its own forward."""
    options |= case.window
    names = ("window_left", "window_right", "scale")
    forward = {name: options[name] for name in names if name in options}
    out, lse = flash_cuda.fwd(q, k, v, kernel=kernel, **forward)
    poison(q.device.type)
    kernel = kernel_names.gradient_kernel(kernel)
    return flash_cuda.bwd(dout, q, k, v, out, lse, dlse=dlse, kernel=kernel, **options)


def check(actual, exact, baseline):
    for name, a, e, b in zip(NAMES, actual, exact, baseline, strict=True):
        close_enough(a, e, b, name)


@pytest.mark.parametrize("device, kernel, case", BACKWARD)
def test_gradients(device, kernel, case):
    q, k, v, dout, dlse = make_inputs(case, device)
    actual = gradients(case, kernel, q, k, v, dout, dlse)
    check(actual, *reference_gradients(q, k, v, dout, dlse, **case.window))
    for gradient, tensor in zip(actual, (q, k, v), strict=True):
        assert gradient.dtype == tensor.dtype and gradient.is_contiguous()


@pytest.mark.parametrize("device, kernel, case", FEW)
@pytest.mark.parametrize("deterministic", [False, True])
def test_autograd(device, kernel, case, deterministic):
    """flash_cuda.attention, the raw op and the drop-in agree with one another and with float64."""
    q, k, v, dout, _ = make_inputs(case, device)
    window = (case.left, case.right)

    def attention(q, k, v):
        options = {"window": window, "deterministic": deterministic, "kernel": kernel}
        return flash_cuda.attention(q, k, v, return_lse=True, **options)

    def fwd(q, k, v):
        return flash_cuda.fwd(q, k, v, kernel=kernel, **case.window)

    def drop_in(q, k, v):
        options = {"window_size": window, "deterministic": deterministic}
        return flash_cuda.flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]

    exact, baseline = reference_gradients(q, k, v, dout, **case.window)
    for function in (attention, fwd, drop_in):
        check(gradients_of(function, q, k, v, dout), exact, baseline)


@pytest.mark.parametrize("device, kernel, case", FEW)
def test_lse_alone(device, kernel, case):
    """A loss of lse only: dq and dk follow, dv is zero; its gradient may have stride 0."""
    q, k, v, dout, _ = make_inputs(case, device)

    def attention(q, k, v):
        window = (case.left, case.right)
        return flash_cuda.attention(q, k, v, window=window, kernel=kernel, return_lse=True)

    dlse = torch.full((), 0.5, device=device).expand(case.batch, case.heads, case.sq)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    actual = torch.autograd.grad(attention(*inputs)[1], inputs, dlse, allow_unused=True)
    exact, baseline = reference_gradients(q, k, v, torch.zeros_like(dout), dlse, **case.window)
    check(actual, exact, baseline)
    assert (actual[2] == 0).all()


def test_hopper_has_the_gradients_of_auto():
    """Its backward serves fewer head dims; what bwd refuses must not reach it through autograd."""
    q, k, v = (
        torch.empty(1, 3, 2, 192, device="meta", dtype=torch.float16, requires_grad=True)
        for _ in "qkv"
    )
    for out in (
        flash_cuda.attention(q, k, v, kernel="hopper"),
        flash_cuda.fwd(q, k, v, kernel="hopper")[0],
    ):
        gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        assert [g.shape for g in gradients] == [q.shape] * 3


def test_gradcheck():
    case = Case(5, 7, 2, 1, 3, 2, 1, torch.float64, batch=1)
    inputs = [t.requires_grad_() for t in make_inputs(case, "cpu")[:3]]
    for function in (
        lambda q, k, v: flash_cuda.attention(q, k, v, window=(2, 1), return_lse=True),
        lambda q, k, v: flash_cuda.fwd(q, k, v, window_left=2, window_right=1),
    ):
        assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("device, kernel, case", FEW_BACKWARD)
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)])
def test_subsets(device, kernel, case, wanted):
    q, k, v, dout, dlse = make_inputs(case, device)
    options = {"deterministic": True}
    full = gradients(case, kernel, q, k, v, dout, dlse, **options)
    needs = dict(zip(("need_dq", "need_dk", "need_dv"), map(bool, wanted), strict=True))
    some = gradients(case, kernel, q, k, v, dout, dlse, **options, **needs)
    for actual, expected, need in zip(some, full, wanted, strict=True):
        assert torch.equal(actual, expected) if need else actual.shape == (0,)


@pytest.mark.parametrize("device, kernel, case", FEW_BACKWARD)
def test_dout_strides(device, kernel, case):
    q, k, v, dout, dlse = make_inputs(case, device)
    views = {
        "transposed": dout.transpose(1, 2).contiguous().transpose(1, 2),
        "last dim strided": dout.transpose(1, 3).contiguous().transpose(1, 3),
        "expanded over batch": dout[:1].expand(dout.shape),
        "all strides 0": dout.new_full((), 0.75).expand(dout.shape),
    }
    for name, view in views.items():
        dlse_view = dlse.transpose(1, 2).contiguous().transpose(1, 2)
        expected = gradients(case, kernel, q, k, v, view.contiguous(), dlse, deterministic=True)
        actual = gradients(case, kernel, q, k, v, view, dlse_view, deterministic=True)
        for gradient, a, e in zip(NAMES, actual, expected, strict=True):
            assert torch.equal(a, e), f"{gradient}, dout {name}"


@pytest.mark.parametrize("device, kernel, case", FEW_BACKWARD)
def test_input_strides(device, kernel, case):
    """q, k, v as slices of one packed tensor, unaligned rows, stride-0 heads."""
    q, k, v, dout, dlse = make_inputs(case, device)
    packed = [torch.stack([t, t + 1], dim=2)[:, :, 0] for t in (q, k, v)]
    unaligned = [torch.cat([t[..., :1], t, t[..., :1]], dim=-1)[..., 1:-1] for t in (q, k, v)]
    expanded = [q, k[:, :, :1].expand(k.shape), v[:, :, :1].expand(v.shape)]
    for views in (packed, unaligned, expanded):
        plain = [t.contiguous() for t in views]
        expected = gradients(case, kernel, *plain, dout, dlse, deterministic=True)
        actual = gradients(case, kernel, *views, dout, dlse, deterministic=True)
        for name, a, e in zip(NAMES, actual, expected, strict=True):
            assert torch.equal(a, e), name


@pytest.mark.parametrize("device, kernel, case", with_kernels(REPEATS[:1], REPEATS))
@pytest.mark.parametrize("flag", ["argument", "torch"])
def test_deterministic(device, kernel, case, flag):
    q, k, v, dout, _ = make_inputs(case, device)

    def once():
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        deterministic = True if flag == "argument" else None
        out = flash_cuda.attention(
            *inputs, window=(case.left, case.right), deterministic=deterministic, kernel=kernel
        )
        return torch.autograd.grad(out, inputs, dout)

    torch.use_deterministic_algorithms(flag == "torch")
    try:
        first = once()
        for _ in range(2 if device == "cpu" else 10):
            assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    options = {"need_dq": True, "deterministic": False}
    for a, b in zip(gradients(case, kernel, q, k, v, dout, **options), first, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch, sq, sk", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_sizes(device, batch, sq, sk, deterministic):
    case = Case(sq, sk, 4, 2, 64, *CAUSAL, torch.float16, batch=batch)
    q, k, v, dout, dlse = make_inputs(case, device)
    actual = gradients(case, "auto", q, k, v, dout, dlse, deterministic=deterministic)
    for gradient, tensor in zip(actual, (q, k, v), strict=True):
        assert gradient.shape == tensor.shape and (gradient == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sq, sk, band", [(129, 33, CAUSAL), (200, 1, (3, 3)), (65, 129, (0, 0))])
def test_rows_without_keys(device, sq, sk, band):
    """Rows that see no key, and keys that no row sees, have zero gradients, NaN in them or not."""
    case = Case(sq, sk, 4, 2, 64, *band, torch.bfloat16)
    q, k, v, dout, dlse = make_inputs(case, device)
    seen = naive.band_mask(sq, sk, *band, device)
    dead_rows, dead_keys = ~seen.any(1), ~seen.any(0)
    for value in (1.0, float("nan"), float("inf")):
        q[:, dead_rows] = value
        k[:, dead_keys], v[:, dead_keys] = value, value
        dq, dk, dv = gradients(case, "auto", q, k, v, dout, dlse)
        assert (dq[:, dead_rows] == 0).all()
        assert (dk[:, dead_keys] == 0).all() and (dv[:, dead_keys] == 0).all()
        assert all(t.isfinite().all() for t in (dq, dk, dv))


@pytest.mark.parametrize("device, kernel, case", ISOLATION_BACKWARD)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_isolation(device, kernel, case, bad):
    """NaN in a key or value reaches neither the dq of rows that do not see it ..."""
    q, k, v, dout, _ = make_inputs(case, device)
    clean = gradients(case, kernel, q, k, v, dout, deterministic=True)
    seen = naive.band_mask(case.sq, case.sk, case.left, case.right, device)
    for key in (63, 100):
        for spoilt in (k, v):
            good = spoilt[:, key].clone()
            spoilt[:, key] = bad
            actual = gradients(case, kernel, q, k, v, dout, deterministic=True)
            spoilt[:, key] = good
            rows = ~seen[:, key]
            assert torch.equal(actual[0][:, rows], clean[0][:, rows])
            # ... nor the dk, dv of keys that no row which sees the bad key sees.
            keys = ~seen[seen[:, key]].any(0)
            for name, a, c in zip(NAMES[1:], actual[1:], clean[1:], strict=True):
                assert torch.equal(a[:, keys], c[:, keys]), name


@pytest.mark.parametrize("device, kernel, case", ISOLATION_BACKWARD)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_isolation_of_queries(device, kernel, case, bad):
    """NaN in a query or its dout reaches the dk, dv of the keys that it sees, and nothing else."""
    q, k, v, dout, _ = make_inputs(case, device)
    clean = gradients(case, kernel, q, k, v, dout, deterministic=True)
    seen = naive.band_mask(case.sq, case.sk, case.left, case.right, device)
    for row in (63, 100):
        for spoilt in (q, dout):
            good = spoilt[:, row].clone()
            spoilt[:, row] = bad
            dq, dk, dv = gradients(case, kernel, q, k, v, dout, deterministic=True)
            spoilt[:, row] = good
            others = [i for i in range(case.sq) if i != row]
            assert torch.equal(dq[:, others], clean[0][:, others])
            for name, a, c in (("dk", dk, clean[1]), ("dv", dv, clean[2])):
                assert torch.equal(a[:, ~seen[row]], c[:, ~seen[row]]), name
                assert not a[:, seen[row]].isfinite().any(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor, scale", [(1, 0.0), (1, 2.0), (30, None)])
def test_scale_and_large_logits(device, factor, scale):
    case = Case(129, 200, 4, 2, 64, *CAUSAL, torch.bfloat16)
    q, k, v, dout, dlse = make_inputs(case, device)
    q *= factor
    exact, baseline = reference_gradients(q, k, v, dout, dlse, scale=scale, **case.window)
    check(gradients(case, "auto", q, k, v, dout, dlse, scale=scale), exact, baseline)


@pytest.mark.parametrize("device", DEVICES)
def test_double_backward_is_refused(device):
    q, k, v, _, _ = (t.requires_grad_() for t in make_inputs(FEW_CASES[0], device))
    for out in (flash_cuda.attention(q, k, v), flash_cuda.fwd(q, k, v)[0]):
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="flash_cuda.bwd: double backward is not supported"):
            dq.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_do(device):
    """No input asks for a gradient, or none flows into the outputs."""
    q, k, v, _, _ = make_inputs(Case(17, 17, 2, 2, 32, *FULL, torch.float16), device)
    assert not flash_cuda.attention(q, k, v).requires_grad
    q.requires_grad_()
    with torch.no_grad():
        assert not flash_cuda.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert flash_cuda.attention(q, k, v).is_inference()
    out, lse = flash_cuda.attention(q, k, v, return_lse=True)
    assert out.requires_grad and lse.requires_grad
