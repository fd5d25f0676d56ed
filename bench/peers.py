"""The peers: every other attention that can be imported here, and flash_cuda with one change.

A peer that is missing or broken is a reason in a list, never an exception.
"""

import argparse
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import variant
from bench.common import one_line
from bench.contestants import OWN_NAME, Contestant, ours, ours_backward, sdpa_on_views
from bench.contestants import standard_attention as standard_attention

SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


def _flash_attention_package(
    name: str, module: str, *distributions: str, open_side: int | None = -1
) -> Contestant:
    """FA2, FA3 and FA4 agree on `flash_attn_func(q, k, v, causal=, window_size=)`.

    They differ in the window's open side (`open_side`: -1, FA4 None) and in what they return: FA4
    (out, lse), where lse is computed only for inputs that need gradients; the others out.
    """
    function = importlib.import_module(module).flash_attn_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        left, right = (open_side if side < 0 else side for side in window)
        return _first(function(q, k, v, causal=causal, window_size=(left, right)))

    return Contestant(name, _distribution_version(*distributions), attend, has_window=True)


def _fa3() -> Contestant:
    found = _flash_attention_package(
        "fa3", "flash_attn_interface", "tokenspeed-fa3", "flash-attn-3"
    )
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        flags = {}
    return replace(
        found,
        has_backward=not flags.get("FLASHATTENTION_DISABLE_BACKWARD", False),
        has_window=not flags.get("FLASHATTENTION_DISABLE_LOCAL", False),
    )


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


def _peer_makers() -> dict[str, Callable[[], Contestant]]:
    package = _flash_attention_package
    return {
        **{name: functools.partial(_sdpa, name) for name in SDPA_BACKENDS},
        "fa2": lambda: package("fa2", "flash_attn", "flash-attn"),
        "fa3": _fa3,
        "fa4": lambda: package("fa4", "flash_attn.cute", "flash-attn-4", open_side=None),
        "flex": _flex,
    }


# flex is compiled anew for every shape, which costs more than all the rest of a grid.
OFF_BY_DEFAULT = {"flex"}
PEER_NAMES = tuple(_peer_makers())
OWN = ("ours:", variant.PREFIX)  # how the names of what is flash_cuda itself begin


def _own(name: str, kernel: str) -> Contestant:
    """`ours:fp16`, `ours:deterministic` or `ours:KERNEL`: flash_cuda with one thing changed.

    `ours:backward` has SDPA's flash forward. `variant:NAME` is another build (bench/variants.py).
    """
    if name.startswith(variant.PREFIX):
        return variant.contestant(name)
    change = name.removeprefix(OWN[0])
    if change in DTYPES:
        own = ours(kernel, dtype=DTYPES[change])
    elif change == "deterministic":
        own = ours(kernel, deterministic=True)
    elif change == "backward":
        own = ours_backward(kernel)
    else:
        own = ours(change)
    return replace(own, name=name)


def discover(wanted: str, kernel: str = "auto") -> tuple[list[Contestant], dict[str, str]]:
    """Find peers.

    Args:
        wanted: `auto` (all that import, without flex), `none`, or a comma list of PEER_NAMES and of
            `ours:fp16`, `ours:bf16`, `ours:deterministic`, `ours:backward`, `ours:KERNEL`,
            `variant:NAME` (flash_cuda itself).
        kernel: the kernel of all `ours:` but `ours:KERNEL`.

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
    unknown = [name for name in names if name not in makers and not name.startswith(OWN)]
    if unknown:
        known = ", ".join([*makers, "ours:CHANGE"])
        raise ValueError(f"--peers: expected {known} or variant:NAME, got {', '.join(unknown)}")
    found, missing = [], {}
    for name in names:
        try:
            maker = makers.get(name) or functools.partial(_own, name, kernel)
            found.append(maker())
        except Exception as error:  # a broken wheel can raise anything while it is imported
            missing[name] = one_line(error)
    return found, missing


def line_up(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[list[Contestant], dict[str, str]]:
    """flash_cuda first, where it imports, then the peers of --peers; reasons for all others."""
    try:
        found, missing = discover(arguments.peers, arguments.kernel)
    except ValueError as error:
        parser.error(str(error))
    try:
        return [ours(arguments.kernel), *found], missing
    except ImportError as error:
        return found, {OWN_NAME: one_line(error), **missing}
