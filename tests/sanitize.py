"""A few small calls of every kernel, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.sanitize
    compute-sanitizer --tool racecheck python -m tests.sanitize

Without the caching allocator every tensor is an allocation of its own, so that memcheck sees a
kernel step over its end.
"""

import sys

import torch

import flash_cuda
from flash_cuda import doctor
from flash_cuda.kernel_names import gradient_kernel
from tests.cases import (
    CAUSAL,
    FORWARD_KERNELS,
    FULL,
    LAB_BUDGETS,
    LAB_CORNERS,
    TILE_HEAD_DIMS,
    V1_MAX_HEAD_DIM,
)

SHAPES = [(67, 131, FULL), (131, 131, CAUSAL), (130, 67, CAUSAL), (131, 200, (50, 20))]
# Two blocks of keys and three strips of queries for every block size of the lab.
LAB_SHAPES = [(131, 131, CAUSAL), (200, 460, (400, 20))]


def inputs(sq, sk, head_dim, dtype, spoil):
    q, dout = (torch.randn(1, sq, 2, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, sk, 1, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    if spoil:  # the careful second passes
        k[:, 40], v[:, 50], q[:, 30], dout[:, 20] = (float("nan"),) * 4
    return q, k, v, dout


def both_ways(kernel, head_dim):
    """Forward and backward."""
    if kernel == "v1" and head_dim > V1_MAX_HEAD_DIM:
        return 0
    for number, (sq, sk, band) in enumerate(SHAPES):
        dtype = (torch.float16, torch.bfloat16)[number % 2]
        q, k, v, dout = inputs(sq, sk, head_dim, dtype, spoil=number == 1)
        options = {"window_left": band[0], "window_right": band[1]}
        out, lse = flash_cuda.fwd(q, k, v, kernel=kernel, **options)
        options |= {"deterministic": number % 2 == 0, "kernel": gradient_kernel(kernel)}
        flash_cuda.bwd(dout, q, k, v, out, lse, **options)
    return 2 * len(SHAPES)


def hopper(head_dim):
    """More tiles than the GPU runs at once, with more blocks of keys than are loaded."""
    for spoil in (False, True):
        q, k, v, _ = inputs(300, 700, head_dim, torch.bfloat16, spoil)
        q = q[:, :, :1].expand(60, -1, 3, -1).contiguous()
        k, v = (t.expand(60, -1, -1, -1).contiguous() for t in (k, v))
        out, lse = flash_cuda.fwd(q, k, v, window_right=0, kernel="hopper")
        flash_cuda.bwd(out, q, k, v, out, lse, window_right=0, kernel="hopper")
    return 4


def lab(head_dim):
    """Every corner at every budget, forward."""
    if head_dim not in (64, 128):
        return 0
    for number, kernel in enumerate(f"{c}/{m}KB" for c in LAB_CORNERS for m in LAB_BUDGETS):
        sq, sk, band = LAB_SHAPES[number // 2 % 2]
        dtype = (torch.float16, torch.bfloat16)[number % 2]
        q, k, v, _ = inputs(sq, sk, head_dim, dtype, spoil=number % 3 == 0)
        flash_cuda.fwd(q, k, v, window_left=band[0], window_right=band[1], kernel=kernel)
    return len(LAB_CORNERS) * len(LAB_BUDGETS)


def main():
    # A smaller selection where the tool slows every shared-memory access down.
    head_dims = [int(d) for d in sys.argv[1:]] or TILE_HEAD_DIMS
    kernels, calls = FORWARD_KERNELS, 0
    if doctor.forward_kernel("cuda")[0] != "hopper":
        kernels = tuple(kernel for kernel in kernels if kernel != "hopper")
    for head_dim in head_dims:
        calls += sum(both_ways(kernel, head_dim) for kernel in kernels) + lab(head_dim)
        calls += hopper(head_dim) if "hopper" in kernels else 0
    torch.cuda.synchronize()
    print(f"{calls} calls of the ops, kernels {', '.join(kernels)}, head dims {head_dims}")


if __name__ == "__main__":
    main()
