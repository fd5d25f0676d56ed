"""The grid of shapes that forward.py and backward.py share: its cells, options and inputs."""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench import common, peers, tables

# Grids by name: seqlens. Every grid is head dim x causal x seqlen at a fixed number of tokens.
GRIDS = {
    "full": (512, 1024, 2048, 4096, 8192, 16384),
    "issue2": (512, 1024, 4096, 16384),
    "quick": (1024, 4096),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    """One shape of the grid; self-attention, so sq = sk = seqlen."""

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    dtype: str

    def flops(self) -> float:
        return common.attention_flops(
            self.batch, self.heads, self.seqlen, self.seqlen, self.head_dim, self.causal
        )

    def __str__(self) -> str:
        return tables.cell_name(asdict(self))


def parser(module: str, description: str) -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    p = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--grid", choices=GRIDS, default="full", help="named list of seqlens")
    p.add_argument("--seq", type=numbers, default=None, help="seqlens, in place of the grid's")
    p.add_argument("--d", type=numbers, default=[64, 128, 256], help="head dims")
    p.add_argument("--causal", type=numbers, default=[0, 1], help="0, 1 or 0,1")
    p.add_argument("--tokens", type=int, default=16384, help="batch * seqlen")
    p.add_argument("--hidden", type=int, default=2048, help="heads * head dim")
    p.add_argument("--gqa", type=int, default=1, help="query heads that share a key head")
    p.add_argument("--dtype", choices=DTYPES, default="bf16")
    p.add_argument("--kernel", default="auto", help="kernel of flash_cuda")
    p.add_argument(
        "--peers",
        default="auto",
        help=f"auto, none, or a list of {', '.join(peers.PEER_NAMES)}, ours:fp16, "
        "ours:deterministic, ours:KERNEL",
    )
    p.add_argument("--budget", type=float, default=1.0, help="seconds of timing for a cell")
    p.add_argument(
        "--bar",
        default=None,
        metavar="PEER:GEOMEAN:MIN",
        help="exit 1 where the speed relative to PEER misses these, e.g. sdpa-flash:1.05:0.95",
    )
    p.add_argument(
        "--profile",
        action="store_true",
        help="launch flash_cuda once on the first cell, between cudaProfilerStart and Stop",
    )
    common.add_output_options(p)
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
        )


def inputs(cell: Cell, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """q, k, v, dout from a normal distribution, the same values for every dtype."""
    generator = torch.Generator(common.DEVICE).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        shape = (cell.batch, cell.seqlen, heads, cell.head_dim)
        drawn = torch.randn(shape, device=common.DEVICE, dtype=torch.float32, generator=generator)
        return drawn.to(torch.bfloat16).to(dtype)

    return normal(cell.heads), normal(cell.heads_kv), normal(cell.heads_kv), normal(cell.heads)
