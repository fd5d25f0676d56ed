"""Every benchmark in turn, each in its own process: `python -m bench.all` (`make bench`).

`--peers` and `--kernel` go to all that know them; options that are not known here are passed on to
forward, backward and train_step, e.g. `--grid quick`.
"""

import argparse
import subprocess
import sys
import time

from bench import common
from bench.common import say
from bench.report import GRID_NAMES

NAMES = ("overhead", "memory", "small", "gqa", "accuracy", *GRID_NAMES)
WITHOUT_PEERS = ("memory", "gqa")  # they race what they are about, not every peer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(NAMES), help="some of them, in this order")
    parser.add_argument("--peers", default=None, help="as for bench.forward")
    parser.add_argument("--kernel", default=None, help="kernel of flash_cuda")
    common.add_output_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    common.require_gpu("bench.all")
    failed = []
    for name in arguments.only.split(","):
        command = [sys.executable, "-m", f"bench.{name}"]
        command += ["--out", str(arguments.out), "--formats", arguments.formats]
        if arguments.kernel:
            command += ["--kernel", arguments.kernel]
        if arguments.peers and name not in WITHOUT_PEERS:
            command += ["--peers", arguments.peers]
        command += rest if name in GRID_NAMES else []
        say(f"\n=== {' '.join(command[1:])}")
        begin = time.monotonic()
        status = subprocess.run(command, cwd=common.REPOSITORY).returncode
        say(f"=== bench.{name} took {time.monotonic() - begin:.0f} s, exit status {status}")
        if status:
            failed.append(name)
    if failed:
        say("with a non-zero exit status:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
