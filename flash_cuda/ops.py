"""The two ops in Python: `fwd` and `bwd`, their fake kernels and their CPU kernels.

The schemas live in csrc/ops/library.cpp, the CUDA kernels in csrc; gradients and autocast are in
autograd.py. The ops say `kernel_name` where Python says `kernel`: Inductor cannot call an op that
has an argument called `kernel`.
"""

import torch
from torch import Tensor

from flash_cuda import checks, kernel_names

FWD = torch.ops.flash_cuda.fwd.default
BWD = torch.ops.flash_cuda.bwd.default
# Read before anything is registered below; a build with FLASH_CUDA_BUILD_KERNELS=0 has none.
HAS_CUDA_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key("flash_cuda::fwd", "CUDA")


def call(op, *args, **kwargs):
    """op(...), with an out-of-memory of the CUDA op as torch.OutOfMemoryError.

    The stable ABI that csrc is built on hands every exception on as a RuntimeError.
    """
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if "flash_cuda: CUDA out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention forward, the op `flash_cuda::fwd` (FlashAttention-2, section 3.1).

    Args:
        q: (b, sq, h, d), any strides.
        k, v: (b, sk, hk, d), h a multiple of hk; dtype and device of q.
        scale: multiplies q k^T; None = 1 / sqrt(d).
        window_left, window_right: query i sees key j iff
            i + sk - sq - window_left <= j <= i + sk - sq + window_right; -1 = open on that side.
        kernel: "auto", "hopper", "v2", "v1" or a corner of the lab (CUDA), or "reference" (CPU), as
            flash_cuda.attention takes it.

    Returns:
        out (b, sq, h, d) in the dtype of q; lse (b, h, sq), natural logarithm, float32 (float64 for
        float64 inputs on the CPU); both contiguous. A row that sees no key: out = 0, lse = -inf.

    Raises:
        RuntimeError (CUDA), ValueError, TypeError or NotImplementedError (CPU) naming the argument.
    """
    checks.check_types("flash_cuda.fwd", scale, kernel, q=q, k=k, v=v)
    window = {"window_left": window_left, "window_right": window_right}
    return call(FWD, q, k, v, scale=scale, kernel_name=kernel, **window)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    deterministic: bool = False,
    need_dq: bool = True,
    need_dk: bool = True,
    need_dv: bool = True,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention backward, the op `flash_cuda::bwd` (FlashAttention-2, section 3.1, algorithm 2).

    Args:
        dout: gradient of out, (b, sq, h, d), any strides.
        q, k, v, scale, window_left, window_right: as given to `fwd`.
        kernel: "auto", "hopper", "v2", "v1" (CUDA) or "reference" (CPU). "auto" on CUDA is hopper
            where it runs and d is 33 at least, else v2. v1 has one tile size a head dim, whatever
            budget stands behind its name, and is deterministic.
        out, lse: as returned by `fwd`.
        dlse: gradient of lse, (b, h, sq) in the dtype of lse, or None for zero.
        deterministic: the same bits at every repeat, for a little time and memory.
        need_dq, need_dk, need_dv: which gradients to compute.

    Returns:
        dq, dk, dv, contiguous, shaped like q, k, v; one that is not needed has shape (0,).

    Raises:
        As `fwd`.
    """
    checks.check_types("flash_cuda.bwd", scale, kernel, dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    return call(
        BWD,
        dout,
        q,
        k,
        v,
        out,
        lse,
        dlse,
        scale=scale,
        window_left=window_left,
        window_right=window_right,
        deterministic=deterministic,
        need_dq=need_dq,
        need_dk=need_dk,
        need_dv=need_dv,
        kernel_name=kernel,
    )


def _empty_gradients(q, k, v, need_dq, need_dk, need_dv):
    needs = ((q, need_dq), (k, need_dk), (v, need_dv))
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in needs)


@torch.library.register_fake("flash_cuda::fwd")
def _fwd_fake(q, k, v, *, scale=None, window_left=-1, window_right=-1, kernel_name="auto"):
    checks.check_inputs("flash_cuda.fwd", q, k, v, scale, window_left, window_right, kernel_name)
    rows = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(rows, dtype=checks.lse_dtype(q))


@torch.library.register_fake("flash_cuda::bwd")
def _bwd_fake(
    dout,
    q,
    k,
    v,
    out,
    lse,
    dlse=None,
    *,
    scale=None,
    window_left=-1,
    window_right=-1,
    deterministic=False,
    need_dq=True,
    need_dk=True,
    need_dv=True,
    kernel_name="auto",
):
    checks.check_inputs("flash_cuda.bwd", q, k, v, scale, window_left, window_right, kernel_name)
    kernel_names.check_backward("flash_cuda.bwd", kernel_name)
    checks.check_gradients("flash_cuda.bwd", q, dout, out, lse, dlse)
    return _empty_gradients(q, k, v, need_dq, need_dk, need_dv)


def _default_scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _dense(t: Tensor) -> Tensor:
    """Contiguous with the strides of a new tensor: .contiguous() leaves those of size-1 dims be."""
    return t.reshape(-1).view(t.shape)


@torch.library.impl("flash_cuda::fwd", "cpu")
def _fwd_cpu(q, k, v, *, scale=None, window_left=-1, window_right=-1, kernel_name="auto"):
    checks.check_inputs("flash_cuda.fwd", q, k, v, scale, window_left, window_right, kernel_name)
    from flash_cuda.reference import tiled

    window = {"window_left": window_left, "window_right": window_right}
    out, lse = tiled.forward(q, k, v, scale=_default_scale(scale, q), **window)
    return _dense(out), _dense(lse)


@torch.library.impl("flash_cuda::bwd", "cpu")
def _bwd_cpu(
    dout,
    q,
    k,
    v,
    out,
    lse,
    dlse=None,
    *,
    scale=None,
    window_left=-1,
    window_right=-1,
    deterministic=False,
    need_dq=True,
    need_dk=True,
    need_dv=True,
    kernel_name="auto",
):
    checks.check_inputs("flash_cuda.bwd", q, k, v, scale, window_left, window_right, kernel_name)
    checks.check_gradients("flash_cuda.bwd", q, dout, out, lse, dlse)
    from flash_cuda.reference import tiled

    gradients = tiled.backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dlse=dlse,
        scale=_default_scale(scale, q),
        window_left=window_left,
        window_right=window_right,
        need_dq=need_dq,
        need_dk=need_dk,
        need_dv=need_dv,
    )
    # The op's schema has no optional outputs: a gradient that nobody asked for is an empty tensor.
    return tuple(q.new_empty(0) if g is None else _dense(g) for g in gradients)


def _no_cuda_kernels(*args, **kwargs):
    raise RuntimeError(
        "flash_cuda: this build holds no CUDA kernels (FLASH_CUDA_BUILD_KERNELS=0); "
        "install it again without that variable, or move the tensors to the CPU"
    )


if not HAS_CUDA_KERNELS:
    torch.library.impl("flash_cuda::fwd", "cuda", _no_cuda_kernels)
    torch.library.impl("flash_cuda::bwd", "cuda", _no_cuda_kernels)
