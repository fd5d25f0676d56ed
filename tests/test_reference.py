"""flash_cuda.reference: each algorithm against plain attention, in float64."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_cuda import reference as ref
from flash_cuda.reference import blocks

ALGORITHMS = {
    "v1": (ref.v1_forward, ref.v1_backward),
    "v2": (ref.v2_forward, ref.v2_backward),
}
algorithms = pytest.mark.parametrize("forward, backward", ALGORITHMS.values(), ids=ALGORITHMS)
quick = settings(max_examples=40, deadline=None, derandomize=True)
windows = st.integers(-1, 12)


class Problem(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    band: dict

    @property
    def qkv(self):
        return self.q, self.k, self.v

    @property
    def seen(self):
        return ref.band_mask(self.q.shape[1], self.k.shape[1], **self.band)


def make(b, sq, sk, h, hk, d, dv=None, left=-1, right=-1, seed=0, dtype=torch.float64):
    """Inputs with a mean other than 0, so that a sum over the wrong rows shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.3).to(dtype)

    dv = dv or d
    return Problem(
        q=normal(b, sq, h, d),
        k=normal(b, sk, hk, d),
        v=normal(b, sk, hk, dv),
        dout=normal(b, sq, h, dv),
        dlse=normal(b, h, sq),
        band={"window_left": left, "window_right": right},
    )


@st.composite
def problems(draw):
    hk = draw(st.integers(1, 2))
    return make(
        b=draw(st.integers(0, 2)),
        sq=draw(st.integers(0, 21)),
        sk=draw(st.integers(0, 21)),
        h=hk * draw(st.integers(1, 3)),
        hk=hk,
        d=draw(st.integers(1, 5)),
        dv=draw(st.integers(1, 5)),
        left=draw(windows),
        right=draw(windows),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def block_sizes(draw):
    return {"block_q": draw(st.integers(1, 24)), "block_k": draw(st.integers(1, 24))}


def naive_gradients(p):
    """(dq, dk, dv) of plain attention by autograd; the lse of a row without keys takes no part."""
    leaves = [x.clone().requires_grad_() for x in p.qkv]
    out, lse = ref.attention(*leaves, **p.band)
    loss = (out * p.dout).sum() + (lse * p.dlse).masked_fill(lse == -math.inf, 0).sum()
    return torch.autograd.grad(loss, leaves)


def as_function(forward, backward, **options):
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = forward(q, k, v, **options)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, dout, dlse):
            q, k, v, out, lse = ctx.saved_tensors
            return backward(dout, q, k, v, out, lse, dlse=dlse, **options)

    return Attention.apply


# --- softmax and one query ---------------------------------------------------------------------


@quick
@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20))
def test_softmax_in_three_two_and_one_pass(x):
    x = torch.tensor(x, dtype=torch.float64)
    for softmax in (ref.safe_softmax_3pass, ref.online_softmax_2pass, ref.online_softmax_1pass):
        torch.testing.assert_close(softmax(x), x.softmax(0))


@pytest.mark.parametrize(
    "step", [ref.fused_attention, ref.attention_2pass, ref.flash_attention_1pass]
)
def test_attention_of_one_query(step):
    p = make(1, 1, 13, 1, 1, 4, dv=3)
    q, K, V = p.q[0, 0, 0], p.k[0, :, 0], p.v[0, :, 0]
    out, _ = ref.attention(*p.qkv)
    torch.testing.assert_close(step(q, K, V), out[0, 0, 0])
    assert torch.autograd.gradcheck(step, [x.clone().requires_grad_() for x in (q, K, V)])


def test_only_the_step_without_a_max_overflows():
    q, K, V = torch.full((4,), 40.0), torch.full((3, 4), 40.0), torch.eye(3)
    assert ref.fused_attention(q, K, V).isnan().all()
    for step in (ref.attention_2pass, ref.flash_attention_1pass):
        torch.testing.assert_close(step(q, K, V), torch.full((3,), 1 / 3))


@pytest.mark.parametrize("tile_size", [1, 2, 5, 7, 64])
def test_flash_attention_tiled(tile_size):
    p = make(1, 7, 12, 1, 1, 4, dv=3)
    out, _ = ref.attention(*p.qkv)
    tiled = ref.flash_attention_tiled(p.q[0, :, 0], p.k[0, :, 0], p.v[0, :, 0], tile_size)
    torch.testing.assert_close(tiled, out[0, :, 0])


# --- plain attention ---------------------------------------------------------------------------


@quick
@given(problems())
def test_naive_is_the_definition_row_by_row(p):
    out, lse = ref.attention(*p.qkv, **p.band)
    b, sq, h, d = p.q.shape
    sk, hk = p.k.shape[1:3]
    left, right = p.band.values()
    for n in range(b):
        for i in range(sq):
            at = i + sk - sq
            keys = [
                j
                for j in range(sk)
                if (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
            ]
            for x in range(h):
                y = x * hk // h
                scores = p.k[n, keys, y] @ p.q[n, i, x] / math.sqrt(d)
                if keys:
                    o = ref.safe_softmax_3pass(scores) @ p.v[n, keys, y]
                    torch.testing.assert_close(out[n, i, x], o)
                    torch.testing.assert_close(lse[n, x, i], scores.logsumexp(0))
                else:
                    assert (out[n, i, x] == 0).all() and lse[n, x, i] == -math.inf


def test_naive_gradcheck_twice():
    p = make(1, 3, 4, 2, 1, 2, left=1, right=1)
    leaves = [x.clone().requires_grad_() for x in p.qkv]
    assert torch.autograd.gradcheck(lambda *x: ref.attention(*x, **p.band), leaves)
    assert torch.autograd.gradgradcheck(lambda *x: ref.attention(*x, **p.band), leaves)


# --- v1 and v2 ---------------------------------------------------------------------------------


@algorithms
@quick
@given(p=problems(), sizes=block_sizes())
def test_forward_and_backward_equal_plain_attention_for_any_blocks(forward, backward, p, sizes):
    out, lse = forward(*p.qkv, **p.band, **sizes)
    expected_out, expected_lse = ref.attention(*p.qkv, **p.band)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    grads = backward(p.dout, *p.qkv, out, lse, dlse=p.dlse, **p.band, **sizes)
    for grad, expected in zip(grads, naive_gradients(p), strict=True):
        torch.testing.assert_close(grad, expected)
    assert all(x.is_contiguous() for x in (out, lse, *grads))


@algorithms
@pytest.mark.parametrize("left, right", [(-1, -1), (-1, 0), (1, 0), (0, 2)])
@pytest.mark.parametrize("sq, sk", [(5, 5), (3, 6), (6, 3)])
def test_gradcheck(forward, backward, left, right, sq, sk):
    p = make(1, sq, sk, 2, 1, 3, dv=2, left=left, right=right)
    apply = as_function(forward, backward, **p.band, block_q=2, block_k=3)

    def function(q, k, v):
        out, lse = apply(q, k, v)
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in p.qkv])


@algorithms
def test_scale_and_default_blocks(forward, backward):
    p = make(1, 200, 150, 2, 2, 8, right=0)
    options = {**p.band, "scale": 0.7}
    out, lse = forward(*p.qkv, **options)
    leaves = [x.clone().requires_grad_() for x in p.qkv]
    expected_out, expected_lse = ref.attention(*leaves, **options)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    expected = torch.autograd.grad(expected_out, leaves, p.dout)
    for grad, x in zip(backward(p.dout, *p.qkv, out, lse, **options), expected, strict=True):
        torch.testing.assert_close(grad, x)


@pytest.mark.parametrize("d", [1, 40, 64, 128, 256])
def test_v1_block_sizes_fill_the_sram(d):
    M = 24 * 1024
    B_r, B_c = ref.v1.block_sizes(d, M)
    assert B_r <= B_c and B_r * d <= M / 4 + d and B_c * d <= M / 4 + d
    assert B_r * B_c <= M / 4 + d


# --- v2 as the CPU kernel of the ops -----------------------------------------------------------


@quick
@given(p=problems(), sizes=block_sizes(), needs=st.tuples(*[st.booleans()] * 3))
def test_gradients_that_are_not_needed_are_none(p, sizes, needs):
    out, lse = ref.v2_forward(*p.qkv, **p.band)
    options = {"dlse": p.dlse, **p.band, **sizes}
    full = ref.v2_backward(p.dout, *p.qkv, out, lse, **options)
    need_dq, need_dk, need_dv = needs
    some = ref.v2_backward(
        p.dout, *p.qkv, out, lse, **options, need_dq=need_dq, need_dk=need_dk, need_dv=need_dv
    )
    for need, grad, expected in zip(needs, some, full, strict=True):
        assert torch.equal(grad, expected) if need else grad is None


def test_two_forwards_and_backwards_are_bitwise_equal():
    p = make(2, 150, 140, 4, 2, 16, left=60, right=0, dtype=torch.float32)
    runs = []
    for _ in range(2):
        out, lse = ref.v2_forward(*p.qkv, **p.band)
        runs.append((out, lse, *ref.v2_backward(p.dout, *p.qkv, out, lse, **p.band)))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_the_error_of_each(dtype):
    exact = make(2, 70, 90, 4, 2, 32, left=40, right=3, dtype=dtype)
    p = Problem(*(x.to(dtype) for x in exact[:5]), exact.band)
    high = Problem(*(x.double() for x in p[:5]), p.band)
    out, lse = ref.v2_forward(*p.qkv, **p.band)
    dlse = p.dlse.to(lse.dtype)
    grads = ref.v2_backward(p.dout, *p.qkv, out, lse, dlse=dlse, **p.band)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(x.dtype == dtype for x in (out, *grads))

    expected = (ref.attention(*high.qkv, **p.band)[0], *naive_gradients(high))
    plain = (ref.attention(*p.qkv, **p.band)[0], *naive_gradients(p))
    for ours, theirs, truth in zip((out, *grads), plain, expected, strict=True):
        error = (ours - truth).abs().max()
        assert error <= 2 * (theirs - truth).abs().max() + 1e-5 * (dtype != torch.float64) + 1e-12
    torch.testing.assert_close(
        lse.double(), ref.attention(*high.qkv, **p.band)[1], atol=1e-4, rtol=0
    )


def layouts(x):
    """The same values with other strides."""
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    padded = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan)
    padded[..., 1::2] = x
    yield padded[..., 1::2]


@pytest.mark.parametrize("layout", range(3))
def test_any_strides(layout):
    p = make(2, 9, 11, 4, 2, 8, right=0, dtype=torch.bfloat16)
    out, lse = ref.v2_forward(*p.qkv, **p.band)
    expected = (out, lse, *ref.v2_backward(p.dout, *p.qkv, out, lse, dlse=p.dlse, **p.band))
    q, k, v, dout, out = (list(layouts(x))[layout] for x in (*p.qkv, p.dout, out))
    lse, dlse = (x.mT.contiguous().mT for x in (lse, p.dlse))
    got = (
        *ref.v2_forward(q, k, v, **p.band),
        *ref.v2_backward(dout, q, k, v, out, lse, dlse=dlse, **p.band),
    )
    assert all(torch.equal(x, y) and x.is_contiguous() for x, y in zip(got, expected, strict=True))


def test_windows_as_wide_as_int64():
    p = make(1, 5, 6, 1, 1, 4)
    wide = 2**63 - 1
    for left, right in ((wide, 1), (1, wide), (wide, wide)):
        band = {"window_left": left, "window_right": right}
        out, _ = ref.v2_forward(*p.qkv, **band, block_q=2, block_k=2)
        narrow = {name: min(size, 99) for name, size in band.items()}
        torch.testing.assert_close(out, ref.attention(*p.qkv, **narrow)[0])
        torch.testing.assert_close(out, ref.attention(*p.qkv, **band)[0])


def test_expanded_inputs():
    p = make(2, 6, 7, 4, 2, 8)
    k, v = (x[:, :1].expand_as(x) for x in (p.k, p.v))
    dout = p.dout[:1, :1, :1, :1].expand_as(p.dout)
    out, lse = ref.v2_forward(p.q, k, v)
    grads = ref.v2_backward(dout, p.q, k, v, out, lse)
    k, v, dout = (x.contiguous() for x in (k, v, dout))
    expected = ref.v2_backward(dout, p.q, k, v, *ref.v2_forward(p.q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(grads, expected, strict=True))


@algorithms
@pytest.mark.parametrize("b, sq, sk", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("right", [-1, 0])
def test_empty_sizes(forward, backward, b, sq, sk, right):
    p = make(b, sq, sk, 4, 2, 8, right=right, dtype=torch.bfloat16)
    out, lse = forward(*p.qkv, **p.band)
    assert out.shape == p.q.shape and (out == 0).all()
    assert lse.shape == (b, 4, sq) and (lse == -math.inf).all()
    grads = backward(p.dout, *p.qkv, out, lse, dlse=p.dlse, **p.band)
    for grad, x in zip(grads, p.qkv, strict=True):
        assert grad.shape == x.shape and (grad == 0).all()


@algorithms
def test_rows_without_keys(forward, backward):
    p = make(1, 9, 4, 2, 2, 8, right=0)
    dead = ~p.seen.any(1)
    assert dead.tolist() == [True] * 5 + [False] * 4
    out, lse = forward(*p.qkv, **p.band, block_q=4, block_k=4)
    assert (out[:, dead] == 0).all() and (lse[..., dead] == -math.inf).all()
    assert out.isfinite().all() and lse[..., ~dead].isfinite().all()
    grads = backward(p.dout, *p.qkv, out, lse, dlse=p.dlse, **p.band, block_q=4, block_k=4)
    assert (grads[0][:, dead] == 0).all() and all(x.isfinite().all() for x in grads)


@algorithms
def test_logits_far_below_any_finite_mask_constant(forward, backward):
    """Case 13: one key with a logit below -5e4 still has weight 1."""
    q, k, v = torch.full((1, 1, 1, 128), 40.0), torch.full((1, 1, 1, 128), -166.0), torch.ones(())
    v = v.expand(1, 1, 1, 128)
    out, lse = forward(q, k, v)
    assert torch.equal(out, v) and lse < -5e4
    assert all(x.isfinite().all() for x in backward(v, q, k, v, out, lse))


@algorithms
def test_logits_that_overflow_to_minus_infinity_count_as_no_key(forward, backward):
    q, k, v = (
        torch.full((1, 2, 1, 4), 1e30),
        torch.full((1, 3, 1, 4), -1e30),
        torch.ones(1, 3, 1, 4),
    )
    out, lse = forward(q, k, v)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert torch.equal(ref.attention(q, k, v)[0], out)
    for grad in backward(torch.ones_like(q), q, k, v, out, lse):
        assert (grad == 0).all()


# --- isolation ---------------------------------------------------------------------------------

BANDS = [(-1, 0), (2, 0), (0, 3), (3, 1)]
POISONS = pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])


@algorithms
@POISONS
@pytest.mark.parametrize("left, right", BANDS)
def test_a_key_reaches_only_the_rows_that_see_it(forward, backward, left, right, poison):
    """Case 16: with NaN or Inf in key j, rows that do not see j are bitwise what they were."""
    p = make(2, 11, 9, 4, 2, 8, left=left, right=right, dtype=torch.float32)
    options = {**p.band, "block_q": 4, "block_k": 5}
    clean = forward(*p.qkv, **options)
    dq, dk, dv = backward(p.dout, *p.qkv, *clean, dlse=p.dlse, **options)
    for j in range(9):
        k, v = p.k.clone(), p.v.clone()
        k[:, j], v[:, j] = poison, poison
        out, lse = forward(p.q, k, v, **options)
        safe = ~p.seen[:, j]
        assert torch.equal(out[:, safe], clean[0][:, safe])
        assert torch.equal(lse[..., safe], clean[1][..., safe])
        assert not out[:, ~safe].isfinite().any()

        grads = backward(p.dout, p.q, k, v, out, lse, dlse=p.dlse, **options)
        assert torch.equal(grads[0][:, safe], dq[:, safe])
        clean_keys = ~p.seen[~safe].any(0)  # keys that no reached row sees
        assert torch.equal(grads[1][:, clean_keys], dk[:, clean_keys])
        assert torch.equal(grads[2][:, clean_keys], dv[:, clean_keys])


@algorithms
@POISONS
@pytest.mark.parametrize("left, right", BANDS)
def test_a_row_reaches_only_the_keys_it_sees(forward, backward, left, right, poison):
    p = make(2, 11, 9, 4, 2, 8, left=left, right=right, dtype=torch.float32)
    options = {**p.band, "block_q": 4, "block_k": 5}
    clean = forward(*p.qkv, **options)
    dq, dk, dv = backward(p.dout, *p.qkv, *clean, **options)
    for i in range(11):
        q, dout = p.q.clone(), p.dout.clone()
        q[:, i], dout[:, i] = poison, poison
        out, lse = forward(q, p.k, p.v, **options)
        grads = backward(dout, q, p.k, p.v, out, lse, **options)
        other = torch.arange(11) != i
        assert torch.equal(out[:, other], clean[0][:, other])
        assert torch.equal(grads[0][:, other], dq[:, other])
        safe = ~p.seen[i]
        assert torch.equal(grads[1][:, safe], dk[:, safe])
        assert torch.equal(grads[2][:, safe], dv[:, safe])


@pytest.mark.parametrize("sq, sk, d", [(200, 260, 64), (130, 130, 96), (300, 40, 40)])
def test_poison_behind_the_band_changes_no_bit(sq, sk, d):
    """Case 16 at the default block sizes, where the last keys are seen by the last rows only."""
    p = make(1, sq, sk, 2, 1, d, right=0, dtype=torch.float32)
    safe = ~p.seen[:, -20:].any(1)
    outs = []
    for value in (0.0, math.nan):
        k, v = p.k.clone(), p.v.clone()
        k[:, -20:], v[:, -20:] = value, value
        outs.append(ref.v2_forward(p.q, k, v, **p.band)[0][:, safe])
    assert torch.equal(*outs)


def test_an_infinite_value_that_is_seen_arrives_as_in_plain_attention():
    p = make(1, 9, 9, 2, 2, 4, right=0)
    p.v[0, 3, 0, 0], p.v[0, 5, 0, 0], p.v[0, 3, 1, 1] = math.inf, -math.inf, math.inf
    out, _ = ref.v2_forward(*p.qkv, **p.band, block_q=4, block_k=4)
    rows = torch.zeros(9, dtype=torch.bool)
    rows[3:] = True
    expected, _ = ref.attention(*(x[:, 3:] if x is p.q else x for x in p.qkv), **p.band)
    inf = torch.tensor(math.inf, dtype=torch.float64)
    assert (out[0, 3:5, 0, 0] == inf).all() and out[0, 5:, 0, 0].isnan().all()
    assert (out[0, 3:, 1, 1] == inf).all() and out[0, :3].isfinite().all()
    torch.testing.assert_close(out[:, rows][..., 2:], expected[..., 2:])


# --- the band in blocks ------------------------------------------------------------------------


@settings(quick, max_examples=200)
@given(st.data(), st.integers(1, 15), st.integers(1, 15), windows, windows, st.integers(1, 3))
def test_band_blocks_equal_the_mask(data, sq, sk, left, right, g):
    seen = ref.band_mask(sq, sk, left, right)
    band = blocks.Band(sq, sk, left, right)
    i0, j0 = data.draw(st.integers(0, sq - 1)), data.draw(st.integers(0, sk - 1))
    i1, j1 = data.draw(st.integers(i0 + 1, sq)), data.draw(st.integers(j0 + 1, sk))

    keys, queries = seen[i0:i1].any(0).nonzero(), seen[:, j0:j1].any(1).nonzero()
    for (begin, end), truth in ((band.keys(i0, i1), keys), (band.queries(j0, j1), queries)):
        assert list(range(begin, end)) == truth.flatten().tolist()

    hidden = band.hidden(i0, i1, j0, j1, g, seen)
    block = seen[i0:i1, j0:j1]
    if hidden is None:
        assert block.all()
    else:
        assert not block.all()
        assert torch.equal(hidden, ~block.repeat(g, 1))


# --- merging -----------------------------------------------------------------------------------


@quick
@given(problems(), st.lists(st.integers(0, 21), max_size=4))
def test_merged_splits_equal_the_whole(p, cuts):
    """Causal: a split that ends `after` keys early has its diagonal that far to the right."""
    sk = p.k.shape[1]
    edges = [0, *sorted(min(c, sk) for c in cuts), sk]
    parts = []
    for j0, j1 in zip(edges, edges[1:], strict=False):
        after = sk - j1
        parts.append(ref.v2_forward(p.q, p.k[:, j0:j1], p.v[:, j0:j1], window_right=after))
    out, lse = ref.merge(parts)
    expected_out, expected_lse = ref.attention(*p.qkv, window_right=0)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_merge_is_associative_and_commutative():
    p = make(2, 5, 12, 4, 2, 8)
    a, b, c = (ref.v2_forward(p.q, p.k[:, s : s + 4], p.v[:, s : s + 4]) for s in (0, 4, 8))
    expected = ref.merge([a, b, c])
    for merged in (
        ref.merge([ref.merge([a, b]), c]),
        ref.merge([a, ref.merge([b, c])]),
        ref.merge([c, a, b]),
    ):
        for x, y in zip(merged, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_merge_of_parts_without_keys():
    p = make(1, 3, 4, 2, 2, 8, dtype=torch.bfloat16)
    some = ref.v2_forward(*p.qkv)
    none = ref.v2_forward(p.q, p.k[:, :0], p.v[:, :0])
    out, lse = ref.merge([none, some])
    assert torch.equal(out, some[0]) and torch.equal(lse, some[1])
    out, lse = ref.merge([none, none])
    assert out.dtype == torch.bfloat16 and (out == 0).all() and (lse == -math.inf).all()
