"""Argument checks of both ops in Python, for the fake and the CPU kernels.

The CUDA op does the same checks in C++ (csrc/ops), with the same texts:
`<op>: <argument>: expected <what>, got <what>`. Here a wrong value or shape is a ValueError, a
wrong dtype a TypeError, a kernel still to come a NotImplementedError.
"""

import itertools
import math
import re
import sys

import torch
from torch import Tensor

from flash_cuda.tile_plan import BUDGETS_KB

MAX_HEAD_DIM = 256
CUDA_DTYPES = (torch.float16, torch.bfloat16)
V1 = "kv_outer/split_k/eager"
LAB_KERNELS = ("v1",) + tuple(
    "/".join(choice)
    for choice in itertools.product(
        ("kv_outer", "q_outer"), ("split_k", "split_q"), ("eager", "deferred")
    )
)
LAB_BUDGETS = tuple(f"{kilobytes}KB" for kilobytes in BUDGETS_KB)
LAB_MAX_HEAD_DIM = 128
# What an error lists as available.
CPU_KERNELS = "auto, reference"
CUDA_BACKWARDS = "auto, v2, v1[/<M>KB]"
CUDA_KERNELS = f"{CUDA_BACKWARDS}, <kv_outer|q_outer>/<split_k|split_q>/<eager|deferred>[/<M>KB]"


def _fail(op: str, argument: str, expected: str, got: object, error: type = ValueError):
    raise error(f"{op}: {argument}: expected {expected}, got {got}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtype(op: str, q: Tensor) -> None:
    if q.device.type == "cuda" and q.dtype not in CUDA_DTYPES:
        remedy = 'cast the inputs or call under torch.autocast("cuda", dtype=torch.bfloat16)'
        got = f"{dtype_name(q.dtype)}; {remedy}"
        _fail(op, "q", "float16 or bfloat16", got, TypeError)
    if not q.is_floating_point():
        _fail(op, "q", "a floating point dtype", dtype_name(q.dtype), TypeError)


def lab_kernel(kernel: str) -> tuple[str, str] | None:
    """("q_outer/split_q/eager", "99KB") of such a name, "" where it has no budget; else None."""
    if kernel in LAB_KERNELS:
        return kernel, ""
    match = re.fullmatch(r"(.+)/([1-9][0-9]*KB)", kernel)
    return match.groups() if match and match[1] in LAB_KERNELS else None


def forward_only(kernel: str) -> bool:
    """Whether `kernel` is a corner of the lab that has no backward: any but v1."""
    lab = lab_kernel(kernel)
    return lab is not None and lab[0] not in ("v1", V1)


def _refuse(op: str, kernel: str, why: str, available: str, error: type):
    raise error(f'{op}: kernel "{kernel}" {why}; available here: {available}')


def check_kernel(op: str, kernel: str, device: str, head_dim: int) -> None:
    """Refuses a kernel that cannot run on `device`; on "meta" every built name will do."""
    here = CPU_KERNELS if device == "cpu" else CUDA_KERNELS
    lab = lab_kernel(kernel)
    if kernel == "hopper":
        _refuse(op, kernel, "is not built yet", here, NotImplementedError)
    if kernel == "reference" and device == "cuda":
        _refuse(op, kernel, "runs on CPU tensors", here, ValueError)
    if (kernel == "v2" or lab) and device == "cpu":
        _refuse(op, kernel, "runs on CUDA tensors", here, ValueError)
    if not lab:
        if kernel not in ("auto", "v2", "reference"):
            _fail(op, "kernel", f"one of {here}", f'"{kernel}"')
        return
    if lab[1] and lab[1] not in LAB_BUDGETS:
        why = "has no tiles for that shared-memory budget"
        _refuse(op, kernel, why, ", ".join(LAB_BUDGETS), ValueError)
    if head_dim > LAB_MAX_HEAD_DIM:
        why = f"serves head_dim from 1 to {LAB_MAX_HEAD_DIM}, got {head_dim}"
        _refuse(op, kernel, why, "auto, v2", NotImplementedError)


def check_backward_kernel(op: str, kernel: str) -> None:
    """Refuses a kernel that has no backward; to be called after check_kernel."""
    if forward_only(kernel):
        _refuse(op, kernel, "is forward only", CUDA_BACKWARDS, NotImplementedError)


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
    if isinstance(scale, float) and not 0 <= scale < math.inf:
        _fail(op, "scale", "a finite number >= 0", f"{scale:f}")
    check_kernel(op, kernel, q.device.type, head_dim)


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
        if tensor is None:
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
    return window[0], window[1]


def check_tensors(op: str, **tensors: object) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            _fail(op, name, "a torch.Tensor", type(value).__name__, TypeError)


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
