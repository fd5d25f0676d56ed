"""Result files to markdown pages and charts.

`python -m bench.report bench/results/*.json` rewrites the .md and .png beside each json, on any
machine: a GPU machine need only bring the json home.
"""

import argparse
import json
import sys
from pathlib import Path

from bench.common import describe, markdown_table, say
from bench.lab import tables as lab
from bench.tables import by_cell, cell_name, race_cells, race_columns, summary_text

GRID_NAMES = ("forward", "backward")


def grid_markdown(result: dict) -> str:
    names = result["contestants"]
    rows = [
        [cell_name(next(iter(cell.values()))), *race_cells(list(cell.values()), names)]
        for cell in by_cell(result["rows"])
    ]
    ceiling = result["ceiling_tflops"]
    skipped = sorted({f"{s['contestant']}: {s['reason']}" for s in result["skipped"]})
    parts = [
        f"Timed: {result['timed']}; dtype {result['arguments']['dtype']}. "
        f"bf16 8192^3 matmul {ceiling['before']} TFLOP/s before, {ceiling['after']} after.",
        markdown_table(race_columns(names), rows),
        summary_text(result["summary"], names[0]).replace("\n", "  \n"),
    ]
    if skipped:
        parts.append("Left out:\n" + "\n".join(f"- {line}" for line in skipped))
    return "\n\n".join(parts)


def mebibytes(count: int | None) -> str:
    return "out of memory" if count is None else f"{count / 2**20:,.1f}"


def memory_markdown(result: dict) -> str:
    """One table for the forward, one for forward and backward; MiB beyond the inputs."""
    parts = [f"Shape: {result['shape']}. MiB that the call takes beyond its inputs, at the peak."]
    kinds = result["contestants"]
    for phase, title in (("forward", "Forward"), ("training", "Forward and backward")):
        rows = []
        for tokens in dict.fromkeys(row["tokens"] for row in result["rows"]):
            at = {r["contestant"]: r for r in result["rows"] if r["tokens"] == tokens}
            promised = next(iter(at.values()))["promised"][phase]
            measured = [mebibytes(at[kind][phase]) if kind in at else "-" for kind in kinds]
            rows.append([f"{tokens:,}", mebibytes(promised), *measured])
        parts += [f"### {title}", markdown_table(["tokens", "promised", *kinds], rows)]
    return "\n\n".join(parts)


def overhead_markdown(result: dict) -> str:
    columns = ["call", "no grad, us", "with grad, us", "forward + backward, us"]
    rows = [
        [row["contestant"]]
        + [
            "-" if row[key] is None else f"{row[key]:.1f}"
            for key in ("no_grad", "grad", "forward_backward")
        ]
        for row in result["rows"]
    ]
    intro = f"Shape: {result['shape']}. Time that one call keeps the Python thread busy."
    return intro + "\n\n" + markdown_table(columns, rows)


def train_markdown(result: dict) -> str:
    """The table of bench.train_context: peak memory and speed by context and kind."""
    kinds = result["contestants"]
    rows = []
    for context in dict.fromkeys(row["context"] for row in result["rows"]):
        at = {r["attention"]: r for r in result["rows"] if r["context"] == context}
        cells = []
        for kind in kinds:
            row = at.get(kind)
            if row is None:
                cells.append("-")
            elif row["oom"]:
                cells.append("out of memory")
            else:
                cells.append(f"{row['peak_gib']:.1f} GiB, {row['tokens_per_s']:,.0f} tokens/s")
        rows.append([f"{context:,}", *cells])
    return f"{result['shape']}\n\n" + markdown_table(["context", *kinds], rows)


def curves_markdown(result: dict) -> str:
    """How far the loss curves of bench.train_curves lie apart."""
    columns = ["runs", "largest", "mean", "largest of first ten steps", "between last-ten means"]
    keys = ("max", "mean", "first_ten_max", "mean_of_last_ten")
    rows = [
        [" and ".join(pair["runs"]), *(f"{pair[key]:.1e}" for key in keys)]
        for pair in result["differences"]
    ]
    intro = f"{result['shape']} Difference of the training loss, same seed and data, in nats."
    return intro + "\n\n" + markdown_table(columns, rows)


MARKDOWN = {
    **dict.fromkeys(GRID_NAMES, grid_markdown),
    "memory": memory_markdown,
    "overhead": overhead_markdown,
    "train_context": train_markdown,
    "train_curves": curves_markdown,
    "ab": lab.markdown,
}


def page(result: dict) -> str:
    title = result["name"].replace("_", " ")
    return (
        f"# {title}\n\n{describe(result['environment'])}.\n\n{MARKDOWN[result['name']](result)}\n"
    )


def write(result: dict, stem: Path, *, markdown: bool, chart: bool) -> None:
    """Write STEM.md and STEM.png; without matplotlib (extra `plot`) the chart is left out."""
    if markdown:
        path = stem.with_suffix(".md")
        path.write_text(page(result))
        say(f"wrote {path}")
    if chart:
        from bench import charts

        charts.write(result, stem.with_suffix(".png"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="json files of bench/results")
    for path in parser.parse_args(argv).results:
        result = json.loads(path.read_text())
        write(result, path.with_suffix(""), markdown=True, chart=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
