"""Find a CUDA toolkit by what it holds, since CUDA_HOME and the nvcc on the PATH may mislead."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .checks import FALSE_WORDS
from .errors import BuildError

HEADERS = ("cuda_runtime.h", "crt/host_config.h")
# PyPI packages that together hold a toolkit; before CUDA 13 none of them had the nvcc driver.
PYPI_PACKAGES = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-cccl",
    "nvidia-cuda-runtime",
)
PYPI_FIRST_MAJOR = 13


@dataclass(frozen=True)
class Toolkit:
    home: Path
    version: str  # "13.0"
    origin: str  # where the search met it, for the build log
    cudart: Path  # the runtime to link; PyPI's packages hold libcudart.so.13 and no libcudart.so
    include: Path  # the runtime's headers

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"

    def known_archs(self) -> set[str]:
        """Numbers of the architectures that this nvcc compiles for, such as {"80", "90"}."""
        return set(re.findall(r"compute_(\d+)", _output(self.nvcc, "--list-gpu-arch")))


def requirements(cuda: str) -> list[str]:
    """The PyPI packages that give the toolkit of CUDA release `cuda` ("13.0"); empty if none do."""
    major, minor = cuda.split(".")[:2]
    if int(major) < PYPI_FIRST_MAJOR:
        return []
    return [f"{package}=={major}.{minor}.*" for package in PYPI_PACKAGES]


def candidates(cuda: str, environ=os.environ, paths=None, system="/usr/local") -> Iterator:
    """(origin, home) of every place worth a look, the user's own choice first."""
    if environ.get("FLASH_CUDA_IGNORE_SYSTEM_TOOLKIT", "0").lower() in ("", *FALSE_WORDS):
        for name in ("CUDA_HOME", "CUDA_PATH"):
            if environ.get(name):
                yield name, Path(environ[name])
        nvcc = shutil.which("nvcc", path=environ.get("PATH"))
        if nvcc:
            yield f"nvcc on the PATH ({nvcc})", home_of(nvcc)
        for home in sorted(glob.glob(f"{system}/cuda*"), key=_newest_last, reverse=True):
            yield system, Path(home)
    for path in sys.path if paths is None else paths:
        home = Path(path) / "nvidia" / f"cu{cuda.split('.')[0]}"
        if home.is_dir():
            yield "PyPI packages", home


def home_of(nvcc: str) -> Path:
    """The toolkit an nvcc belongs to, which it tells itself; a wrapper script lies elsewhere."""
    top = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-x", "cu", os.devnull), re.M)
    return Path(top.group(1)).resolve() if top else Path(nvcc).resolve().parent.parent


def inspect(origin: str, home: Path, cuda: str) -> Toolkit | str:
    """The toolkit at `home`, or why it does not serve torch's CUDA release `cuda`."""
    if not (home / "bin" / "nvcc").is_file():
        return "no bin/nvcc"
    for header in HEADERS:
        if not any((home / folder / header).is_file() for folder in ("include", *_targets(home))):
            return f"no include/{header}"
    version, major = release(home), cuda.split(".")[0]
    if not version:
        return "its nvcc does not run"
    if version.split(".")[0] != major:
        return f"is CUDA {version}, torch needs CUDA {major}"
    for folder in ("lib64", "lib", *(f"{t[: -len('include')]}lib" for t in _targets(home))):
        for name in ("libcudart.so", f"libcudart.so.{major}"):
            if (home / folder / name).exists():
                library = home / folder / name
                return Toolkit(home, version, origin, library, home / "include")
    return f"no libcudart.so.{major}"


def find(cuda: str, log=print, **places) -> Toolkit | None:
    """The first candidate that qualifies for torch's CUDA release `cuda`; each verdict is logged.

    places: environ, paths, system of `candidates`.
    """
    seen = set()
    for origin, home in candidates(cuda, **places):
        if home.resolve() in seen:
            continue
        seen.add(home.resolve())
        found = inspect(origin, home, cuda)
        if isinstance(found, Toolkit):
            found = with_own_runtime(found, cuda, places.get("paths"))
            log(f"flash_cuda: CUDA toolkit {found.version} taken from {home} ({origin})")
            return found
        log(f"flash_cuda: {home} ({origin}) not taken as CUDA toolkit: {found}")
    return None


def with_own_runtime(toolkit: Toolkit, cuda: str, paths=None) -> Toolkit:
    """`toolkit` with headers and library of its nvcc's own release, also when pip split them.

    In an isolated build torch's runtime is in one folder and nvcc in a second one, to which pip
    adds the newest runtime, because nvidia-cuda-nvcc asks for any.
    """
    major, minor = map(int, toolkit.version.split("."))
    wanted = re.compile(rf"#define\s+CUDART_VERSION\s+{major * 1000 + minor * 10}\b")
    homes = [home for origin, home in candidates(cuda, paths=paths) if origin == "PyPI packages"]
    for home in (toolkit.include.parent, *(homes if toolkit.origin == "PyPI packages" else ())):
        header = home / "include" / "cuda_runtime_api.h"
        if header.is_file() and wanted.search(header.read_text()):
            for name in ("libcudart.so", f"libcudart.so.{major}"):
                if (home / "lib" / name).exists():
                    return replace(toolkit, cudart=home / "lib" / name, include=home / "include")
    return toolkit


def require(cuda: str, torch_version: str, log=print, **places) -> Toolkit:
    """As `find`, and where nothing qualifies the sentence that says how to get a toolkit."""
    found = find(cuda, log, **places)
    if found is None:
        major = cuda.split(".")[0]
        others = {release(home) for _, home in candidates(cuda, **places)} - {""}
        seen = f"only CUDA {', '.join(sorted(others))} was found" if others else "none was found"
        packages = " ".join(f'"{r}"' for r in requirements(cuda))
        pypi = f"run `pip install {packages}` or drop --no-build-isolation, or " if packages else ""
        raise BuildError(
            f"torch {torch_version} needs nvcc of CUDA {major} and {seen}: {pypi}set CUDA_HOME to "
            f"a CUDA {major} toolkit, or set FLASH_CUDA_BUILD_KERNELS=0 for the CPU path alone."
        )
    return found


def release(home: Path) -> str:
    """CUDA release of the nvcc at `home`, such as "13.0"; empty when there is none that runs."""
    found = re.search(r"release (\d+\.\d+)", _output(home / "bin" / "nvcc", "--version"))
    return found.group(1) if found else ""


def _targets(home: Path) -> list[str]:
    """Include folders of conda's layout, relative to `home`."""
    return [str(path.relative_to(home)) for path in home.glob("targets/*/include")]


def _newest_last(home: str) -> tuple[int, ...]:
    # The unversioned name is the machine's own choice and goes before every version.
    numbers = re.findall(r"\d+", Path(home).name)
    return tuple(map(int, numbers)) if numbers else (sys.maxsize,)


def _output(program: str | Path, *arguments: str) -> str:
    """What a program prints on both streams; empty when it cannot be run."""
    try:
        done = subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
