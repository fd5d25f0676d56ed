"""What docs say of files: the lines that docs/lab.md quotes, its names and sizes, and all links."""

import re
from pathlib import Path

import pytest

from flash_cuda import io_model, kernel_names
from flash_cuda.tile_plan import BUDGETS_KB, shared_traffic, tile_plan

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
LAB = ROOT / "docs" / "lab.md"
# | formula | `line` | [name](path) |
QUOTE = re.compile(r"^\| [^|]*\| `([^`|]+)` \| \[[^\]]+\]\(\.\./([^)]+)\) \|$", re.M)


def squeezed(text: str) -> str:
    """Without whitespace, so that a formatter may break a line."""
    return re.sub(r"\s+", "", text)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_quoted_lines_stand_in_their_files():
    text = LAB.read_text()
    quotes = QUOTE.findall(text)
    formulas = text.count("| formula | line | file |")
    assert formulas >= 8 and len(quotes) > 5 * formulas
    missing = [
        f"{path}: {line}"
        for line, path in quotes
        if not (ROOT / path).is_file() or squeezed(line) not in squeezed((ROOT / path).read_text())
    ]
    assert missing == [], "docs/lab.md quotes lines that are no longer there"


def test_every_row_of_a_table_of_formulas_is_a_quote():
    for table in LAB.read_text().split("| formula | line | file |\n|:--|:--|:--|\n")[1:]:
        rows = table.split("\n\n")[0].split("\n")
        assert [row for row in rows if not QUOTE.fullmatch(row)] == []


def test_the_names_of_the_corners():
    named = re.findall(r"^\| `([^`]+)`(?:, `v1`)? \|", LAB.read_text(), re.M)
    assert {"v1", *(name for name in named if "outer" in name)} == set(kernel_names.LAB_KERNELS)


def plan_row(head_dim: int, kilobytes: int) -> str:
    plan = tile_plan(head_dim, kilobytes)
    work = io_model.Workload(1, 1, 1, 4096, 4096, head_dim)
    moved = (io_model.lab_forward(name, work, plan).total for name in ("v1", "q_outer/split_q"))
    steps = [shared_traffic(plan, partition) for partition in ("split_k", "split_q")]
    cells = [
        head_dim,
        f"{kilobytes} KB",
        f"{plan.paper_rows} x {plan.paper_columns}",
        f"{plan.rows} x {plan.columns}",
        f"{plan.teams} x {plan.split_k}",
        plan.split_q,
        *(f"{total / 2**20:.0f}" for total in moved),
        *(f"{(step.read + step.write) / 1024:.0f}" for step in steps),
        *(step.barriers for step in steps),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def test_the_table_of_block_sizes():
    (table,) = re.findall(r"<!-- lab:plan -->\n(.*?)<!-- /lab:plan -->", LAB.read_text(), re.S)
    expected = [plan_row(head_dim, kb) for head_dim in (64, 128) for kb in BUDGETS_KB]
    assert table.splitlines()[2:] == expected
    works = [io_model.Workload(1, 1, 1, 4096, 4096, head_dim) for head_dim in (64, 128)]
    standard = [round(io_model.standard_forward(work).total / 2**20) for work in works]
    v2 = [round(io_model.v2_forward(work).total / 2**20) for work in works]
    sentence = "Standard attention moves {} MiB (d 64) and {} MiB (d 128), the tuned v2 {} and {}."
    assert squeezed(sentence.format(*standard, *v2)) in squeezed(LAB.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        if not found.exists() or (anchor and anchor not in headings(found)):
            broken.append(target)
    assert broken == []
