"""The v2 algorithm on blocks: the CPU kernel of flash_cuda::fwd and flash_cuda::bwd.

O(N) memory, batched over batch and heads. It serves all that the ops accept: GQA, the band,
sq != sk, rows without keys, empty sizes, any strides, every floating dtype. Products and sums are
float32 (float64 for float64).
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

# Measured on 2 cores, forward and backward, causal, 256 to 1024 tokens: within 10 % of the best of
# 64, 128 and 256. A larger block wastes more at the band's edge, a smaller one pays more calls.
BLOCK = 128


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    block_q: int = BLOCK,
    block_k: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Q outer, KV inner; m, l and O of a Q block stay "in registers"; one division at the end.

    Per KV block:  S = scale Q_i K_j^T;  m' = max(m, rowmax S);  P = exp(S - m');
                   l = e^(m - m') l + rowsum P;  O = e^(m - m') O + P V_j.
    At the end:    O_i = O / l,  lse_i = m + log l.

    q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), any strides; scale defaults to 1/sqrt(d).
    Returns contiguous out (b, sq, h, dv) in q's dtype and lse (b, h, sq), float32 (float64 for
    float64). A row without keys has out 0 and lse -inf. NaN or Inf in keys and values that a row
    does not see never reaches it.

    Source: Dao 2023, Algorithm 1 and section 3.1.
    """
    b, sq, h, d = q.shape
    sk, hk = k.shape[1:3]
    band = Band(sq, sk, window_left, window_right)
    Q = stack_heads(q, hk) * (1 / math.sqrt(d) if scale is None else scale)
    K, V = stack_heads(k, hk)[:, 0], stack_heads(v, hk)[:, 0]
    n, g = Q.shape[:2]
    O = Q.new_zeros(n, g, sq, V.shape[-1])
    L = Q.new_full((n, g, sq, 1), -math.inf)

    for i0, i1 in spans(0, sq, block_q):
        Q_i = row_block(Q, i0, i1)
        m = Q.new_full((*Q_i.shape[:2], 1), -math.inf)
        l = torch.zeros_like(m)
        o = Q.new_zeros(*Q_i.shape[:2], V.shape[-1])
        for j0, j1 in spans(*band.keys(i0, i1), block_k):
            hidden = band.hidden(i0, i1, j0, j1, g, Q)
            S = Q_i @ K[:, j0:j1].mT
            if hidden is not None:
                S.masked_fill_(hidden, -math.inf)
            m_old, m = m, torch.maximum(m, S.amax(-1, keepdim=True))
            P = S.sub_(finite_max(m)).exp_()
            rescale = torch.exp(m_old - finite_max(m))
            l = l * rescale + P.sum(-1, keepdim=True)
            o = o.mul_(rescale).add_(isolated_matmul(P, V[:, j0:j1], hidden))
        O[:, :, i0:i1] = (o / l.masked_fill(l == 0, 1)).view(n, g, i1 - i0, V.shape[-1])
        L[:, :, i0:i1] = (m + l.log()).view(n, g, i1 - i0, 1)

    return unstack_heads(O, hk, q.dtype), L.view(b, h, sq)


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
    need_dq: bool = True,
    need_dk: bool = True,
    need_dv: bool = True,
    block_q: int = BLOCK,
    block_k: int = BLOCK,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """KV outer, Q inner; P is recomputed from lse, so no other statistic of the forward is needed.

    Before:         D = rowsum(dO * O) - dlse.
    Per Q block:    P = exp(scale Q_i K_j^T - lse_i);  dV_j += P^T dO_i;  dP = dO_i V_j^T;
                    dS = P * (dP - D_i);  dQ_i += scale dS K_j;  dK_j += scale dS^T Q_i.
    d lse / d S = P, so the gradient of lse adds P * dlse to dS: it joins D with a minus sign.

    dout, out (b, sq, h, dv), lse and dlse (b, h, sq), the rest as in `forward`. Returns contiguous
    (dq, dk, dv) shaped like q, k, v, None where not needed. The order of sums is fixed.

    Source: Dao 2023, Algorithm 2; Dao et al. 2022, appendix B.2.
    """
    b, sq, h, d = q.shape
    sk, hk = k.shape[1:3]
    band = Band(sq, sk, window_left, window_right)
    scale = 1 / math.sqrt(d) if scale is None else scale
    Q = stack_heads(q, hk) * scale
    K, V = stack_heads(k, hk)[:, 0], stack_heads(v, hk)[:, 0]
    dO = stack_heads(dout, hk)
    n, g = Q.shape[:2]
    L = lse.to(Q.dtype).reshape(n, g, sq, 1)
    D = (dO * stack_heads(out, hk)).sum(-1, keepdim=True)
    if dlse is not None:
        D -= dlse.to(Q.dtype).reshape(n, g, sq, 1)
    dQ = torch.zeros_like(Q) if need_dq else None
    dK = torch.zeros_like(K) if need_dk else None
    dV = torch.zeros_like(V) if need_dv else None

    for j0, j1 in spans(0, sk, block_k):
        K_j, V_j = K[:, j0:j1], V[:, j0:j1]
        for i0, i1 in spans(*band.queries(j0, j1), block_q):
            Q_i, dO_i = row_block(Q, i0, i1), row_block(dO, i0, i1)
            hidden = band.hidden(i0, i1, j0, j1, g, Q)
            hidden_T = None if hidden is None else hidden.T
            # A row whose visible scores are all -inf has lse -inf: P = exp(-inf - 0) = 0.
            P = (Q_i @ K_j.mT).sub_(finite_max(row_block(L, i0, i1))).exp_()
            if hidden is not None:
                P.masked_fill_(hidden, 0)
            if need_dv:
                dV[:, j0:j1] += isolated_matmul(P.mT, dO_i, hidden_T)
            if not (need_dq or need_dk):
                continue
            dS = (dO_i @ V_j.mT).sub_(row_block(D, i0, i1)).mul_(P)
            if hidden is not None:  # P is 0 there, but dP or D may be NaN
                dS.masked_fill_(hidden, 0)
            if need_dq:
                dQ_i = isolated_matmul(dS, K_j, hidden)
                dQ[:, :, i0:i1] += dQ_i.view(n, g, i1 - i0, d)
            if need_dk:
                dK[:, j0:j1] += isolated_matmul(dS.mT, Q_i, hidden_T)

    return (
        unstack_heads(dQ.mul_(scale), hk, q.dtype) if need_dq else None,
        unstack_heads(dK[:, None], hk, k.dtype) if need_dk else None,
        unstack_heads(dV[:, None], hk, v.dtype) if need_dv else None,
    )
