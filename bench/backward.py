"""Backward pass alone: `python -m bench.backward`, through torch.autograd.grad on a retained graph.

  python -m bench.backward --grid four --peers sdpa-flash --bar sdpa-flash:1.00:0.90
  python -m bench.backward --grid four --peers ours:fp16,ours:deterministic
  ncu --profile-from-start off --clock-control none --set full -o backward \\
      python -m bench.backward --profile --d 128 --causal 1 --seq 4096
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from bench import grid, race
from bench.common import BACKWARD_FLOPS
from bench.peers import Contestant


def prepare(
    contestant: Contestant, cell: grid.Cell, tensors: tuple[Tensor, ...]
) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    *leaves, dout = tensors
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = contestant.attend(*leaves, cell.causal, **cell.band())

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return run, (out.detach(), *run())


EVENT = race.Event(
    "backward",
    prepare,
    what_is_timed="backward alone (dq, dk, dv), torch.autograd.grad on a retained graph",
    flops_factor=BACKWARD_FLOPS,
)


def main(argv: list[str] | None = None) -> int:
    return race.main(EVENT, grid.parser("bench.backward", __doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
