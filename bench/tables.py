"""The table of a race, `shape | us | TFLOP/s | % of matmul | x each peer`, and its summary."""

from bench.common import geometric_mean, markdown_table, say

CELL_KEYS = ("head_dim", "causal", "seqlen", "batch", "heads", "heads_kv", "dtype")


def cell_key(row: dict) -> tuple:
    return tuple(row[key] for key in CELL_KEYS)


def by_cell(rows: list[dict]) -> list[dict[str, dict]]:
    """Rows gathered by cell, in order: contestant name -> row."""
    gathered: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        gathered.setdefault(cell_key(row), {})[row["contestant"]] = row
    return list(gathered.values())


def cell_name(row: dict) -> str:
    """The name of a cell everywhere; `row` is a result row or a grid.Cell as a dict."""
    grouped = f"/{row['heads_kv']}" if row["heads_kv"] != row["heads"] else ""
    mask = "causal" if row["causal"] else "full"
    return f"d{row['head_dim']} {mask} s{row['seqlen']} b{row['batch']} h{row['heads']}{grouped}"


def race_columns(contestants: list[str]) -> list[str]:
    first, *others = contestants
    return ["shape", f"{first} us", "TFLOP/s", "% of matmul"] + [
        f"x {other} (its TFLOP/s)" for other in others
    ]


def race_header(contestants: list[str]) -> str:
    return markdown_table(race_columns(contestants), [])


def race_cells(rows: list[dict], contestants: list[str]) -> list[str]:
    """us, TFLOP/s, % of the first contestant; for each other one the speed of the first over it."""
    by_name = {row["contestant"]: row for row in rows}
    first, *others = contestants
    mine = by_name.get(first)
    if mine is None:
        shown = ["-", "-", "-"]
    else:
        late = " (late)" if mine["late"] else ""
        shown = [
            f"{mine['us']:.1f}{late}",
            f"{mine['tflops']:.0f}",
            f"{mine['percent_of_ceiling']:.0f}",
        ]
    for other in others:
        theirs = by_name.get(other)
        if theirs is None:
            shown.append("-")
        else:
            late = " late" if theirs["late"] else ""
            times = "-" if mine is None else f"{theirs['us'] / mine['us']:.2f}x"
            shown.append(f"{times} ({theirs['tflops']:.0f}{late})")
    return shown


def race_row(shape: str, rows: list[dict], contestants: list[str]) -> str:
    return "| " + " | ".join([shape, *race_cells(rows, contestants)]) + " |"


def summarize(rows: list[dict], contestants: list[str]) -> dict[str, dict]:
    """For each peer: geometric mean and minimum of first's speed over the peer's, by cell."""
    first, *others = contestants
    summary = {}
    for other in others:
        ratios = [
            (cell[other]["us"] / cell[first]["us"], cell_name(cell[first]))
            for cell in by_cell(rows)
            if first in cell and other in cell
        ]
        if not ratios:
            continue
        least, where = min(ratios)
        summary[other] = {
            "geometric_mean": round(geometric_mean(ratio for ratio, _ in ratios), 4),
            "min": round(least, 4),
            "min_cell": where,
            "cells": len(ratios),
        }
    return summary


def summary_text(summary: dict[str, dict], first: str) -> str:
    if not summary:
        return "no cell was run by two contestants"
    return "\n".join(
        f"{first} against {peer}: geometric mean {s['geometric_mean']:.3f}x, "
        f"least {s['min']:.3f}x at {s['min_cell']} ({s['cells']} cells)"
        for peer, s in summary.items()
    )


def check_bar(summary: dict[str, dict], bar: str) -> int:
    """Compare with `PEER:GEOMEAN:MIN`, say the outcome, return an exit status."""
    *name, geomean, least = bar.split(":")
    peer = ":".join(name)
    reached = summary.get(peer)
    if reached is None:
        say(f"bar {bar}: not judged, {peer} ran no cell")
        return 1
    passed = reached["geometric_mean"] >= float(geomean) and reached["min"] >= float(least)
    say(f"bar {bar}: {'passed' if passed else 'MISSED'}")
    return 0 if passed else 1
