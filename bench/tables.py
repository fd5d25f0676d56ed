"""The table of a race, `shape | us | TFLOP/s | % of matmul | x the peers`, and its summary.

`contestants` is a list of names whose first is flash_cuda's, where it could be imported; a peer is
any other that is not flash_cuda with one thing changed (`ours:...`).
"""

import argparse

from bench.common import geometric_mean, markdown_table, say
from bench.peers import OWN

CELL_KEYS = ("head_dim", "causal", "seqlen", "batch", "heads", "heads_kv", "dtype")
BEST = "best"


def cell_key(row: dict) -> tuple:
    return (*(row[key] for key in CELL_KEYS), row.get("window", -1))


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
    window = f" w{row['window']}" if row.get("window", -1) >= 0 else ""
    heads = f"h{row['heads']}{grouped}"
    return f"d{row['head_dim']} {mask}{window} s{row['seqlen']} b{row['batch']} {heads}"


def real_peers(contestants: list[str]) -> list[str]:
    return [name for name in contestants[1:] if not name.startswith(OWN)]


def best_peer(cell: dict[str, dict], contestants: list[str]) -> dict | None:
    """The row of the fastest peer in a cell; None where no peer ran."""
    rows = [cell[name] for name in real_peers(contestants) if name in cell]
    return min(rows, key=lambda row: row["us"], default=None)


def race_columns(contestants: list[str]) -> list[str]:
    first, *others = contestants
    best = ["x best peer"] if len(real_peers(contestants)) > 1 else []
    return [
        *("shape", f"{first} us", "TFLOP/s", "% of matmul", *best),
        *(f"x {other} (its TFLOP/s)" for other in others),
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
    if len(real_peers(contestants)) > 1:
        best = best_peer(by_name, contestants)
        known = mine is not None and best is not None
        shown.append(f"{best['us'] / mine['us']:.2f}x {best['contestant']}" if known else "-")
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


def spread(ratios: list[tuple[float, str]]) -> dict:
    """Geometric mean, least and greatest of (ratio, name of its cell)."""
    (least, where_least), (greatest, where_greatest) = min(ratios), max(ratios)
    return {
        "geometric_mean": round(geometric_mean(ratio for ratio, _ in ratios), 4),
        "min": round(least, 4),
        "min_cell": where_least,
        "max": round(greatest, 4),
        "max_cell": where_greatest,
        "cells": len(ratios),
    }


def summarize(rows: list[dict], contestants: list[str]) -> dict[str, dict]:
    """For each peer: geometric mean, least and greatest of first's speed over the peer's, by cell.

    BEST is the fastest peer of each cell; `of` says which there were, `untimed` how many timings of
    theirs are missing, `below` in which cells it was faster.
    """
    first, *others = contestants
    cells = [cell for cell in by_cell(rows) if first in cell]
    summary = {}
    for other in others:
        timed = [cell for cell in cells if other in cell]
        if timed:
            summary[other] = spread(
                [(c[other]["us"] / c[first]["us"], cell_name(c[first])) for c in timed]
            )
    peers = real_peers(contestants)
    bests = [
        (best["us"] / cell[first]["us"], cell_name(cell[first]), best["contestant"])
        for cell in cells
        if (best := best_peer(cell, contestants))
    ]
    if bests:
        summary[BEST] = spread([(ratio, name) for ratio, name, _ in bests]) | {
            "of": peers,
            "untimed": sum(peer not in cell for cell in cells for peer in peers),
            "below": [
                f"{name} {ratio:.3f}x {peer}" for ratio, name, peer in sorted(bests) if ratio < 1
            ],
        }
    return summary


def summary_text(summary: dict[str, dict], first: str) -> str:
    if not summary:
        return "no cell was run by two contestants"
    lines = []
    for peer, s in summary.items():
        named = peer
        if peer == BEST:
            if len(s["of"]) < 2:
                continue
            named = f"the best of {', '.join(s['of'])} in each cell"
        lines.append(
            f"{first} against {named}: geometric mean {s['geometric_mean']:.3f}x, "
            f"least {s['min']:.3f}x at {s['min_cell']} ({s['cells']} cells)"
        )
        if peer.startswith(OWN) and "max" in s:
            lines[-1] += f", greatest {s['max']:.3f}x at {s['max_cell']}"
        if s.get("untimed"):
            lines.append(f"{s['untimed']} timings of peers are missing")
        if s.get("below"):
            lines.append(f"slower than the best peer: {'; '.join(s['below'])}")
    return "\n".join(lines)


def parse_bar(bar: str) -> tuple[str, list[float]]:
    """`PEER:GEOMEAN:MIN` or `PEER:GEOMEAN:MIN:MAX`; a name may hold colons, but no number."""
    name, limits = bar.split(":"), []
    while name and name[-1].replace(".", "", 1).isdigit():
        limits.insert(0, float(name.pop()))
    if not name or len(limits) not in (2, 3):
        raise ValueError(f"expected PEER:GEOMEAN:MIN or PEER:GEOMEAN:MIN:MAX, got {bar!r}")
    return ":".join(name), limits


def bar_text(text: str) -> str:
    """argparse's check: a bar that cannot be read must not cost a run."""
    try:
        parse_bar(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def check_bar(summary: dict[str, dict], bar: str) -> int:
    """Compare with a bar, say the outcome, return an exit status."""
    peer, (geomean, least, *greatest) = parse_bar(bar)
    reached = summary.get(peer)
    if reached is None:
        say(f"bar {bar}: not judged, {peer} ran no cell")
        return 1
    passed = reached["geometric_mean"] >= geomean and reached["min"] >= least
    passed = passed and all(reached["max"] <= limit for limit in greatest)
    say(f"bar {bar}: {'passed' if passed else 'MISSED'}")
    return 0 if passed else 1
