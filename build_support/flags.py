"""Sources and compiler flags of the extensions: the one list for setup.py and CMakeLists.txt."""

from __future__ import annotations

from glob import glob
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = str(ROOT / "csrc")  # absolute, because ninja runs elsewhere

SCHEMAS = ["csrc/ops/library.cpp"]
# Compiles against torch 2.10's stable ABI and Python 3.10's limited API: one wheel serves every
# later release of both.
LIMITED_API = "0x030A0000"
COMMON = ["-O3", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
WITH_KERNELS = ["-DUSE_CUDA"]
# A hidden symbol cannot clash with another extension's copy of the same template.
HIDDEN = "-fvisibility=hidden"

CXX = [*COMMON, HIDDEN]
CXX_WITH_KERNELS = [*CXX, *WITH_KERNELS]
# ptxas reports the registers and spills of each kernel in the build log.
NVCC = [*COMMON, *WITH_KERNELS, f"-Xcompiler={HIDDEN}", "-lineinfo", "-Xptxas=-v,-warn-spills"]


def op_sources() -> list[str]:
    return sorted(glob("csrc/ops/*.cpp", root_dir=ROOT))


def launch_sources() -> list[str]:
    """The kernels of flash_cuda._C."""
    return sorted(set(glob("csrc/launch/*.cu", root_dir=ROOT)) - set(lab_sources()))


def lab_sources() -> list[str]:
    """flash_cuda._lab: the kernels of v1 and of the lab, loaded when a call names one."""
    return sorted(
        source
        for pattern in ("lab_*.cu", "v1_*.cu", "lab_module.cpp")
        for source in glob(f"csrc/launch/{pattern}", root_dir=ROOT)
    )
