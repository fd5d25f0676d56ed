"""Error against float64 on the same inputs, forward or gradients: `python -m bench.accuracy`.

Inputs as in FlashAttention-3's paper (section 4.3): q, k, v from N(0, 1), and from
N(0, 1) + N(0, 100) * Bernoulli(0.001), whose outliers have a standard deviation of 10. They are
rounded to the dtype first, so what is measured is the kernel's own error.

  python -m bench.accuracy --peers sdpa-flash,sdpa-cudnn,fa3,fa4 --bar fa3:1.001
  python -m bench.accuracy --gradients --causal 0,1 --peers sdpa-flash,fa4,ours:backward
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from bench import common, grid, peers, report
from bench.common import say
from bench.contestants import announce, standard_attention

INPUTS = ("normal", "outliers")
REFERENCE_ROWS = 512  # query rows at a time: a float64 score matrix would fill the memory


def draw(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v of one kind of INPUTS, rounded to `dtype`; the same numbers for every dtype."""
    generator = torch.Generator(common.DEVICE).manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(shape, device=common.DEVICE, dtype=torch.float32, generator=generator)

    tensors = []
    for _ in range(3):
        x = normal()
        if kind == "outliers":
            uniform = torch.rand(shape, device=common.DEVICE, generator=generator)
            x = x + 10 * normal() * (uniform < 0.001)
        tensors.append(x.to(dtype))
    return tensors


def errors(out: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root of the mean square, and maximum, of the difference."""
    difference = out.double() - exact
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


def results(
    attend: Callable[..., Tensor], inputs: list[Tensor], causal: bool, dout: Tensor | None
) -> dict[str, Tensor]:
    """What is compared, by its name: the output, or with dout the gradients of q, k and v."""
    if dout is None:
        with torch.no_grad():
            return {"out": attend(*inputs, causal)}
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(attend(*leaves, causal), leaves, dout)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def measure(
    contestants: list[peers.Contestant], arguments: argparse.Namespace
) -> tuple[list[dict], list[dict]]:
    """The rows of the result, and what was left out and why."""
    rows, skipped = [], []
    cases = itertools.product(arguments.d, arguments.causal, arguments.dtypes, INPUTS)
    for seed, (head_dim, causal, dtype, kind) in enumerate(cases):
        shape = (arguments.batch, arguments.seqlen, arguments.heads, head_dim)
        inputs = draw(shape, kind, grid.DTYPES[dtype], seed)
        dout = None
        if arguments.gradients:
            dout = draw(shape, "normal", grid.DTYPES[dtype], seed + 1000)[0]
        wide = [None if x is None else x.double() for x in (*inputs, dout)]
        in_strips = functools.partial(standard_attention, rows=REFERENCE_ROWS)
        exact = results(in_strips, wide[:3], bool(causal), wide[3])
        case = {"head_dim": head_dim, "causal": bool(causal), "dtype": dtype, "inputs": kind}
        for contestant in contestants:
            try:
                found = results(contestant.attend, inputs, bool(causal), dout)
            except Exception as error:  # a peer may fail in any way; the others go on
                reason = common.one_line(error)
                skipped.append({"contestant": contestant.name, "reason": reason, **case})
                say(f"  {contestant.name} left out of {report.accuracy_case(case)}: {reason}")
                if common.context_is_lost():
                    say("the CUDA context is lost: stopping here")
                    return rows, skipped
                continue
            for of, value in found.items():
                rmse, largest = errors(value, exact[of])
                row = {**case, "of": of, "contestant": contestant.name}
                rows.append({**row, "rmse": rmse, "max": largest})
                words = f"rmse {rmse:.4e} | max {largest:.3e}"
                say(f"  {report.accuracy_case(row)} | {contestant.name} | {words}")
    return rows, skipped


def ratios(rows: list[dict], first: str, peer: str) -> list[tuple[float, str]]:
    """RMSE of `first` over that of `peer`, case by case, with the name of the case."""
    by_case: dict[str, dict[str, float]] = {}
    for row in rows:
        by_case.setdefault(report.accuracy_case(row), {})[row["contestant"]] = row["rmse"]
    return [
        (by[first] / by[peer], case) for case, by in by_case.items() if first in by and peer in by
    ]


def bar_pair(text: str) -> tuple[str, float]:
    peer, _, factor = text.rpartition(":")
    if not peer:
        raise argparse.ArgumentTypeError(f"expected PEER:FACTOR, got {text!r}")
    return peer, float(factor)


def check_bar(rows: list[dict], first: str, bar: tuple[str, float]) -> int:
    """0 where no error of `first` is above `bar`'s factor times its peer's; says the outcome."""
    peer, factor = bar
    found = ratios(rows, first, peer)
    if not found:
        say(f"bar {peer}:{factor}: not judged, {peer} ran no case")
        return 1
    worst, where = max(found)
    passed = all(ratio <= factor for ratio, _ in found)  # NaN fails
    say(
        f"bar {peer}:{factor}: {'passed' if passed else 'MISSED'}; "
        f"largest rmse over {peer}'s {worst:.5f} at {where} ({len(found)} cases)"
    )
    return 0 if passed else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--d", type=grid.numbers, default=[64, 128, 256], help="head dims")
    parser.add_argument("--causal", type=grid.numbers, default=[0], help="0, 1 or 0,1")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(grid.DTYPES))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--gradients", action="store_true", help="of dq, dk, dv")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--peers", default="auto", help="as for bench.forward")
    parser.add_argument(
        "--bar",
        type=bar_pair,
        default=None,
        metavar="PEER:FACTOR",
        help="exit 1 where the rmse is above FACTOR times PEER's, e.g. fa3:1.001",
    )
    common.add_output_options(parser)
    arguments = parser.parse_args(argv)
    common.require_gpu("bench.accuracy")
    contestants, missing = peers.line_up(arguments, parser)
    environment = announce(contestants, missing)
    rows, skipped = measure(contestants, arguments)
    result = {
        "schema": common.SCHEMA,
        "name": "gradient_accuracy" if arguments.gradients else "accuracy",
        "shape": f"b{arguments.batch} s{arguments.seqlen} h{arguments.heads}",
        "environment": environment,
        "contestants": [contestant.name for contestant in contestants],
        "missing": missing,
        "rows": rows,
        "skipped": skipped,
    }
    say(report.page(result))
    common.write_results(result, arguments)
    return 0 if arguments.bar is None else check_bar(rows, contestants[0].name, arguments.bar)


if __name__ == "__main__":
    sys.exit(main())
