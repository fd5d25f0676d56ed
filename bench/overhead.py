"""Host overhead: the time one call keeps the Python thread busy. `python -m bench.overhead`.

b1 s128 h8 d64 bf16, GPU work not waited for: the clock stops when the last call of a loop returns,
the GPU is waited for after that. SDPA's backend is forced once, outside the loop, and it gets
(b, h, s, d) tensors, its own layout; a second row forces it in every call, on (b, s, h, d) views,
which is what a program that must have that backend pays. Median over loops, contestants in turn.

  python -m bench.overhead --kernel v2,hopper --bar 5   # side by side, in the same loops
"""

import argparse
import contextlib
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import common, peers, report
from bench.common import say
from bench.contestants import announce

SHAPE = (1, 128, 8, 64)  # (b, s, h, d)
PHASES = ("no_grad", "grad", "forward_backward")


@dataclass(frozen=True)
class Caller:
    """`call(q, k, v)` on tensors of `shape`; `backend` is forced around the whole loop."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    shape: tuple[int, int, int, int] = SHAPE
    backend: SDPBackend | None = None

    def phases(self) -> dict[str, Callable[[], object]]:
        """The three calls to time. `grad` records a graph and drops it."""
        q, k, v = (
            torch.randn(self.shape, device=common.DEVICE, dtype=torch.bfloat16) for _ in range(3)
        )
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        dout = torch.randn_like(q)
        call = self.call
        return {
            "no_grad": lambda: call(q, k, v),
            "grad": lambda: call(*leaves),
            "forward_backward": lambda: torch.autograd.grad(call(*leaves), leaves, dout),
        }

    def surroundings(self, phase: str) -> contextlib.ExitStack:
        """What holds for a whole loop: the forced backend, and no_grad in its phase."""
        stack = contextlib.ExitStack()
        if self.backend is not None:
            stack.enter_context(sdpa_kernel(self.backend))
        if phase == "no_grad":
            stack.enter_context(torch.no_grad())
        return stack


def busy_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds of host time for each of `calls` calls."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    end = time.perf_counter_ns()
    torch.cuda.synchronize()
    return (end - begin) / calls * 1e-3


def entry(function: str, kernel: str, kernels: list[str]) -> str:
    """The name of one of flash_cuda's entry points; with its kernel where several are compared."""
    return f"flash_cuda.{function}" + (f", kernel {kernel}" if len(kernels) > 1 else "")


def callers(kernels: list[str], found: list[peers.Contestant]) -> dict[str, Caller]:
    """flash_cuda's three entry points, two of them with each kernel, and the peers, by name."""
    made: dict[str, Caller] = {}
    with contextlib.suppress(ImportError):
        import flash_cuda

        for kernel in kernels:
            made[entry("attention", kernel, kernels)] = Caller(
                lambda q, k, v, kernel=kernel: flash_cuda.attention(q, k, v, kernel=kernel)
            )
            made[entry("fwd", kernel, kernels)] = Caller(
                lambda q, k, v, kernel=kernel: flash_cuda.fwd(q, k, v, kernel=kernel)[0]
            )
        made["flash_cuda.flash_attn_func"] = Caller(flash_cuda.flash_attn_func)
    b, s, h, d = SHAPE
    for peer in found:
        if peer.name in peers.SDPA_BACKENDS:
            made[peer.name] = Caller(
                F.scaled_dot_product_attention, (b, h, s, d), peers.SDPA_BACKENDS[peer.name]
            )
            made[f"{peer.name}, backend forced in the call"] = Caller(
                lambda q, k, v, attend=peer.attend: attend(q, k, v, False)
            )
        else:
            made[peer.name] = Caller(lambda q, k, v, attend=peer.attend: attend(q, k, v, False))
    return made


def race(
    racing: dict[str, Caller], calls: int, loops: int
) -> tuple[dict[str, dict[str, float | None]], list[str]]:
    """Median microseconds by contestant and phase (None where it failed), and the failures."""
    medians: dict[str, dict[str, float | None]] = {n: dict.fromkeys(PHASES) for n in racing}
    failures = []
    for phase in PHASES:
        samples: dict[str, list[float]] = {}
        ready: dict[str, Callable[[], object]] = {}
        for name, caller in racing.items():
            try:
                run = caller.phases()[phase]
                with caller.surroundings(phase):
                    busy_us(run, min(calls, 20))
                ready[name] = run
            except Exception as error:  # no such backend in this build, say
                failures.append(f"{name}, {phase}: {common.one_line(error)}")
                say("left out:", failures[-1])
        for _ in range(loops):
            gc.collect()
            gc.disable()  # a collection inside a loop would be charged to whoever is running
            for name, run in ready.items():
                with racing[name].surroundings(phase):
                    samples.setdefault(name, []).append(busy_us(run, calls))
            gc.enable()
        for name, taken in samples.items():
            medians[name][phase] = round(statistics.median(taken), 2)
    return medians, failures


def check_bar(medians: dict[str, dict[str, float | None]], kernels: list[str], limit: float) -> int:
    """0 where no kernel costs `limit` microseconds more than the first; says the differences."""
    base, *others = kernels
    missed = False
    # Not the third phase: its backward may be the same kernel for all.
    for kernel, function, phase in itertools.product(others, ("attention", "fwd"), PHASES[:2]):
        names = (entry(function, name, kernels) for name in (kernel, base))
        mine, theirs = (medians.get(name, {}).get(phase) for name in names)
        more = math.nan if mine is None or theirs is None else mine - theirs
        missed |= not more <= limit  # NaN misses
        verdict = "passed" if more <= limit else "MISSED"
        say(f"bar {limit}: {function} {phase}, {kernel} - {base}: {more:+.1f} us {verdict}")
    return int(missed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kernel", default="auto", help="one, or several to compare: v2,hopper")
    parser.add_argument("--peers", default="auto", help="as for bench.forward")
    parser.add_argument("--calls", type=int, default=200, help="calls in a loop")
    parser.add_argument("--loops", type=int, default=15)
    parser.add_argument(
        "--bar",
        type=float,
        default=None,
        metavar="US",
        help="exit 1 where a call with a kernel of --kernel takes US longer than with the first",
    )
    common.add_output_options(parser)
    arguments = parser.parse_args(argv)
    common.require_gpu("bench.overhead")
    kernels = arguments.kernel.split(",")
    try:
        found, missing = peers.discover(arguments.peers, kernels[0])
    except ValueError as error:
        parser.error(str(error))
    environment = announce(found, missing)
    racing = callers(kernels, found)
    medians, failures = race(racing, arguments.calls, arguments.loops)
    result = {
        "schema": common.SCHEMA,
        "name": "overhead",
        "shape": "b1 s128 h8 d64, bf16",
        "environment": environment,
        "missing": missing,
        "contestants": list(racing),
        "failures": failures,
        "rows": [{"contestant": name, **phases} for name, phases in medians.items()],
    }
    say(report.overhead_markdown(result))
    common.write_results(result, arguments)
    return 0 if arguments.bar is None else check_bar(medians, kernels, arguments.bar)


if __name__ == "__main__":
    sys.exit(main())
