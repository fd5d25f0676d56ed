"""The charts of bench.ab: one figure, a panel for each question that was measured."""

import math

from bench.lab.effects import CORNERS, V1, V2
from bench.lab.tables import rows_of
from bench.tables import by_cell, cell_name

COLOURS = ("#c0392b", "#2c3e50", "#2980b9", "#27ae60", "#8e44ad", "#f39c12", "#7f8c8d", "#16a085")
CHART_DIM = 128  # of the panels that show one head dim


def corners(panel, result: dict) -> None:
    """Speed of every corner relative to v1, a group of bars for each cell."""
    cells = [cell for cell in by_cell(rows_of(result, "factorial")) if V1 in cell]
    width = 0.8 / len(CORNERS)
    for place, (corner, colour) in enumerate(zip(CORNERS, COLOURS, strict=True)):
        heights = [cell[V1]["us"] / cell[corner]["us"] if corner in cell else 0 for cell in cells]
        at = [index + (place - 3.5) * width for index in range(len(cells))]
        panel.bar(at, heights, width, color=colour, label=corner)
    names = [cell_name(next(iter(cell.values()))).split(" b")[0] for cell in cells]
    panel.set_xticks(range(len(cells)), names, rotation=20, ha="right", fontsize=7)
    panel.set_ylabel("speed relative to v1")
    panel.legend(fontsize=6, ncols=2)


def effects(panel, result: dict) -> None:
    """Every effect with its interval, a colour for each cell."""
    for place, entry in enumerate(result["effects"]):
        last = place == len(result["effects"]) - 1
        for line, effect in enumerate(entry["effects"]):
            y = -line - 0.6 * place / len(result["effects"])
            ends = [[effect["ratio"] - effect["low"]], [effect["high"] - effect["ratio"]]]
            panel.errorbar(
                effect["ratio"],
                y,
                xerr=ends if math.isfinite(effect["high"]) else None,
                marker="D" if last else ".",
                color="black" if last else COLOURS[place % len(COLOURS)],
                label=entry["cell"].split(" b")[0] if line == 0 else None,
            )
    names = [effect["name"] for effect in result["effects"][0]["effects"]]
    panel.set_yticks([-line - 0.3 for line in range(len(names))], names, fontsize=7)
    panel.axvline(1, color="#bbbbbb")
    panel.set_xlabel("ratio of speed, 95 % interval")
    panel.legend(fontsize=6)


def moved(panel, result: dict) -> None:
    """Model, SM and DRAM bytes of each forward call of one head dim."""
    rows = [
        row
        for row in result["bytes"]
        if (row["section"], row["head_dim"], row["backward"]) == ("bytes", CHART_DIM, False)
    ]
    places = range(len(rows))
    series = {
        "model": [sum((row["model"] or {}).values()) or None for row in rows],
        "SMs, measured": [row["sm_total"] for row in rows],
        "DRAM, measured": [row["dram_total"] for row in rows],
    }
    for (name, values), marker in zip(series.items(), "|ox", strict=True):
        shown = [(value / 2**30, -at) for at, value in zip(places, values, strict=True) if value]
        if shown:
            panel.plot(*zip(*shown, strict=True), marker, label=name)
    names = [
        f"{row['kernel'].rpartition('/')[0] or row['kernel']}, "
        f"{'causal' if row['causal'] else 'full'} {row['seqlen']}, "
        f"{row['working_set'] / 2**20:,.0f} MiB"
        for row in rows
    ]
    panel.set_yticks([-at for at in places], names, fontsize=6)
    panel.set_xscale("log")
    panel.set_xlabel("GiB")
    panel.legend(fontsize=7)


def against_budget(panel, rows: list[dict], value, label: str) -> None:
    """A line for each kernel that names its shared memory and head dim."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name, _, kilobytes = (row.get("contestant") or row["kernel"]).rpartition("/")
        if kilobytes.endswith("KB") and value(row):
            points = lines.setdefault(f"{name}, d {row['head_dim']}", [])
            points.append((int(kilobytes.removesuffix("KB")), value(row)))
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        panel.plot(*zip(*sorted(points), strict=True), marker="o", color=colour, label=name)
    panel.set_xlabel("shared memory of a thread block, KB")
    panel.set_ylabel(label)
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7)


def budget_time(panel, result: dict) -> None:
    against_budget(panel, rows_of(result, "budget"), lambda row: row["us"] / 1e3, "ms")


def budget_bytes(panel, result: dict) -> None:
    rows = [row for row in result["bytes"] if row["section"] == "budget"]
    against_budget(panel, rows, lambda row: (row["dram_total"] or 0) / 2**30, "DRAM, GiB")


def parallel(panel, result: dict) -> None:
    rows = [row for row in rows_of(result, "parallel") if row["head_dim"] == CHART_DIM]
    for name, colour in zip((V1, V2, "v2"), COLOURS, strict=False):
        points = [
            (row["batch"] * row["heads"], row["tflops"])
            for row in rows
            if row["contestant"] == name
        ]
        panel.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
    panel.axvline(result["sms"], color="#bbbbbb", linestyle=":", label="SMs")
    panel.set_xscale("log", base=2)
    panel.set_xlabel("batch x heads")
    panel.set_ylabel("TFLOP/s")
    panel.legend(fontsize=7)


def draw(result: dict, pyplot) -> None:
    timed = {row["section"] for row in result["rows"]}
    counted = {row["section"] for row in result["bytes"]}
    panels = {
        "The eight corners": corners if "factorial" in timed else None,
        "Effects": effects if result["effects"] else None,
        f"Bytes moved, d {CHART_DIM}": moved if "bytes" in counted else None,
        "Time and block size": budget_time if "budget" in timed else None,
        "DRAM bytes and block size": budget_bytes if "budget" in counted else None,
        f"Sequence parallelism, d {CHART_DIM}": parallel if "parallel" in timed else None,
    }
    drawn = {title: chart for title, chart in panels.items() if chart}
    lines = max(math.ceil(len(drawn) / 2), 1)
    _, axes = pyplot.subplots(lines, 2, figsize=(17, 4.6 * lines), squeeze=False)
    for (title, chart), panel in zip(drawn.items(), axes.flat, strict=False):
        chart(panel, result)
        panel.set_title(title)
        panel.grid(alpha=0.3)
    for empty in axes.flat[len(drawn) :]:
        empty.set_axis_off()
