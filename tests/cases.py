"""The only lists of shapes: which inputs the tests run on the CPU and on a GPU.

A Case is one call; FORWARD and BACKWARD pair cases with the kernels that must serve them. Every
head dim meets every band; lengths, heads and dtypes are drawn with a fixed seed, so that collection
is the same in each pytest-xdist worker. Parameters of the hopper kernel are marked `hopper`, and
skipped where it does not run.
"""

import random
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Case:
    sq: int
    sk: int
    heads: int
    heads_k: int
    head_dim: int
    left: int  # window, inclusive, -1 = open
    right: int
    dtype: torch.dtype
    batch: int = 2

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{dtype}-b{self.batch}-s{self.sq}x{self.sk}-h{self.heads}x{self.heads_k}"
            f"-d{self.head_dim}-w{self.left},{self.right}"
        )

    @property
    def window(self) -> dict[str, int]:
        return {"window_left": self.left, "window_right": self.right}


# Every tile width of the kernels, dims just off them, and dims that need padding (40, 59, 111).
HEAD_DIMS = (8, 16, 32, 40, 59, 64, 72, 80, 96, 111, 128, 136, 160, 192, 224, 248, 256)
# One head dim of each tile size, for tests about something else than shapes.
TILE_HEAD_DIMS = (32, 64, 96, 128, 192, 256)

CAUSAL = (-1, 0)
FULL = (-1, -1)
BANDS = (
    FULL, CAUSAL, (0, 0), (0, -1), (31, 0), (-1, 16), (64, -1), (32, 64), (127, 127), (200, 3),
)  # fmt: skip

# (sq, sk): around multiples of the 64- and 128-row tiles, one row, one key, sq below and above sk.
SMALL_LENGTHS = (
    (1, 1), (1, 65), (17, 17), (17, 64), (63, 65), (64, 64), (64, 1), (65, 129), (127, 128),
    (128, 127), (129, 33), (33, 129), (203, 113),
)  # fmt: skip
LENGTHS = SMALL_LENGTHS + (
    (1, 513), (113, 203), (256, 256), (257, 257), (257, 129), (384, 511), (513, 513), (513, 64),
    (768, 1000), (1024, 1023), (1025, 2048),
)  # fmt: skip

# (heads, heads_k): MHA, GQA with even and odd ratios, MQA.
HEADS = ((1, 1), (4, 4), (3, 3), (4, 2), (6, 2), (14, 2), (6, 1))

CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
GPU_DTYPES = (torch.bfloat16, torch.float16)


def _draw(lengths, dtypes, repeats: int, seed: int) -> list[Case]:
    choose = random.Random(seed).choice
    return [
        Case(*choose(lengths), *choose(HEADS), head_dim, *band, choose(dtypes))
        for _ in range(repeats)
        for head_dim in HEAD_DIMS
        for band in BANDS
    ]


def _draw_any(count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)

    def side():
        return draw.choice((-1, 0, draw.randint(1, 2000)))

    def case():
        sq, sk = (min(draw.randint(1, 3000), draw.randint(1, 3000)) for _ in "qk")
        heads_k = draw.choice((1, 2, 3))
        heads = heads_k * draw.choice((1, 1, 2, 5))
        any_dim, multiple = draw.randint(1, 256), 8 * draw.randint(1, 32)
        head_dim = draw.choice((any_dim, multiple, draw.choice(TILE_HEAD_DIMS)))
        band = draw.choice((FULL, CAUSAL, (side(), side())))
        return Case(
            sq, sk, heads, heads_k, head_dim, *band, draw.choice(GPU_DTYPES), draw.randint(1, 3)
        )

    return [case() for _ in range(count)]


CPU_CASES = _draw(SMALL_LENGTHS, CPU_DTYPES, repeats=1, seed=1)
GPU_CASES = _draw(LENGTHS, GPU_DTYPES, repeats=3, seed=2)
# Lengths of many tiles, where a wrong stage of the pipeline or a wrong block range would show.
LONG_CASES = [
    Case(sq, sk, 2, 1, head_dim, *band, torch.bfloat16, batch=1)
    for head_dim in TILE_HEAD_DIMS
    for band in (FULL, CAUSAL, (1000, 0))
    for sq, sk in ((4096, 4096), (2049, 4097))
]
# A few calls of different kind, for tests about something else than shapes.
FEW_CASES = [
    Case(65, 129, 4, 2, 64, *FULL, torch.bfloat16),
    Case(129, 129, 4, 4, 128, *CAUSAL, torch.float16),
    Case(129, 65, 6, 1, 59, *CAUSAL, torch.bfloat16),
    Case(128, 203, 3, 3, 96, 31, 0, torch.float16),
    Case(64, 256, 4, 2, 256, *FULL, torch.bfloat16),
]

# Bands that hide keys from some rows: what is in those keys must not reach them.
ISOLATION_CASES = [
    Case(129, 129, 4, 2, head_dim, *band, torch.float16)
    for head_dim in TILE_HEAD_DIMS
    for band in (CAUSAL, (31, 0), (-1, 16), (0, 0))
]

# Any shape at all, for tests that repeat a call: what differs between repeats is a race.
RANDOM_CASES = _draw_any(200, seed=3)


class SmallGpu(str):
    """A kernel's name, for tests that run as on a GPU of two multiprocessors (conftest.py).

    There the tiles of large calls serve small ones, and a thread block walks over many of them.
    """

    MULTIPROCESSORS = 2


# Kernels by device. "auto" must mean the first that runs there.
CPU_KERNELS = ("reference",)
FORWARD_KERNELS = ("hopper", "v2", "v1")
WHOLE_AND_SMALL = (*FORWARD_KERNELS, SmallGpu("hopper"))
BACKWARD_KERNELS = ("hopper", "v2", "v1")  # as "auto" takes it: some head dims are v2's
V1_MAX_HEAD_DIM = 128

CPU = pytest.param("cpu", id="cpu")
CUDA = pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)
DEVICES = (CPU, CUDA)


def _on_cuda(kernel, *values, name):
    """The pytest parameter ("cuda", kernel, *values) with the marks that say where it runs."""
    marks = [pytest.mark.gpu] + [pytest.mark.hopper] * (kernel == "hopper")
    if isinstance(kernel, SmallGpu):
        name = f"small_gpu-{name}"
    return pytest.param("cuda", kernel, *values, id=name, marks=marks)


# (device, kernel) of the forward, for tests about one shape.
KERNELS = [pytest.param("cpu", "reference", id="reference")] + [
    _on_cuda(kernel, name=kernel) for kernel in ("hopper", SmallGpu("hopper"), "v2")
]


def with_kernels(cpu_cases, cuda_cases, cuda_kernels=WHOLE_AND_SMALL) -> list:
    """pytest parameters (device, kernel, case) for every kernel that serves the case."""
    parameters = [
        pytest.param("cpu", kernel, case, id=f"{kernel}-{case}")
        for kernel in CPU_KERNELS
        for case in cpu_cases
    ]
    parameters += [
        _on_cuda(kernel, case, name=f"{kernel}-{case}")
        for kernel in cuda_kernels
        for case in cuda_cases
        if kernel != "v1" or case.head_dim <= V1_MAX_HEAD_DIM
    ]
    return list({p.id: p for p in parameters}.values())


def _lab(cases_of) -> list:
    """pytest parameters ("cuda", kernel, case): every corner at every budget, cases in turn."""
    return [
        _on_cuda(kernel, case, name=f"{kernel}-{case}")
        for number, kernel in enumerate(f"{c}/{m}KB" for c in LAB_CORNERS for m in LAB_BUDGETS)
        for case in cases_of(number)
    ]


LAB_CORNERS = tuple(
    f"{loop}/{warps}/{normalisation}"
    for loop in ("kv_outer", "q_outer")
    for warps in ("split_k", "split_q")
    for normalisation in ("eager", "deferred")
)
LAB_BUDGETS = (48, 99, 163, 227)  # KB, on a GPU that has them
_LAB_CASES = [case for case in GPU_CASES + LONG_CASES if case.head_dim <= V1_MAX_HEAD_DIM]
_LAB_ISOLATION = [case for case in ISOLATION_CASES if case.head_dim in (64, 128)]

FORWARD = with_kernels(CPU_CASES, GPU_CASES + LONG_CASES)
BACKWARD = with_kernels(
    CPU_CASES[::2], GPU_CASES[::2] + GPU_CASES[1::4] + LONG_CASES, BACKWARD_KERNELS
)
FEW = with_kernels(FEW_CASES, FEW_CASES)
FEW_BACKWARD = with_kernels(FEW_CASES, FEW_CASES, BACKWARD_KERNELS)
ISOLATION = with_kernels(ISOLATION_CASES[4:8], ISOLATION_CASES)
ISOLATION_BACKWARD = with_kernels(ISOLATION_CASES[4:8], ISOLATION_CASES, BACKWARD_KERNELS)
LAB_FORWARD = _lab(lambda number: _LAB_CASES[number % 19 :: 19])
LAB_ISOLATION = _lab(lambda number: _LAB_ISOLATION[number % 4 :: 4])
