"""What the machine must have, and how much of it a build may use."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from .errors import BuildError

MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 10)
MAX_DEFAULT_JOBS = 4
BYTES_PER_JOB = 2 << 30  # what one nvcc on the largest kernel file may take
FALSE_WORDS = ("0", "off", "false", "no")


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def require_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> None:
    if version[:2] < MIN_PYTHON:
        raise BuildError(
            f"Python {dotted(version)} is too old: use Python {dotted(MIN_PYTHON)} or newer, "
            "for example in a new virtual environment."
        )


def require_torch():
    """Return the torch module that the extension is compiled against."""
    remedy = (
        f'run `pip install "torch>={dotted(MIN_TORCH)}"`, or drop --no-build-isolation so that pip '
        "brings it for the build."
    )
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise BuildError(f"torch does not import ({error}): reinstall it.") from error
        raise BuildError(f"the build needs torch and finds none: {remedy}") from error
    except ImportError as error:
        raise BuildError(f"torch does not import ({error}): reinstall it.") from error
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < MIN_TORCH:
        raise BuildError(f"torch {torch.__version__} is too old: {remedy}")
    return torch


def require_cxx(environ=os.environ) -> str:
    """Return the C++ compiler that torch's build rules will call."""
    compiler = environ.get("CXX", "").strip() or "c++"
    # CXX may hold a launcher and flags ("ccache g++ -m64"): only its program has to exist.
    if shutil.which(shlex.split(compiler)[0], path=environ.get("PATH")) is None:
        raise BuildError(
            f"no C++ compiler ({compiler} is not on the PATH): install g++ 11 or newer "
            "(Debian, Ubuntu: `apt-get install g++`), or set CXX to the path of one."
        )
    return compiler


def want_kernels(torch_cuda: str | None, torch_version: str, environ=os.environ) -> bool:
    """Whether to compile CUDA kernels: FLASH_CUDA_BUILD_KERNELS, else what torch can run."""
    wish = environ.get("FLASH_CUDA_BUILD_KERNELS", "").strip().lower()
    if wish in FALSE_WORDS:
        return False
    if torch_cuda is None and wish:
        raise BuildError(
            f"FLASH_CUDA_BUILD_KERNELS={wish}, but torch {torch_version} is built without CUDA: "
            "install a CUDA build of torch, or set FLASH_CUDA_BUILD_KERNELS=0 for the CPU path."
        )
    return torch_cuda is not None


def job_count(environ=os.environ, cores: int | None = None, memory: int | None = None) -> int:
    """Parallel compilers: MAX_JOBS, else bounded by cores, free memory and an 8 GB peak."""
    wish = environ.get("MAX_JOBS", "").strip()
    if wish:
        if not wish.isdigit() or int(wish) == 0:
            raise BuildError(f"MAX_JOBS={wish} is not a positive number: set it to 1 or more.")
        return int(wish)
    cores = available_cores() if cores is None else cores
    memory = available_memory() if memory is None else memory
    return max(1, min(cores, MAX_DEFAULT_JOBS, memory // BYTES_PER_JOB))


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still use: free memory, or the container's limit when smaller."""
    bounds = []
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        free = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        bounds += [int(free.group(1)) << 10] if free else []
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        path = root / "sys/fs/cgroup" / limit
        if path.exists() and path.read_text().strip().isdigit():
            bounds.append(int(path.read_text()))
    return min(bounds, default=MAX_DEFAULT_JOBS * BYTES_PER_JOB)
