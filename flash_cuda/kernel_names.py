"""The argument `kernel`: its names, and which of them a call may have.

For the fake and the CPU kernels; csrc/ops/kernel_name.cpp says the same for the CUDA op, and knows
the GPU too. An unknown name and a kernel of the other device are a ValueError, what a kernel does
not serve is a NotImplementedError.
"""

import itertools
import re

from flash_cuda.tile_plan import BUDGETS_KB

V1 = "kv_outer/split_k/eager"
LAB_KERNELS = ("v1",) + tuple(
    "/".join(choice)
    for choice in itertools.product(
        ("kv_outer", "q_outer"), ("split_k", "split_q"), ("eager", "deferred")
    )
)
LAB_BUDGETS = tuple(f"{kilobytes}KB" for kilobytes in BUDGETS_KB)
LAB_MAX_HEAD_DIM = 128
# What an error lists as available.
CPU_KERNELS = "auto, reference"
# Of any GPU: the CUDA op leaves hopper out where it does not run.
CUDA_BACKWARDS = "auto, hopper, v2, v1[/<M>KB]"
CUDA_FORWARDS = (
    "auto, hopper, v2, v1[/<M>KB], <kv_outer|q_outer>/<split_k|split_q>/<eager|deferred>[/<M>KB]"
)


def lab_kernel(kernel: str) -> tuple[str, str] | None:
    """("q_outer/split_q/eager", "99KB") of such a name, "" where it has no budget; else None."""
    if kernel in LAB_KERNELS:
        return kernel, ""
    match = re.fullmatch(r"(.+)/([1-9][0-9]*KB)", kernel)
    return match.groups() if match and match[1] in LAB_KERNELS else None


def forward_only(kernel: str) -> bool:
    """Whether `kernel` has no backward: the corners of the lab but v1."""
    lab = lab_kernel(kernel)
    return lab is not None and lab[0] not in ("v1", V1)


def gradient_kernel(kernel: str) -> str:
    """The `kernel` of bwd for gradients of a forward by `kernel`."""
    return "auto" if kernel == "hopper" else kernel


def _available(op: str, device: str) -> str:
    if device == "cpu":
        return CPU_KERNELS
    return CUDA_BACKWARDS if op == "flash_cuda.bwd" else CUDA_FORWARDS


def _refuse(op: str, kernel: str, why: str, available: str, error: type):
    raise error(f'{op}: kernel "{kernel}" {why}; available here: {available}')


def check(op: str, kernel: str, device: str, head_dim: int) -> None:
    """Refuses a kernel that cannot run on `device`, as far as its type tells; "meta" has all."""
    here = _available(op, device)
    lab = lab_kernel(kernel)
    if kernel == "reference" and device == "cuda":
        _refuse(op, kernel, "runs on CPU tensors", here, ValueError)
    if (kernel in ("hopper", "v2") or lab) and device == "cpu":
        _refuse(op, kernel, "runs on CUDA tensors", here, ValueError)
    if not lab:
        if kernel not in ("auto", "hopper", "v2", "reference"):
            raise ValueError(f'{op}: kernel: expected one of {here}, got "{kernel}"')
        return
    if lab[1] and lab[1] not in LAB_BUDGETS:
        why = "has no tiles for that shared-memory budget"
        _refuse(op, kernel, why, ", ".join(LAB_BUDGETS), ValueError)
    if head_dim > LAB_MAX_HEAD_DIM:
        why = f"serves head_dim from 1 to {LAB_MAX_HEAD_DIM}, got {head_dim}"
        _refuse(op, kernel, why, "auto, hopper, v2", NotImplementedError)


def check_backward(op: str, kernel: str) -> None:
    """Refuses a kernel that has no backward; to be called after check()."""
    if forward_only(kernel):
        _refuse(op, kernel, "is forward only", CUDA_BACKWARDS, NotImplementedError)
