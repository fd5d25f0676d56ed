"""Variants of the Hopper kernels in one race: csrc/ as it is, as it was, as it might be.

Figures of two builds compare only where they stem from one run, and a process can load one build
of flash_cuda. So a variant is a shared library of its own, made of the launchers alone in less than
a minute, from a git revision or from a folder laid out like csrc/. It races as `variant:NAME`,
bfloat16 only, on any machine to which build/variants has been carried:

  python -m bench.variants HEAD before=6e7cf28 two_copies=TRIAL/csrc
  python -m bench.forward --peers variant:HEAD,variant:before,variant:two_copies,fa3 --formats ''
  python -m bench.small --peers variant:HEAD,variant:before --formats ''
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import common
from bench.common import say
from bench.variant import FOLDER
from build_support import flags, toolkit

ENTRY = Path(__file__).with_name("variant.cpp")


@contextlib.contextmanager
def headers(source: str) -> Iterator[Path]:
    """`source` itself where it is a folder, else the csrc/ of that git revision, for a while."""
    if Path(source).is_dir():
        yield Path(source).resolve()
        return
    archive = ["git", "archive", "--format=tar", source, "csrc"]
    done = subprocess.run(archive, cwd=common.REPOSITORY, capture_output=True)
    if done.returncode:
        raise ValueError(f"{source} is no folder and no git revision with a csrc/")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=done.stdout, check=True)
        yield Path(folder) / "csrc"


def command(nvcc: Path, csrc: Path, library: Path, backward: bool) -> list[str]:
    """The nvcc call that makes `library` of the launchers under `csrc`, for sm_90a."""
    launchers = ["work_queue", "hopper_forward_bf16", *["hopper_backward_bf16"] * backward]
    sources = [ENTRY, *(csrc / "launch" / f"{name}.cu" for name in launchers)]
    options = ["-shared", "-Xcompiler=-fPIC", "-gencode=arch=compute_90a,code=sm_90a"]
    options += ["--expt-relaxed-constexpr", "--threads=0", *["-DVARIANT_BACKWARD"] * backward]
    compiler = [flag for flag in flags.NVCC if flag != "-lineinfo"]  # half of the library's size
    return [str(x) for x in (nvcc, *compiler, *options, f"-I{csrc}", *sources, "-o", library)]


def build(name: str, source: str, nvcc: Path, backward: bool) -> bool:
    """Make FOLDER/NAME.so, with what nvcc said in NAME.log; True where that worked."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with headers(source) as csrc:
        done = subprocess.run(
            command(nvcc, csrc, FOLDER / f"{name}.so", backward), capture_output=True, text=True
        )
    log = done.stdout + done.stderr
    (FOLDER / f"{name}.log").write_text(log)
    if done.returncode:
        said = re.findall(r".*error.*", log)[:3] or log.splitlines()[-3:]
        say("\n  ".join([f"{name}: nvcc failed:", *said]))
        return False
    spills = [n for n in re.findall(r"(\d+) bytes spill stores", log) if int(n)]
    notes = sorted(set(re.findall(r"C75\d\d", log)))
    say(
        f"{name}: {time.monotonic() - begin:.0f} s; spills: {', '.join(spills) or 'none'}; "
        f"notes on wgmma and setmaxnreg: {', '.join(notes) or 'none'}"
    )
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.variants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="[NAME=]SOURCE",
        help="a git revision or a folder laid out like csrc/; NAME is SOURCE where it is left out",
    )
    parser.add_argument("--backward", action="store_true", help="build the backward, too")
    arguments = parser.parse_args(argv)
    found = toolkit.find(torch.version.cuda or "", log=lambda line: None)
    if found is None:
        say(f"no toolkit of CUDA {torch.version.cuda}, this torch's; see docs/install.md")
        return common.NO_GPU_EXIT
    worked = []
    for text in arguments.sources:
        name, _, source = text.rpartition("=")
        try:
            worked.append(
                build(name or source.replace("/", "-"), source, found.nvcc, arguments.backward)
            )
        except ValueError as error:
            parser.error(str(error))
    return 0 if all(worked) else 1


if __name__ == "__main__":
    sys.exit(main())
