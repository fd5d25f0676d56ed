"""The steps from softmax to flash attention, one key at a time.

m is the running max, d the running denominator (l in the papers), o the running output. Loops are
plain Python and meant for reading; `v1.py` and `tiled.py` are the same mathematics on blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _start(x: Tensor) -> tuple[Tensor, Tensor]:
    """m = -inf and d = 0 as scalars of x's dtype and device."""
    return x.new_full((), -math.inf), x.new_zeros(())


def safe_softmax_3pass(x: Tensor) -> Tensor:
    """softmax(x)_i = e^(x_i - m) / sum_j e^(x_j - m), m = max(x): a pass each for m, d, the result.

    x (N,) -> (N,). Every exponent is <= 0, so nothing overflows; d needs the max of the whole row.
    Source: Milakov & Gimelshein 2018, Algorithm 2.
    """
    m, d = _start(x)
    for x_i in x:
        m = torch.maximum(m, x_i)
    for x_i in x:
        d = d + torch.exp(x_i - m)
    return torch.exp(x - m) / d


def online_softmax_2pass(x: Tensor) -> Tensor:
    """m and d in one pass, d_i = d_(i-1) e^(m_(i-1) - m_i) + e^(x_i - m_i), then the result.

    x (N,) -> (N,). d_i = sum_(j<=i) e^(x_j - m_i) needs only the max so far; d_N is exact.
    Source: Milakov & Gimelshein 2018, Algorithm 3.
    """
    m, d = _start(x)
    for x_i in x:
        m_old, m = m, torch.maximum(m, x_i)
        d = d * torch.exp(m_old - m) + torch.exp(x_i - m)
    return torch.exp(x - m) / d


def online_softmax_1pass(x: Tensor) -> Tensor:
    """A_i = (f A_(i-1), e^(x_i - m_i) / d_i) with f = e^(m_(i-1) - m_i) d_(i-1) / d_i.

    x (N,) -> (N,). One pass over x, but all results so far are rescaled at every step: no gain for
    softmax itself. It is the step that flash attention takes with o in place of A.
    """
    m, d = _start(x)
    A = x.new_zeros(0)
    for x_i in x:
        m_old, m = m, torch.maximum(m, x_i)
        d_old, d = d, d * torch.exp(m_old - m) + torch.exp(x_i - m)
        A = torch.cat([A * (torch.exp(m_old - m) * d_old / d), (torch.exp(x_i - m) / d)[None]])
    return A


def fused_attention(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """o = sum_j e^(x_j) v_j / sum_j e^(x_j) in one pass without a max: overflows for large x.

    One query: q (D,), K (N, D), V (N, Dv) -> (Dv,), x_j = q . k_j / sqrt(D).
    """
    _, d = _start(q)
    o = torch.zeros_like(V[0])
    for k, v in zip(K, V, strict=True):
        x = q @ k / math.sqrt(K.shape[1])
        o = o + torch.exp(x) * v
        d = d + torch.exp(x)
    return o / d


def attention_2pass(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Online softmax, then o = sum_j e^(x_j - m_N) / d_N v_j in a pass that computes x_j again.

    q (D,), K (N, D), V (N, Dv) -> (Dv,). No score is stored, but K is read twice.
    """
    m, d = _start(q)
    o = torch.zeros_like(V[0])
    scale = 1 / math.sqrt(K.shape[1])
    for k in K:
        x = q @ k * scale
        m_old, m = m, torch.maximum(m, x)
        d = d * torch.exp(m_old - m) + torch.exp(x - m)
    for k, v in zip(K, V, strict=True):
        o = o + torch.exp(q @ k * scale - m) / d * v
    return o


def flash_attention_1pass(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """o_i = o_(i-1) d_(i-1) e^(m_(i-1) - m_i) / d_i + e^(x_i - m_i) / d_i v_i, in one pass.

    q (D,), K (N, D), V (N, Dv) -> (Dv,). o_i is attention over the first i keys: the last o is the
    answer.
    Source: Dao et al. 2022, section 3.1, for blocks of one key.
    """
    m, d = _start(q)
    o = torch.zeros_like(V[0])
    scale = 1 / math.sqrt(K.shape[1])
    for k, v in zip(K, V, strict=True):
        x = q @ k * scale
        m_old, m = m, torch.maximum(m, x)
        d_old, d = d, d * torch.exp(m_old - m) + torch.exp(x - m)
        o = o * (d_old * torch.exp(m_old - m) / d) + torch.exp(x - m) / d * v
    return o


def flash_attention_tiled(Q: Tensor, K: Tensor, V: Tensor, tile_size: int) -> Tensor:
    """The one-pass recurrence on tiles: a tile of queries holds m, d, o while tiles of keys pass.

    One head, no mask: Q (N, D), K (M, D), V (M, Dv) -> (N, Dv). o is normalised at every step
    (eager); `tiled.forward` defers the division to the end.
    Source: the loop order of Dao 2023 with the recurrence of Dao et al. 2022.
    """
    scale = 1 / math.sqrt(K.shape[1])
    O = []  # noqa: E741
    for i in range(0, len(Q), tile_size):
        Q_tile = Q[i : i + tile_size]
        m = Q.new_full((len(Q_tile), 1), -math.inf)
        d = Q.new_zeros(len(Q_tile), 1)
        o = Q.new_zeros(len(Q_tile), V.shape[1])
        for j in range(0, len(K), tile_size):
            K_tile, V_tile = K[j : j + tile_size], V[j : j + tile_size]
            x = Q_tile @ K_tile.T * scale
            m_old, m = m, torch.maximum(m, x.amax(1, keepdim=True))
            p = torch.exp(x - m)
            d_old, d = d, d * torch.exp(m_old - m) + p.sum(1, keepdim=True)
            o = o * (d_old * torch.exp(m_old - m) / d) + (p / d) @ V_tile
        O.append(o)
    return torch.cat(O) if O else Q.new_zeros(0, V.shape[1])
