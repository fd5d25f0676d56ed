"""Peak memory beyond the inputs, from 1k to 128k tokens: `python -m bench.memory`.

flash_cuda beside standard attention and SDPA's flash backend; `promised` is what DESIGN.md
section 1 allows: the forward allocates out and lse; the backward dq, dk, dv, one float32 dq
accumulator and one float32 row vector. Measured are the bytes asked of PyTorch's allocator, before
it rounds them to its blocks; every allocation of flash_cuda goes through it.
"""

import argparse
import gc
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from bench import common, peers, report
from bench.common import say

TOKENS = tuple(1024 << step for step in range(8))  # 1k to 128k


def promised_bytes(
    batch: int, seqlen: int, heads: int, heads_kv: int, head_dim: int, element: int = 2
) -> dict[str, int]:
    """Bytes that one forward, and one forward with backward, may take at their peak."""
    rows = batch * seqlen * heads
    out, lse = rows * head_dim * element, rows * 4
    dq, dkv = rows * head_dim * element, 2 * batch * seqlen * heads_kv * head_dim * element
    accumulator, row_vector = rows * head_dim * 4, rows * 4
    forward = out + lse
    return {"forward": forward, "training": forward + dq + dkv + accumulator + row_vector}


def requested(moment: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"]


def peak_beyond_inputs(call: Callable[[], object]) -> int | None:
    """Peak of the bytes requested during `call` over those before it; None if out of memory."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    try:
        call()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    return requested("peak") - before


def measure(contestant: peers.Contestant, shape: tuple[int, int, int, int, int], causal: bool):
    """(forward, training) peaks of one shape (batch, seqlen, heads, heads_kv, head_dim)."""
    batch, seqlen, heads, heads_kv, head_dim = shape

    def normal(h: int) -> Tensor:
        return torch.randn(batch, seqlen, h, head_dim, device=common.DEVICE, dtype=torch.bfloat16)

    q, k, v, dout = normal(heads), normal(heads_kv), normal(heads_kv), normal(heads)

    @torch.no_grad()
    def forward() -> None:
        contestant.attend(q, k, v, causal)

    forward_peak = peak_beyond_inputs(forward)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def training() -> None:
        out = contestant.attend(*leaves, causal)
        # The gradients must be alive together, as they are in a training step.
        grads = torch.autograd.grad(out, leaves, dout)
        del out, grads

    return forward_peak, peak_beyond_inputs(training)


def contestants(kernel: str) -> list[peers.Contestant]:
    found, _ = peers.discover("sdpa-flash")
    standard = peers.Contestant("standard", torch.__version__, peers.standard_attention)
    try:
        return [peers.ours(kernel), standard, *found]
    except ImportError as error:
        say(f"not here: flash_cuda ({common.one_line(error)})")
        return [standard, *found]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="list of seqlens")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-kv", type=int, default=None, help="default: as --heads")
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--causal", type=int, default=1)
    parser.add_argument("--kernel", default="auto")
    common.add_output_options(parser)
    arguments = parser.parse_args(argv)
    common.require_gpu("bench.memory")
    heads, heads_kv = arguments.heads, arguments.heads_kv or arguments.heads
    racing = contestants(arguments.kernel)
    environment = common.environment({c.name: c.version for c in racing[1:]})
    say(common.describe(environment))
    for contestant in racing:  # cuBLAS workspaces and the like exist before anything is counted
        try:
            measure(contestant, (1, 256, heads, heads_kv, arguments.d), bool(arguments.causal))
        except Exception as error:
            say(f"{contestant.name} fails on a small shape: {common.one_line(error)}")
    rows, kept = [], True
    say("tokens | contestant | forward MiB | forward + backward MiB | promise")
    for tokens in map(int, arguments.tokens.split(",")):
        shape = (1, tokens, heads, heads_kv, arguments.d)
        promised = promised_bytes(*shape)
        for contestant in racing:
            try:
                forward, training = measure(contestant, shape, bool(arguments.causal))
            except Exception as error:
                say(f"{tokens:,} | {contestant.name} | {common.one_line(error)}")
                if common.context_is_lost():
                    say("the CUDA context is lost: stopping here")
                    return 1
                continue
            rows.append(
                {
                    "tokens": tokens,
                    "contestant": contestant.name,
                    "forward": forward,
                    "training": training,
                    "promised": promised,
                }
            )
            verdict = ""
            if contestant.name.startswith("flash_cuda"):
                exact = forward == promised["forward"] and training == promised["training"]
                kept &= exact
                verdict = (
                    "exactly as promised"
                    if exact
                    else f"promised {promised['forward']:,} and {promised['training']:,} bytes, "
                    f"took {forward if forward is None else format(forward, ',')} and "
                    f"{training if training is None else format(training, ',')}"
                )
            say(
                f"{tokens:,} | {contestant.name} | {report.mebibytes(forward)} | "
                f"{report.mebibytes(training)} | {verdict}"
            )
    result = {
        "schema": common.SCHEMA,
        "name": "memory",
        "shape": f"batch 1, {heads} heads, {heads_kv} key heads, d {arguments.d}, bf16, "
        f"{'causal' if arguments.causal else 'full'}",
        "environment": environment,
        "contestants": [c.name for c in racing],
        "rows": rows,
        "promise_kept": kept,
    }
    common.write_results(result, arguments)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
