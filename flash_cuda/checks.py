"""Argument checks of both ops in Python, for the fake and the CPU kernels.

The CUDA op does the same checks in C++ (csrc/ops), with the same texts:
`<op>: <argument>: expected <what>, got <what>`. Here a wrong value or shape is a ValueError, a
wrong dtype a TypeError, what a kernel does not serve a NotImplementedError.
"""

import numbers
import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_cuda import kernel_names

MAX_HEAD_DIM = 256
CUDA_DTYPES = (torch.float16, torch.bfloat16)
# What errors name for what the kernels do not do.
PLAIN_ATTENTION = "`from flash_cuda.reference import attention`, which returns (out, lse)"


def _fail(op: str, argument: str, expected: str, got: object, error: type = ValueError):
    raise error(f"{op}: {argument}: expected {expected}, got {got}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtype(op: str, q: Tensor) -> None:
    if q.device.type == "cuda" and q.dtype not in CUDA_DTYPES:
        remedy = "cast the inputs"
        if op != "flash_cuda.bwd":  # which autocast leaves alone
            remedy += ' or call under torch.autocast("cuda", dtype=torch.bfloat16)'
        got = f"{dtype_name(q.dtype)}; {remedy}"
        _fail(op, "q", "float16 or bfloat16", got, TypeError)
    if not q.is_floating_point():
        _fail(op, "q", "a floating point dtype", dtype_name(q.dtype), TypeError)


def check_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window_left: int,
    window_right: int,
    kernel: str,
) -> None:
    """What both ops share: q (b, sq, h, d), k, v (b, sk, hk, d), h a multiple of hk, d <= 256."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            shape = f"shape {tuple(tensor.shape)}"
            _fail(op, name, "4 dimensions (batch, seqlen, heads, head_dim)", shape)
    _check_dtype(op, q)
    batch, _, heads, head_dim = q.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        _fail(op, "q", f"head_dim from 1 to {MAX_HEAD_DIM}", head_dim)
    if heads < 1:
        _fail(op, "q", "at least 1 head", heads)
    if k.shape[0] != batch or k.shape[3] != head_dim:
        _fail(op, "k", f"shape ({batch}, seqlen_k, heads_kv, {head_dim})", tuple(k.shape))
    if k.shape[2] < 1 or heads % k.shape[2] != 0:
        _fail(op, "k", f"a number of heads that divides q's {heads}", k.shape[2])
    _check_like(op, "k", k, "q", q)
    if v.shape != k.shape:
        _fail(op, "v", f"shape {tuple(k.shape)} like k", tuple(v.shape))
    _check_like(op, "v", v, "k", k)
    for name, value in (("window_left", window_left), ("window_right", window_right)):
        if value < -1:
            _fail(op, name, "a width >= 0, or -1 for no limit", value)
    # The kernels and float32 hold no larger one.
    most = sys.float_info.max if q.dtype == torch.float64 else torch.finfo(torch.float32).max
    if isinstance(scale, float) and not 0 <= scale <= most:
        _fail(op, "scale", "a finite number >= 0", f"{scale:g}")
    kernel_names.check(op, kernel, q.device.type, head_dim)


def _check_like(op: str, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        expected = f"{dtype_name(like.dtype)} like {like_name}"
        _fail(op, name, expected, dtype_name(tensor.dtype), TypeError)
    if tensor.device != like.device:
        _fail(op, name, f"device {like.device} like q", tensor.device)


def check_gradients(
    op: str, q: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> None:
    """What bwd has beyond fwd: dout and out shaped as q; lse and dlse (b, h, sq)."""
    for name, tensor in (("dout", dout), ("out", out)):
        _check_like(op, name, tensor, "q", q)
        if tensor.shape != q.shape:
            _fail(op, name, f"shape {tuple(q.shape)} like q", tuple(tensor.shape))
    rows = (q.shape[0], q.shape[2], q.shape[1])
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if name == "dlse" and tensor is None:
            continue
        if tensor.dtype != lse_dtype(q):
            _fail(op, name, dtype_name(lse_dtype(q)), dtype_name(tensor.dtype), TypeError)
        if tensor.device != q.device:
            _fail(op, name, f"device {q.device} like q", tensor.device)
        if tuple(tensor.shape) != rows:
            _fail(op, name, f"shape {rows}", tuple(tensor.shape))


def lse_dtype(q: Tensor) -> torch.dtype:
    """float32, except for float64 inputs (which only the CPU kernels take)."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def window_pair(op: str, window: object, argument: str = "window") -> tuple[int, int]:
    """(left, right) from what the user gave; both inclusive, -1 = open."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        _fail(op, argument, "a pair (left, right) of ints", repr(window), TypeError)
    for name, value in zip(("left", "right"), window, strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            _fail(op, f"{argument} {name}", "an int", repr(value), TypeError)
        if value < -1:
            _fail(op, f"{argument} {name}", "a width >= 0, or -1 for no limit", value)
        if isinstance(value, int) and value >= 2**63:
            _fail(op, f"{argument} {name}", "a width below 2^63, or -1 for no limit", value)
    return window[0], window[1]


def check_tensors(op: str, **tensors: object) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            _fail(op, name, "a torch.Tensor", type(value).__name__, TypeError)


def check_kernel_type(op: str, kernel: object) -> None:
    if not isinstance(kernel, str):
        _fail(op, "kernel", "a str", type(kernel).__name__, TypeError)


def check_scale_type(op: str, scale: object) -> None:
    """A number, torch's symbolic one and a tensor of one element included."""
    if not isinstance(scale, (numbers.Real, torch.SymFloat, torch.SymInt, Tensor)):
        _fail(op, "scale", "a number or None", type(scale).__name__, TypeError)


def check_transforms(op: str) -> None:
    """Refuses what would lose a derivative silently: a tangent below the autograd kernels, say."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{op}: forward-mode differentiation is not supported; use {PLAIN_ATTENTION}"
        )
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    levels = torch._C._functorch.get_interpreter_stack()
    if any(level.key() == torch._C._functorch.TransformType.Grad for level in levels):
        raise NotImplementedError(
            f"{op}: the gradient transforms of torch.func are not supported; call backward() or "
            f"torch.autograd.grad, or use {PLAIN_ATTENTION}"
        )


def check_types(op: str, scale: object, kernel: object, **tensors: object) -> None:
    """What the dispatcher would refuse in words of its own, and what it would lose silently."""
    check_tensors(op, **tensors)
    check_kernel_type(op, kernel)
    if scale is not None:
        check_scale_type(op, scale)
    check_transforms(op)


def torch_too_old(version: str, minimum: tuple[int, int] = (2, 10)) -> str | None:
    """The sentence for a torch older than `minimum`, None when `version` will do."""
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if (major, minor) >= minimum:
        return None
    wanted = ".".join(map(str, minimum))
    return (
        f"flash_cuda needs torch >= {wanted}, but torch {version} is installed: "
        f'run `{sys.executable} -m pip install "torch>={wanted}"`.'
    )
