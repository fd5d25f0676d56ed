"""The command line: `python -m flash_cuda <command>`, installed as `flash-cuda <command>`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_cuda import __version__, doctor, plan

SOURCES = Path(__file__).resolve().parent.parent  # of a checkout; bench is in no wheel


def _ab(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    if not (SOURCES / "bench" / "ab.py").is_file():
        parser.error(
            "ab: the benchmarks are in no wheel: run it in a source checkout, as "
            "`python -m flash_cuda ab`"
        )
    # First, because other packages are called bench too.
    sys.path.insert(0, str(SOURCES))
    from bench import ab

    return ab.main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="flash-cuda", description="Exact attention in CUDA C++: tools of the package."
    )
    parser.add_argument("--version", action="version", version=f"flash_cuda {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("doctor", help="say what is installed, and check that it computes right")
    blocks = commands.add_parser("plan", help="block sizes of v1 and the lab on a GPU")
    blocks.add_argument("--head-dim", type=int, default=128, metavar="D", help="1 to 128")
    blocks.add_argument(
        "--gpu",
        choices=[*plan.GPUS, "local"],
        help="default: the local one if there is one, else all",
    )
    # Its options are those of `python -m bench.ab`, --help too.
    commands.add_parser("ab", help="measure v1, v2 and the lab side by side", add_help=False)
    chosen, rest = parser.parse_known_args(arguments)
    if chosen.command == "ab":
        return _ab(parser, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if chosen.command == "plan":
        try:
            return plan.main(chosen.head_dim, chosen.gpu)
        except ValueError as error:
            parser.error(str(error))
    return doctor.main()
