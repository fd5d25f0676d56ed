"""Context lengths that each attention can train: `python -m bench.train_context`.

Trains the gpt2 preset of examples/train_gpt.py for a few steps at each context and records peak
memory and tokens/s, or that the GPU ran out of memory. `--kinds` are the example's `--attention`,
or `flash_cuda:KERNEL`: flash_cuda with that `--kernel`. Other options go to the example.

  python -m bench.train_context \\
      --kinds sdpa-flash,sdpa-cudnn,sdpa-efficient,flash_cuda:v2,flash_cuda:hopper
"""

import argparse
import gc
import importlib
import itertools
import sys

import torch

from bench import common
from bench.common import say

KINDS = ("standard", "sdpa", "flash_cuda")
TIMED_TOKENS = 2**17
CONTEXTS = "1024,4096,8192,16384,32768,65536,131072"


def example():
    """examples/train_gpt.py as a module; examples/ is no package, its files run on their own."""
    folder = str(common.REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("train_gpt")


def parse(kind: str, options: list[str]) -> argparse.Namespace:
    """The example's arguments for one entry of --kinds."""
    attention, colon, kernel = kind.partition(":")
    if colon and (attention != "flash_cuda" or not kernel):
        sys.exit(f"--kinds: expected a kind or flash_cuda:KERNEL, got {kind}")
    options = [*options, "--attention", attention]
    return example().parse([*options, "--kernel", kernel] if kernel else options)


def train(kind: str, args: argparse.Namespace):
    """The example's Report under the name `kind`; None where the run failed, with a line why."""
    try:
        report = example().train(args, measure_only=True)
    except (Exception, SystemExit) as error:  # a kind that fails leaves the others their rows
        say(f"{kind} | context {args.context:,} | {common.one_line(error)}")
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    report.attention = kind
    say(example().describe(report))
    return report


def steps_of(context: int) -> int:
    """Many short steps, which wait for Python and scatter; few of the longest, seconds each."""
    return example().WARMUP_STEPS + max(2, min(32, TIMED_TOKENS // context))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.train_context", description=__doc__)
    parser.add_argument("--contexts", default=CONTEXTS)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--device", default="cuda")
    common.add_output_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.device == "cuda":
        common.require_gpu("bench.train_context")
    kinds = arguments.kinds.split(",")
    environment = common.environment()
    say(common.describe(environment))
    rows = []
    contexts = map(int, arguments.contexts.split(","))
    for context, kind in itertools.product(contexts, kinds):
        options = ["--preset", "gpt2", "--batch", "1", "--steps", str(steps_of(context)), *rest]
        args = parse(kind, [*options, "--context", str(context), "--device", arguments.device])
        report = train(kind, args)
        if report is None:
            if arguments.device == "cuda" and common.context_is_lost():
                say("the CUDA context is lost: stopping here")
                break
            continue
        rows.append(
            {
                "context": context,
                "attention": kind,
                "steps": args.steps,
                "oom": report.oom,
                "tokens_per_s": report.tokens_per_s,
                "peak_gib": report.peak_gib,
            }
        )
    result = {
        "schema": common.SCHEMA,
        "name": "train_context",
        "shape": f"Byte-level GPT, {args.layers} layers, {args.heads} heads, dim {args.dim}, "
        f"batch {args.batch}, {args.dtype}: peak memory and training speed.",
        "environment": environment,
        "contestants": kinds,
        "rows": rows,
    }
    common.write_results(result, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
