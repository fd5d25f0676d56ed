"""Fill the measured tables of README.md and docs/lab.md from bench/results.

`python -m bench.readme [--gpu h200]`. The text between `<!-- bench:NAME -->` and
`<!-- /bench:NAME -->` is replaced by the table of NAME_<gpu>.json; docs/lab.md has a marker for
each section of bench.ab. A marker whose file, or whose section in it, is missing keeps its text.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench import report, tables
from bench.common import REPOSITORY, RESULTS, describe, markdown_table, say
from bench.lab import summary
from bench.lab import tables as lab


def compact_grid(result: dict) -> str:
    """A row for each head dim and mask, a column for each seqlen: TFLOP/s (x the best peer)."""
    first = result["contestants"][0]
    named = tables.real_peers(result["contestants"])
    against = f" (x {named[0] if len(named) == 1 else 'best peer'})" if named else ""
    cells = [cell for cell in tables.by_cell(result["rows"]) if first in cell]
    seqlens = sorted({cell[first]["seqlen"] for cell in cells})
    table: dict[str, dict[int, str]] = {}
    for cell in cells:
        mine, peer = cell[first], tables.best_peer(cell, result["contestants"])
        ratio = f" ({peer['us'] / mine['us']:.2f}x)" if peer else ""
        label = f"d {mine['head_dim']}, {'causal' if mine['causal'] else 'full'}"
        table.setdefault(label, {})[mine["seqlen"]] = f"{mine['tflops']:.0f}{ratio}"
    header = [f"TFLOP/s{against}", *(f"seq {seqlen}" for seqlen in seqlens)]
    rows = [[label, *(by.get(seqlen, "-") for seqlen in seqlens)] for label, by in table.items()]
    summary = tables.summary_text(result["summary"], first).replace("\n", "  \n")
    return f"{markdown_table(header, rows)}\n\n{summary}"


# README.md: the grids and the lab's page smaller than in bench/results, where alone the others are.
AS_THEY_ARE = ("memory", "overhead", "train_context", "train_curves")
RENDER: dict[str, Callable[[dict], str]] = {
    **{name: report.MARKDOWN[name] for name in AS_THEY_ARE},
    **dict.fromkeys(report.GRID_NAMES, compact_grid),
    "ab": lab.corner_times,
}


def measured_where(result: dict) -> str:
    return f"<sub>{describe(result['environment'])}.</sub>"


def readme_blocks(result: dict) -> dict[str, str]:
    name = result["name"]
    if name == "ab" and "factorial" not in result["sections"]:
        return {}
    return {name: f"{RENDER[name](result)}\n\n{measured_where(result)}"}


def lab_blocks(result: dict) -> dict[str, str]:
    """The sections of docs/lab.md; they share one line on where they were measured."""
    if result["name"] != "ab":
        return {}
    sections = {f"ab_{name}": content for name, content in summary.sections(result).items()}
    return {"ab": f"{summary.about(result)}\n\n{measured_where(result)}", **sections}


PAGES = {"README.md": readme_blocks, "docs/lab.md": lab_blocks}


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between the markers of `name`; text without them is returned as is."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    return re.sub(pattern, lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.readme", description=__doc__)
    parser.add_argument("--gpu", default="h200", help="which results: NAME_<gpu>.json")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="folder of README.md")
    arguments = parser.parse_args(argv)
    texts = {page: (arguments.root / page).read_text() for page in PAGES}
    for name in RENDER:
        path = arguments.results / f"{name}_{arguments.gpu}.json"
        if not path.exists():
            say(f"{name}: no {path}, left as it is")
            continue
        result = json.loads(path.read_text())
        for page, blocks in PAGES.items():
            for marker, content in blocks(result).items():
                texts[page] = fill(texts[page], marker, content)
        say(f"{name}: filled from {path}")
    for page, text in texts.items():
        (arguments.root / page).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
