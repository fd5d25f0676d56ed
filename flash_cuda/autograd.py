"""What happens above the kernels: gradients of fwd and the casts of autocast.

There are two ways to a gradient, with one backward. `Attention` is the function behind
flash_cuda.attention: it carries `deterministic`, which is no argument of fwd, and costs the least
host time (half of the other way's). The raw op torch.ops.flash_cuda.fwd has the same formula
through torch.library.register_autograd; there only torch's global flag asks for determinism.
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_cuda import checks, kernel_names
from flash_cuda.ops import BWD, FWD, call

# The autograd kernels of the ops are Python functions; an eager call that records its own gradient,
# or needs none, goes below them. torch.compile must see the plain op.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


def below_autograd():
    """A context in which the ops skip their autograd kernels; nothing inside it is recorded."""
    return nullcontext() if torch.compiler.is_compiling() else _BelowAutograd()


def _gradients(ctx, dout: Tensor | None, dlse: Tensor | None, options: dict, deterministic: bool):
    """(dq, dk, dv), None where not asked for; dout, dlse None = nothing flowed into out, lse."""
    q, k, v, out, lse = ctx.saved_tensors
    need_dq, need_dk, need_dv = ctx.needs_input_grad[:3]
    if dout is None:
        dout = torch.zeros_like(out)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if "kernel_name" in options:
        kernel = kernel_names.gradient_kernel(options["kernel_name"])
        options = {**options, "kernel_name": kernel}
    # With create_graph=True the op's own autograd kernel runs, which refuses the second derivative.
    with nullcontext() if torch.is_grad_enabled() else below_autograd():
        dq, dk, dv = call(
            BWD,
            dout,
            q,
            k,
            v,
            out,
            lse,
            dlse,
            deterministic=deterministic,
            need_dq=need_dq,
            need_dk=need_dk,
            need_dv=need_dv,
            **options,
        )
    return (dq if need_dq else None, dk if need_dk else None, dv if need_dv else None)


class Attention(torch.autograd.Function):
    """flash_cuda::fwd with its gradient; returns out, or (out, lse) when return_lse."""

    @staticmethod
    def forward(ctx, q, k, v, options, deterministic, return_lse):
        with below_autograd():
            out, lse = call(FWD, q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.deterministic = deterministic
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        if dout is None and dlse is None:
            return (None,) * 6
        gradients = _gradients(ctx, dout, dlse, ctx.options, ctx.deterministic)
        return *gradients, None, None, None


class AttentionInVmap(torch.autograd.Function):
    """Attention as torch.vmap takes it, sample by sample; returns (out, lse)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, options, deterministic):
        return call(FWD, q, k, v, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *qkv, ctx.options, ctx.deterministic = inputs
        ctx.save_for_backward(*qkv, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 5
        return *_gradients(ctx, dout, dlse, ctx.options, ctx.deterministic), None, None


# Function.apply without its Python half, which serves torch.func and default arguments and costs
# a third of the host time of an eager call (torch 2.11: 2.3 of 6.6 us).
_apply_eagerly = super(torch.autograd.Function, Attention).apply


def attend(q, k, v, options: dict, deterministic: bool, return_lse: bool):
    """fwd by the shortest way; `options` are the keywords of the op."""
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and torch._C._are_functorch_transforms_active()
    if transformed or forward_ad._current_level >= 0:
        checks.check_transforms("flash_cuda.attention")
        # It is torch.vmap, where a tensor does not tell whether it requires gradients.
        out, lse = AttentionInVmap.apply(q, k, v, options, deterministic)
        return (out, lse) if return_lse else out
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if "kernel_name" in options:
            kernel = kernel_names.gradient_kernel(options["kernel_name"])
            if kernel_names.forward_only(kernel):
                kernel_names.check("flash_cuda.attention", kernel, q.device.type, q.shape[-1])
                kernel_names.check_backward("flash_cuda.attention", kernel)
        apply = Attention.apply if compiling else _apply_eagerly
        return apply(q, k, v, options, deterministic, return_lse)
    with nullcontext() if compiling else _BelowAutograd():
        out, lse = call(FWD, q, k, v, **options)
    return (out, lse) if return_lse else out


def _fwd_setup_context(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)
    ctx.options = keyword_only_inputs


def _fwd_backward(ctx, dout, dlse):
    if dout is None and dlse is None:
        return None, None, None
    return _gradients(ctx, dout, dlse, ctx.options, deterministic=False)


def _bwd_backward(ctx, *gradients):
    raise RuntimeError(
        "flash_cuda.bwd: double backward is not supported; for gradients of gradients take "
        f"{checks.PLAIN_ATTENTION}"
    )


AUTOCAST_KEYS = {
    "cuda": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU),
}


def autocast(q: Tensor, k: Tensor, v: Tensor, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype of the enclosing torch.autocast; as in torch, float64 stays, and what
    is not floating point."""
    dtype = torch.get_autocast_dtype(device)
    kept = (dtype, torch.float64)
    return tuple(
        t if t.dtype in kept or not t.is_floating_point() else t.to(dtype) for t in (q, k, v)
    )


def below_autocast(device: str):
    """A context in which the ops do not cast again; torch.autocast(enabled=False) takes 10 us."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS[device])


def _autocast_kernel(device: str):
    def fwd(q, k, v, **options):
        q, k, v = autocast(q, k, v, device)
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS[device]):
            return FWD(q, k, v, **options)

    return fwd


_library = torch.library.Library("flash_cuda", "IMPL")
# torch.library.register_autocast casts to one fixed dtype and refuses keyword arguments.
_library.impl("fwd", _autocast_kernel("cuda"), "AutocastCUDA")
_library.impl("fwd", _autocast_kernel("cpu"), "AutocastCPU")
torch.library.register_autograd("flash_cuda::fwd", _fwd_backward, setup_context=_fwd_setup_context)
torch.library.register_autograd("flash_cuda::bwd", _bwd_backward)
