"""Context lengths that each attention can train: `python -m bench.train_context`.

Trains the gpt2 preset of examples/train_gpt.py for a few steps at each context and records peak
memory and tokens/s, or that the GPU ran out of memory. Other options go to the example.
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
CONTEXTS = "1024,4096,8192,16384,32768,65536,131072"


def example():
    """examples/train_gpt.py as a module; examples/ is no package, its files run on their own."""
    folder = str(common.REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("train_gpt")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.train_context", description=__doc__)
    parser.add_argument("--contexts", default=CONTEXTS)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--device", default="cuda")
    common.add_output_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.device == "cuda":
        common.require_gpu("bench.train_context")
    train_gpt = example()
    kinds = arguments.kinds.split(",")
    environment = common.environment()
    say(common.describe(environment))
    rows = []
    contexts = map(int, arguments.contexts.split(","))
    for context, kind in itertools.product(contexts, kinds):
        options = ["--preset", "gpt2", "--batch", "1", "--steps", "6", *rest]
        options += ["--context", str(context), "--attention", kind]
        args = train_gpt.parse([*options, "--device", arguments.device])
        try:
            report = train_gpt.train(args, measure_only=True)
        except (Exception, SystemExit) as error:  # a kind that fails leaves the others their rows
            say(f"{kind} | context {context:,} | {common.one_line(error)}")
            if arguments.device == "cuda" and common.context_is_lost():
                say("the CUDA context is lost: stopping here")
                break
            continue
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        say(train_gpt.describe(report))
        rows.append(
            {
                "context": context,
                "attention": kind,
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
