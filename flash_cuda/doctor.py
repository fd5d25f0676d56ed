"""`python -m flash_cuda doctor`: what is installed, which kernels serve which GPU, a self-check.

Each finding is one line, `OK` or `FAIL`; a FAIL is followed by what to do, and the exit code is 1.
"""

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import flash_cuda
from flash_cuda import ops
from flash_cuda.reference import naive

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # one of each tile size
MINIMUM_CAPABILITY = (8, 0)


@dataclass
class Finding:
    ok: bool
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'OK  ' if self.ok else 'FAIL'}  {self.text}"
        return line if self.ok else f"{line}\n      -> {self.remedy}"


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.split("\n")[0].strip() or "unknown"


def _installation() -> list[Finding]:
    holds = "CUDA kernels and the CPU path" if ops.HAS_CUDA_KERNELS else "the CPU path alone"
    return [
        Finding(True, f"flash_cuda {flash_cuda.__version__} in {Path(__file__).parent}: {holds}"),
        Finding(True, f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"),
        Finding(True, f"Python {platform.python_version()}, {platform.platform()}"),
    ]


def _gpu(index: int, driver: str) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) // 1024
    text = (
        f"GPU {index}: {properties.name}, compute capability {capability[0]}.{capability[1]}, "
        f"{shared} KB shared memory per block, {properties.total_memory / 2**30:.0f} GiB, "
        f"driver {driver}"
    )
    remedy = "kernels need compute capability 8.0 or later: use the CPU path on this machine"
    return Finding(capability >= MINIMUM_CAPABILITY, text, remedy)


def forward_kernel(device: str) -> tuple[str, str]:
    """What "auto" means for a forward on a GPU: ("hopper", "") or ("v2", why it is not hopper)."""
    nothing = torch.empty(0, 1, 1, 64, device=device, dtype=torch.float16)
    try:
        flash_cuda.fwd(nothing, nothing, nothing, kernel="hopper")
    except RuntimeError as refusal:
        sentence = str(refusal).split("\n")[0]
        return "v2", sentence.removeprefix("flash_cuda.fwd: ").split("; available here")[0]
    return "hopper", ""


def _kernels(index: int) -> Finding:
    forward, why = forward_kernel(f"cuda:{index}")
    backward = "hopper (v2 up to head_dim 32)" if forward == "hopper" else "v2"
    text = f'GPU {index}: kernel "auto" takes {forward} forward, {backward} backward'
    return Finding(True, f"{text} ({why})" if why else text)


def _inputs(head_dim: int, dtype: torch.dtype, device: str):
    """q, k, v, dout of a causal GQA call whose lengths fill no tile: sq 65, sk 129, heads 4 / 2."""
    generator = torch.Generator().manual_seed(head_dim)

    def randn(seqlen, heads):
        values = torch.randn(2, seqlen, heads, head_dim, generator=generator) + 0.25
        return values.to(device, dtype)

    return randn(65, 4), randn(129, 2), randn(129, 2), randn(65, 4)


def _with_gradients(function, q, k, v, dout):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def _error(head_dim: int, dtype: torch.dtype, device: str) -> float:
    """The largest error of out, dq, dk, dv against float64, in units of what PyTorch errs by.

    That unit is the error of plain attention in the same dtype, and at least two roundings.
    """

    def ours(q, k, v):
        return flash_cuda.attention(q, k, v, causal=True)

    def plain(q, k, v):
        return naive.attention(q, k, v, window_right=0)[0]

    inputs = _inputs(head_dim, dtype, device)
    exact = _with_gradients(plain, *(t.double() for t in inputs))
    errors = []
    for mine, theirs, e in zip(
        _with_gradients(ours, *inputs), _with_gradients(plain, *inputs), exact, strict=True
    ):
        unit = max((theirs - e).abs().max(), 2 * torch.finfo(dtype).eps * e.abs().max())
        errors.append((mine - e).abs().max() / unit)
    # stack, not Python's max: a NaN must not vanish.
    return torch.stack(errors).max().item()


def _self_check(device: str, dtype: torch.dtype) -> Finding:
    name = f"forward and backward on {device}, {str(dtype).removeprefix('torch.')}"
    name += f", head_dim {', '.join(map(str, HEAD_DIMS))}"
    try:
        errors = torch.tensor([_error(head_dim, dtype, device) for head_dim in HEAD_DIMS])
        error = errors.max().item()
    except Exception as failure:  # whatever goes wrong is what the user must read
        sentence = str(failure).strip().split("\n")[0]
        remedy = "please report this line with your versions of flash_cuda and torch"
        if device != "cpu":
            remedy = "install again with FLASH_CUDA_BUILD_KERNELS unset and TORCH_CUDA_ARCH_LIST="
            remedy += _capability(device)
        return Finding(False, f"{name}: {type(failure).__name__}: {sentence}", remedy)
    ok = error <= 2
    text = f"{name}: error {error:.2f} x that of plain PyTorch, against float64"
    return Finding(ok, text, "wrong results: please report this line with your GPU and versions")


def _capability(device: str) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def findings() -> list[Finding]:
    """All findings, in the order in which they are printed."""
    found = _installation()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver = _driver_version() if gpus else ""
    for index in range(gpus):
        found.append(_gpu(index, driver))
        if found[-1].ok:
            if ops.HAS_CUDA_KERNELS:
                found.append(_kernels(index))
            found += [_self_check(f"cuda:{index}", t) for t in (torch.float16, torch.bfloat16)]
    if not gpus:
        reason = (
            "no GPU or no NVIDIA driver in sight" if torch.version.cuda else "torch has no CUDA"
        )
        found.append(Finding(True, f"no CUDA device ({reason}): the CPU path serves"))
    found.append(_self_check("cpu", torch.float32))
    return found


def main() -> int:
    found = findings()
    print("\n".join(map(str, found)))
    return 0 if all(finding.ok for finding in found) else 1
