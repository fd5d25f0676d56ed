"""The timed sections of bench.ab: kernels in turn on each cell, every round kept."""

import functools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from bench import common, grid, peers, race, timing
from bench.common import say
from bench.lab.effects import CORNERS, V1, V2
from flash_cuda.tile_plan import BUDGETS_KB

LAUNCHES = 2  # of each kernel in a round
BUDGET_KERNELS = tuple(f"{name}/{kb}KB" for name in ("v1", V2) for kb in BUDGETS_KB)
PEER = "sdpa-flash"
# Around the number of SMs, where one thread block per head begins to fill the card.
FEW_HEADS = (1, 4, 16, 64)
PER_SM = (1, 4, 8)


@dataclass(frozen=True)
class Entry:
    """One cell of a section and the kernels that race on it; the first judges the others."""

    section: str
    cell: grid.Cell
    kernels: tuple[str, ...]
    backward: bool = False


def cell(pairs: int, seqlen: int, head_dim: int, causal: bool, dtype: str = "bf16") -> grid.Cell:
    """A cell of `pairs` = batch * heads, with as many of 16 heads as divide it."""
    heads = math.gcd(pairs, 16)
    return grid.Cell(pairs // heads, seqlen, heads, heads, head_dim, causal, dtype)


def entries(section: str, sms: int, quick: bool) -> list[Entry]:
    """What a timed section runs; `sms` sets batch * heads."""
    dims, masks = ((128,), (False,)) if quick else ((64, 128), (False, True))
    lengths = (2048,) if quick else (2048, 4096)
    full = 4 * sms
    if section == "factorial":
        shapes = [(full, n, d, c) for d in dims for c in masks for n in lengths]
        kernels: tuple[str, ...] = ("v2", *CORNERS, PEER)
    elif section == "budget":
        shapes = [(full, lengths[-1], d, False) for d in dims]
        kernels = ("v2", *BUDGET_KERNELS)
    elif section == "parallel":
        pairs = sorted({*FEW_HEADS, *(per_sm * sms for per_sm in PER_SM)})
        shapes = [(p, lengths[-1], d, False) for d in dims for p in pairs]
        kernels = ("v2", V1, V2)
    else:
        pairs = (full,) if quick else (16, full)
        shapes = [(p, 2048, d, c) for d in dims for c in masks for p in pairs]
        kernels = ("v2", "v1")
    backward = section == "backward"
    return [Entry(section, cell(*shape), kernels, backward) for shape in shapes]


def prepare(
    kernel: str, cell: grid.Cell, tensors: tuple[Tensor, ...], backward: bool
) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    """The op alone, forward or backward, as a callable, and what it computes."""
    import flash_cuda

    q, k, v, dout = tensors
    right = 0 if cell.causal else -1
    if kernel == PEER:
        (found, *_), _ = peers.discover(PEER)
        run = functools.partial(found.attend, q, k, v, cell.causal)
        return run, (run(),)
    if not backward:
        run = functools.partial(flash_cuda.fwd, q, k, v, window_right=right, kernel=kernel)
        return run, run()[:1]
    out, lse = flash_cuda.fwd(q, k, v, window_right=right)
    run = functools.partial(
        flash_cuda.bwd, dout, q, k, v, out, lse, window_right=right, kernel=kernel
    )
    return run, run()


@dataclass
class Laboratory:
    """Runs entries; `rows` and `skipped` go into the result file."""

    rounds: int
    rows: list[dict] = field(default_factory=list)
    skipped: list[dict] = field(default_factory=list)
    lost: bool = False

    def _ready(self, entry: Entry, seed: int) -> dict[str, Callable[[], object]]:
        tensors = grid.inputs(entry.cell, grid.DTYPES[entry.cell.dtype], seed)
        ready: dict[str, Callable[[], object]] = {}
        first = None
        for kernel in entry.kernels:
            try:
                run, results = prepare(kernel, entry.cell, tensors, entry.backward)
                torch.cuda.synchronize()
                first = first or results
                reason = race.disagreement(first, results)
            except Exception as error:  # a kernel that cannot run here leaves the others to race
                reason = common.one_line(error)
                self.lost = common.context_is_lost()
            if reason is None:
                ready[kernel] = run
                continue
            self._skip(entry, kernel, reason)
            if self.lost:
                return {}
        return ready

    def _skip(self, entry: Entry, kernel: str, reason: str) -> None:
        self.skipped.append(
            {"section": entry.section, "kernel": kernel, "reason": reason, **asdict(entry.cell)}
        )
        say(f"  {entry.section}: {kernel} left out of {entry.cell}: {reason}")

    def run(self, entry: Entry, seed: int, flush: Tensor) -> None:
        with torch.no_grad():
            ready = self._ready(entry, seed)
            lanes = [timing.Lane(run) for run in ready.values()]
            try:
                timing.sample_in_turn(lanes, flush, 1, 1)  # finds each lane's spin
                samples = timing.sample_in_turn(lanes, flush, LAUNCHES, self.rounds)
            except Exception as error:  # what was measured before must not be lost
                self._skip(entry, "all", "while the race ran: " + common.one_line(error))
                self.lost = common.context_is_lost()
                return
        factor = common.BACKWARD_FLOPS if entry.backward else 1.0
        for kernel, lane, rounds in zip(ready, lanes, samples, strict=True):
            us = statistics.median(sum(rounds, []))
            row = {
                "section": entry.section,
                **asdict(entry.cell),
                "contestant": kernel,
                "us": round(us, 3),
                "tflops": round(entry.cell.flops() * factor / us * 1e-6, 2),
                "late": lane.late,
                "rounds_us": [
                    round(math.exp(statistics.fmean(map(math.log, taken))), 3) for taken in rounds
                ],
            }
            self.rows.append(row)
            say(f"  {entry.section} | {entry.cell} | {kernel} | {us:.1f} us | {row['tflops']:.0f}")


def run_sections(sections: Iterable[str], sms: int, quick: bool, rounds: int) -> Laboratory:
    """Every entry of the timed sections, one after the other."""
    laboratory = Laboratory(rounds)
    flush = timing.flush_buffer()
    for section in sections:
        for seed, entry in enumerate(entries(section, sms, quick)):
            if laboratory.lost:
                say("the CUDA context is lost: no further cell can be run in this process")
                return laboratory
            laboratory.run(entry, seed, flush)
    return laboratory
