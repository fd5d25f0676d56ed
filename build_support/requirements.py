"""Print what pip has to install, one a line: `python -m build_support.requirements dev`.

Arguments: names of extras of pyproject.toml, and `toolkit` for the PyPI nvcc packages that this
machine needs (none where it has a CUDA toolkit).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from . import checks, toolkit

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def of_toolkit(log) -> list[str]:
    """PyPI packages of an nvcc for the torch in this environment; empty where none is needed."""
    torch = checks.require_torch()
    cuda = torch.version.cuda
    if not checks.want_kernels(cuda, torch.__version__) or toolkit.find(cuda, log):
        return []
    return toolkit.requirements(cuda)


def of_extra(extra: str) -> list[str]:
    """Requirements of one extra, read by hand because Python 3.10 has no tomllib."""
    array = re.search(rf"^{re.escape(extra)} = \[(.*?)\]$", PYPROJECT.read_text(), re.M | re.S)
    if array is None:
        raise SystemExit(f"pyproject.toml has no extra {extra!r}")
    return re.findall(r'"([^"]+)"', array.group(1))


def main(names: list[str]) -> None:
    def to_stderr(line: str) -> None:
        print(line, file=sys.stderr)

    for name in names:
        found = of_toolkit(to_stderr) if name == "toolkit" else of_extra(name)
        for requirement in found:
            print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
