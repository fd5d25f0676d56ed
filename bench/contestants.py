"""What a contestant is, flash_cuda as one, and attention written plainly, which runs anywhere.

Each takes q (b, sq, h, d), k and v (b, sk, hk, d) and returns (b, sq, h, d); hk divides h.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import common

# attend(q, k, v, causal); where has_window also attend(..., window=(left, right)), both inclusive,
# aligned at the bottom right, -1 = open.
Attend = Callable[..., Tensor]


OWN_NAME = "flash_cuda"


@dataclass(frozen=True)
class Contestant:
    """An attention to time. `unable` says why a call is not for it; dtype None = the cell's own."""

    name: str
    version: str
    attend: Attend
    dtype: torch.dtype | None = None
    top_left_causal: bool = False
    has_backward: bool = True
    has_window: bool = False

    def unable(
        self, seqlen_q: int, seqlen_k: int, causal: bool, backward: bool, window: bool = False
    ) -> str | None:
        if backward and not self.has_backward:
            return "this build has no backward"
        if causal and self.top_left_causal and seqlen_q != seqlen_k:
            return "its causal mask is top-left aligned, ours bottom-right"
        if window and not self.has_window:
            return "it has no sliding window"
        return None


def ours(
    kernel: str = "auto", *, dtype: torch.dtype | None = None, deterministic: bool = False
) -> Contestant:
    """flash_cuda itself. Raises ImportError where it is not installed."""
    import flash_cuda

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        return flash_cuda.attention(
            q, k, v, causal=causal, window=window, kernel=kernel, deterministic=deterministic
        )

    return Contestant(OWN_NAME, common.flash_cuda_version(), attend, dtype=dtype, has_window=True)


class _BackwardOfSdpa(torch.autograd.Function):
    """SDPA's flash forward, flash_cuda's backward from its output and lse."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, bwd: Callable) -> Tensor:
        name = "_scaled_dot_product_flash_attention" + ("" if q.is_cuda else "_for_cpu")
        views = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = getattr(torch.ops.aten, name)(*views, 0.0, causal)[:2]
        out = out.transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.bwd = functools.partial(bwd, window_right=0 if causal else -1)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.bwd(dout, *ctx.saved_tensors), None, None)


def ours_backward(kernel: str = "auto") -> Contestant:
    """flash_cuda's backward behind a peer's forward: the error of the one without the other's.

    Raises ImportError where flash_cuda is not installed.
    """
    import flash_cuda

    bwd = functools.partial(flash_cuda.bwd, kernel=kernel)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _BackwardOfSdpa.apply(q, k, v, causal, bwd)

    return Contestant(OWN_NAME, common.flash_cuda_version(), attend, top_left_causal=True)


def announce(contestants: list[Contestant], missing: dict[str, str]) -> dict:
    """Say where this runs, with which peers, and why others are not here; the environment."""
    versions = {c.name: c.version for c in contestants if c.name != OWN_NAME}
    environment = common.environment(versions)
    common.say(common.describe(environment))
    for peer, reason in missing.items():
        common.say(f"not here: {peer} ({reason})")
    return environment


def hidden(
    rows: range, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int], device: object
) -> Tensor:
    """bool (len(rows), sk): True where a query of `rows` does not see a key."""
    left, right = window[0], 0 if causal else window[1]
    i = torch.arange(rows.start, rows.stop, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)[None, :]
    outside = torch.zeros(len(rows), seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        outside |= j < i - left
    if right >= 0:
        outside |= j > i + right
    return outside


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    rows: int | None = None,
) -> Tensor:
    """Attention as a textbook writes it: scores, softmax, weighted sum, in the dtype of the inputs.

    The whole (sq, sk) score matrix is in memory, or `rows` of its rows at a time.
    """
    seqlen_q, seqlen_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    parts = []
    for start in range(0, seqlen_q, rows or seqlen_q):
        part = range(start, min(start + (rows or seqlen_q), seqlen_q))
        scores = q[:, :, part.start : part.stop] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal or window != (-1, -1):
            unseen = hidden(part, seqlen_q, seqlen_k, causal, window, q.device)
            scores = scores.masked_fill(unseen, float("-inf"))
        parts.append(scores.softmax(-1) @ v)
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2)


def sdpa_on_views(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """F.scaled_dot_product_attention on (b, s, h, d) tensors; views only, no copies."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
