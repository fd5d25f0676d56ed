"""Forward pass: `python -m bench.forward`, timed under no_grad (out and lse are written anyway).

  python -m bench.forward --grid issue2 --peers sdpa-flash --bar sdpa-flash:1.05:0.95
  python -m bench.forward --grid issue2 --peers ours:fp16
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
        return contestant.attend(q, k, v, cell.causal)

    return run, (run(),)


def main(argv: list[str] | None = None) -> int:
    return race.main(
        "forward",
        prepare,
        flops_factor=1.0,
        what_is_timed="forward, no grad",
        argument_parser=grid.parser("bench.forward", __doc__),
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())
