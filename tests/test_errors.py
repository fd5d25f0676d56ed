"""Error texts: each names the op, the argument, what was expected and what was got."""

import subprocess
import sys

import pytest
import torch

import flash_cuda
from flash_cuda import checks, doctor, kernel_names
from tests.cases import CAUSAL, DEVICES, Case
from tests.conftest import make_inputs

CASE = Case(5, 7, 6, 2, 64, *CAUSAL, torch.float16)
# Python's checks raise the specific kind, those of the CUDA op RuntimeError: the text is the same.
ERRORS = (RuntimeError, ValueError, TypeError)
CORNERS = "<kv_outer|q_outer>/<split_k|split_q>/<eager|deferred>[/<M>KB]"


def for_every_head_dim(fake=False):
    """The kernels on CUDA that serve all; a fake tensor has no GPU that could lack hopper."""
    hopper = fake or doctor.forward_kernel("cuda")[0] == "hopper"
    return f"auto, {'hopper, ' * hopper}v2"


def available(op, device, fake=False):
    """What an error lists on a machine whose GPU, if it is to have one, is GPU 0."""
    if device == "cpu":
        return "auto, reference"
    names = f"{for_every_head_dim(fake)}, v1[/<M>KB]"
    return names if op == "flash_cuda.bwd" else f"{names}, {CORNERS}"


INPUT_ERRORS = {
    "k dims": (
        lambda q, k, v: (q, k[0, 0], v),
        "k: expected 4 dimensions (batch, seqlen, heads, head_dim), got shape (2, 64)",
    ),
    "head_dim": (
        lambda q, k, v: tuple(torch.cat([t] * 5, dim=-1) for t in (q, k, v)),
        "q: expected head_dim from 1 to 256, got 320",
    ),
    "head_dim 0": (
        lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]),
        "q: expected head_dim from 1 to 256, got 0",
    ),
    "no heads": (lambda q, k, v: (q[:, :, :0], k, v), "q: expected at least 1 head, got 0"),
    "batch": (
        lambda q, k, v: (q, k[:1], v[:1]),
        "k: expected shape (2, seqlen_k, heads_kv, 64), got (1, 7, 2, 64)",
    ),
    "k head_dim": (
        lambda q, k, v: (q, k[..., :32], v),
        "k: expected shape (2, seqlen_k, heads_kv, 64), got (2, 7, 2, 32)",
    ),
    "heads": (
        lambda q, k, v: (q[:, :, :5], k, v),
        "k: expected a number of heads that divides q's 5, got 2",
    ),
    "v length": (
        lambda q, k, v: (q, k, v[:, :6]),
        "v: expected shape (2, 7, 2, 64) like k, got (2, 6, 2, 64)",
    ),
    "k dtype": (
        lambda q, k, v: (q, k.bfloat16(), v),
        "k: expected float16 like q, got bfloat16",
    ),
    "v dtype": (
        lambda q, k, v: (q, k, v.bfloat16()),
        "v: expected float16 like k, got bfloat16",
    ),
}


def fails(op, text, function, *arguments, **options):
    with pytest.raises(ERRORS) as caught:
        function(*arguments, **options)
    assert f"{op}: {text}" in str(caught.value)
    return caught.type


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", INPUT_ERRORS)
def test_inputs(device, name):
    change, text = INPUT_ERRORS[name]
    q, k, v, dout, _ = make_inputs(CASE, device)
    out, lse = flash_cuda.fwd(q, k, v)
    inputs = change(q, k, v)
    fails("flash_cuda.fwd", text, flash_cuda.fwd, *inputs)
    fails("flash_cuda.fwd", text, flash_cuda.attention, *inputs)
    fails("flash_cuda.bwd", text, flash_cuda.bwd, dout, *inputs, out, lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options, text",
    [
        ({"window_left": -2}, "window_left: expected a width >= 0, or -1 for no limit, got -2"),
        ({"window_right": -7}, "window_right: expected a width >= 0, or -1 for no limit, got -7"),
        ({"scale": float("nan")}, "scale: expected a finite number >= 0, got nan"),
        ({"scale": float("inf")}, "scale: expected a finite number >= 0, got inf"),
        ({"scale": -0.5}, "scale: expected a finite number >= 0, got -0.5"),
        ({"scale": -1e-12}, "scale: expected a finite number >= 0, got -1e-12"),
        ({"scale": 1e39}, "scale: expected a finite number >= 0, got 1e+39"),
        ({"scale": "1"}, "scale: expected a number or None, got str"),
        ({"kernel": None}, "kernel: expected a str, got NoneType"),
        *(
            ({"kernel": name}, f'kernel: expected one of {{available}}, got "{name}"')
            for name in (
                *("fast", "", "/", "v1/", "v1/99", "v1/99kb", "v1/0KB", "v1/099KB", "v1/99KB/99KB"),
                *("/99KB", "v2/99KB", "kv_outer", "kv_outer/split_q", "split_q/kv_outer/eager"),
            )
        ),
    ],
    ids=str,
)
def test_options(device, options, text):
    q, k, v, dout, _ = make_inputs(CASE, device)
    out, lse = flash_cuda.fwd(q, k, v)
    for op, function, tensors in (
        ("flash_cuda.fwd", flash_cuda.fwd, (q, k, v)),
        ("flash_cuda.bwd", flash_cuda.bwd, (dout, q, k, v, out, lse)),
    ):
        said = text.format(available=available(op, device))
        fails(op, said, function, *tensors, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_of_the_other_device(device):
    served = "CUDA" if device == "cpu" else "CPU"
    lab = ("v1", "v1/99KB", "v1/64KB", "q_outer/split_q/eager")
    for other in ("hopper", "v2", *lab) if device == "cpu" else ("reference",):
        for op, call in forward_and_backward(device, 64).items():
            here = available(op, device)
            text = f'kernel "{other}" runs on {served} tensors; available here: {here}'
            fails(op, text, call, other)


# (kernel, head dim, error of the fakes, text) of both ops, on CUDA and "meta" tensors.
LAB_ERRORS = [
    *(
        (
            name,
            64,
            ValueError,
            "has no tiles for that shared-memory budget; available here: 48KB, 99KB, 163KB, 227KB",
        )
        for name in ("v1/64KB", "v1/1KB", "q_outer/split_k/eager/228KB")
    ),
    *(
        (
            name,
            256,
            NotImplementedError,
            "serves head_dim from 1 to 128, got 256; available here: {for_every_head_dim}",
        )
        for name in ("v1", "v1/48KB", "q_outer/split_q/deferred")
    ),
]
FORWARD_ONLY = [
    name for name in kernel_names.LAB_KERNELS if name not in ("v1", "kv_outer/split_k/eager")
]


def forward_and_backward(device, head_dim):
    """fwd and bwd as functions of `kernel`, on tensors that no kernel has touched."""
    q = torch.empty(2, 5, 6, head_dim, device=device, dtype=torch.float16)
    lse = torch.empty(2, 6, 5, device=device)
    return {
        "flash_cuda.fwd": lambda kernel: flash_cuda.fwd(q, q, q, kernel=kernel),
        "flash_cuda.bwd": lambda kernel: flash_cuda.bwd(q, q, q, q, q, lse, kernel=kernel),
    }


def check_lab_errors(device, raised, fake=False):
    """`raised` maps the error of Python's checks to what is raised here."""
    for kernel, head_dim, kind, text in LAB_ERRORS:
        text = text.format(for_every_head_dim=for_every_head_dim(fake))
        for op, call in forward_and_backward(device, head_dim).items():
            assert fails(op, f'kernel "{kernel}" {text}', call, kernel) is raised(kind)
    backward = forward_and_backward(device, 64)["flash_cuda.bwd"]
    corners = [name + budget for name in FORWARD_ONLY for budget in ("", "/99KB")]
    for kernel in corners:
        here = available("flash_cuda.bwd", device, fake)
        text = f'kernel "{kernel}" is forward only; available here: {here}'
        kind = fails("flash_cuda.bwd", text, backward, kernel)
        assert kind is raised(NotImplementedError)


@pytest.mark.gpu
def test_lab_kernels_on_cuda():
    check_lab_errors("cuda", lambda kind: RuntimeError)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_lab_kernels_on_fakes(device):
    with torch._subclasses.FakeTensorMode():
        check_lab_errors(device, lambda kind: kind, fake=True)
        forward, backward = forward_and_backward(device, 128).values()
        for kernel in kernel_names.LAB_KERNELS:
            for budget in ("", "/48KB", "/99KB", "/163KB", "/227KB"):
                assert forward(kernel + budget)[0].shape == (2, 5, 6, 128)
                assert kernel_names.forward_only(kernel + budget) == (kernel in FORWARD_ONLY)
                if kernel not in FORWARD_ONLY:
                    assert backward(kernel + budget)[0].shape == (2, 5, 6, 128)
    assert len(FORWARD_ONLY) == 7
    assert not any(map(kernel_names.forward_only, ("auto", "v2", "reference", "fast", "v1/")))


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_hopper_on_fakes(device):
    """A fake tensor has no GPU that could refuse the call."""
    with torch._subclasses.FakeTensorMode():
        for call in forward_and_backward(device, 256).values():
            assert call("hopper")[0].shape == (2, 5, 6, 256)
    assert kernel_names.gradient_kernel("hopper") == "auto"
    assert kernel_names.gradient_kernel("v1/99KB") == "v1/99KB"


@pytest.mark.gpu
def test_hopper_says_why_it_does_not_run(monkeypatch):
    """Of a GPU that it is not for, of a build without it, of a small device that is played."""
    call = forward_and_backward("cuda", 64)["flash_cuda.fwd"]
    major, minor = torch.cuda.get_device_capability()
    here = f"available here: auto, v2, v1[/<M>KB], {CORNERS}"
    if (major, minor) != (9, 0):
        text = f'kernel "hopper" needs compute capability 9.0, this GPU has {major}.{minor}; {here}'
        fails("flash_cuda.fwd", text, call, "hopper")
    elif doctor.forward_kernel("cuda")[0] != "hopper":
        remedy = "rebuild with TORCH_CUDA_ARCH_LIST=9.0a"
        text = f'kernel "hopper" is not in this build: {remedy}; {here}'
        fails("flash_cuda.fwd", text, call, "hopper")
    else:
        monkeypatch.setenv("FLASH_CUDA_SHARED_MEMORY_LIMIT", "101376")
        text = "needs 227 KB of shared memory per thread block, this GPU has 99"
        fails("flash_cuda.fwd", f'kernel "hopper" {text}; {here}', call, "hopper")
        call("auto")


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_inputs(device):
    q, k, v, dout, dlse = make_inputs(CASE, device)
    out, lse = flash_cuda.fwd(q, k, v)

    def bwd(dout=dout, out=out, lse=lse, dlse=dlse):
        return flash_cuda.bwd(dout, q, k, v, out, lse, dlse=dlse)

    op = "flash_cuda.bwd"
    shape = "expected shape (2, 5, 6, 64) like q, got (2, 4, 6, 64)"
    fails(op, f"dout: {shape}", bwd, dout=dout[:, :4])
    fails(op, f"out: {shape}", bwd, out=out[:, :4])
    fails(op, "dout: expected float16 like q, got bfloat16", bwd, dout=dout.bfloat16())
    rows = "expected shape (2, 6, 5), got (2, 5, 6)"
    fails(op, f"lse: {rows}", bwd, lse=lse.transpose(1, 2))
    fails(op, f"dlse: {rows}", bwd, dlse=dlse.transpose(1, 2))
    fails(op, "lse: expected float32, got float16", bwd, lse=lse.half())
    fails(op, "lse: expected a torch.Tensor, got NoneType", bwd, lse=None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_on_cuda(dtype):
    q, k, v, _, _ = (t.to(dtype) for t in make_inputs(CASE, "cuda"))
    name = str(dtype).removeprefix("torch.")
    text = (
        f"q: expected float16 or bfloat16, got {name}; cast the inputs or call under "
        'torch.autocast("cuda", dtype=torch.bfloat16)'
    )
    fails("flash_cuda.fwd", text, flash_cuda.attention, q, k, v)


@pytest.mark.gpu
def test_devices_differ():
    q, k, v, _, _ = make_inputs(CASE, "cuda")
    text = "k: expected device cuda:0 like q, got cpu"
    fails("flash_cuda.fwd", text, flash_cuda.attention, q, k.cpu(), v)


def test_fakes_say_what_the_cuda_op_says():
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 5, 6, 64, device="cuda")
        text = "q: expected float16 or bfloat16, got float32; cast the inputs"
        assert fails("flash_cuda.fwd", text, flash_cuda.fwd, q, q, q) is TypeError
        # Autocast casts for fwd only.
        lse = torch.empty(2, 6, 5, device="cuda")
        with pytest.raises(TypeError, match="got float32; cast the inputs$"):
            flash_cuda.bwd(q, q, q, q, q, lse)
        q = q.half()
        text = f"kernel: expected one of auto, hopper, v2, v1[/<M>KB], {CORNERS}, got"
        assert fails("flash_cuda.fwd", text, flash_cuda.fwd, q, q, q, kernel="v3") is ValueError


@pytest.mark.parametrize(
    "window, kind, text",
    [
        (3, TypeError, "window: expected a pair (left, right) of ints, got 3"),
        ((1, 2, 3), TypeError, "window: expected a pair (left, right) of ints, got (1, 2, 3)"),
        ((1.5, 0), TypeError, "window left: expected an int, got 1.5"),
        ((0, True), TypeError, "window right: expected an int, got True"),
        ((None, 0), TypeError, "window left: expected an int, got None"),
        ((0, -2), ValueError, "window right: expected a width >= 0, or -1 for no limit, got -2"),
        (
            (2**63, 0),
            ValueError,
            f"window left: expected a width below 2^63, or -1 for no limit, got {2**63}",
        ),
    ],
)
def test_window(window, kind, text):
    q, k, v, _, _ = make_inputs(CASE, "cpu")
    kinds = fails("flash_cuda.attention", text, flash_cuda.attention, q, k, v, window=window)
    assert kinds is kind


def test_not_a_tensor():
    q, k, v, _, _ = make_inputs(CASE, "cpu")
    text = "v: expected a torch.Tensor, got list"
    fails("flash_cuda.attention", text, flash_cuda.attention, q, k, v.tolist())
    fails("flash_cuda.fwd", text, flash_cuda.fwd, q, k, v.tolist())


@pytest.mark.parametrize(
    "options, text",
    [
        ({"kernel": None}, "kernel: expected a str, got NoneType"),
        ({"scale": "1"}, "scale: expected a number or None, got str"),
    ],
    ids=str,
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_option_types_of_attention(options, text, requires_grad):
    q, k, v, _, _ = make_inputs(CASE, "cpu")
    q.requires_grad_(requires_grad)
    kind = fails("flash_cuda.attention", text, flash_cuda.attention, q, k, v, **options)
    assert kind is TypeError


def test_a_forward_only_kernel_on_the_cpu_with_gradients():
    q, k, v, _, _ = make_inputs(CASE, "cpu")
    kernel = "q_outer/split_q/eager"
    text = f'kernel "{kernel}" runs on CUDA tensors; available here: auto, reference'
    op = "flash_cuda.attention"
    fails(op, text, flash_cuda.attention, q.requires_grad_(), k, v, kernel=kernel)


def test_kinds_on_the_cpu():
    q, k, v, _, _ = make_inputs(CASE, "cpu")
    for error, options in (
        (ValueError, {"kernel": "fast"}),
        (ValueError, {"kernel": "v1"}),
        (ValueError, {"kernel": "hopper"}),
        (ValueError, {"window": (-3, 0)}),
    ):
        with pytest.raises(error):
            flash_cuda.attention(q, k, v, **options)
    with pytest.raises(TypeError):
        flash_cuda.attention(q, k.bfloat16(), v)
    with pytest.raises(TypeError, match="a floating point dtype, got int64"):
        flash_cuda.attention(q.long(), k.long(), v.long())


@pytest.mark.gpu
def test_the_process_lives_after_an_error():
    q, k, v, _, _ = make_inputs(CASE, "cuda")
    for _ in range(3):
        with pytest.raises(RuntimeError):
            flash_cuda.fwd(q, k[..., :32], v)
    torch.cuda.synchronize()
    assert flash_cuda.attention(q, k, v).isfinite().all()


def test_old_torch():
    sentence = checks.torch_too_old("2.9.1+cu128")
    assert "needs torch >= 2.10, but torch 2.9.1+cu128 is installed: run" in sentence
    assert "\n" not in sentence
    for version in ("2.10.0", "2.14.1+cu130", "3.0.0a0+git123"):
        assert checks.torch_too_old(version) is None


def test_missing_extension():
    """Without the compiled extension the import says how to build it, in one sentence."""
    code = "import sys; sys.modules['flash_cuda._C'] = None; import flash_cuda"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: flash_cuda's compiled extension flash_cuda._C could not")
    assert "pip install --no-build-isolation -e ." in last
