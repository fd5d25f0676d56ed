"""The counted sections of bench.ab: which calls ncu profiles, and what its counters say of them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bench import common
from bench.common import say
from bench.lab import model, ncu, races
from bench.lab.effects import CORNERS, V1
from bench.lab.ncu import Call
from flash_cuda.tile_plan import BUDGETS_KB, tile_plan

SMALL_SEQLEN = 4096
WHOLE_BLOCKS = 1152  # a seqlen of whole blocks: 64 or 128 queries, 64, 128 or 192 keys
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Gpu:
    """What of a GPU sets sizes here; `shared_bytes` is what a thread block may have."""

    sms: int
    l2_bytes: int
    shared_bytes: int

    def with_budget(self, kernel: str, head_dim: int) -> str:
        """The kernel's name with its default budget, so that it says which blocks it has."""
        fitting = [kb for kb in BUDGETS_KB if kb * 1024 <= self.shared_bytes]
        return f"{kernel}/{tile_plan(head_dim, fitting[-1]).default_kb}KB"

    def small_pairs(self, head_dim: int) -> int:
        """batch * heads whose tensors and workspace take about half of the L2 cache."""
        per_pair = SMALL_SEQLEN * model.row_bytes(head_dim, backward=False, workspace=True)
        return max(self.l2_bytes // 2 // per_pair, 1)


def byte_calls(gpu: Gpu, quick: bool) -> list[Call]:
    """v1, v2, forward and backward, on both sides of the L2 cache; all corners at one size."""
    dims = (128,) if quick else (64, 128)
    calls = []
    for d, causal in itertools.product(dims, (False, True)):
        sizes = [(gpu.small_pairs(d), SMALL_SEQLEN), (4 * gpu.sms, 4096)]
        sizes += [] if quick else [(4 * gpu.sms, 8192)]
        for pairs, seqlen in sizes:
            cell = races.cell(pairs, seqlen, d, causal)
            calls += [Call(gpu.with_budget("v1", d), cell), Call("v2", cell)]
            if seqlen == 4096:
                calls += [Call(kernel, cell, backward=True) for kernel in ("v1", "v2")]
    last = races.cell(4 * gpu.sms, 4096, 128, False)
    return calls + [Call(gpu.with_budget(corner, 128), last) for corner in CORNERS if corner != V1]


def budget_calls(gpu: Gpu, quick: bool) -> list[Call]:
    """What the section `budget` times."""
    return [
        Call(kernel, entry.cell)
        for entry in races.entries("budget", gpu.sms, quick)
        for kernel in entry.kernels
    ]


def shared_calls(gpu: Gpu, quick: bool) -> list[Call]:
    return [
        Call(gpu.with_budget(corner, d), races.cell(2 * gpu.sms, WHOLE_BLOCKS, d, False))
        for d in ((128,) if quick else (64, 128))
        for corner in CORNERS
    ]


def expected(question: Callable[[Call], object], call: Call):
    """The model's answer; None where it has none (tables show the measurement alone)."""
    try:
        return question(call)
    except (AttributeError, ImportError, KeyError, ValueError) as error:
        say(f"  no model of {call}: {common.one_line(error)}")
        return None


def _sum(*values: float | None) -> float | None:
    return None if None in values else sum(values)


def byte_row(section: str, call: Call, launches: Sequence[ncu.Launch]) -> dict:
    """Bytes of one call: measured at the SMs, the L2 cache and DRAM, and the model's."""

    def sectors(*parts: str) -> float | None:
        count = _sum(*(ncu.total(launches, ncu.L2_METRICS[part]) for part in parts))
        return None if count is None else count * ncu.SECTOR

    l2 = {"read": sectors("read"), "write": sectors("write"), "reduced": sectors("red")}
    dram = {part: ncu.total(launches, name) for part, name in ncu.DRAM_METRICS.items()}
    l2_total, dram_total = _sum(*l2.values()), _sum(*dram.values())
    sm_read = ncu.total(launches, ncu.SM_READ_METRIC)
    return {
        "section": section,
        **asdict(call.cell),
        "kernel": call.kernel,
        "backward": call.backward,
        "launches": len(launches),
        "working_set": model.working_set(call),
        "l2": l2,
        "l2_total": l2_total,
        "sm_read": sm_read,
        "sm_total": _sum(sm_read, l2["write"], l2["reduced"]),
        "dram": dram,
        "dram_total": dram_total,
        "dram_over_l2": dram_total / l2_total if dram_total is not None and l2_total else None,
        "model": expected(model.traffic, call),
    }


def shared_row(call: Call, launches: Sequence[ncu.Launch]) -> dict:
    return {
        "section": "shared",
        **asdict(call.cell),
        "kernel": call.kernel,
        "metrics": {key: ncu.total(launches, name) for key, name in ncu.SHARED_METRICS.items()},
        "model": expected(model.wavefronts, call),
    }


def count_bytes(sections: Sequence[str], gpu: Gpu, quick: bool):
    """(rows, sentence): the sections `bytes` and `budget` in one profiled process."""
    labelled = [("bytes", call) for call in byte_calls(gpu, quick)]
    labelled += [("budget", call) for call in budget_calls(gpu, quick)]
    labelled = [(section, call) for section, call in labelled if section in sections]
    say(f"ncu: bytes of {len(labelled)} calls")
    groups, sentence = ncu.profile([call for _, call in labelled], ncu.BYTE_METRICS, TIMEOUT_S)
    pairs = zip(labelled, groups, strict=False)  # no groups at all where there is a sentence
    rows = [byte_row(section, call, group) for (section, call), group in pairs if group]
    return rows, sentence


def count_shared(gpu: Gpu, quick: bool):
    """(rows, sentence): the section `shared`."""
    calls = shared_calls(gpu, quick)
    say(f"ncu: shared memory and barriers of {len(calls)} calls")
    groups, sentence = ncu.profile(calls, tuple(ncu.SHARED_METRICS.values()), TIMEOUT_S)
    pairs = zip(calls, groups, strict=False)
    return [shared_row(call, group) for call, group in pairs if group], sentence
