"""What was built: the log of the last build (`make test` keeps it), and the machine code itself."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from build_support import toolkit
from flash_cuda import _C, ops
from tests.gpu_report import ROOT

LOG = ROOT / "build" / "build.log"
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
HOPPER_KERNEL = re.compile(r"_ZN10flash_cuda6hopper\d+\w+_kernelI")


@pytest.fixture(scope="module")
def log():
    if not LOG.exists():
        pytest.skip("no build/build.log: the extension was not built by make")
    text = LOG.read_text(errors="replace")
    if not ENTRY.search(text):
        pytest.skip("the last build compiled no kernel")
    return text


def test_no_kernel_spills(log):
    """Nothing is loaded from the stack in a loop. A kernel may store what the rare second pass, a
    function of its own (forward_again, backward_again), has to find again on return."""
    spilling = [m["name"] + " on " + m["arch"] for m in ENTRY.finditer(log) if int(m["loads"])]
    assert spilling == []


def test_hopper_kernels_spill_nothing_at_all(log):
    hopper = [m for m in ENTRY.finditer(log) if HOPPER_KERNEL.match(m["name"])]
    if not hopper:
        pytest.skip("the last build compiled no Hopper kernel")
    assert [m["name"] for m in hopper if int(m["stores"]) or int(m["loads"])] == []


def test_no_serialised_instructions(log):
    """ptxas says C75xx where it serialises wgmma or ignores setmaxnreg."""
    assert re.findall(r"C75\d\d.*", log) == []


def cuobjdump() -> str | None:
    """The disassembler of a toolkit, of PyPI's packages, of Triton, or on the PATH."""
    homes = [home for _, home in toolkit.candidates(torch.version.cuda or "13.0")]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        homes.append(Path(triton.origin).parent / "backends" / "nvidia")
    found = [home / "bin" / "cuobjdump" for home in homes if (home / "bin" / "cuobjdump").is_file()]
    return str(found[0]) if found else shutil.which("cuobjdump")


@pytest.fixture(scope="module")
def hopper_code():
    """Machine code of each Hopper kernel of the installed extension, by its mangled name."""
    if not ops.HAS_CUDA_KERNELS:
        pytest.skip("this build holds no CUDA kernels")
    program = cuobjdump()
    if program is None:
        pytest.skip("needs cuobjdump")
    command = [program, "-sass", "-arch", "sm_90a", _C.__file__]
    done = subprocess.run(command, capture_output=True, text=True)
    functions = re.split(r"^\s*Function : ", done.stdout, flags=re.MULTILINE)[1:]
    if not functions:
        pytest.skip("this build holds no code for sm_90a: " + (done.stderr or "none listed"))
    code = dict(function.split("\n", 1) for function in functions)
    return {name: text for name, text in code.items() if HOPPER_KERNEL.match(name)}


def test_hopper_kernels_use_what_only_hopper_has(hopper_code):
    """wgmma is HGMMA in machine code, a load by the copy engine UTMALDG."""
    assert any("__nv_bfloat16" in name for name in hopper_code)
    assert any("__half" in name for name in hopper_code)
    for name, code in hopper_code.items():
        assert re.search(r"\bHGMMA\.", code) and re.search(r"\bUTMALDG\.", code), name


def test_hopper_code_can_be_told_from_none(hopper_code):
    """has_hopper_code() looks for static shared memory, which an empty kernel has not."""
    command = [cuobjdump(), "-res-usage", "-arch", "sm_90a", _C.__file__]
    done = subprocess.run(command, capture_output=True, text=True)
    usage = re.findall(r"Function (\w+):\n.*?SHARED:(\d+)", done.stdout + done.stderr)
    reserved = 1024  # of every kernel, by the system
    shared = [int(size) for name, size in usage if HOPPER_KERNEL.match(name) and "forward" in name]
    assert shared and min(shared) > reserved


def test_hopper_kernels_keep_nothing_in_local_memory(hopper_code):
    """What the log says of spills, for builds that kept none."""
    users = [name for name, code in hopper_code.items() if re.search(r"\b(STL|LDL)\b", code)]
    assert users == []
