"""flash_cuda.attention: the function that users call."""

import torch
from torch import Tensor

from flash_cuda import checks
from flash_cuda.autograd import AUTOCAST_KEYS, attend, autocast, below_autocast


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    deterministic: bool | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention softmax(scale q k^T) v in O(seqlen) memory, differentiable in q, k, v, lse.

    FlashAttention-2 (Dao, 2023), section 3.1, algorithms 1 and 2; kernel="v1": FlashAttention (Dao
    et al., 2022), algorithms 1 and 4; kernel="hopper": FlashAttention-2's algorithms on wgmma and
    TMA, as FlashAttention-3 (Shah et al., 2024) does it.

    Args:
        q: (batch, seqlen_q, heads, head_dim); head_dim from 1 to 256, any strides.
            float16 or bfloat16 on CUDA, every floating dtype on the CPU.
        k, v: (batch, seqlen_k, heads_k, head_dim); heads is a multiple of heads_k (GQA, MQA).
        causal: query i sees keys j <= i + seqlen_k - seqlen_q (bottom-right aligned): sets the
            right side of the window to 0.
        window: (left, right), inclusive, -1 = open: query i sees keys
            i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right.
        scale: multiplies q k^T; None = 1 / sqrt(head_dim).
        deterministic: True makes the gradients bitwise repeatable; otherwise they are when
            torch.use_deterministic_algorithms(True) is on. The forward always is.
        kernel: "auto" (on CUDA hopper where it runs, else v2; the reference on the CPU), "hopper"
            (compute capability 9.0; its gradients are those of "auto"), "v2", "reference",
            or on CUDA for head_dim up to 128 "v1" and the corners of the lab (docs/lab.md),
            "<kv_outer|q_outer>/<split_k|split_q>/<eager|deferred>"; other corners than v1 are
            forward only. "/48KB", "/99KB", "/163KB" or "/227KB" behind such a name is the shared
            memory that its block sizes come from.
        return_lse: also return the logsumexp of the scaled scores of each row.

    Returns:
        out (batch, seqlen_q, heads, head_dim), contiguous, in the dtype of q; with return_lse also
        lse (batch, heads, seqlen_q), natural logarithm, float32 (float64 for float64 inputs on the
        CPU). A row that sees no key has out = 0, lse = -inf and zero gradients.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument that Python checks, named.
        RuntimeError: the same from the CUDA op (shapes, dtypes, devices), naming op and argument.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        checks.check_tensors("flash_cuda.attention", q=q, k=k, v=v)
    # Defaults are left out: every keyword costs the dispatcher host time.
    options = {}
    if kernel != "auto":
        checks.check_kernel_type("flash_cuda.attention", kernel)
        options["kernel_name"] = kernel
    if scale is not None:
        checks.check_scale_type("flash_cuda.attention", scale)
        options["scale"] = scale
    if window != (-1, -1):
        left, right = checks.window_pair("flash_cuda.attention", window)
        options["window_left"], options["window_right"] = left, right
    if causal:
        options["window_right"] = 0
    deterministic = bool(deterministic)
    device = "cuda" if q.is_cuda else q.device.type  # a device is an object to build
    if device in AUTOCAST_KEYS and torch.is_autocast_enabled(device):
        q, k, v = autocast(q, k, v, device)
        with below_autocast(device):
            return attend(q, k, v, options, deterministic, return_lse)
    return attend(q, k, v, options, deterministic, return_lse)
