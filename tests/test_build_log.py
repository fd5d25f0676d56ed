"""The log of the last build (`make test` keeps it): registers, spills and notes of every kernel."""

import re

import pytest

from tests.gpu_report import ROOT

LOG = ROOT / "build" / "build.log"
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


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


def test_no_serialised_instructions(log):
    """ptxas says C75xx where it serialises wgmma or ignores setmaxnreg."""
    assert re.findall(r"C75\d\d.*", log) == []
