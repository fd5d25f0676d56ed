"""`python -m flash_cuda plan`: the block sizes of v1 and the lab, and what they take of a GPU.

For each shared-memory budget: the paper's B_r and B_c, what the kernels make of them, shared
memory, registers and thread blocks per SM, and floating-point operations per byte of HBM traffic.
"""

from dataclasses import dataclass, replace

import torch

from flash_cuda import io_model, kernel_names
from flash_cuda.tile_plan import BUDGETS_KB, TilePlan, tile_plan

REGISTERS = 65536  # of an SM
RESERVED = 1024  # bytes of shared memory that CUDA takes for each thread block
# Whose registers stand for all kernels of a warp partition: v1, and the lab's form of v2.
CORNERS = {"split_k": kernel_names.V1, "split_q": "q_outer/split_q/deferred"}
SEQLEN = 4096  # for operations per byte


@dataclass(frozen=True)
class Gpu:
    """None where a figure is not known."""

    name: str
    sms: int
    shared_kb: int  # that a thread block may have
    sm_shared_kb: int
    sram_mb: float | None  # L1 and shared memory of all SMs, 2^20 bytes
    hbm_gb: int
    hbm_tbs: float | None  # 10^12 bytes per second
    tflops: float | None  # dense bfloat16 products
    is_local: bool = False

    def budgets(self) -> list[int]:
        return [kilobytes for kilobytes in BUDGETS_KB if kilobytes <= self.shared_kb]

    def __str__(self) -> str:
        facts = [
            f"{self.name}: {self.sms} SMs",
            f"{self.shared_kb} KB of shared memory per thread block, {self.sm_shared_kb} per SM",
        ]
        if self.sram_mb:
            facts.append(f"SRAM {self.sram_mb:g} MB")
        rate = f" at {self.hbm_tbs:g} TB/s" if self.hbm_tbs else ""
        return ", ".join([*facts, f"HBM {self.hbm_gb} GB{rate}"])


GPUS = {
    "a100": Gpu("A100", 108, 163, 164, 20.25, 40, 1.55, 312),
    "h100": Gpu("H100", 132, 227, 228, 33, 80, 3.35, 989),
    "h200": Gpu("H200", 132, 227, 228, 33, 141, 4.8, 989),
    "b200": Gpu("B200", 148, 227, 228, 37, 192, 8.0, 2250),
}


def local_gpu() -> Gpu | None:
    """This machine's first GPU: what it says itself, and GPUS's figures where it is one of them."""
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    unknown = Gpu("", 0, 0, 0, None, 0, None, None)
    known = next((gpu for gpu in GPUS.values() if gpu.name in facts.name.split()), unknown)
    return replace(
        known,
        name=facts.name,
        sms=facts.multi_processor_count,
        shared_kb=facts.shared_memory_per_block_optin // 1024,
        sm_shared_kb=facts.shared_memory_per_multiprocessor // 1024,
        hbm_gb=round(facts.total_memory / 1e9),
        is_local=True,
    )


def chosen_gpus(name: str | None) -> list[Gpu]:
    """The GPU called `name`; None = the local one if there is one, else all of GPUS."""
    if name in GPUS:
        return [GPUS[name]]
    local = local_gpu()
    if name == "local" and local is None:
        raise ValueError(f"plan: torch sees no GPU here; --gpu takes {', '.join(GPUS)}")
    return list(GPUS.values()) if local is None else [local]


def launch_bounds(plan: TilePlan, partition: str, gpu: Gpu) -> tuple[int, int]:
    """(registers at most, thread blocks per SM at least) as the kernels' launch bounds promise."""
    threads = 32 * plan.warps(partition)
    registers = min(255, REGISTERS // (threads * plan.blocks(partition)) // 8 * 8)
    by_registers = REGISTERS // (threads * -(-registers // 8) * 8)
    by_memory = gpu.sm_shared_kb * 1024 // (plan.shared_bytes(partition) + RESERVED)
    return registers, min(by_registers, by_memory)


def kernel_facts(plan: TilePlan, partition: str, kilobytes: int) -> tuple[int, int] | None:
    """(registers, thread blocks per SM) of the compiled kernel; None in a build without kernels."""
    try:
        from flash_cuda import _lab
    except ImportError:
        return None
    name = f"{CORNERS[partition]}/{kilobytes}KB"
    registers, *_, blocks = _lab.kernel_facts(name, plan.width, False)
    return registers, blocks


def operations_per_byte(corner: str, head_dim: int, plan: TilePlan) -> float:
    """Forward operations per byte to and from global memory, self-attention of SEQLEN tokens."""
    work = io_model.Workload(1, 1, 1, SEQLEN, SEQLEN, head_dim)
    return 4 * SEQLEN**2 * head_dim / io_model.lab_forward(corner, work, plan).total


def _row(gpu: Gpu, head_dim: int, kilobytes: int) -> list[str]:
    plan = tile_plan(head_dim, kilobytes)
    cells = [f"{kilobytes}KB", f"{kilobytes * 1024 // io_model.ELEMENT}"]
    cells += [f"{plan.paper_rows} x {plan.paper_columns}", f"{plan.rows} x {plan.columns}"]
    for partition, corner in CORNERS.items():
        measured = kernel_facts(plan, partition, kilobytes) if gpu.is_local else None
        registers, blocks = measured or launch_bounds(plan, partition, gpu)
        teams = f"{plan.teams} x {plan.split_k}" if partition == "split_k" else f"{plan.split_q}"
        cells += [teams, f"{plan.shared_bytes(partition) / 1024:.2f}"]
        cells += [f"{registers}" if measured else f"<={registers}", f"{blocks}"]
        cells.append(f"{operations_per_byte(corner, head_dim, plan):.0f}")
    return cells


HEADER = [
    ["", "", "paper's", "kernels'", *["split-K", "", "", "", ""], *["split-Q", "", "", "", ""]],
    ["budget", "M", "B_r x B_c", "B_r x B_c", *["warps", "KB", "regs", "blocks", "flop/B"] * 2],
]


def describe(gpu: Gpu, head_dim: int) -> str:
    """The page for one GPU and a head dim from 1 to 128; ValueError for others."""
    largest = tile_plan(head_dim, gpu.budgets()[-1])
    table = HEADER + [_row(gpu, head_dim, kilobytes) for kilobytes in gpu.budgets()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in table]
    page = [
        str(gpu),
        "",
        f"head_dim {head_dim}, tiles {largest.width} wide, float16 or bfloat16",
        *lines,
    ]
    page.append(f'kernel="v1" takes {largest.default_kb}KB here; kernel="v1/48KB" another budget')
    if gpu.hbm_tbs and gpu.tflops:
        balance = gpu.tflops / gpu.hbm_tbs
        page.append(
            f"at {gpu.tflops:g} TFLOP/s the tensor cores do {balance:.0f} operations per byte of "
            "HBM: a kernel with fewer waits for HBM, unless the L2 cache helps"
        )
    return "\n".join(page)


NOTES = f"""\
M = budget in 2-byte elements, B_c = ceil(M / 4d), B_r = min(B_c, d): Dao et al. 2022, Algorithm 1
warps: split-K teams x warps that divide the keys; split-Q warps of 16 rows. KB: shared memory of a
thread block. regs: registers of a thread, <= where they are the launch bound and not measured.
blocks: thread blocks on an SM. flop/B: forward operations per byte to and from global memory at
{SEQLEN} tokens, caches not counted, of {CORNERS["split_k"]} (v1) and {CORNERS["split_q"]}"""


def main(head_dim: int, gpu: str | None) -> int:
    """Prints the pages; ValueError for a head dim or GPU that there is no plan for."""
    print("\n\n".join([*(describe(g, head_dim) for g in chosen_gpus(gpu)), NOTES]))
    return 0
