"""The command line: `python -m flash_cuda <command>`, installed as `flash-cuda <command>`."""

import argparse
from collections.abc import Sequence

from flash_cuda import __version__, doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="flash-cuda", description="Exact attention in CUDA C++: tools of the package."
    )
    parser.add_argument("--version", action="version", version=f"flash_cuda {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("doctor", help="say what is installed, and check that it computes right")
    parser.parse_args(arguments)
    return doctor.main()
