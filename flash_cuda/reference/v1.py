"""The v1 algorithm: KV outer, Q inner; O, l, m live in HBM, re-read and rescaled for every block.

`tiled.py` is v2. The two differ in loop order and in when they divide by l, not in the result.
"""
# ruff: noqa: E741 (l and O are the papers' letters)

from __future__ import annotations

import math

import torch
from torch import Tensor

from .blocks import (
    Band,
    finite_max,
    isolated_matmul,
    row_block,
    spans,
    stack_heads,
    unstack_heads,
)

# The M of Algorithm 1, in elements: 64 KiB of float32.
SRAM_ELEMENTS = 16384


def block_sizes(d: int, M: int = SRAM_ELEMENTS) -> tuple[int, int]:
    """(B_r, B_c): B_c = ceil(M / 4d), B_r = min(B_c, d), M = elements that SRAM holds.

    Each of Q_i, O_i, K_j, V_j then has at most about M / 4 elements, and so has S (B_r x B_c),
    because B_r <= d.
    Source: Dao et al. 2022, Algorithm 1, line 1.
    """
    B_c = math.ceil(M / (4 * d))
    return min(B_c, d), B_c


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """KV outer, Q inner; O is normalised after every block: attention over the keys read so far.

    Per KV block j, per Q block i (~ marks the block's own statistics, `*_block` in the code):
        S = scale Q_i K_j^T;  m~ = rowmax S;  P~ = exp(S - m~);  l~ = rowsum P~;
        m_new = max(m_i, m~);  l_new = e^(m_i - m_new) l_i + e^(m~ - m_new) l~;
        O_i = diag(l_new)^-1 (diag(l_i) e^(m_i - m_new) O_i + e^(m~ - m_new) P~ V_j);
        l_i = l_new;  m_i = m_new.

    Shapes, results and rows without keys as in `tiled.forward`; blocks default to `block_sizes(d)`.

    Source: Dao et al. 2022, Algorithm 1 (Algorithm 2 of its appendix B for the mask).
    """
    b, sq, h, d = q.shape
    sk, hk = k.shape[1:3]
    B_r, B_c = (x or y for x, y in zip((block_q, block_k), block_sizes(d), strict=True))
    band = Band(sq, sk, window_left, window_right)
    Q = stack_heads(q, hk) * (1 / math.sqrt(d) if scale is None else scale)
    K, V = stack_heads(k, hk)[:, 0], stack_heads(v, hk)[:, 0]
    n, g = Q.shape[:2]
    O = Q.new_zeros(n, g, sq, V.shape[-1])
    l = Q.new_zeros(n, g, sq, 1)
    m = Q.new_full((n, g, sq, 1), -math.inf)

    for j0, j1 in spans(0, sk, B_c):
        K_j, V_j = K[:, j0:j1], V[:, j0:j1]
        for i0, i1 in spans(*band.queries(j0, j1), B_r):
            Q_i, O_i, l_i, m_i = (row_block(x, i0, i1) for x in (Q, O, l, m))
            hidden = band.hidden(i0, i1, j0, j1, g, Q)
            S = Q_i @ K_j.mT
            if hidden is not None:
                S = S.masked_fill(hidden, -math.inf)
            m_block = S.amax(-1, keepdim=True)
            P = torch.exp(S - finite_max(m_block))
            l_block = P.sum(-1, keepdim=True)
            m_new = torch.maximum(m_i, m_block)
            rescale = torch.exp(m_i - finite_max(m_new))
            rescale_block = torch.exp(m_block - finite_max(m_new))
            l_new = rescale * l_i + rescale_block * l_block
            O_i = l_i * rescale * O_i + rescale_block * isolated_matmul(P, V_j, hidden)
            O_i = O_i / l_new.masked_fill(l_new == 0, 1)
            for hbm, block in ((O, O_i), (l, l_new), (m, m_new)):
                hbm[:, :, i0:i1] = block.view(n, g, i1 - i0, hbm.shape[-1])

    return unstack_heads(O, hk, q.dtype), (m + l.log()).view(b, h, sq)


def backward(
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
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """KV outer, Q inner; dQ_i lives in HBM and is re-read for every KV block.

    Per KV block j, per Q block i:
        P = diag(l_i)^-1 exp(S - m_i) = exp(S - lse_i);  dV_j += P^T dO_i;  dP = dO_i V_j^T;
        D_i = rowsum(dO_i * O_i) - dlse_i;  dS = P * (dP - D_i);
        dQ_i += scale dS K_j;  dK_j += scale dS^T Q_i.

    D_i is computed again in every block, from O_i; v2 computes it once, before the loops.
    Shapes and results as in `tiled.backward`.

    Source: Dao et al. 2022, Algorithm 4 (appendix B.4), with lse = m + log l as its one statistic.
    """
    b, sq, h, d = q.shape
    sk, hk = k.shape[1:3]
    B_r, B_c = (x or y for x, y in zip((block_q, block_k), block_sizes(d), strict=True))
    band = Band(sq, sk, window_left, window_right)
    scale = 1 / math.sqrt(d) if scale is None else scale
    Q, dO, O = (stack_heads(x, hk) for x in (q, dout, out))
    K, V = stack_heads(k, hk)[:, 0], stack_heads(v, hk)[:, 0]
    n, g = Q.shape[:2]
    L = lse.to(Q.dtype).reshape(n, g, sq, 1)
    dL = torch.zeros_like(L) if dlse is None else dlse.to(Q.dtype).reshape(n, g, sq, 1)
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)

    for j0, j1 in spans(0, sk, B_c):
        K_j, V_j = K[:, j0:j1], V[:, j0:j1]
        for i0, i1 in spans(*band.queries(j0, j1), B_r):
            Q_i, O_i, dO_i, L_i, dL_i = (row_block(x, i0, i1) for x in (Q, O, dO, L, dL))
            hidden = band.hidden(i0, i1, j0, j1, g, Q)
            if hidden is None:
                hidden = Q.new_zeros(g * (i1 - i0), j1 - j0, dtype=torch.bool)
            P = torch.exp(scale * Q_i @ K_j.mT - finite_max(L_i)).masked_fill(hidden, 0)
            dV[:, j0:j1] += isolated_matmul(P.mT, dO_i, hidden.T)
            dP = dO_i @ V_j.mT
            D_i = (dO_i * O_i).sum(-1, keepdim=True) - dL_i
            dS = (P * (dP - D_i)).masked_fill(hidden, 0)
            dQ_i = scale * isolated_matmul(dS, K_j, hidden)
            dQ[:, :, i0:i1] += dQ_i.view(n, g, i1 - i0, d)
            dK[:, j0:j1] += scale * isolated_matmul(dS.mT, Q_i, hidden.T)

    return (
        unstack_heads(dQ, hk, q.dtype),
        unstack_heads(dK[:, None], hk, k.dtype),
        unstack_heads(dV[:, None], hk, v.dtype),
    )
