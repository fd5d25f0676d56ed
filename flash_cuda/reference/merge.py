"""Attention over disjoint sets of keys, merged exactly: split-KV decoding, ring attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import finite_max


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """lse = log sum_s e^(lse_s);  out = sum_s e^(lse_s - lse) out_s.

    parts: one (out_s (b, sq, h, dv), lse_s (b, h, sq)) per set of keys; returns such a pair for
    their union. Associative and commutative up to rounding; the one-pass recurrence is its special
    case of adding one key. A part without keys (lse -inf) has weight 0; a row without keys in any
    part has out 0, lse -inf.

    Source: Dao et al. 2022, section 3.1 (two blocks); the reduction of Flash-Decoding.
    """
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    m = finite_max(lses.amax(0))
    weights = torch.exp(lses - m)
    total = weights.sum(0)
    weights = weights / total.masked_fill(total == 0, 1)
    rows = weights.transpose(-1, -2)[..., None]  # (s, b, sq, h, 1): over out's axes
    out = (rows * outs.to(weights.dtype)).masked_fill(rows == 0, 0).sum(0)
    return out.to(outs.dtype), m + total.log()
