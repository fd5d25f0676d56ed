"""Every benchmark in turn, each in its own process: `python -m bench.all` (`make bench`).

Options that it does not know are passed on to forward and backward, e.g. `--peers sdpa-flash`.
"""

import argparse
import subprocess
import sys
import time

from bench import common
from bench.common import say


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.all", description=__doc__)
    parser.add_argument("--only", default="overhead,memory,forward,backward")
    common.add_output_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    common.require_gpu("bench.all")
    outputs = ["--out", str(arguments.out), "--formats", arguments.formats]
    failed = []
    for name in arguments.only.split(","):
        command = [sys.executable, "-m", f"bench.{name}", *outputs]
        command += rest if name in ("forward", "backward") else []
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
