"""Grouped and multi-query heads beside as many key heads as query heads: `python -m bench.gqa`.

Each contestant runs with 32 query heads and 32, 8 and 1 key heads (GQA, MQA), all in turn in one
race; the table gives the speed of fewer key heads over that of as many. Same operations, fewer
bytes of keys and values: nothing should be slower.

  python -m bench.gqa --bar 0.99
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from bench import common, grid, peers, race, report, tables, timing
from bench.common import say
from bench.contestants import announce

Run = Callable[[], torch.Tensor]


def mha_cells(arguments: argparse.Namespace) -> Iterator[grid.Cell]:
    """Every shape with as many key heads as query heads."""
    for d, causal, seqlen in itertools.product(arguments.d, arguments.causal, arguments.seq):
        batch = max(arguments.tokens // seqlen, 1)
        yield grid.Cell(
            batch, seqlen, arguments.heads, arguments.heads, d, bool(causal), arguments.dtype
        )


def runs_of(contestant: peers.Contestant, cells: list[grid.Cell]) -> list[Run]:
    """One callable for each cell, warmed up; the cells differ in the number of key heads alone.

    Raises:
        ValueError: fewer key heads do not give what the same keys, repeated, give.
    """
    runs = []
    for cell in cells:
        q, k, v, _ = grid.inputs(cell, grid.DTYPES[cell.dtype], seed=0)

        @torch.no_grad()
        def run(q=q, k=k, v=v, causal=cell.causal) -> torch.Tensor:
            return contestant.attend(q, k, v, causal)

        groups = cell.heads // cell.heads_kv
        repeated = run(q, *(x.repeat_interleave(groups, dim=2) for x in (k, v)))
        if reason := race.disagreement((repeated,), (run(),)):
            raise ValueError(f"{cell}: {reason}")
        runs.append(run)
    return runs


def measure(
    contestants: list[peers.Contestant], arguments: argparse.Namespace
) -> tuple[list[dict], list[dict]]:
    """The rows of the result, and what was left out and why."""
    rows, skipped = [], []
    flush = timing.flush_buffer()
    for mha in mha_cells(arguments):
        cells = [mha, *(replace(mha, heads_kv=heads_kv) for heads_kv in arguments.heads_kv)]
        lanes: list[tuple[str, grid.Cell, Run]] = []
        for contestant in contestants:
            try:
                runs = runs_of(contestant, cells)
                torch.cuda.synchronize()
                lanes += [(contestant.name, *lane) for lane in zip(cells, runs, strict=True)]
            except Exception as error:  # a peer may fail in any way; the others go on
                reason = common.one_line(error)
                skipped.append(
                    {"contestant": contestant.name, "cell": asdict(mha), "reason": reason}
                )
                say(f"  {contestant.name} left out of {mha}: {reason}")
                if common.context_is_lost():
                    say("the CUDA context is lost: stopping here")
                    return rows, skipped
        if not lanes:
            continue
        times = timing.time_in_turn([run for *_, run in lanes], flush, arguments.budget)
        for (name, cell, _), timed in zip(lanes, times, strict=True):
            rows.append(
                {
                    **asdict(cell),
                    "contestant": name,
                    "us": round(timed.median, 3),
                    "tflops": round(cell.flops() / timed.median * 1e-6, 2),
                    "samples": timed.samples,
                    "late": timed.late,
                }
            )
            say(f"  {cell} | {name} | {timed.median:.1f} us | {rows[-1]['tflops']:.0f} TFLOP/s")
    return rows, skipped


def summarize(rows: list[dict]) -> dict[str, dict]:
    """`CONTESTANT h/hk` -> spread of its speed over the same contestant's with hk = h."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    mha = {}
    for row in rows:
        key = tables.cell_key({**row, "heads_kv": row["heads"]}), row["contestant"]
        if row["heads_kv"] == row["heads"]:
            mha[key] = row["us"]
        elif key in mha:
            name = f"{row['contestant']} {row['heads']}/{row['heads_kv']}"
            ratios.setdefault(name, []).append((mha[key] / row["us"], tables.cell_name(row)))
    return {name: tables.spread(found) for name, found in ratios.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gqa",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--d", type=grid.numbers, default=[128])
    parser.add_argument("--causal", type=grid.numbers, default=[0, 1])
    parser.add_argument("--seq", type=grid.numbers, default=[1024, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=16384, help="batch * seqlen")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--heads-kv", type=grid.numbers, default=[8, 1], help="key heads")
    parser.add_argument("--dtype", choices=grid.DTYPES, default="bf16")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--peers", default="none", help="as for bench.forward")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timing for a shape")
    parser.add_argument(
        "--bar", type=float, default=None, help="exit 1 where flash_cuda is slower by this ratio"
    )
    common.add_output_options(parser)
    arguments = parser.parse_args(argv)
    common.require_gpu("bench.gqa")
    contestants, missing = peers.line_up(arguments, parser)
    environment = announce(contestants, missing)
    rows, skipped = measure(contestants, arguments)
    result = {
        "schema": common.SCHEMA,
        "name": "gqa",
        "dtype": arguments.dtype,
        "environment": environment,
        "contestants": [contestant.name for contestant in contestants],
        "missing": missing,
        "rows": rows,
        "skipped": skipped,
        "summary": summarize(rows),
    }
    say(report.page(result))
    common.write_results(result, arguments)
    if arguments.bar is None:
        return 0
    own = [s for name, s in result["summary"].items() if name.startswith("flash_cuda ")]
    passed = bool(own) and all(s["min"] >= arguments.bar for s in own)
    say(f"bar {arguments.bar}: {'passed' if passed else 'MISSED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
