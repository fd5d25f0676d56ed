"""The drop-in names: FlashAttention-2's signatures and conventions, packed tensors not copied."""

import inspect

import pytest
import torch

import flash_cuda
from tests.cases import CAUSAL, DEVICES, Case
from tests.conftest import make_inputs

NAMES = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func")
KEYWORDS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
TENSORS = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_kvpacked_func": ["q", "kv"],
}
CASE = Case(33, 33, 4, 4, 64, *CAUSAL, torch.float16)


def arguments(name, device):
    q, k, v, _, _ = make_inputs(CASE, device)
    if name == "flash_attn_func":
        return [q, k, v]
    if name == "flash_attn_kvpacked_func":
        return [q, torch.stack([k, v], dim=2)]
    return [torch.stack([q, k, v], dim=2)]


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    """Positional order and defaults are those of flash_attn 2.8."""
    parameters = inspect.signature(getattr(flash_cuda, name)).parameters
    assert list(parameters) == TENSORS[name] + list(KEYWORDS)
    assert {n: parameters[n].default for n in KEYWORDS} == KEYWORDS
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_values(device, name):
    q, k, v, _, _ = make_inputs(CASE, device)
    function, tensors = getattr(flash_cuda, name), arguments(name, device)
    out, lse = flash_cuda.attention(q, k, v, window=(8, 0), scale=0.2, return_lse=True)
    assert torch.equal(function(*tensors, 0.0, 0.2, True, (8, 5)), out)
    result = function(*tensors, softmax_scale=0.2, window_size=(8, 0), return_attn_probs=True)
    assert torch.equal(result[0], out) and torch.equal(result[1], lse) and result[2] is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(device, name):
    """Those of a packed tensor are those of its parts, in their places."""
    plain = [t.requires_grad_() for t in arguments("flash_attn_func", device)]
    flash_cuda.flash_attn_func(*plain, causal=True, deterministic=True).square().sum().backward()
    tensors = [t.requires_grad_() for t in arguments(name, device)]
    out = getattr(flash_cuda, name)(*tensors, causal=True, deterministic=True)
    out.square().sum().backward()
    parts = [p for t in tensors for p in (t.grad.unbind(2) if t.dim() == 5 else [t.grad])]
    for part, tensor in zip(parts, plain, strict=True):
        assert torch.equal(part, tensor.grad)


def test_packed_tensors_are_not_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "flash_cuda.compat.attention", lambda *tensors, **options: seen.extend(tensors)
    )
    (qkv,) = arguments("flash_attn_qkvpacked_func", "cpu")
    flash_cuda.flash_attn_qkvpacked_func(qkv)
    q, kv = arguments("flash_attn_kvpacked_func", "cpu")
    flash_cuda.flash_attn_kvpacked_func(q, kv)
    memory = [t.untyped_storage().data_ptr() for t in (qkv, qkv, qkv, q, kv, kv)]
    assert [t.untyped_storage().data_ptr() for t in seen] == memory


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "argument, value",
    [("dropout_p", 0.1), ("softcap", 50.0), ("alibi_slopes", torch.ones(4))],
    ids=["dropout_p", "softcap", "alibi_slopes"],
)
def test_what_is_not_built_says_so(name, argument, value):
    with pytest.raises(NotImplementedError, match=f"flash_cuda.{name}: {argument}: not built yet"):
        getattr(flash_cuda, name)(*arguments(name, "cpu"), **{argument: value})


def test_packed_shapes_are_checked():
    (qkv,) = arguments("flash_attn_qkvpacked_func", "cpu")
    with pytest.raises(ValueError, match=r"qkvpacked_func: qkv: expected shape \(batch, seqlen, 3"):
        flash_cuda.flash_attn_qkvpacked_func(qkv[:, :, :2])
    with pytest.raises(ValueError, match=r"kvpacked_func: kv: expected shape \(batch, seqlen, 2"):
        flash_cuda.flash_attn_kvpacked_func(qkv[:, :, 0], qkv)
    with pytest.raises(TypeError, match="window_size: expected a pair"):
        flash_cuda.flash_attn_qkvpacked_func(qkv, window_size=None)
