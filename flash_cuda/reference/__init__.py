"""The algorithms of the two FlashAttention papers as tensor code, each under its own name.

naive    plain softmax attention with an explicit mask: what all others are tested against
softmax  softmax in 3, 2 and 1 passes, attention in 2 and 1 passes, tiled: one query or one head
v1       Dao et al. 2022: KV outer; O, l, m re-read and rescaled
tiled    Dao 2023 (v2): Q outer, one division at the end; the CPU kernel of flash_cuda::fwd and bwd
merge    results over disjoint sets of keys, merged
blocks   the band in blocks and the products that v1 and tiled share

docs/algorithms.md derives them from one another.
"""

from . import tiled, v1
from .merge import merge
from .naive import attention, band_mask
from .softmax import (
    attention_2pass,
    flash_attention_1pass,
    flash_attention_tiled,
    fused_attention,
    online_softmax_1pass,
    online_softmax_2pass,
    safe_softmax_3pass,
)

v1_forward, v1_backward = v1.forward, v1.backward
v2_forward, v2_backward = tiled.forward, tiled.backward

__all__ = [
    "attention",
    "attention_2pass",
    "band_mask",
    "flash_attention_1pass",
    "flash_attention_tiled",
    "fused_attention",
    "merge",
    "online_softmax_1pass",
    "online_softmax_2pass",
    "safe_softmax_3pass",
    "tiled",
    "v1",
    "v1_backward",
    "v1_forward",
    "v2_backward",
    "v2_forward",
]
