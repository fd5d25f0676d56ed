"""Standard attention, S and P as whole matrices: what every other algorithm is tested against."""
# ruff: noqa: E741 (l and O are the papers' letters)

from __future__ import annotations

import math

import torch
from torch import Tensor


def band_mask(
    sq: int,
    sk: int,
    window_left: int = -1,
    window_right: int = -1,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which key each query sees: bool (sq, sk), True where query i sees key j.

    i + sk - sq - window_left <= j <= i + sk - sq + window_right; -1 opens that side. The last
    query is aligned with the last key (bottom right), so causal attention is window_right = 0.
    """
    # A query's own position on the key axis, and each key's distance to the right of it.
    position = torch.arange(sq, device=device)[:, None] + (sk - sq)
    distance = torch.arange(sk, device=device)[None, :] - position
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if window_left >= 0:
        seen &= distance >= -window_left
    if window_right >= 0:
        seen &= distance <= window_right
    return seen


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
) -> tuple[Tensor, Tensor]:
    """O = softmax(scale Q K^T) V with an explicit mask; memory sq * sk, differentiable twice.

    q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), h a multiple of hk: query head x reads kv
    head x // (h / hk). Returns out (b, sq, h, dv) and lse (b, h, sq), the natural logarithm of each
    row's sum of exponentials, both in the dtype of q: nothing is computed in a higher precision.
    A row without a key has out 0, lse -inf and zero gradients. No isolation: 0 * NaN is NaN.

    Source: Vaswani et al. 2017, section 3.2.1; Dao et al. 2022, Algorithm 0.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    S = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    seen = band_mask(q.shape[1], k.shape[1], window_left, window_right, q.device)
    S = S.masked_fill(~seen, -math.inf)

    if k.shape[1] == 0:  # amax has no value over zero keys
        m = S.new_full(S.shape[:-1], -math.inf)
    else:
        m = S.detach().amax(-1)  # the result does not depend on m, so neither does the gradient
    dead = m == -math.inf
    m = m.masked_fill(dead, 0)  # -inf - (-inf) would be NaN
    P = torch.exp(S - m[..., None])
    # A dead row has sum 0; 1 in its place keeps 0 / 0 and the gradient of log(0) out.
    l = P.sum(-1).masked_fill(dead, 1)
    P = P / l[..., None]

    out = torch.einsum("bhij,bjhd->bihd", P, v)
    lse = (m + l.log()).masked_fill(dead, -math.inf)
    return out, lse
