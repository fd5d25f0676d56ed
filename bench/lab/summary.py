"""The measurements of docs/lab.md: bench.ab's page, shortened to what a reader can take in.

The whole page, every shape of it, is bench/results/ab_<gpu>.md.
"""

from bench.common import markdown_table
from bench.lab import counter_tables, tables
from bench.lab.counter_tables import times_model
from bench.lab.tables import Render, bar, column_name, rows_of, speed
from bench.tables import by_cell, cell_name

HEAD_DIM = 128  # of the sections that show one head dim


def of_one_head_dim(result: dict) -> dict:
    """The result with the measurements of HEAD_DIM alone."""
    kept = {
        key: [row for row in result[key] if row["head_dim"] == HEAD_DIM]
        for key in ("rows", "bytes", "shared")
    }
    return {**result, **kept}


def effects(result: dict) -> str:
    """Each effect over all cells, and between which values single cells lie."""
    *cells, pooled = [entry["effects"] for entry in result["effects"]]
    rows = []
    for place, effect in enumerate(pooled):
        found = [of_cell[place]["ratio"] for of_cell in cells]
        interval = f"{effect['low']:.3f} to {effect['high']:.3f}"
        span = f"{min(found):.3f} to {max(found):.3f}"
        rows.append([effect["name"], f"{effect['ratio']:.3f}", interval, span])
    return markdown_table(["effect", "all cells", "95 % interval", "single cells"], rows)


def factorial(result: dict) -> str:
    parts = ["Time over v1's, geometric mean of the shapes:", tables.corner_times(result)]
    if result["effects"]:
        parts += ["Effects as ratios of speed:", effects(result), result["verdict"]]
    return "\n\n".join(parts)


def traffic(result: dict) -> str:
    """All bytes of the SMs and of DRAM, of full attention at one head dim."""
    rows = []
    for row in counter_tables.rows_of_bytes(of_one_head_dim(result)):
        if row["causal"]:
            continue
        rows.append(
            [
                counter_tables.call_name(row),
                cell_name(row),
                f"{row['working_set'] / 2**20:,.0f}",
                times_model(row["sm_total"], sum((row["model"] or {}).values())),
                times_model(row["dram_total"], None),
                "-" if row["dram_over_l2"] is None else f"{row['dram_over_l2']:.2f}",
            ]
        )
    header = ["kernel", "shape", "tensors, MiB", "SMs, GiB (x model)", "DRAM, GiB", "DRAM / L2"]
    agreement = counter_tables.agreement(counter_tables.rows_of_bytes(result))
    intro = f"The L2 cache has {result['l2_mib']:.0f} MiB. {agreement}".strip()
    return f"{intro}\n\n{markdown_table(header, rows)}"


def shared(result: dict) -> str:
    return counter_tables.shared(of_one_head_dim(result))


def parallel(result: dict) -> str:
    return tables.parallel(of_one_head_dim(result))


def backward(result: dict) -> str:
    cells = [cell for cell in by_cell(rows_of(result, "backward")) if {"v1", "v2"} <= set(cell)]
    rows = []
    for cell in cells:
        v1, v2 = cell["v1"], cell["v2"]
        pairs = v1["batch"] * v1["heads"]
        gain = v1["us"] / v2["us"]
        rows.append([column_name(cell), pairs, speed(v1), speed(v2), f"{gain:.2f}x", bar(1, gain)])
    header = ["shape", "batch x heads", "v1: us, TFLOP/s", "v2", "v2 over v1", "v2's time of v1's"]
    return markdown_table(header, rows)


SECTIONS: dict[str, Render] = {
    "factorial": factorial,
    "bytes": traffic,
    "shared": shared,
    "budget": tables.budget,
    "parallel": parallel,
    "backward": backward,
}


def about(result: dict) -> str:
    return "\n\n".join(filter(None, [tables.intro(result), tables.left_out(result)]))


def sections(result: dict) -> dict[str, str]:
    """What stands in docs/lab.md of each section that was run."""
    return {name: tables.body(result, name, SECTIONS[name]) for name in result["sections"]}
