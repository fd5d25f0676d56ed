"""Compiles tests/host/module.cpp with the C++ compiler alone, and imports it."""

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "tests" / "host" / "module.cpp"
FLAGS = ["-std=c++20", "-O1", "-Wall", "-shared", "-fPIC"]


def flash_cuda_host(folder: Path) -> ModuleType:
    """The module, compiled into `folder` once per content of its sources and command.

    Processes that share `folder` wait for one compilation. Skips the test where the compiler,
    pybind11 or Python's headers are missing; a compiler error fails it.
    """
    pybind11 = pytest.importorskip("pybind11", reason="needs pybind11")
    compiler = shlex.split(os.environ.get("CXX", "").strip() or "g++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"needs a C++ compiler: no {compiler[0]} on the PATH")
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        pytest.skip(f"needs Python.h, which is not in {python}")
    command = [*compiler, *FLAGS, f"-I{ROOT / 'csrc'}", str(SOURCE)]
    command += ["-isystem", pybind11.get_include(), "-isystem", str(python)]
    key = hashlib.sha256(" ".join([*command, pybind11.__version__]).encode())
    for source in [SOURCE, *sorted((ROOT / "csrc").rglob("*.h"))]:
        key.update(source.read_bytes())
    library = folder / f"{key.hexdigest()[:16]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with FileLock(folder / "lock"):
        if not library.exists():
            for old in folder.glob("*.so"):
                old.unlink()
            part = library.with_suffix(".part")
            done = subprocess.run([*command, "-o", part], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            part.replace(library)
        spec = importlib.util.spec_from_file_location("flash_cuda_host", library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
