"""The race of forward, backward, train_step and small: all contestants on each cell, in turn."""

import argparse
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench import common, grid, peers, tables, timing
from bench.common import say
from bench.contestants import announce
from bench.grid import DTYPES, Cell

# Two right answers rounded differently differ by 2e-3 to 6e-3 in bf16; a wrong one by far more.
TOLERANCE = 2e-2
SLOW_START_S = 1.0  # a contestant that compiles before its first run is named

# (q, k, v, dout) of a cell -> a callable to time and the tensors by which contestants must agree.
# q, k, v, dout have the contestant's dtype.
Prepare = Callable[
    [peers.Contestant, Cell, tuple[Tensor, ...]],
    tuple[Callable[[], object], tuple[Tensor, ...]],
]


@dataclass(frozen=True)
class Event:
    """What is raced: one run of what `prepare` returns is `calls` calls, on a flushed L2 or not."""

    name: str
    prepare: Prepare
    what_is_timed: str
    flops_factor: float = 1.0
    calls: int = 1
    flushed: bool = True


def disagreement(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> str | None:
    """Why two contestants do not compute the same function; None where they do."""
    for position, (actual, expected) in enumerate(zip(theirs, mine, strict=True)):
        error = common.relative_error(actual, expected)
        if not error <= TOLERANCE:  # NaN fails
            return f"disagrees: result {position} differs by {error:.2g} relative to the first"
    return None


class Race:
    """Runs the cells, prints a row after each, keeps what the result file needs."""

    def __init__(self, event: Event, contestants: list[peers.Contestant], budget_s: float) -> None:
        self.event, self.contestants, self.budget_s = event, contestants, budget_s
        self.flush = timing.flush_buffer() if event.flushed else timing.no_flush()
        self.rows: list[dict] = []
        self.skipped: list[dict] = []
        self.lost = False

    def _skip(self, contestant: peers.Contestant, cell: Cell, reason: str) -> None:
        self.skipped.append({"contestant": contestant.name, "cell": asdict(cell), "reason": reason})
        say(f"  {contestant.name} left out of {cell}: {reason}")

    def _prepare(self, contestant: peers.Contestant, cell: Cell, seed: int):
        """The callable, warmed up, and its results; says so where that took long."""
        begin = time.monotonic()
        tensors = grid.inputs(cell, contestant.dtype or DTYPES[cell.dtype], seed)
        run, results = self.event.prepare(contestant, cell, tensors)
        run()
        torch.cuda.synchronize()
        if (seconds := time.monotonic() - begin) > SLOW_START_S:
            say(f"  {contestant.name} took {seconds:.1f} s before its first run of {cell}")
        return run, results

    def _ready(self, cell: Cell, seed: int) -> list[tuple[peers.Contestant, Callable]]:
        """Contestants that ran this cell and agree with the first one that did."""
        ready, first = [], None
        backward = self.event.flops_factor != 1.0
        for contestant in self.contestants:
            reason = contestant.unable(
                cell.seqlen, cell.seqlen, cell.causal, backward, bool(cell.band())
            )
            if reason is None:
                try:
                    run, results = self._prepare(contestant, cell, seed)
                    first = first or results
                    reason = disagreement(first, results)
                except Exception as error:  # a peer may fail in any way; the others go on
                    reason = common.one_line(error)
                    self.lost = common.context_is_lost()
            if reason is None:
                ready.append((contestant, run))
                continue
            self._skip(contestant, cell, reason)
            if self.lost:
                return []
        return ready

    def run(self, cell: Cell, seed: int, ceiling: float) -> None:
        ready = self._ready(cell, seed)
        if not ready:
            return
        try:
            times = timing.time_in_turn([run for _, run in ready], self.flush, self.budget_s)
        except Exception as error:  # a launch that fails late must not cost the rows measured
            for contestant, _ in ready:
                self._skip(contestant, cell, "while the race ran: " + common.one_line(error))
            self.lost = common.context_is_lost()
            return
        new = []
        for (contestant, _), timed in zip(ready, times, strict=True):
            us = timed.median / self.event.calls
            tflops = cell.flops() * self.event.flops_factor / us * 1e-6
            new.append(
                {
                    **asdict(cell),
                    "contestant": contestant.name,
                    "us": round(us, 3),
                    "tflops": round(tflops, 2),
                    "percent_of_ceiling": round(100 * tflops / ceiling, 1),
                    "spread": round((timed.quartile_high - timed.quartile_low) / timed.median, 4),
                    "samples": timed.samples,
                    "late": timed.late,
                }
            )
        self.rows += new
        say(tables.race_row(str(cell), new, [c.name for c in self.contestants]))


def profile(prepare: Prepare, contestant: peers.Contestant, cell: Cell) -> None:
    """One launch between profiler marks: `ncu --profile-from-start off` records nothing else."""
    run, _ = prepare(contestant, cell, grid.inputs(cell, DTYPES[cell.dtype], seed=0))
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    say(f"profiled one launch of {contestant.name} on {cell}")


def main(
    event: Event,
    argument_parser: argparse.ArgumentParser,
    argv: list[str] | None,
    cells: Callable[[argparse.Namespace], Iterable[Cell]] = grid.cells,
) -> int:
    """Run the cells that the arguments choose; returns the exit status."""
    arguments = argument_parser.parse_args(argv)
    common.require_gpu(f"bench.{event.name}")
    contestants, missing = peers.line_up(arguments, argument_parser)
    if arguments.profile:
        if "flash_cuda" in missing:
            say(f"nothing to profile: {missing['flash_cuda']}")
            return common.NO_GPU_EXIT
        profile(event.prepare, contestants[0], next(iter(cells(arguments))))
        return 0
    environment = announce(contestants, missing)
    if not contestants:
        say("nothing to time")
        return common.NO_GPU_EXIT
    names = [contestant.name for contestant in contestants]
    before = timing.matmul_ceiling_tflops()
    say(f"timed: {event.what_is_timed}; bf16 8192^3 matmul before: {before:.0f} TFLOP/s\n")
    say(tables.race_header(names))
    race = Race(event, contestants, arguments.budget)
    for seed, cell in enumerate(cells(arguments)):
        race.run(cell, seed, before)
        if race.lost:
            say("the CUDA context is lost: no further cell can be run in this process")
            break
    after = math.nan if race.lost else timing.matmul_ceiling_tflops()
    result = {
        "schema": common.SCHEMA,
        "name": event.name,
        "timed": event.what_is_timed,
        "environment": environment,
        "arguments": {k: v for k, v in vars(arguments).items() if k not in ("out", "formats")},
        "contestants": names,
        "missing": missing,
        "ceiling_tflops": {
            "before": round(before, 1),
            "after": None if race.lost else round(after, 1),
        },
        "rows": race.rows,
        "skipped": race.skipped,
        "summary": tables.summarize(race.rows, names),
    }
    say(f"\nbf16 8192^3 matmul after: {after:.0f} TFLOP/s")
    say(tables.summary_text(result["summary"], names[0]))
    common.write_results(result, arguments)
    if race.lost:
        return 1
    return max((tables.check_bar(result["summary"], bar) for bar in arguments.bar), default=0)
