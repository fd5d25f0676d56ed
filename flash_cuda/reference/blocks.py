"""What the block algorithms (v1.py, tiled.py) share: the band, stacked heads, masked products.

Letters: n = batch * kv heads, g = query heads per kv head, B_r = rows of a Q block,
B_c = keys of a KV block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Band(NamedTuple):
    """Full, causal and sliding-window attention as one band of the (sq, sk) score matrix.

    Query i sees key j iff i + sk - sq - left <= j <= i + sk - sq + right; -1 opens that side.
    Ranges are half open and may be empty (begin >= end).
    """

    sq: int
    sk: int
    left: int
    right: int

    def keys(self, i0: int, i1: int) -> tuple[int, int]:
        """The keys that some query of [i0, i1) sees."""
        shift = self.sk - self.sq
        begin = 0 if self.left < 0 else max(0, i0 + shift - self.left)
        end = self.sk if self.right < 0 else min(self.sk, i1 + shift + self.right)
        return begin, end

    def queries(self, j0: int, j1: int) -> tuple[int, int]:
        """The queries that see some key of [j0, j1)."""
        shift = self.sk - self.sq
        begin = 0 if self.right < 0 else max(0, j0 - shift - self.right)
        end = self.sq if self.left < 0 else min(self.sq, j1 - shift + self.left)
        return begin, end

    def hidden(self, i0: int, i1: int, j0: int, j1: int, g: int, like: Tensor) -> Tensor | None:
        """What a block must not see: bool (g * B_r, B_c), or None where every query sees every key.

        Rows repeat g times, once per stacked head (`row_block`).
        """
        shift = self.sk - self.sq
        left_inside = self.left < 0 or j0 >= i1 - 1 + shift - self.left
        right_inside = self.right < 0 or j1 - 1 <= i0 + shift + self.right
        if left_inside and right_inside:
            return None
        position = torch.arange(i0, i1, device=like.device)[:, None] + shift
        distance = torch.arange(j0, j1, device=like.device)[None, :] - position
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left >= 0:
            hidden |= distance < -self.left
        if self.right >= 0:
            hidden |= distance > self.right
        return hidden.repeat(g, 1)


def spans(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """[begin, end) cut into half-open spans of `size`; the last may be shorter."""
    for start in range(begin, end, size):
        yield start, min(start + size, end)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stack_heads(x: Tensor, hk: int) -> Tensor:
    """(b, s, h, d) -> contiguous (b * hk, g, s, d) in the accumulator dtype; g = 1 for k and v."""
    b, s, h, d = x.shape
    g = h // hk
    x = x.reshape(b, s, hk, g, d).permute(0, 2, 3, 1, 4)
    return x.to(accumulator(x.dtype)).contiguous().view(b * hk, g, s, d)


def unstack_heads(x: Tensor, hk: int, dtype: torch.dtype) -> Tensor:
    """(b * hk, g, s, d) -> contiguous (b, s, h, d), the inverse of `stack_heads`."""
    n, g, s, d = x.shape
    return x.view(n // hk, hk * g, s, d).transpose(1, 2).to(dtype).contiguous()


def row_block(x: Tensor, i0: int, i1: int) -> Tensor:
    """Rows [i0, i1) of each of the g heads of a kv head, stacked: (n, g, s, d) -> (n, g * B_r, d).

    Stacked, one product serves the whole group, and the sum over its heads that dK and dV need is
    the product's own sum over rows.
    """
    n, g, _, d = x.shape
    return x[:, :, i0:i1].reshape(n, g * (i1 - i0), d)


def finite_max(m: Tensor) -> Tensor:
    """A row max that is safe to subtract: 0 in place of -inf, because -inf - (-inf) is NaN."""
    return m.masked_fill(m == -math.inf, 0)


def isolated_matmul(weights: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """weights @ values in which row r of weights never meets row c of values where hidden[r, c].

    weights (n, r, c), 0 where hidden; values (n, c, d); hidden (r, c) or None. A weight of 0 is not
    enough: 0 * NaN is NaN. So values that are not finite are taken out of the product, and those
    that a row does see are added to that row one by one.
    """
    if hidden is None:
        return weights @ values
    finite = values.isfinite()
    if finite.all():
        return weights @ values
    product = weights @ values.masked_fill(~finite, 0)
    for c in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        outer = weights[:, :, c, None] * values[:, None, c]  # (n, r, d)
        product += outer.masked_fill(hidden[:, c, None] | finite[:, None, c], 0)
    return product
