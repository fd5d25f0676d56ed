"""The names and signatures of FlashAttention-2 (flash_attn 2.8)."""

from torch import Tensor

from flash_cuda import checks
from flash_cuda.interface import attention


def _refuse(op: str, dropout_p: float, softcap: float, alibi_slopes: Tensor | None) -> None:
    for argument, given in (
        ("dropout_p", dropout_p != 0.0),
        ("softcap", softcap != 0.0),
        ("alibi_slopes", alibi_slopes is not None),
    ):
        if given:
            raise NotImplementedError(f"{op}: {argument}: not built yet; leave it at its default")


def _attend(op, q, k, v, dropout_p, scale, causal, window, softcap, alibi, deterministic, probs):
    _refuse(op, dropout_p, softcap, alibi)
    result = attention(
        q,
        k,
        v,
        causal=causal,
        window=checks.window_pair(op, window, "window_size"),
        scale=scale,
        deterministic=deterministic,
        return_lse=probs,
    )
    # FlashAttention-2 returns its dropout mask in third place, None without dropout.
    return (*result, None) if probs else result


def _packed(op: str, argument: str, packed: Tensor, parts: int) -> tuple[Tensor, ...]:
    """The views of a tensor (b, s, parts, h, d) along its third dimension: no copy."""
    checks.check_tensors(op, **{argument: packed})
    if packed.dim() != 5 or packed.shape[2] != parts:
        raise ValueError(
            f"{op}: {argument}: expected shape (batch, seqlen, {parts}, heads, head_dim), "
            f"got {tuple(packed.shape)}"
        )
    return packed.unbind(2)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """q (b, sq, h, d), k and v (b, sk, hk, d) -> out (b, sq, h, d); see flash_cuda.attention.

    With return_attn_probs: (out, lse, None). Unlike FlashAttention-2, a row that sees no key has
    lse = -inf (not +inf) and a gradient that flows into lse counts.

    Raises:
        NotImplementedError: dropout_p, softcap or alibi_slopes is given.
    """
    return _attend(
        "flash_cuda.flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """qkv (b, s, 3, h, d) -> out (b, s, h, d); otherwise as flash_attn_func."""
    op = "flash_cuda.flash_attn_qkvpacked_func"
    return _attend(
        op, *_packed(op, "qkv", qkv, 3), dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """q (b, sq, h, d), kv (b, sk, 2, hk, d) -> out (b, sq, h, d); otherwise as flash_attn_func."""
    op = "flash_cuda.flash_attn_kvpacked_func"
    return _attend(
        op, q, *_packed(op, "kv", kv, 2), dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
