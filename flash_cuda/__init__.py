"""Exact attention in hand-written CUDA C++: attention() and the names of FlashAttention-2."""

from importlib.metadata import PackageNotFoundError, version

try:
    import torch
except ImportError as error:
    raise ImportError(
        'flash_cuda needs torch >= 2.10: run `python -m pip install "torch>=2.10"` first.'
    ) from error

from flash_cuda import checks

if _sentence := checks.torch_too_old(torch.__version__):
    # The extension is built for torch's stable ABI of 2.10: an older torch would fail to load it.
    raise ImportError(_sentence)

try:
    import flash_cuda._C  # noqa: F401  registers the schemas and, where built, the CUDA kernels
except ImportError as error:
    raise ImportError(
        f"flash_cuda's compiled extension flash_cuda._C could not be loaded ({error}): build it "
        "with `python -m pip install --no-build-isolation -e .` in the source folder, or import "
        "flash_cuda from another folder than its sources."
    ) from error

from flash_cuda.compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from flash_cuda.interface import attention
from flash_cuda.ops import bwd, fwd

try:
    __version__ = version("flash_cuda")
except PackageNotFoundError:  # the sources on the path, never installed
    __version__ = "0+unknown"

__all__ = [
    "attention",
    "bwd",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "fwd",
]
