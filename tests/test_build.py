"""What setup.py decides, on made-up machines: toolkit, architectures, jobs, error sentences."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from build_support import archs, backend, checks, flags, prerequisites, requirements, toolkit
from build_support.errors import BuildError

ROOT = Path(__file__).resolve().parent.parent
KNOWN = {"75", "80", "86", "89", "90", "100", "120"}


def pyproject(pattern: str) -> str:
    found = re.search(pattern, (ROOT / "pyproject.toml").read_text(), re.M)
    assert found, pattern
    return found.group(1)


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def make_toolkit(home: Path, version="13.0", runtime="lib64/libcudart.so") -> Path:
    """A tree that has what the search looks at, with an nvcc that answers its two questions."""
    write_program(
        home / "bin/nvcc",
        f'case "$1" in\n'
        f'--version) echo "Cuda compilation tools, release {version}, V{version}.88";;\n'
        f'--dryrun) echo "#\\$ TOP={home}/bin/.." >&2;;\n'
        f"--list-gpu-arch) echo compute_80; echo compute_90;;\n"
        f"esac",
    )
    for file in ("include/cuda_runtime.h", "include/crt/host_config.h", runtime):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    return home


@pytest.fixture
def search(tmp_path):
    """Searches for a CUDA 13.0 toolkit on a machine with nothing but what the test names."""

    def run(environ=None, paths=()):
        lines = []
        # /usr/bin stays on the PATH: the programs of make_toolkit are shell scripts.
        environ = {"PATH": "/nonexistent", **(environ or {})}
        places = {"environ": environ, "paths": list(paths), "system": str(tmp_path / "local")}
        return toolkit.find("13.0", lines.append, **places), lines

    return run


def test_runtime_of_nvccs_own_release(search, tmp_path):
    """pip may put torch's runtime and a newer one, brought by nvcc, into two folders."""
    homes = {}
    for folder, release in (("newest", 13050), ("torch", 13000)):
        homes[folder] = home = tmp_path / folder / "nvidia" / "cu13"
        header = home / "include" / "cuda_runtime_api.h"
        header.parent.mkdir(parents=True)
        header.write_text(f"#define CUDART_VERSION  {release}\n")
        (home / "lib").mkdir()
        (home / "lib" / "libcudart.so.13").touch()
    make_toolkit(homes["newest"], runtime="lib/libcudart.so.13")
    found, _ = search(paths=[tmp_path / "newest", tmp_path / "torch"])
    assert found.home == homes["newest"]
    assert found.include == homes["torch"] / "include"
    assert found.cudart == homes["torch"] / "lib" / "libcudart.so.13"


@pytest.mark.parametrize("found, said", [(None, "needs setuptools"), ("65.5.0", "is too old")])
def test_setuptools_missing_or_too_old(monkeypatch, found, said):
    def version(name):
        if found is None:
            raise prerequisites.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(prerequisites.metadata, "version", version)
    with pytest.raises(SystemExit, match=said):
        prerequisites.require_setuptools()


def test_toolkit_of_the_user_is_first(search, tmp_path):
    mine = make_toolkit(tmp_path / "mine")
    make_toolkit(tmp_path / "local/cuda-13.0")
    found, lines = search({"CUDA_HOME": str(mine)})
    assert (found.home, found.version, found.origin) == (mine, "13.0", "CUDA_HOME")
    assert found.known_archs() == {"80", "90"}
    assert lines == [f"flash_cuda: CUDA toolkit 13.0 taken from {mine} (CUDA_HOME)"]


def test_toolkit_behind_a_wrapper_script(search, tmp_path):
    real = make_toolkit(tmp_path / "opt/cuda")
    write_program(tmp_path / "bin/nvcc", f'exec {real}/bin/nvcc "$@"')
    found, _ = search({"PATH": str(tmp_path / "bin")})
    assert found.home == real


def test_toolkit_behind_a_symlink(search, tmp_path):
    real = make_toolkit(tmp_path / "opt/cuda")
    (real / "bin/nvcc").write_text((real / "bin/nvcc").read_text().replace("--dryrun", "--never"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(real / "bin/nvcc")
    found, _ = search({"PATH": str(tmp_path / "bin")})
    assert found.home == real


def test_newest_system_toolkit_of_the_right_major(search, tmp_path):
    for version in ("12.4", "13.0", "13.1", "14.0"):
        make_toolkit(tmp_path / f"local/cuda-{version}", version)
    found, lines = search()
    assert found.home.name == "cuda-13.1"
    assert "is CUDA 14.0, torch needs CUDA 13" in lines[0]


@pytest.mark.parametrize(
    ("missing", "verdict"),
    [
        ("bin/nvcc", "no bin/nvcc"),
        ("include/cuda_runtime.h", "no include/cuda_runtime.h"),
        ("include/crt/host_config.h", "no include/crt/host_config.h"),
        ("lib64/libcudart.so", "no libcudart.so.13"),
    ],
)
def test_a_toolkit_must_hold_what_a_build_needs(search, tmp_path, missing, verdict):
    home = make_toolkit(tmp_path / "mine")
    (home / missing).unlink()
    found, lines = search({"CUDA_HOME": str(home)})
    assert found is None
    assert lines == [f"flash_cuda: {home} (CUDA_HOME) not taken as CUDA toolkit: {verdict}"]


def test_toolkit_from_pypi_links_the_versioned_runtime(search, tmp_path):
    home = make_toolkit(tmp_path / "site/nvidia/cu13", runtime="lib/libcudart.so.13")
    found, lines = search(paths=[tmp_path / "empty", tmp_path / "site"])
    assert (found.home, found.cudart) == (home, home / "lib/libcudart.so.13")
    assert lines[-1].endswith("(PyPI packages)")


def test_conda_layout(search, tmp_path):
    home = make_toolkit(tmp_path / "env")
    (home / "targets/x86_64-linux").mkdir(parents=True)
    (home / "include").rename(home / "targets/x86_64-linux/include")
    (home / "lib64").rename(home / "targets/x86_64-linux/lib")
    found, _ = search({"CUDA_HOME": str(home)})
    assert found.cudart == home / "targets/x86_64-linux/lib/libcudart.so"


def test_system_toolkit_can_be_ignored(search, tmp_path):
    mine = make_toolkit(tmp_path / "mine")
    ignoring = {"CUDA_HOME": str(mine), "FLASH_CUDA_IGNORE_SYSTEM_TOOLKIT": "1"}
    assert search(ignoring)[0] is None
    assert search({**ignoring, "FLASH_CUDA_IGNORE_SYSTEM_TOOLKIT": "0"})[0].home == mine


def require_toolkit(tmp_path, cuda, **environ):
    environ = {"PATH": "/nonexistent", **environ}
    places = {"environ": environ, "paths": [], "system": str(tmp_path / "local")}
    return toolkit.require(cuda, "2.14.1", lambda line: None, **places)


def test_no_toolkit_says_what_to_install(tmp_path):
    with pytest.raises(BuildError) as error:
        require_toolkit(tmp_path, "13.0")
    assert "needs nvcc of CUDA 13 and none was found: run `pip install" in str(error.value)
    assert all(f'"{package}==13.0.*"' in str(error.value) for package in toolkit.PYPI_PACKAGES)
    assert "FLASH_CUDA_BUILD_KERNELS=0" in str(error.value)


def test_another_major_is_named(tmp_path):
    old = make_toolkit(tmp_path / "old", "12.4")
    with pytest.raises(BuildError, match="only CUDA 12.4 was found"):
        require_toolkit(tmp_path, "13.0", CUDA_HOME=str(old))


def test_no_pypi_toolkit_before_cuda_13(tmp_path):
    assert toolkit.requirements("12.8") == []
    with pytest.raises(BuildError, match="none was found: set CUDA_HOME to a CUDA 12 toolkit"):
        require_toolkit(tmp_path, "12.8")


def fake_torch(cuda="13.0", capabilities=()):
    return SimpleNamespace(
        __version__="2.14.1",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: bool(capabilities),
            device_count=lambda: len(capabilities),
            get_device_capability=lambda index: capabilities[index],
        ),
    )


@pytest.mark.parametrize(
    "hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"]
)
def test_backend_asks_for_nvcc_only_where_there_is_none(monkeypatch, hook):
    monkeypatch.delenv("FLASH_CUDA_BUILD_KERNELS", raising=False)
    monkeypatch.setattr(backend.build_meta, hook, lambda settings: [])
    monkeypatch.setattr(checks, "require_torch", fake_torch)
    monkeypatch.setattr(toolkit, "find", lambda cuda, log: None)
    assert getattr(backend, hook)() == [f"{p}==13.0.*" for p in toolkit.PYPI_PACKAGES]
    monkeypatch.setattr(toolkit, "find", lambda cuda, log: "a toolkit")
    assert getattr(backend, hook)() == []
    monkeypatch.setattr(toolkit, "find", lambda cuda, log: None)
    monkeypatch.setenv("FLASH_CUDA_BUILD_KERNELS", "0")
    assert getattr(backend, hook)() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0", ["80/sm_80"]),
        ("8.0+PTX", ["80/sm_80", "80/compute_80"]),
        ("8.0;9.0a", ["80/sm_80", "90a/sm_90a"]),
        (" 8.0, 8.6 8.0;", ["80/sm_80", "86/sm_86"]),
        ("9.0", ["90a/sm_90a"]),
        ("9.0+PTX", ["90a/sm_90a", "90/compute_90"]),
        ("9.0a+PTX", ["90a/sm_90a", "90a/compute_90a"]),
        ("12.0f", ["120f/sm_120f"]),
        ("Ampere", ["80/sm_80", "86/sm_86", "86/compute_86"]),
        ("Ada;Hopper", ["89/sm_89", "89/compute_89", "90a/sm_90a", "90/compute_90"]),
    ],
)
def test_arch_list(text, expected):
    flags_of_list = [flag for arch in archs.parse(text, KNOWN) for flag in arch.flags()]
    pattern = r"-gencode=arch=compute_(\w+),code=(\w+)"
    assert ["/".join(re.fullmatch(pattern, flag).groups()) for flag in flags_of_list] == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("7.5;8.0", "7.5 is not supported, flash_cuda needs compute capability 8.0 or newer"),
        ("8.7", "8.7 is not known to this nvcc (it knows 8.0, 8.6, 8.9, 9.0, 10.0, 12.0)"),
        ("8.0a", "8.0a is not known to this nvcc"),
        ("sm_80", "'sm_80' is no architecture: write entries such as"),
        ("8.0;;9.0.1", "'9.0.1' is no architecture"),
    ],
)
def test_unsupported_arch(text, sentence):
    with pytest.raises(BuildError, match=re.escape(f"TORCH_CUDA_ARCH_LIST: {sentence}")):
        archs.parse(text, KNOWN)


@pytest.mark.parametrize(
    ("wish", "capabilities", "expected"),
    [
        ("", [], "8.0+PTX;9.0a"),
        ("native", [(9, 0), (9, 0)], "9.0a"),
        ("", [(8, 6), (8, 0)], "8.0;8.6"),
        ("", [(7, 5)], "8.0+PTX;9.0a"),
        ("", [(7, 5), (8, 9)], "8.9"),
        ("", [(15, 0)], "8.0+PTX;9.0a"),
        ("12.0", [(9, 0)], "12.0"),
    ],
)
def test_arch_choice(wish, capabilities, expected):
    torch = fake_torch(capabilities=capabilities)
    chosen, _ = archs.choose(torch, KNOWN, {"TORCH_CUDA_ARCH_LIST": wish})
    assert chosen == archs.parse(expected, KNOWN)


@pytest.mark.parametrize(
    ("environ", "cores", "gigabytes", "jobs"),
    [
        ({}, 2, 24, 2),
        ({}, 64, 512, 4),
        ({}, 64, 5, 2),
        ({}, 64, 1, 1),
        ({"MAX_JOBS": "7"}, 2, 1, 7),
        ({"MAX_JOBS": ""}, 2, 24, 2),
    ],
)
def test_job_count(environ, cores, gigabytes, jobs):
    assert checks.job_count(environ, cores, gigabytes << 30) == jobs


@pytest.mark.parametrize("jobs", ["many", "0", "-1"])
def test_bad_max_jobs(jobs):
    with pytest.raises(BuildError, match=f"MAX_JOBS={jobs} is not a positive number"):
        checks.job_count({"MAX_JOBS": jobs})


@pytest.mark.parametrize(("limit", "expected"), [("max", 8 << 30), (str(3 << 30), 3 << 30)])
def test_memory_of_a_container_counts(tmp_path, limit, expected):
    for file, text in {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {8 << 20} kB\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    assert checks.available_memory(tmp_path) == expected


def test_old_python():
    with pytest.raises(BuildError, match="Python 3.9.7 is too old: use Python 3.10 or newer"):
        checks.require_python((3, 9, 7))
    checks.require_python((3, 10, 0))


def test_missing_and_old_torch(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BuildError, match="torch"):
        checks.require_torch()
    for version, good in [("2.9.1+cu128", False), ("2.10.0", True), ("2.14.1a0", True)]:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
        if good:
            assert checks.require_torch().__version__ == version
        else:
            with pytest.raises(BuildError, match=r"too old: run `pip install \"torch>=2\.10\"`"):
                checks.require_torch()


def test_torch_is_missing_in_a_bare_python():
    program = "from build_support import checks; checks.require_torch()"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("flash_cuda: the build needs torch and finds none: run `pip")
    assert len(done.stderr.splitlines()) == 1  # one sentence, no traceback


def test_cxx(tmp_path):
    compiler = write_program(tmp_path / "c++", "true")
    assert checks.require_cxx({"PATH": str(tmp_path)}) == "c++"
    assert checks.require_cxx({"PATH": "", "CXX": f"{compiler} -m64"}) == f"{compiler} -m64"
    with pytest.raises(BuildError, match="no C.. compiler .c.. is not on the PATH.: install g.."):
        checks.require_cxx({"PATH": str(tmp_path / "empty")})


@pytest.mark.parametrize(
    ("wish", "cuda", "expected"),
    [("", "13.0", True), ("1", "13.0", True), ("0", "13.0", False), ("OFF", None, False)],
)
def test_want_kernels(wish, cuda, expected):
    assert checks.want_kernels(cuda, "2.14.1", {"FLASH_CUDA_BUILD_KERNELS": wish}) is expected


def test_kernels_need_a_torch_with_cuda():
    assert checks.want_kernels(None, "2.14.1+cpu", {}) is False
    with pytest.raises(BuildError, match=r"torch 2.14.1\+cpu is built without CUDA"):
        checks.want_kernels(None, "2.14.1+cpu", {"FLASH_CUDA_BUILD_KERNELS": "1"})


def test_versions_are_said_once_in_spirit():
    """The minimum versions stand in several formats; they have to agree."""
    torch, python = checks.dotted(checks.MIN_TORCH), checks.dotted(checks.MIN_PYTHON)
    assert pyproject(r'^dependencies = \["torch>=([\d.]+)"\]') == torch
    assert pyproject(r'^requires = .*"torch>=([\d.]+); ') == torch
    assert pyproject(r"^requires = .*python_version >= '([\d.]+)'") == python
    setuptools = checks.dotted(prerequisites.MIN_SETUPTOOLS)
    assert pyproject(r'^requires = .*"setuptools>=([\d.]+)"') == setuptools
    assert pyproject(r'^    "setuptools>=([\d.]+)",') == setuptools
    assert pyproject(r'^requires-python = ">=([\d.]+)"') == python
    assert pyproject(r'^target-version = "py(\d+)"') == python.replace(".", "")
    assert f"cp{python.replace('.', '')}" in (ROOT / "setup.py").read_text()
    major, minor = checks.MIN_TORCH
    assert f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000" in flags.COMMON
    major, minor = checks.MIN_PYTHON
    assert int(flags.LIMITED_API, 16) == major << 24 | minor << 16


def test_requirements_of_extras():
    assert "pytest" in requirements.of_extra("dev")
    assert requirements.of_extra("plot") == ["matplotlib"]
    with pytest.raises(SystemExit, match="no extra 'nonesuch'"):
        requirements.of_extra("nonesuch")


def test_sources_of_the_extension():
    assert set(flags.SCHEMAS) <= set(flags.op_sources())
    assert flags.launch_sources()
    assert all((ROOT / source).is_file() for source in flags.op_sources() + flags.launch_sources())


def test_sdist_holds_everything_a_build_reads(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    pytest.importorskip("setuptools")
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=dict(os.environ))
    listed = set((tmp_path / "flash_cuda.egg-info/SOURCES.txt").read_text().splitlines())
    needed = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile", "CMakeLists.txt"}
    for folder in ("csrc", "build_support", "flash_cuda", "tests"):
        needed |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.*")}
    generated = ("__pycache__", ".so", ".pyc")
    needed = {n for n in needed if (ROOT / n).is_file() and not any(g in n for g in generated)}
    assert needed - listed == set()
    assert not [name for name in listed if name.endswith((".so", ".pyc", ".o"))]
