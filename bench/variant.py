"""A variant of the Hopper kernels as a contestant: what bench/variants.py built, by ctypes."""

import ctypes
import time
from pathlib import Path

import torch
from torch import Tensor

from bench import common
from bench.contestants import Contestant

FOLDER = common.REPOSITORY / "build" / "variants"
PREFIX = "variant:"


class Call(ctypes.Structure):
    """As bench/variant.cpp has it, field by field."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in "batch seqlen_q seqlen_k heads_q heads_kv head_dim window_left "
            "window_right shared_memory compute_capability multiprocessors".split()
        ),
        ("scale", ctypes.c_float),
        ("l2_bytes", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in "q k v out lse dout dq dk dv row_delta dq_accumulator stream".split()
        ),
    ]


def device_fields(device: torch.device) -> dict[str, int]:
    """What of the GPU decides between tiles, and the stream to launch on."""
    p = torch.cuda.get_device_properties(device)
    return {
        "shared_memory": p.shared_memory_per_block_optin,
        "compute_capability": 10 * p.major + p.minor,
        "multiprocessors": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "stream": torch.cuda.current_stream(device).cuda_stream,
    }


class Variant:
    """A built variant. Tensors (batch, seqlen, heads, head_dim), bfloat16, made contiguous."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.has_backward = hasattr(self.library, "variant_backward")
        if self.has_backward:
            self.library.variant_accumulator.restype = ctypes.c_int64

    def _call(self, window: tuple[int, int], **tensors: Tensor) -> Call:
        q, k = tensors["q"], tensors["k"]
        if q.dtype != torch.bfloat16:
            raise ValueError(f"a variant holds the bfloat16 kernels, got {q.dtype}")
        call = Call(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], *window)
        call.scale = q.shape[3] ** -0.5
        for name, value in device_fields(q.device).items():
            setattr(call, name, value)
        for name, tensor in tensors.items():
            setattr(call, name, tensor.data_ptr())
        return call

    def _launch(self, function: str, call: Call) -> None:
        if error := getattr(self.library, function)(ctypes.byref(call)):
            raise RuntimeError(f"{function}: CUDA error {error}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> tuple:
        """out, like q, and lse (batch, heads_q, seqlen_q), float32."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        self._launch("variant_forward", self._call(window, q=q, k=k, v=v, out=out, lse=lse))
        return out, lse

    def backward(self, dout: Tensor, saved: tuple[Tensor, ...], window: tuple[int, int]) -> tuple:
        """dq, dk, dv from dout and what forward() had and gave: q, k, v, out, lse."""
        tensors = dict(zip("q k v out lse".split(), (x.contiguous() for x in saved), strict=True))
        made = {f"d{name}": torch.empty_like(tensors[name]) for name in "qkv"}
        made["row_delta"] = torch.empty_like(tensors["lse"])
        call = self._call(window, dout=dout.contiguous(), **tensors, **made)
        elements = self.library.variant_accumulator(ctypes.byref(call))
        accumulator = torch.empty(elements, device=dout.device)
        call.dq_accumulator = accumulator.data_ptr()
        self._launch("variant_backward", call)
        return made["dq"], made["dk"], made["dv"]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, variant: Variant, window: tuple) -> Tensor:
        out, lse = variant.forward(q, k, v, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.variant, ctx.window = variant, window
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.variant.backward(dout, ctx.saved_tensors, ctx.window), None, None)


def contestant(name: str) -> Contestant:
    """The variant `variant:NAME`. Raises FileNotFoundError where NAME has not been built."""
    path = FOLDER / f"{name.removeprefix(PREFIX)}.so"
    if not path.exists():
        raise FileNotFoundError(f"python -m bench.variants has not made {path.name} here")
    variant = Variant(path)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        return _Attention.apply(q, k, v, variant, (window[0], 0 if causal else window[1]))

    built = time.strftime("built %Y-%m-%d %H:%M", time.gmtime(path.stat().st_mtime))
    return Contestant(name, built, attend, has_backward=variant.has_backward, has_window=True)
