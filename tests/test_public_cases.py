"""Inputs on which other attention libraries failed, from their public bug reports.

One test per report, numbered as in the project's list; the docstring says where it was reported
(FA = Dao-AILab/flash-attention). Reports that need variable lengths, dropout or a KV cache are left
for the features.
"""

import sys
from itertools import product

import pytest
import torch

import flash_cuda
from flash_cuda.reference import naive
from tests.cases import CAUSAL, FULL, KERNELS, Case
from tests.conftest import (
    close_enough,
    gradients_of,
    limit_gpu,
    make_inputs,
    poison,
    reference_gradients,
    references,
)

PLACES = [pytest.param(p.values, id=p.id, marks=p.marks) for p in KERNELS]
on_each_device = pytest.mark.parametrize("device", PLACES, indirect=True)
on_gpu = pytest.mark.parametrize("device", PLACES[1:], indirect=True)
KERNEL = "auto"


@pytest.fixture
def device(request, monkeypatch):
    """Where a test runs; attend() takes the kernel that goes with it."""
    where, kernel = request.param
    limit_gpu(kernel, monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "KERNEL", str(kernel))
    return where


def randn(*shape, device, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def attend(q, k, v, **options):
    options |= {"return_lse": True, "deterministic": True, "kernel": KERNEL}
    return flash_cuda.attention(q, k, v, **options)


def check_gradients(q, k, v, dout, window_left=-1, window_right=-1):
    window = (window_left, window_right)
    actual = gradients_of(lambda *t: attend(*t, window=window), q, k, v, dout)
    options = {"window_left": window_left, "window_right": window_right}
    exact, baseline = reference_gradients(q, k, v, dout, **options)
    for name, a, e, b in zip(("dq", "dk", "dv"), actual, exact, baseline, strict=True):
        close_enough(a, e, b, name)
    return actual


def same(actual, expected):
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@on_each_device
def test_case_01_one_key(device):
    """FA #334: one key. dq and dk are zero but for the order of two sums; they were NaN."""
    q, k, v = (randn(1, 1, 1, 16, device=device, seed=s) * 3 for s in range(3))
    dout = torch.ones_like(q)
    out, _ = attend(q, k, v)
    dq, dk, dv = gradients_of(attend, q, k, v, dout)
    assert torch.equal(out, v) and torch.equal(dv, dout)
    assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4


@on_each_device
def test_case_02_more_rows_than_keys(device):
    """FA #443, in its fixed length form: causal, one key per sequence; dq was NaN."""
    for sq, sk in ((76, 1), (34, 1), (146, 1), (256, 3)):
        q = randn(1, sq, 1, 32, device=device) * 3
        k, v = (randn(1, sk, 1, 32, device=device, seed=s) * 3 for s in (1, 2))
        dq, dk, dv = check_gradients(q, k, v, torch.ones_like(q), *CAUSAL)
        assert all(t.isfinite().all() for t in (dq, dk, dv))
        assert (dq[:, : sq - sk] == 0).all()
        if sk == 1:
            assert (dv == 1).all()  # the last row alone sees the key


@on_each_device
def test_case_04_dout_strides_with_mqa(device):
    """FA #355: MQA with a transposed or expanded dout; the gradients used a wrong stride."""
    q = randn(2, 32, 4, 128, device=device)
    k, v = (randn(2, 32, 1, 128, device=device, seed=s) for s in (1, 2))
    dout = randn(2, 4, 32, 128, device=device, seed=3).transpose(1, 2)
    for view in (dout, dout[:1].expand(2, 32, 4, 128), dout[:, :, :1].expand(2, 32, 4, 128)):
        expected = gradients_of(attend, q, k, v, view.contiguous())
        same(gradients_of(attend, q, k, v, view), expected)


@on_each_device
def test_case_05_sum_backward(device):
    """xformers PR#282, FA #355: out.sum().backward() gives a dout whose strides are all 0."""
    q, k, v, dout, _ = make_inputs(Case(33, 65, 4, 2, 64, *FULL, torch.float16), device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    attend(*leaves)[0].sum().backward()
    same([t.grad for t in leaves], gradients_of(attend, q, k, v, torch.ones_like(dout)))


@on_each_device
def test_case_07_transposed_head_dim_256(device):
    """FA #2665, PR#2666: q, k, v as (b, h, s, 256).transpose(1, 2); the error was 0.15."""
    views = [randn(2, 4, 65, 256, device=device, seed=s).transpose(1, 2) for s in range(4)]
    plain = [t.contiguous() for t in views]
    same(attend(*views[:3]), attend(*plain[:3]))
    same(gradients_of(attend, *views), gradients_of(attend, *plain))


@on_each_device
def test_case_10_empty_sizes(device):
    """FA PR#2470, PR#2776, #2503, PR#2515: batch 0, sq 0, sk 0; crashes and errors."""
    shapes = [(0, 64, 64), (2, 0, 64), *((2, sq, 0) for sq in (1, 64, 128, 256))]
    for (batch, sq, sk), head_dim in product(shapes, (128, 192)):
        case = Case(sq, sk, 2, 2, head_dim, *CAUSAL, torch.float16, batch=batch)
        q, k, v, dout, _ = make_inputs(case, device)
        poison(device)
        out, lse = attend(q, k, v)
        assert out.shape == q.shape and (out == 0).all() and (lse == float("-inf")).all()
        for gradient, tensor in zip(gradients_of(attend, q, k, v, dout), (q, k, v), strict=True):
            assert gradient.shape == tensor.shape and (gradient == 0).all()


@on_each_device
def test_case_11_rows_past_the_last_tile(device):
    """FA PR#2324, #1661, in fixed length form: NaN in freed memory reached the last rows."""
    q, k, v, dout, dlse = make_inputs(Case(129, 65, 2, 2, 64, *FULL, torch.float16), device)
    poison(device)
    tensors = (*attend(q, k, v), *gradients_of(attend, q, k, v, dout, dlse))
    assert all(t.isfinite().all() for t in tensors)


@on_each_device
def test_case_12_lse_of_rows_without_keys(device):
    """FA PR#978, flashinfer #4452: causal with sq > sk; lse was +inf, or -49993.97."""
    q, k, v, dout, dlse = make_inputs(Case(129, 33, 4, 2, 64, *CAUSAL, torch.float16), device)
    out, lse = attend(q, k, v, causal=True)
    assert (lse[:, :, :96] == float("-inf")).all() and (out[:, :96] == 0).all()
    assert lse[:, :, 96:].isfinite().all()
    gradients = gradients_of(lambda *t: attend(*t, causal=True), q, k, v, dout, dlse)
    assert all(t.isfinite().all() for t in gradients)


@on_each_device
def test_case_13_very_negative_logits(device):
    """flashinfer #4267, #4451: all logits under -5e4, one key; a finite mask constant gave 0."""
    direction = randn(1, 1, 1, 128, device=device, dtype=torch.float32)
    direction /= direction.norm()
    q, k = (448 * direction).bfloat16(), (-1880 * direction).bfloat16()
    v = randn(1, 1, 1, 128, device=device, dtype=torch.bfloat16, seed=1)
    assert (q.double() * k.double()).sum() / 128**0.5 < -5e4
    out, lse = attend(q, k, v)
    assert torch.equal(out, v) and lse.item() < -5e4
    out, _ = attend(*(t.expand(1, 65, 2, 128) for t in (q, k, v)), causal=True)
    close_enough(out, v.double().expand(out.shape), v.expand(out.shape))


@on_each_device
def test_case_14_negative_scores(device):
    """FA #2082: GQA 14/2, all scores negative; a row maximum stuck at 0 made a whole head 0."""
    q = randn(1, 88, 14, 64, device=device).abs()
    k = -randn(1, 448, 2, 64, device=device, seed=1).abs()
    v = randn(1, 448, 2, 64, device=device, seed=2)
    out, _ = attend(q, k, v, causal=True)
    exact, baseline = references(q, k, v, window_right=0)
    close_enough(out, exact[0], baseline[0])
    assert (out != 0).any(-1).all()


@on_each_device
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_case_16_nan_in_unseen_keys(device, bad):
    """pytorch #101967, flashinfer 27906fdb: 0 * NaN leaked from keys beyond the mask."""
    q, k, v, dout, _ = make_inputs(Case(65, 200, 4, 2, 64, *FULL, torch.float16), device)
    window = (100, 0)
    unseen = ~naive.band_mask(65, 200, *window, device).any(0)
    assert unseen.any()
    results = []
    for value in (0.0, bad):
        k[:, unseen], v[:, unseen] = value, value
        results.append(
            (
                *attend(q, k, v, window=window),
                *gradients_of(lambda *t: attend(*t, window=window), q, k, v, dout),
            )
        )
    same(*results)


@on_each_device
def test_case_17_fully_masked_rows(device):
    """pytorch #103749, #103963: NaN for rows without keys; here 0, and zero gradients."""
    q, k, v, dout, _ = make_inputs(Case(65, 17, 2, 2, 64, *CAUSAL, torch.float16), device)
    out, _ = attend(q, k, v, causal=True)
    assert (out[:, :48] == 0).all()
    dq, _, _ = check_gradients(q, k, v, dout, *CAUSAL)
    assert (dq[:, :48] == 0).all()


@on_each_device
@pytest.mark.parametrize("shape", [(65536, 2, 1, 8), (1, 3, 65537, 8)], ids=str)
def test_case_18_more_than_65535_batches_or_heads(device, shape):
    """FA #1812, pytorch #146704, #142228, xformers #845: over the limit of a grid dimension."""
    q, k, v, dout = (randn(*shape, device=device, seed=s) for s in range(4))
    actual = (*attend(q, k, v, causal=True), *gradients_of(attend, q, k, v, dout))
    last = [t[-1:, :, -1:].contiguous() for t in (q, k, v, dout)]
    out, lse = attend(*last[:3], causal=True)
    expected = (out, lse, *gradients_of(attend, *last))
    assert torch.equal(actual[1][-1:, -1:], expected[1])
    same([t[-1:, :, -1:] for t in (actual[0], *actual[2:])], [expected[0], *expected[2:]])


@on_gpu
@pytest.mark.large
@pytest.mark.parametrize("shape", [(65536, 4, 8, 64), (1, 3, 71280, 128)], ids=str)
def test_case_18_as_reported(device, shape):
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.float16) for _ in range(4))
    actual = (attend(q, k, v)[0], *gradients_of(attend, q, k, v, dout))
    last = [t[-1:, :, -1:].contiguous() for t in (q, k, v, dout)]
    expected = (attend(*last[:3])[0], *gradients_of(attend, *last))
    same([t[-1:, :, -1:] for t in actual], expected)


@on_gpu
@pytest.mark.large
@pytest.mark.parametrize("shape", [(1900, 729, 16, 72), (400, 10496, 4, 128)], ids=str)
def test_case_20_more_than_2_31_elements(device, shape):
    """FA PR#1500, #2214, #772, TabPFN PR#1184, pytorch #150054: 32-bit offsets overflowed."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.float16) for _ in range(4))
    last = [t[-1:].contiguous() for t in (q, k, v, dout)]
    out, lse = attend(q, k, v)
    expected = attend(*last[:3])
    same((out[-1:], lse[-1:]), expected)
    gradients = flash_cuda.bwd(dout, q, k, v, out, lse)
    alone = flash_cuda.bwd(last[3], *last[:3], *expected)
    for gradient, e in zip(gradients, alone, strict=True):
        torch.testing.assert_close(gradient[-1:], e, rtol=1e-2, atol=1e-2)


@on_each_device
def test_case_22_windows_that_mean_causal(device):
    """FA #1133, TransformerEngine #3528: (S-1, 0), (S, 0), (-1, 0) must be causal=True."""
    q, k, v, dout, _ = make_inputs(Case(129, 129, 4, 2, 64, *CAUSAL, torch.float16), device)
    expected = attend(q, k, v, causal=True)
    gradients = gradients_of(lambda *t: attend(*t, causal=True), q, k, v, dout)
    for window in ((128, 0), (129, 0), (-1, 0)):
        same(attend(q, k, v, window=window), expected)
        same(gradients_of(lambda *t, w=window: attend(*t, window=w), q, k, v, dout), gradients)


@on_each_device
def test_case_23_window_semantics(device):
    """FA #2199, #1116, transformers #39408: windows with sq > sk, (0, 0), other negatives."""
    q, k, v, dout, _ = make_inputs(Case(129, 100, 4, 2, 64, 32, 64, torch.float16), device)
    out, _ = attend(q, k, v, window=(32, 64))
    exact, baseline = references(q, k, v, window_left=32, window_right=64)
    close_enough(out, exact[0], baseline[0])
    check_gradients(q, k, v, dout, 32, 64)
    # FA2 clamps the right bound by sk, which is wrong for sq > sk: these rows see nothing.
    q, k, v = (randn(1, s, 1, 32, device=device, seed=s) for s in (100, 10, 10))
    assert (attend(q, k, v, window=(-1, 10))[0][:, :80] == 0).all()
    q, k, v, _, _ = make_inputs(Case(65, 65, 4, 4, 64, 0, 0, torch.float16), device)
    assert torch.equal(attend(q, k, v, window=(0, 0))[0], v)
    with pytest.raises(ValueError, match="window left: expected a width >= 0, or -1"):
        attend(q, k, v, window=(-5, 0))


@on_each_device
@pytest.mark.parametrize("heads_k", [8, 2])
def test_case_24_deterministic_repeats(device, heads_k):
    """FA #2244: deterministic=True, causal; dq differed in 29 of 30 repeats."""
    sq = 33 if device == "cpu" else 1024
    q, k, v, dout, _ = make_inputs(Case(sq, sq, 8, heads_k, 128, *CAUSAL, torch.float16), device)
    first = gradients_of(lambda *t: attend(*t, causal=True), q, k, v, dout)
    for _ in range(29):
        same(gradients_of(lambda *t: attend(*t, causal=True), q, k, v, dout), first)


@on_each_device
def test_case_26_gqa_backward_of_a_stable_abi_build(device):
    """kernels-community #1085: bf16, GQA 8/2, S 8, D 64; a dispatcher error in the backward."""
    check_gradients(*make_inputs(Case(8, 8, 8, 2, 64, *FULL, torch.bfloat16), device)[:4])


@on_each_device
def test_case_27_subsets_of_gradients(device):
    """FA #1406, Paddle #58461, pytorch #136101: requires_grad on each subset of q, k, v."""
    q, k, v, dout, _ = make_inputs(Case(33, 65, 4, 2, 64, *CAUSAL, torch.float16), device)
    full = gradients_of(attend, q, k, v, dout)
    for wanted in list(product((False, True), repeat=3))[1:]:
        leaves = [t.clone().requires_grad_(w) for t, w in zip((q, k, v), wanted, strict=True)]
        attend(*leaves)[0].backward(dout)
        for leaf, expected, want in zip(leaves, full, wanted, strict=True):
            assert torch.equal(leaf.grad, expected) if want else leaf.grad is None


@on_gpu
def test_case_29_side_stream(device):
    """FA PR#1957: the call must wait for inputs that its own stream is still making."""
    q, k, v, _, _ = make_inputs(Case(129, 129, 4, 2, 64, *CAUSAL, torch.float16), device)
    expected = attend(q * 3, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q * 3)
        actual = attend(late, k, v)
    stream.synchronize()
    same(actual, expected)


@on_each_device
@pytest.mark.parametrize("seqlen", [196, 257])
def test_case_33_fake_strides(device, seqlen):
    """MagiAttention #137, pytorch #133671: compiled, transposed inputs; fake strides were wrong."""
    torch._dynamo.reset()
    heads = 1 if device == "cpu" else 4
    inputs = [randn(1, heads, seqlen, 64, device=device, seed=s).transpose(1, 2) for s in range(4)]
    compiled = torch.compile(lambda *t: attend(*t, causal=True), backend="aot_eager")
    actual = gradients_of(compiled, *inputs)
    expected = gradients_of(lambda *t: attend(*t, causal=True), *inputs)
    same(actual, expected)
    assert compiled(*inputs[:3])[0].stride() == attend(*inputs[:3])[0].stride()
    op = torch.ops.flash_cuda.fwd.default
    torch.library.opcheck(op, tuple(inputs[:3]), test_utils=["test_schema", "test_faketensor"])


@on_each_device
def test_case_34_odd_strides(device):
    """pytorch #191937, #116333, #138529, #146377, TransformerEngine #1195: misaligned, garbage."""

    def check(*views):
        plain = [t.contiguous() for t in views]
        same(attend(*views[:3]), attend(*plain[:3]))
        same(gradients_of(attend, *views), gradients_of(attend, *plain))

    q, dout = randn(2, 17, 4, 64, device=device), randn(2, 17, 4, 64, device=device, seed=1)
    # keys and values expanded with stride 0, kv_len % 32 == 1
    k, v = (randn(1, 33, 1, 64, device=device, seed=s).expand(2, 33, 4, 64) for s in (2, 3))
    check(q, k, v, dout)
    # dims of size 1 may have any stride
    one = randn(64, device=device, seed=4).as_strided((1, 1, 1, 64), (7, 13, 3, 1))
    check(one, one, one, one)
    # k as a slice of a split qkv projection, MQA, its rows not 16-byte aligned
    qkv = randn(2, 17, 4 * 64 + 2 * 64 + 1, device=device, seed=5)[..., 1:]
    q, k, v = qkv.split([4 * 64, 64, 64], dim=-1)
    check(q.unflatten(2, (4, 64)), k.unflatten(2, (1, 64)), v.unflatten(2, (1, 64)), dout)
    # one query, many keys, dout with stride 0
    keys = 1025 if device == "cpu" else 65536
    q, dout = randn(1, 1, 4, 64, device=device), randn(1, device=device).expand(1, 1, 4, 64)
    k, v = (randn(1, keys, 4, 64, device=device, seed=s) for s in (6, 7))
    check(q, k, v, dout)
