"""GPU time of a callable, free of host overhead and of a warm L2, several contestants in turn.

Three habits, each for a bias that was met (docs/benchmarks.md tells them at length):
a *spinning kernel* holds the stream while the launches are queued, so a short kernel is not
charged for the time Python needs to launch it; the *L2 is flushed* before each run, since a
training step does not find its inputs there; and contestants run *in turn*, round by round, since
the clock falls as the card warms up.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench import common

ROUNDS = 6
LEAST_LAUNCHES, MOST_LAUNCHES = 4, 8  # of each contestant in a round: 24 to 48 samples
FIRST_SPIN_CYCLES = 1_000_000  # about half a millisecond at 1.9 GHz
LONGEST_SPIN_CYCLES = 64_000_000


@dataclass(frozen=True)
class Timing:
    """Microseconds on the GPU. `late`: some launch was not yet queued when the spin ended."""

    median: float
    quartile_low: float
    quartile_high: float
    samples: int
    late: bool

    @staticmethod
    def of(samples: Sequence[float], late: bool) -> "Timing":
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(middle, low, high, len(samples), late)


class Lane:
    """One contestant on the track: the callable and the spin that its host overhead needs."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run
        self.spin_cycles = FIRST_SPIN_CYCLES
        self.late = False

    def sample(self, launches: int, flush: torch.Tensor) -> list[float]:
        """Microseconds of `launches` runs, all queued behind one spinning kernel.

        A spin found too short is doubled and the whole batch repeated. A callable that waits for
        the GPU itself can never be queued: its batch is kept at the longest spin, marked `late`.
        """
        while True:
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(launches)]
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(launches)]
            spin_over = torch.cuda.Event()
            torch.cuda.synchronize()
            torch.cuda._sleep(self.spin_cycles)
            spin_over.record()
            for start, end in zip(starts, ends, strict=True):
                flush.zero_()
                start.record()
                self.run()
                end.record()
            late = spin_over.query()
            torch.cuda.synchronize()
            if late and self.spin_cycles < LONGEST_SPIN_CYCLES:
                self.spin_cycles *= 2
                continue
            self.late |= late
            return [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]


def flush_buffer() -> torch.Tensor:
    """A buffer of twice the L2: writing it leaves nothing of the inputs there."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.empty(max(2 * size, 32 << 20), dtype=torch.int8, device=common.DEVICE)


def no_flush() -> torch.Tensor:
    """Stands for flush_buffer() where runs may find their inputs in the L2."""
    return torch.empty(1, dtype=torch.int8, device=common.DEVICE)


def launches_per_round(estimates_us: Sequence[float], budget_s: float) -> int:
    """Launches of each contestant in a round, so that all rounds take about `budget_s`.

    A budget too small for LEAST_LAUNCHES is overrun: a median of fewer samples says too little.
    """
    per_launch_s = sum(estimates_us) * 1e-6 + 50e-6 * len(estimates_us)
    affordable = math.floor(budget_s / per_launch_s / ROUNDS)
    return min(max(affordable, LEAST_LAUNCHES), MOST_LAUNCHES)


def sample_in_turn(
    lanes: Sequence[Lane], flush: torch.Tensor, launches: int, rounds: int
) -> list[list[list[float]]]:
    """Microseconds by lane, round and launch.

    Each round begins with another lane, and every second one goes backwards: nobody always runs on
    a card that the same other lane has heated.
    """
    samples: list[list[list[float]]] = [[] for _ in lanes]
    for turn in range(rounds):
        step = -1 if turn % 2 else 1
        for place in range(len(lanes)):
            index = (turn + step * place) % len(lanes)
            samples[index].append(lanes[index].sample(launches, flush))
    return samples


def time_in_turn(
    runs: Sequence[Callable[[], object]], flush: torch.Tensor, budget_s: float
) -> list[Timing]:
    """Time several callables in one interleaved race; each must have been warmed up by the caller.

    Args:
        runs: callables that launch work on the current stream.
        flush: the buffer of `flush_buffer()`.
        budget_s: seconds of GPU time that the race may take, all contestants together.
    """
    lanes = [Lane(run) for run in runs]
    estimates = [statistics.median(lane.sample(3, flush)) for lane in lanes]
    launches = launches_per_round(estimates, budget_s)
    taken = [sum(rounds, []) for rounds in sample_in_turn(lanes, flush, launches, ROUNDS)]
    return [Timing.of(samples, lane.late) for samples, lane in zip(taken, lanes, strict=True)]


def matmul_ceiling_tflops(size: int = 8192, runs: int = 20) -> float:
    """TFLOP/s of a bf16 size^3 matrix product on random data: the practical roof of the card."""
    a = torch.randn(size, size, device=common.DEVICE, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=common.DEVICE, dtype=torch.bfloat16)
    c = torch.empty_like(a)
    run = Lane(lambda: torch.mm(a, b, out=c))
    flush = flush_buffer()
    run.sample(10, flush)
    median_us = statistics.median(run.sample(runs, flush))
    return 2.0 * size**3 / median_us * 1e-6
