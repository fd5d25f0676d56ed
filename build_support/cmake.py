"""Print what CMakeLists.txt has to know, as CMake `set` commands: `python -m build_support.cmake`.

CMake is for IDEs, profilers and unit tests; the package itself is built by setup.py. Both take
toolkit, architectures, sources and flags from here, so what a profiler sees is what users run.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from . import archs, checks, flags, toolkit


def settings() -> dict[str, list[str]]:
    values = {"HOST_CXX_FLAGS": ["-std=c++20", "-O2"]}
    if importlib.util.find_spec("pybind11"):
        import pybind11

        values["PYBIND11_CMAKE"] = [pybind11.get_cmake_dir()]
    if importlib.util.find_spec("torch") is None:
        return values
    torch = checks.require_torch()
    values["OP_SOURCES"] = flags.SCHEMAS
    values["CXX_FLAGS"] = flags.CXX
    found = None
    if checks.want_kernels(torch.version.cuda, torch.__version__):
        found = toolkit.find(torch.version.cuda, log=lambda line: print(line, file=sys.stderr))
    if found is not None:
        os.environ["CUDA_HOME"] = str(found.home)  # cpp_extension reads it when it is imported
    from torch.utils import cpp_extension

    values["TORCH_INCLUDES"] = cpp_extension.include_paths()
    if found is not None:
        chosen, _ = archs.choose(torch, found.known_archs())
        gencodes = [flag for arch in chosen for flag in arch.flags()]
        values |= {
            "NVCC": [str(found.nvcc)],
            "CUDA_INCLUDES": [str(found.home / "include")],
            "OP_SOURCES": flags.op_sources(),
            "CXX_FLAGS": flags.CXX_WITH_KERNELS,
            "LAUNCH_SOURCES": flags.launch_sources() + flags.lab_sources(),
            "NVCC_FLAGS": [*cpp_extension.COMMON_NVCC_FLAGS, *flags.NVCC, *gencodes],
        }
    return values


def main() -> None:
    for name, value in settings().items():
        print(f"set(FLASH_CUDA_{name} [[{';'.join(value)}]])")


if __name__ == "__main__":
    main()
