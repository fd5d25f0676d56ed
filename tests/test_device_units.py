"""Compiles and runs every tests/cuda/*.cu: checks of csrc/ptx and csrc/tile on the GPU itself."""

import subprocess
from pathlib import Path

import pytest
import torch

from build_support import toolkit

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "-O2", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}"]


@pytest.fixture(scope="module")
def nvcc() -> list[str]:
    """The compiler and its flags for the GPU of this machine."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    found = toolkit.find(torch.version.cuda, log=print)
    if found is None:
        pytest.skip(f"needs nvcc of CUDA {torch.version.cuda}")
    major, minor = torch.cuda.get_device_capability()
    number = f"{major}{minor}a" if (major, minor) == (9, 0) else f"{major}{minor}"
    if f"{major}{minor}" not in found.known_archs():
        pytest.skip(f"nvcc of CUDA {found.version} does not know sm_{number}")
    # PyPI's packages keep the static runtime where nvcc does not look for it.
    libraries = f"-L{found.cudart.parent}"
    return [str(found.nvcc), *FLAGS, f"-gencode=arch=compute_{number},code=sm_{number}", libraries]


def run(command: list[str], timeout: int) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.gpu
@pytest.mark.parametrize("source", sorted((ROOT / "tests/cuda").glob("*.cu")), ids=lambda p: p.stem)
def test_device_unit(nvcc, source, tmp_path):
    program = str(tmp_path / source.stem)
    built = run([*nvcc, str(source), "-o", program], timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    done = run([program], timeout=60)
    print(done.stdout)
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if not line.startswith("ok")
    )
