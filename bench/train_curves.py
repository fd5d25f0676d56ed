"""Do the loss curves of the attention kinds agree? `python -m bench.train_curves`.

Trains examples/train_gpt.py once with each kind, same seed and data, and prints how far each curve
is from the others. `--logs A.json B.json` compares runs made earlier with `--log`. `--kinds` are
those of bench.train_context. Other options go to the example, e.g. `--preset small --steps 500`.

  python -m bench.train_curves --kinds standard,flash_cuda:v2,flash_cuda:hopper,sdpa
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from bench import common
from bench.common import say
from bench.train_context import parse, train

KINDS = "standard,flash_cuda,sdpa"


def difference(mine: list[float], theirs: list[float]) -> dict[str, float]:
    """Absolute differences of two loss curves, step by step: largest, mean, and of the last ten."""
    gaps = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    tail = [sum(curve[-10:]) / len(curve[-10:]) for curve in (mine, theirs)]
    return {
        "max": max(gaps),
        "mean": sum(gaps) / len(gaps),
        "first_ten_max": max(gaps[:10]),
        "mean_of_last_ten": abs(tail[0] - tail[1]),
    }


def compare(reports: list[dict]) -> list[dict]:
    """Every pair of runs; runs on other data or of another length are not compared."""
    pairs = []
    for one, other in itertools.combinations(reports, 2):
        settings = [{k: v for k, v in r["settings"].items() if k != "kernel"} for r in (one, other)]
        names = f"{one['attention']} and {other['attention']}"
        if one["data"] != other["data"] or settings[0] != settings[1]:
            say(f"{names}: not compared, their data or settings differ")
            continue
        gap = difference(one["losses"], other["losses"])
        pairs.append({"runs": [one["attention"], other["attention"]], **gap})
        say(
            f"{names}: loss differs by at most {gap['max']:.2e}, {gap['mean']:.2e} on average, "
            f"{gap['first_ten_max']:.2e} in the first ten steps, "
            f"{gap['mean_of_last_ten']:.2e} between the means of the last ten"
        )
    return pairs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.train_curves", description=__doc__)
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--logs", nargs="+", type=Path, default=None)
    common.add_output_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.logs:
        compare([json.loads(path.read_text()) for path in arguments.logs])
        return 0
    environment = common.environment()
    say(common.describe(environment))
    reports = []
    for kind in arguments.kinds.split(","):
        args = parse(kind, rest)
        report = train(kind, args)
        if report is not None and not report.oom:
            reports.append(vars(report))
    result = {
        "schema": common.SCHEMA,
        "name": "train_curves",
        "shape": f"Byte-level GPT, {args.layers} layers, {args.heads} heads, dim {args.dim}, "
        f"context {args.context}, batch {args.batch}, {args.steps} steps, {args.dtype}, "
        f"seed {args.seed}.",
        "environment": environment,
        "contestants": [report["attention"] for report in reports],
        "rows": reports,
        "differences": compare(reports),
    }
    common.write_results(result, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
