"""The tables of bench.ab that show hardware counters beside the models."""

from collections.abc import Sequence

from bench.common import markdown_table
from bench.tables import cell_name

GIB = 2**30


def times_model(measured: float | None, model: float | None) -> str:
    """'1.25 (0.99x)': GiB measured, and how many times the model's."""
    if measured is None:
        return "n/a"
    ratio = f" ({measured / model:.2f}x)" if model else ""
    return f"{measured / GIB:.3g}{ratio}"


def call_name(row: dict) -> str:
    return row["kernel"] + (" backward" if row["backward"] else "")


def rows_of_bytes(result: dict) -> list[dict]:
    """The rows of the section `bytes`; those of `budget` are counted in the same process."""
    return [row for row in result["bytes"] if row["section"] == "bytes"]


def traffic_row(row: dict) -> list[str]:
    model, measured = row["model"] or {}, row["l2"]
    return [
        call_name(row),
        cell_name(row),
        f"{row['working_set'] / 2**20:,.0f}",
        times_model(row["sm_read"], model.get("read")),
        *(times_model(measured[part], model.get(part)) for part in ("write", "reduced")),
        times_model(row["sm_total"], sum(model.values())),
        times_model(measured["read"], None),
        times_model(row["dram"]["read"], None),
        times_model(row["dram"]["write"], None),
        "-" if row["dram_over_l2"] is None else f"{row['dram_over_l2']:.2f}",
    ]


def traffic(result: dict) -> str:
    header = ["kernel", "shape", "tensors, MiB", "SM read", "SM write", "SM reductions"]
    header += ["SM in all", "L2 read", "DRAM read", "DRAM write", "DRAM / L2"]
    counted = rows_of_bytes(result)
    return (
        "GiB that the SMs read, write and reduce, in brackets over `flash_cuda.io_model`; what L2 "
        "reads for them, which is less where its request coalescer answers several SMs with one "
        "read; and between L2 and DRAM, the caches cold at the start and what "
        f"stays in L2 at the end not counted. The L2 has {result['l2_mib']:.0f} MiB: tensors and "
        f"workspace of the small shapes fit it. {agreement(counted)}\n\n"
        + markdown_table(header, map(traffic_row, counted))
    )


def agreement(rows: Sequence[dict]) -> str:
    """How far all bytes of the SMs are from the model's, kernel by kernel."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["model"] and row["sm_total"] is not None:
            name = row["kernel"].split("/")[0] + (" backward" if row["backward"] else "")
            ratios.setdefault(name, []).append(row["sm_total"] / sum(row["model"].values()))
    spans = [f"{name} {min(r):.3f} to {max(r):.3f}" for name, r in ratios.items()]
    return f"Measured over model: {', '.join(spans)}." if spans else ""


def shared(result: dict) -> str:
    def millions(value: float | None) -> str:
        return "n/a" if value is None else f"{value / 1e6:,.2f}"

    rows = []
    for row in result["shared"]:
        read, model = row["metrics"], row["model"]
        waves, stall, every = (read[k] for k in ("wavefronts", "barrier_stall", "all_stalls"))
        rows.append(
            [
                row["kernel"],
                cell_name(row),
                millions(waves) + (f" ({waves / model:.2f}x)" if waves and model else ""),
                *(millions(read[k]) for k in ("conflicts", "conflicts_ld", "conflicts_st")),
                f"{100 * stall / every:.1f}" if stall is not None and every else "n/a",
                *(millions(read[k]) for k in ("instructions", "tensor_instructions")),
            ]
        )
    header = ["kernel", "shape", "wavefronts", "bank conflicts", "of loads", "of stores"]
    header += ["barrier stall, %", "instructions", "tensor instructions"]
    return (
        "Millions. Wavefronts of 128 bytes in shared memory, in brackets over the model's bytes / "
        "128. Barrier stall: the part of the clocks between two instructions of a warp that it "
        "waits at a barrier.\n\n" + markdown_table(header, rows)
    )
