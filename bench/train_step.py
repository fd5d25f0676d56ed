"""What a training step pays: forward and backward, `python -m bench.train_step`, through autograd.

python -m bench.train_step --peers sdpa-flash,sdpa-cudnn,fa4 --bar best:1.03:0.90
python -m bench.train_step --peers ours:deterministic --name train_step_deterministic
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

    def run() -> tuple[Tensor, ...]:
        out = contestant.attend(*leaves, cell.causal, **cell.band())
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return run, run()


EVENT = race.Event(
    "train_step",
    prepare,
    what_is_timed="forward and backward (out, dq, dk, dv), through autograd",
    flops_factor=1.0 + BACKWARD_FLOPS,
)


def main(argv: list[str] | None = None) -> int:
    return race.main(EVENT, grid.parser("bench.train_step", __doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
