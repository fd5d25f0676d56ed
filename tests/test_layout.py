"""DESIGN.md section 3 as tests: direction of includes, where asm and torch may stand, lengths."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
LAYERS = ["ptx", "tile", "attention", "kernels", "launch", "ops"]  # none includes to its right

# Aims, in lines. A file that is better whole stands in LONGER with its own limit and the reason.
KERNEL_LINES, CUDA_LINES, PYTHON_LINES, TEST_LINES = 400, 150, 200, 600
LONGER = {
    "bench/peers.py": (230, "every peer beside the next, so that a new one is a copy of its twin"),
    "flash_cuda/ops.py": (230, "both ops with their fakes and CPU kernels on one page"),
    "examples/train_gpt.py": (400, "an example is one file to read and to copy"),
}

SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".cu", ".cuh", ".cpp", ".h"})
# Assembled from halves, so that this file does not name what it forbids.
REGISTRY_HOSTS = [
    "pypi" + ".org",
    "python" + "hosted.org",
    "pypi.nvidia" + ".com",
    "download.pytorch" + ".org",
    "anaconda" + ".org",
    "npmjs" + ".org",
    "deb.debian" + ".org",
    "docker" + ".io",
]
LOCAL_PATH = re.compile(r"(?<![\w./-])/(?:work|home|root|Users)/\w")


def repository_files() -> list[Path]:
    """Files that are or would be committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_of(path: Path) -> str:
    """The text without comments, so that prose about asm or torch is no offence."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)


def layer_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def test_sources_lie_in_layers():
    assert SOURCES, "csrc is empty"
    assert [name_of(p) for p in SOURCES if layer_of(p) not in LAYERS] == []


def test_includes_point_left():
    wrong = []
    for path in SOURCES:
        for included in re.findall(r'#\s*include\s*"([^"]+)"', code_of(path)):
            layer = included.split("/")[0]
            if not (CSRC / included).is_file():
                wrong.append(f"{name_of(path)}: {included} is no path from csrc/")
            elif LAYERS.index(layer) > LAYERS.index(layer_of(path)):
                wrong.append(f"{name_of(path)}: {included} lies to its right")
    assert wrong == []


def test_asm_only_in_ptx():
    users = [p for p in SOURCES if re.search(r"\b(asm|__asm__)\b", code_of(p))]
    assert [name_of(p) for p in users if layer_of(p) != "ptx"] == []


def test_torch_headers_only_in_ops():
    users = [p for p in SOURCES if re.search(r"#\s*include\s*<(torch|ATen|c10)/", code_of(p))]
    assert [name_of(p) for p in users if layer_of(p) != "ops"] == []


def line_limit(name: str) -> int | None:
    if name in LONGER:
        return LONGER[name][0]
    if name.startswith("csrc/kernels/"):
        return KERNEL_LINES
    if name.endswith((".cu", ".cuh", ".cpp", ".h")):
        return CUDA_LINES if name.startswith("csrc/") else TEST_LINES
    if name.endswith(".py"):
        return TEST_LINES if name.startswith("tests/") else PYTHON_LINES
    return None


def test_files_are_short():
    long = []
    for path in repository_files():
        limit = line_limit(name_of(path))
        lines = len(path.read_text().splitlines()) if limit else 0
        if limit and lines > limit:
            long.append(f"{name_of(path)}: {lines} lines, the aim is {limit}")
    assert long == [], "split these, or give each a reason in LONGER"


def test_setup_py_is_short():
    assert len((ROOT / "setup.py").read_text().splitlines()) < 150


def test_no_tracked_binaries():
    binary = [p for p in repository_files() if b"\0" in p.read_bytes()[:8192]]
    assert [name_of(p) for p in binary] == []


def test_no_registry_host_and_no_local_path():
    wrong = []
    for path in repository_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found = [host for host in REGISTRY_HOSTS if host in line]
            found += [match.group() for match in LOCAL_PATH.finditer(line)]
            wrong += [f"{name_of(path)}:{number}: {what}" for what in found]
    assert wrong == []


def test_ci_script_is_executable():
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
