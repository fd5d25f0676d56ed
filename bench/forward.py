"""Forward pass: `python -m bench.forward`, timed under no_grad (out and lse are written anyway).

  python -m bench.forward --peers sdpa-flash,sdpa-cudnn,fa3,fa4 --bar best:1.00:0.97
  python -m bench.forward --peers ours:fp16 --bar ours:fp16:0.97:0.97:1.03 --name forward_fp16
  python -m bench.forward --peers fa3,fa4 --window 1024 --seq 16384 --causal 1 --name forward_window
  ncu --profile-from-start off --clock-control none --set full -o forward \\
      python -m bench.forward --profile --d 128 --causal 1 --seq 4096
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from bench import grid, race
from bench.peers import Contestant


def prepare(
    contestant: Contestant, cell: grid.Cell, tensors: tuple[Tensor, ...]
) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    q, k, v, _ = tensors

    @torch.no_grad()
    def run() -> Tensor:
        return contestant.attend(q, k, v, cell.causal, **cell.band())

    return run, (run(),)


EVENT = race.Event("forward", prepare, what_is_timed="forward, no grad")


def main(argv: list[str] | None = None) -> int:
    return race.main(EVENT, grid.parser("bench.forward", __doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
