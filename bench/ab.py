"""What each idea of FlashAttention-2 is worth: `python -m bench.ab` (`flash-cuda ab`).

Sections: a factorial (the eight corners of the lab: speed, effects, joint effects), b bytes (L2 and
DRAM bytes against io_model, by ncu), c shared (shared memory and barriers of split-K and split-Q,
by ncu), d budget (time and bytes against shared memory), e parallel (v1 and v2 with few and many
heads), f backward. Where ncu may not read counters, one sentence says so and the rest goes on.

  python -m bench.ab --sections a,e,f --rounds 20
"""

import argparse
import sys
import time

import torch

from bench import common, peers, report
from bench.common import say
from bench.lab import counters, effects, races
from bench.tables import by_cell, cell_name

SECTIONS = ("factorial", "bytes", "shared", "budget", "parallel", "backward")
LETTERS = dict(zip("abcdef", SECTIONS, strict=True))
TIMED = ("factorial", "budget", "parallel", "backward")


def chosen_sections(text: str) -> list[str]:
    """'a,bytes' -> ['factorial', 'bytes'], in the order of SECTIONS."""
    names = [LETTERS.get(part.strip(), part.strip()) for part in text.split(",")]
    for name in names:
        if name not in SECTIONS:
            letters = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
            raise argparse.ArgumentTypeError(f"expected some of {letters}, got {name!r}")
    return [section for section in SECTIONS if section in names]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench.ab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--sections", type=chosen_sections, default=list(SECTIONS), help="e.g. a,b,c")
    p.add_argument("--quick", action="store_true", help="head dim 128 and one length")
    p.add_argument("--rounds", type=int, default=12, help="of all kernels in turn; 2 or more")
    common.add_output_options(p)
    return p


def analyse(rows: list[dict]) -> tuple[list[dict], str]:
    """Effects of each cell of the factorial in which every corner ran, and the words on them."""
    cells = [
        (cell_name(next(iter(cell.values()))), {c: cell[c]["rounds_us"] for c in effects.CORNERS})
        for cell in by_cell([row for row in rows if row["section"] == "factorial"])
        if set(effects.CORNERS) <= set(cell)
    ]
    names = [name for name, _ in cells]
    found = effects.effects_of_cells([times for _, times in cells])
    labels = [*names, "all cells"] if cells else []
    labelled = [{"cell": n, "effects": e} for n, e in zip(labels, found, strict=True)]
    joint = [
        effects.Effect(**effect)
        for entry in labelled[: len(names)]
        for effect in entry["effects"]
        if effect["name"] == effects.CONJECTURE
    ]
    return labelled, effects.verdict(joint, names) if joint else "Not every corner ran."


def measure(arguments: argparse.Namespace) -> dict:
    """Every section, as the result file holds it."""
    device = torch.cuda.get_device_properties(0)
    gpu = counters.Gpu(
        device.multi_processor_count, device.L2_cache_size, device.shared_memory_per_block_optin
    )
    sections, quick = arguments.sections, arguments.quick
    begin = time.monotonic()
    timed = [section for section in TIMED if section in sections]
    laboratory = races.run_sections(timed, gpu.sms, quick, arguments.rounds)
    say(f"timed sections took {time.monotonic() - begin:.0f} s")
    byte_rows, shared_rows, no_counters = [], [], {}
    begin = time.monotonic()
    if counted := [section for section in ("bytes", "budget") if section in sections]:
        byte_rows, sentence = counters.count_bytes(counted, gpu, quick)
        no_counters |= dict.fromkeys(counted, sentence)
    if "shared" in sections:
        shared_rows, no_counters["shared"] = counters.count_shared(gpu, quick)
    say(f"counted sections took {time.monotonic() - begin:.0f} s")
    found, words = analyse(laboratory.rows)
    return {
        "sections": sections,
        "rounds": arguments.rounds,
        "sms": gpu.sms,
        "l2_mib": gpu.l2_bytes / 2**20,
        "rows": laboratory.rows,
        "skipped": laboratory.skipped,
        "effects": found,
        "verdict": words,
        "bytes": byte_rows,
        "shared": shared_rows,
        "no_counters": no_counters,
    }


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.rounds < 2:
        parser().error(f"--rounds: expected 2 or more, got {arguments.rounds}")
    common.require_gpu("bench.ab")
    found, _ = peers.discover(races.PEER)
    environment = common.environment({peer.name: peer.version for peer in found})
    say(common.describe(environment))
    result = {"schema": common.SCHEMA, "name": "ab", "environment": environment}
    result |= measure(arguments)
    say(report.page(result))
    common.write_results(result, arguments)
    return 0 if result["rows"] or result["bytes"] or result["shared"] else 1


if __name__ == "__main__":
    sys.exit(main())
