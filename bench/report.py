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
from bench.tables import by_cell, cell_key, cell_name, race_cells, race_columns, summary_text

# small has their page, but no chart and other shapes.
GRID_NAMES = ("forward", "backward", "train_step")


def grid_markdown(result: dict) -> str:
    names = result["contestants"]
    rows = [
        [cell_name(next(iter(cell.values()))), *race_cells(list(cell.values()), names)]
        for cell in by_cell(result["rows"])
    ]
    ceiling = result["ceiling_tflops"]
    parts = [
        f"Timed: {result['timed']}; dtype {result['arguments']['dtype']}. "
        f"bf16 8192^3 matmul {ceiling['before']} TFLOP/s before, {ceiling['after']} after.",
        markdown_table(race_columns(names), rows),
        summary_text(result["summary"], names[0]).replace("\n", "  \n"),
    ]
    return "\n\n".join(parts + left_out(result))


def left_out(result: dict) -> list[str]:
    """A paragraph on who was left out and why; none where nobody was."""
    skipped = sorted({f"{s['contestant']}: {s['reason']}" for s in result["skipped"]})
    return ["Left out:\n" + "\n".join(f"- {line}" for line in skipped)] if skipped else []


def gqa_markdown(result: dict) -> str:
    """A row for each contestant and shape: time with as many key heads, speed with fewer."""
    header, rows = [], []
    shapes: dict[tuple, list[dict]] = {}
    for row in result["rows"]:
        key = row["contestant"], *cell_key({**row, "heads_kv": row["heads"]})
        shapes.setdefault(key, []).append(row)
    for mha, *fewer in shapes.values():
        header = ["shape", "", "us", "TFLOP/s"]
        header += [f"x with {row['heads_kv']} key heads" for row in fewer]
        cells = [cell_name(mha), mha["contestant"], f"{mha['us']:.1f}", f"{mha['tflops']:.0f}"]
        rows.append(cells + [f"{mha['us'] / row['us']:.3f}x" for row in fewer])
    lines = [
        f"{name}: geometric mean {s['geometric_mean']:.3f}x, least {s['min']:.3f}x "
        f"at {s['min_cell']}"
        for name, s in result["summary"].items()
    ]
    intro = (
        f"Forward, no grad, {result['dtype']}. Times are those with as many key heads as query "
        "heads; x is the speed with fewer, same contestant, over that."
    )
    parts = [intro, markdown_table(header, rows), "  \n".join(lines)]
    return "\n\n".join(parts + left_out(result))


def accuracy_case(row: dict) -> str:
    mask = "causal" if row["causal"] else "full"
    words = [f"d{row['head_dim']}", mask, row["dtype"], row["inputs"], row.get("of", "out")]
    return " ".join(words).removesuffix(" out")


def accuracy_markdown(result: dict) -> str:
    """A row for each case: RMSE, and maximum in parentheses, of each contestant."""
    names = result["contestants"]
    cases: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        shown = f"{row['rmse']:.3e} ({row['max']:.1e})"
        cases.setdefault(accuracy_case(row), {})[row["contestant"]] = shown
    rows = [[case, *(by.get(name, "-") for name in names)] for case, by in cases.items()]
    what = "gradients" if result["name"] == "gradient_accuracy" else "forward"
    intro = f"Shape: {result['shape']}. Error of the {what} against float64: RMSE (maximum)."
    table = markdown_table(["inputs", *names], rows)
    return "\n\n".join([intro, table, *left_out(result)])


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
    **dict.fromkeys((*GRID_NAMES, "small"), grid_markdown),
    "gqa": gqa_markdown,
    "accuracy": accuracy_markdown,
    "gradient_accuracy": accuracy_markdown,
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
