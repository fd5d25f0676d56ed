"""The contestants: flash_cuda itself, and every other attention that can be imported here.

Each takes q (b, sq, h, d), k and v (b, sk, hk, d) and returns (b, sq, h, d). A peer that is missing
or broken is a reason in a list, never an exception.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.common import flash_cuda_version, one_line

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Contestant:
    """An attention to time. `unable` says why a call is not for it; dtype None = the cell's own."""

    name: str
    version: str
    attend: Attend
    dtype: torch.dtype | None = None
    top_left_causal: bool = False
    has_backward: bool = True

    def unable(self, seqlen_q: int, seqlen_k: int, causal: bool, backward: bool) -> str | None:
        if backward and not self.has_backward:
            return "this build has no backward"
        if causal and self.top_left_causal and seqlen_q != seqlen_k:
            return "its causal mask is top-left aligned, ours bottom-right"
        return None


def standard_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention as a textbook writes it: the whole (sq, sk) score matrix in memory."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        sq, sk = scores.shape[-2:]
        hidden = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu_(sk - sq + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


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


def _sdpa(name: str) -> Contestant:
    backend = SDPA_BACKENDS[name]
    version = f"torch {torch.__version__}"
    if backend is SDPBackend.CUDNN_ATTENTION:
        version = f"cuDNN {torch.backends.cudnn.version()}, {version}"

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa_on_views(q, k, v, causal)

    return Contestant(name, version, attend, top_left_causal=True)


def _distribution_version(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "version unknown"


def _first(result: Tensor | tuple) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _flash_attention_package(name: str, module: str, *distributions: str) -> Contestant:
    """FA2, FA3 and FA4 agree on `flash_attn_func(q, k, v, causal=...)`; FA4 returns (out, lse)."""
    function = importlib.import_module(module).flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _first(function(q, k, v, causal=causal))

    return Contestant(name, _distribution_version(*distributions), attend)


def _fa3() -> Contestant:
    found = _flash_attention_package(
        "fa3", "flash_attn_interface", "tokenspeed-fa3", "flash-attn-3"
    )
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        flags = {}
    return replace(found, has_backward=not flags.get("FLASHATTENTION_DISABLE_BACKWARD", False))


def _flex() -> Contestant:
    from torch.nn.attention import flex_attention as flex

    compiled = torch.compile(flex.flex_attention, dynamic=False)

    @functools.lru_cache(maxsize=4)
    def causal_mask(sq: int, sk: int) -> flex.BlockMask:
        return flex.create_block_mask(
            lambda b, h, i, j: j <= i + sk - sq, None, None, sq, sk, device="cuda"
        )

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        mask = causal_mask(q.shape[1], k.shape[1]) if causal else None
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        return compiled(q_, k_, v_, block_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return Contestant("flex", f"torch {torch.__version__}", attend)


def ours(
    kernel: str = "auto", *, dtype: torch.dtype | None = None, deterministic: bool = False
) -> Contestant:
    """flash_cuda itself. Raises ImportError where it is not installed."""
    import flash_cuda

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_cuda.attention(
            q, k, v, causal=causal, kernel=kernel, deterministic=deterministic
        )

    return Contestant("flash_cuda", flash_cuda_version(), attend, dtype=dtype)


def _peer_makers() -> dict[str, Callable[[], Contestant]]:
    package = _flash_attention_package
    return {
        **{name: functools.partial(_sdpa, name) for name in SDPA_BACKENDS},
        "fa2": lambda: package("fa2", "flash_attn", "flash-attn"),
        "fa3": _fa3,
        "fa4": lambda: package("fa4", "flash_attn.cute", "flash-attn-4"),
        "flex": _flex,
    }


# flex is compiled anew for every shape, which costs more than all the rest of a grid.
OFF_BY_DEFAULT = {"flex"}
PEER_NAMES = tuple(_peer_makers())


def _own_variant(name: str, kernel: str) -> Contestant:
    """`ours:fp16`, `ours:deterministic` or `ours:KERNEL`: flash_cuda with one thing changed."""
    variant = name.removeprefix("ours:")
    if variant == "fp16":
        own = ours(kernel, dtype=torch.float16)
    elif variant == "deterministic":
        own = ours(kernel, deterministic=True)
    else:
        own = ours(variant)
    return replace(own, name=name)


def discover(wanted: str, kernel: str = "auto") -> tuple[list[Contestant], dict[str, str]]:
    """Find peers.

    Args:
        wanted: `auto` (all that import, without flex), `none`, or a comma list of PEER_NAMES and of
            `ours:fp16`, `ours:deterministic`, `ours:KERNEL` (flash_cuda against itself).
        kernel: the kernel of `ours:fp16` and `ours:deterministic`.

    Returns:
        The peers found, and for each of the others the reason.

    Raises:
        ValueError: a name that is not a peer's.
    """
    makers = _peer_makers()
    if wanted == "auto":
        names = [name for name in makers if name not in OFF_BY_DEFAULT]
    else:
        names = [name for name in wanted.split(",") if name and name != "none"]
    unknown = [name for name in names if name not in makers and not name.startswith("ours:")]
    if unknown:
        raise ValueError(
            f"--peers: expected {', '.join(makers)} or ours:VARIANT, got {', '.join(unknown)}"
        )
    found, missing = [], {}
    for name in names:
        try:
            maker = makers.get(name) or functools.partial(_own_variant, name, kernel)
            found.append(maker())
        except Exception as error:  # a broken wheel can raise anything while it is imported
            missing[name] = one_line(error)
    return found, missing
