"""The page of bench.ab: a table for each section, and what the factorial says in words."""

from collections.abc import Callable, Iterable

from bench.common import geometric_mean, markdown_table
from bench.lab.counter_tables import shared, times_model, traffic
from bench.lab.effects import V1, V2
from bench.tables import by_cell, cell_name

BAR_CELLS = 24

Render = Callable[[dict], str]


def bar(value: float, largest: float) -> str:
    """'███░░░': the part of `largest` that `value` is; of one width, so that columns align."""
    full = round(BAR_CELLS * value / largest)
    return "█" * full + "░" * (BAR_CELLS - full)


def rows_of(result: dict, section: str) -> list[dict]:
    return [row for row in result["rows"] if row["section"] == section]


def speed(row: dict | None, base: dict | None = None) -> str:
    """'812.4 us, 210 (1.90x)': time, TFLOP/s; the ratio is the speed relative to `base`."""
    if row is None:
        return "-"
    ratio = f" ({base['us'] / row['us']:.2f}x)" if base else ""
    late = " late" if row["late"] else ""
    return f"{row['us']:.1f} us, {row['tflops']:.0f}{ratio}{late}"


def contestants(cells: Iterable[dict[str, dict]]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell))


def column_name(cell: dict[str, dict]) -> str:
    return cell_name(next(iter(cell.values())))


def race_table(result: dict, section: str, base: str) -> str:
    """A row for each kernel, a column for each cell; the speed relative to `base` in brackets."""
    cells = by_cell(rows_of(result, section))
    rows = [
        [name, *(speed(cell.get(name), cell.get(base)) for cell in cells)]
        for name in contestants(cells)
    ]
    return markdown_table(["us, TFLOP/s", *map(column_name, cells)], rows)


def corner_times(result: dict) -> str:
    """Time of each kernel over v1's, slowest first: geometric mean of the cells where both ran."""
    cells = [cell for cell in by_cell(rows_of(result, "factorial")) if V1 in cell]
    ratios = {
        name: [cell[name]["us"] / cell[V1]["us"] for cell in cells if name in cell]
        for name in contestants(cells)
    }
    means = {name: geometric_mean(found) for name, found in ratios.items()}
    rows = []
    for name in sorted(means, key=means.__getitem__, reverse=True):
        found = ratios[name]
        missing = f" ({len(found)} of {len(cells)} cells)" if len(found) < len(cells) else ""
        length = bar(means[name], max(means.values()))
        span = f"{min(found):.2f} to {max(found):.2f}"
        rows.append([name + missing, f"{means[name]:.2f}", span, length])
    return markdown_table(["kernel", "time over v1's", "least to most", "time"], rows)


def factorial(result: dict) -> str:
    parts = [
        f"Corners, v2 and the peer in one run; v1 is {V1}. Time over v1's, geometric mean of the "
        "cells:",
        corner_times(result),
        "Each cell; in brackets the speed relative to v1:",
        race_table(result, "factorial", V1),
    ]
    if result["effects"]:
        names = [entry["cell"] for entry in result["effects"]]
        rows = [
            [
                effects[0]["name"],
                *(f"{e['ratio']:.3f} ({e['low']:.3f} to {e['high']:.3f})" for e in effects),
            ]
            for effects in zip(*(entry["effects"] for entry in result["effects"]), strict=True)
        ]
        parts += [
            "Effects as ratios of speed with 95 % confidence intervals. Of one choice: v2's over "
            "v1's. Of several: the gain of all together over the product of the gains that fewer "
            "of them explain; 1 means independent.",
            markdown_table(["effect", *names], rows),
            result["verdict"],
        ]
    return "\n\n".join(parts)


def budget(result: dict) -> str:
    """Time and bytes of each kernel against its shared memory."""
    bytes_of = {
        (row["kernel"], cell_name(row)): row
        for row in result["bytes"]
        if row["section"] == "budget"
    }
    slowest: dict[str, float] = {}
    for row in rows_of(result, "budget"):
        slowest[cell_name(row)] = max(row["us"], slowest.get(cell_name(row), 0))
    rows = []
    for row in rows_of(result, "budget"):
        counted = bytes_of.get((row["contestant"], cell_name(row)))
        moved = ["-", "-"]
        if counted:
            model = sum((counted["model"] or {}).values())
            moved = [times_model(counted["sm_total"], model), times_model(counted["dram_total"], 0)]
        length = bar(row["us"], slowest[cell_name(row)])
        rows.append([row["contestant"], cell_name(row), speed(row), length, *moved])
    header = ["kernel", "shape", "us, TFLOP/s", "time", "SMs, GiB (x model)", "DRAM, GiB"]
    return (
        "Shared memory of a thread block, M, sets the block sizes; bytes are both ways.\n\n"
        + markdown_table(header, rows)
    )


def parallel(result: dict) -> str:
    cells = by_cell(rows_of(result, "parallel"))
    names = contestants(cells)
    rows = []
    for cell in sorted(cells, key=lambda c: next(iter(c.values()))["head_dim"]):
        any_row = next(iter(cell.values()))
        gains = [
            f"{cell[V1]['us'] / cell[name]['us']:.2f}x" if {V1, name} <= set(cell) else "-"
            for name in (V2, "v2")
        ]
        shown = [speed(cell.get(name)) for name in names]
        rows.append([column_name(cell), any_row["batch"] * any_row["heads"], *shown, *gains])
    header = ["shape", "batch x heads", *names, f"{V2} over v1", "v2 over v1"]
    return (
        f"v1 ({V1}) has one thread block for each head, the Q-outer kernels one for each block of "
        f"queries; {result['sms']} SMs.\n\n" + markdown_table(header, rows)
    )


def backward(result: dict) -> str:
    return "The op `bwd` alone; in brackets the speed relative to v1.\n\n" + race_table(
        result, "backward", "v1"
    )


SECTIONS: dict[str, tuple[str, Render]] = {
    "factorial": ("The eight corners", factorial),
    "bytes": ("Bytes moved", traffic),
    "shared": ("Shared memory and barriers", shared),
    "budget": ("Block size", budget),
    "parallel": ("Sequence parallelism", parallel),
    "backward": ("Backward", backward),
}


def intro(result: dict) -> str:
    return f"bf16, {result['rounds']} rounds of every kernel in turn."


def body(result: dict, section: str, render: Render) -> str:
    """A section by `render`, after the sentence on missing counters; words if nothing ran."""
    measured = {row["section"] for key in ("rows", "bytes", "shared") for row in result[key]}
    shown = render(result) if section in measured else "Nothing was measured."
    return "\n\n".join(filter(None, [result["no_counters"].get(section), shown]))


def left_out(result: dict) -> str:
    skipped = sorted({f"{s['kernel']} ({s['section']}): {s['reason']}" for s in result["skipped"]})
    return "Left out:\n" + "\n".join(f"- {line}" for line in skipped) if skipped else ""


def markdown(result: dict) -> str:
    """The whole page, with only the sections that were run."""
    parts = [intro(result)]
    for name in result["sections"]:
        title, render = SECTIONS[name]
        parts += [f"## {title}", body(result, name, render)]
    parts.append(left_out(result))
    return "\n\n".join(filter(None, parts))
