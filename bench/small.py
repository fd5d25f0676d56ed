"""Batch 1 and short sequences: `python -m bench.small`, GPU time of one forward by graph replay.

A CUDA graph holds CALLS forwards in a row and is replayed: no host time between them, and the
cost of starting the graph is shared by all of them. The L2 keeps what the last one left there, as
it does where a layer has just written its inputs.

  python -m bench.small --peers sdpa-flash,sdpa-cudnn,fa3,fa4 --bar best:1.00:1.00
"""

import argparse
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import forward, grid, race
from bench.peers import Contestant

CALLS = 20  # in a graph
# (batch, seqlen, heads, head dim, causal)
SHAPES = (
    (1, 512, 16, 128, True),
    (1, 2048, 16, 128, True),
    (4, 256, 12, 64, True),
    (8, 128, 12, 64, False),
    (1, 8192, 8, 128, True),
    (2, 8192, 16, 128, True),  # many tiles, as in a training step
)


def capture(run: Callable[[], Tensor], calls: int) -> tuple[Callable[[], object], Tensor]:
    """A graph of `calls` runs as a callable, and what the last run writes when it is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # what a first run allocates or compiles must not be captured
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = run()
    return graph.replay, out


def prepare(
    contestant: Contestant, cell: grid.Cell, tensors: tuple[Tensor, ...]
) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    run, _ = forward.prepare(contestant, cell, tensors)
    replay, out = capture(run, CALLS)
    replay()
    return replay, (out,)


def cells(arguments: argparse.Namespace) -> Iterator[grid.Cell]:
    for batch, seqlen, heads, head_dim, causal in SHAPES:
        yield grid.Cell(batch, seqlen, heads, heads, head_dim, causal, arguments.dtype)


EVENT = race.Event(
    "small",
    prepare,
    what_is_timed=f"forward, no grad, GPU time by replay of a CUDA graph of {CALLS}, L2 warm",
    calls=CALLS,
    flushed=False,
)


def main(argv: list[str] | None = None) -> int:
    return race.main(EVENT, grid.base_parser("bench.small", __doc__), argv, cells)


if __name__ == "__main__":
    sys.exit(main())
