"""A few small calls of every kernel, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.sanitize
    compute-sanitizer --tool racecheck python -m tests.sanitize

Without the caching allocator every tensor is an allocation of its own, so that memcheck sees a
kernel step over its end.
"""

import sys

import torch

import flash_cuda
from tests.cases import CAUSAL, FULL, TILE_HEAD_DIMS

SHAPES = [(67, 131, FULL), (131, 131, CAUSAL), (130, 67, CAUSAL), (131, 200, (50, 20))]


def run(sq, sk, band, head_dim, dtype, deterministic, spoil):
    q, dout = (torch.randn(1, sq, 2, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, sk, 1, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    if spoil:  # the careful second passes
        k[:, 40], v[:, 50], q[:, 30], dout[:, 20] = (float("nan"),) * 4
    window = {"window_left": band[0], "window_right": band[1]}
    out, lse = flash_cuda.fwd(q, k, v, **window)
    flash_cuda.bwd(dout, q, k, v, out, lse, deterministic=deterministic, **window)


def main():
    # A smaller selection where the tool slows every shared-memory access down.
    head_dims = [int(d) for d in sys.argv[1:]] or TILE_HEAD_DIMS
    calls = 0
    for head_dim in head_dims:
        for number, (sq, sk, band) in enumerate(SHAPES):
            dtype = (torch.float16, torch.bfloat16)[number % 2]
            run(sq, sk, band, head_dim, dtype, number % 2 == 0, spoil=number == 1)
            calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls of forward and backward, head dims {head_dims}")


if __name__ == "__main__":
    main()
