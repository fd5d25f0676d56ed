"""The grid of forward.py, backward.py and train_step.py: its cells, options and inputs."""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench import common, peers, tables
from bench.peers import DTYPES

# Grids by name: seqlens. Every grid is head dim x causal x seqlen at a fixed number of tokens.
GRIDS = {
    "full": (512, 1024, 2048, 4096, 8192, 16384),
    "four": (512, 1024, 4096, 16384),
    "quick": (1024, 4096),
}


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int, right: int) -> int:
    """Pairs (query, key) inside the window (left, right): inclusive, bottom-right, -1 = open."""
    pairs = 0
    for i in range(seqlen_k - seqlen_q, seqlen_k):  # the key on the diagonal of each query
        first = max(i - left, 0) if left >= 0 else 0
        last = min(i + right, seqlen_k - 1) if right >= 0 else seqlen_k - 1
        pairs += max(last - first + 1, 0)
    return pairs


@dataclass(frozen=True)
class Cell:
    """One shape of the grid; self-attention, so sq = sk = seqlen.

    `window` is how many keys to its left a query sees beside its own, -1 = all: (window, 0) where
    causal, else (window, window), as in FlashAttention's `window_size`.
    """

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    dtype: str
    window: int = -1

    def band(self) -> dict[str, tuple[int, int]]:
        """The window as a keyword of Contestant.attend; none where the cell has none."""
        if self.window < 0:
            return {}
        return {"window": (self.window, 0 if self.causal else self.window)}

    def flops(self) -> float:
        """As the papers count: a causal mask halves. Of a window, the visible pairs."""
        if not self.band():
            return common.attention_flops(
                self.batch, self.heads, self.seqlen, self.seqlen, self.head_dim, self.causal
            )
        pairs = visible_pairs(self.seqlen, self.seqlen, *self.band()["window"])
        return 4.0 * self.batch * self.heads * pairs * self.head_dim

    def __str__(self) -> str:
        return tables.cell_name(asdict(self))


def base_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The options of every race: who runs, how long, what must be reached, what is written."""
    p = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--dtype", choices=DTYPES, default="bf16")
    p.add_argument("--kernel", default="auto", help="kernel of flash_cuda")
    p.add_argument(
        "--peers",
        default="auto",
        help=f"auto, none, or a list of {', '.join(peers.PEER_NAMES)}, ours:fp16, ours:bf16, "
        "ours:deterministic, ours:KERNEL, variant:NAME",
    )
    p.add_argument("--budget", type=float, default=1.0, help="seconds of timing for a cell")
    p.add_argument(
        "--bar",
        action="append",
        default=[],
        type=tables.bar_text,
        metavar="PEER:GEOMEAN:MIN[:MAX]",
        help="exit 1 where the speed relative to PEER, or to the best peer of each cell (best), "
        "misses these, e.g. best:1.00:0.97; may be given several times",
    )
    p.add_argument(
        "--profile",
        action="store_true",
        help="launch flash_cuda once on the first cell, between cudaProfilerStart and Stop",
    )
    common.add_output_options(p)
    return p


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser(module: str, description: str) -> argparse.ArgumentParser:
    p = base_parser(module, description)
    p.add_argument("--grid", choices=GRIDS, default="full", help="named list of seqlens")
    p.add_argument("--seq", type=numbers, default=None, help="seqlens, in place of the grid's")
    p.add_argument("--d", type=numbers, default=[64, 128, 256], help="head dims")
    p.add_argument("--causal", type=numbers, default=[0, 1], help="0, 1 or 0,1")
    p.add_argument("--tokens", type=int, default=16384, help="batch * seqlen")
    p.add_argument("--hidden", type=int, default=2048, help="heads * head dim")
    p.add_argument("--gqa", type=int, default=1, help="query heads that share a key head")
    p.add_argument(
        "--window",
        type=int,
        default=-1,
        metavar="LEFT",
        help="sliding window: (LEFT, 0) where causal, else (LEFT, LEFT)",
    )
    return p


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    seqlens = arguments.seq or GRIDS[arguments.grid]
    for d, causal, seqlen in itertools.product(arguments.d, arguments.causal, seqlens):
        heads = max(arguments.hidden // d, 1)
        yield Cell(
            batch=max(arguments.tokens // seqlen, 1),
            seqlen=seqlen,
            heads=heads,
            heads_kv=max(heads // arguments.gqa, 1),
            head_dim=d,
            causal=bool(causal),
            dtype=arguments.dtype,
            window=arguments.window,
        )


def inputs(cell: Cell, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """q, k, v, dout from a normal distribution, the same values for every dtype."""
    generator = torch.Generator(common.DEVICE).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        shape = (cell.batch, cell.seqlen, heads, cell.head_dim)
        drawn = torch.randn(shape, device=common.DEVICE, dtype=torch.float32, generator=generator)
        return drawn.to(torch.bfloat16).to(dtype)

    return normal(cell.heads), normal(cell.heads_kv), normal(cell.heads_kv), normal(cell.heads)
