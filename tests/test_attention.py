"""The forward: values and lse against float64, strides, isolation, dead rows, empty sizes."""

import itertools
import math
from pathlib import Path

import pytest
import torch

import flash_cuda
from flash_cuda import doctor
from flash_cuda.reference import naive
from tests.cases import (
    BANDS,
    CAUSAL,
    DEVICES,
    FEW,
    FEW_CASES,
    FORWARD,
    FULL,
    HEADS,
    ISOLATION,
    KERNELS,
    LAB_FORWARD,
    LAB_ISOLATION,
    Case,
)
from tests.conftest import close_enough, close_lse, make_inputs, poison, references


@pytest.mark.parametrize("device, kernel, case", FORWARD + LAB_FORWARD)
def test_values(device, kernel, case):
    q, k, v, _, _ = make_inputs(case, device)
    poison(device)
    out, lse = flash_cuda.fwd(q, k, v, kernel=kernel, **case.window)
    exact, baseline = references(q, k, v, **case.window)
    assert out.dtype == q.dtype and out.is_contiguous() and lse.is_contiguous()
    close_enough(out, exact[0], baseline[0])
    close_lse(lse, exact[1])


@pytest.mark.parametrize("device, kernel, case", FEW)
def test_attention_is_fwd(device, kernel, case):
    q, k, v, _, _ = make_inputs(case, device)
    out, lse = flash_cuda.fwd(q, k, v, kernel=kernel, **case.window)
    window = (case.left, case.right)
    also = flash_cuda.attention(q, k, v, window=window, kernel=kernel, return_lse=True)
    assert torch.equal(also[0], out) and torch.equal(also[1], lse)


def first_kernel(device):
    """Of FORWARD_KERNELS the first that runs on the GPU: hopper, where GPU and build have it."""
    if device == "cpu":
        return "reference"
    kernel, why = doctor.forward_kernel(device)
    if torch.cuda.get_device_capability() != (9, 0):
        assert "needs compute capability 9.0" in why
    elif b"-arch sm_90a" in Path(flash_cuda._C.__file__).read_bytes():
        assert kernel == "hopper"
    else:
        assert "is not in this build" in why
    return kernel


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_auto_is_the_first_kernel(device, case):
    q, k, v, _, _ = make_inputs(case, device)
    expected = flash_cuda.fwd(q, k, v, kernel=first_kernel(device), **case.window)
    window = (case.left, case.right)
    for actual in (
        flash_cuda.fwd(q, k, v, **case.window),
        flash_cuda.fwd(q, k, v, kernel="auto", **case.window),
        flash_cuda.attention(q, k, v, window=window, return_lse=True),
        flash_cuda.flash_attn_func(q, k, v, window_size=window, return_attn_probs=True)[:2],
    ):
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("device, kernel", KERNELS)
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3])
def test_scale(device, kernel, scale):
    q, k, v, _, _ = make_inputs(FEW_CASES[1], device)
    options = {"scale": scale, "causal": True, "kernel": kernel}
    out, lse = flash_cuda.attention(q, k, v, return_lse=True, **options)
    exact, baseline = references(q, k, v, scale=scale, window_right=0)
    close_enough(out, exact[0], baseline[0])
    close_lse(lse, exact[1])


def _transposed(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _sliced(t):
    """As one of three tensors that share their memory, as q, k, v of one projection do."""
    return torch.stack([t + 1, t, t - 1], dim=2)[:, :, 1]


def _sequence_first(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def _columns(t):
    """Rows that are aligned parts of longer ones."""
    memory = t.new_zeros(*t.shape[:-1], (t.shape[-1] + 15) // 8 * 8)
    memory[..., 8 : 8 + t.shape[-1]] = t
    return memory[..., 8 : 8 + t.shape[-1]]


def _last_dim_strided(t):
    return t.transpose(1, 3).contiguous().transpose(1, 3)


def _unaligned(t):
    """Rows that start at 2 bytes past a multiple of 16."""
    *sizes, head_dim = t.shape
    memory = t.new_zeros(*sizes, head_dim + 8 + head_dim % 2)
    memory[..., 1 : head_dim + 1] = t
    return memory[..., 1 : head_dim + 1]


def _odd_rows(t):
    """Rows that lie an odd number of elements apart."""
    memory = t.new_zeros(*t.shape[:-1], t.shape[-1] + 1 + t.shape[-1] % 2)
    memory[..., : t.shape[-1]] = t
    return memory[..., : t.shape[-1]]


def _offset(t):
    """Contiguous, but one element after an aligned address."""
    memory = t.new_zeros(t.numel() + 1)
    memory[1:] = t.flatten()
    return memory[1:].view(t.shape)


LAYOUTS = (
    _transposed, _sliced, _sequence_first, _columns, _last_dim_strided, _unaligned, _odd_rows,
    _offset,
)  # fmt: skip


@pytest.mark.parametrize("device, kernel, case", FEW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, kernel, case, layout):
    q, k, v, _, _ = make_inputs(case, device)
    expected = flash_cuda.fwd(q, k, v, kernel=kernel, **case.window)
    poison(device)
    for views in ((layout(q), layout(k), layout(v)), (layout(q), k, v), (q, k, layout(v))):
        actual = flash_cuda.fwd(*views, kernel=kernel, **case.window)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("device, kernel, case", FEW)
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_stride_zero(device, kernel, case, dim):
    """One batch entry, row, head or element expanded, as torch does it for keys and values."""
    q, k, v, _, _ = make_inputs(case, device)
    expanded = [t.narrow(dim, 0, 1).expand(t.shape) for t in (q, k, v)]
    poison(device)
    for views in (expanded, [q, *expanded[1:]]):
        plain = [t.contiguous() for t in views]
        expected = flash_cuda.fwd(*plain, kernel=kernel, **case.window)
        actual = flash_cuda.fwd(*views, kernel=kernel, **case.window)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("device, kernel, case", ISOLATION + LAB_ISOLATION)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_isolation(device, kernel, case, bad):
    """NaN or Inf in a key or value reaches only the rows that see that key."""
    q, k, v, _, _ = make_inputs(case, device)
    clean = flash_cuda.fwd(q, k, v, kernel=kernel, **case.window)
    seen = naive.band_mask(case.sq, case.sk, case.left, case.right, device)
    # Whole rows give NaN scores, one bad element gives infinite ones too: those move row maxima.
    for key, columns in itertools.product((0, 63, 64, 100, 128), (slice(None), 0)):
        for spoilt in (k, v):
            good = spoilt[:, key].clone()
            spoilt[:, key, :, columns] = bad
            out, lse = flash_cuda.fwd(q, k, v, kernel=kernel, **case.window)
            spoilt[:, key] = good
            rows = ~seen[:, key]
            assert torch.equal(out[:, rows], clean[0][:, rows])
            assert torch.equal(lse[:, :, rows], clean[1][:, :, rows])


@pytest.mark.parametrize("device, kernel", KERNELS)
@pytest.mark.parametrize("side", ["q", "row of q"])
def test_isolation_of_rows(device, kernel, side):
    """NaN in one query spoils that row alone."""
    q, k, v, _, _ = make_inputs(FEW_CASES[1], device)
    clean = flash_cuda.fwd(q, k, v, kernel=kernel)[0]
    q[:, 70, slice(None) if side == "q" else 0] = float("nan")
    out = flash_cuda.fwd(q, k, v, kernel=kernel)[0]
    others = [row for row in range(q.shape[1]) if row != 70]
    assert torch.equal(out[:, others], clean[:, others])
    assert out[:, 70, 0].isnan().all()


@pytest.mark.parametrize("device, kernel", KERNELS)
@pytest.mark.parametrize(
    "sq, sk, band",
    [(129, 33, CAUSAL), (200, 1, (3, 3)), (65, 129, (0, 0)), (700, 260, CAUSAL), (1, 1, (0, 0))],
)
def test_rows_without_keys(device, kernel, sq, sk, band):
    case = Case(sq, sk, 4, 2, 64, *band, torch.bfloat16)
    q, k, v, _, _ = make_inputs(case, device)
    poison(device)
    out, lse = flash_cuda.fwd(q, k, v, kernel=kernel, **case.window)
    dead = ~naive.band_mask(sq, sk, *band, device).any(1)
    assert (out[:, dead] == 0).all()
    assert (lse[:, :, dead] == float("-inf")).all()
    assert lse[:, :, ~dead].isfinite().all()


@pytest.mark.parametrize("device, kernel", KERNELS)
@pytest.mark.parametrize("batch, sq, sk", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 300, 0), (0, 0, 0)])
@pytest.mark.parametrize("band", [FULL, CAUSAL, (3, 3)])
def test_empty_sizes(device, kernel, batch, sq, sk, band):
    case = Case(sq, sk, 4, 2, 64, *band, torch.float16, batch=batch)
    q, k, v, _, _ = make_inputs(case, device)
    poison(device)
    out, lse = flash_cuda.fwd(q, k, v, kernel=kernel, **case.window)
    assert out.shape == q.shape and lse.shape == (batch, 4, sq)
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("device, kernel", KERNELS)
@pytest.mark.parametrize("factor", [30.0, 300.0])
def test_large_logits(device, kernel, factor):
    """Scores of up to 10^5: the row maximum is subtracted before any exponential."""
    q, k, v, _, _ = make_inputs(FEW_CASES[0], device)
    q = q * factor
    out, lse = flash_cuda.fwd(q, k, v, kernel=kernel)
    exact, baseline = references(q, k, v)
    assert out.isfinite().all()
    close_enough(out, exact[0], baseline[0])
    close_lse(lse, exact[1])


@pytest.mark.parametrize("device, kernel", KERNELS)
@pytest.mark.parametrize("jump", [5, 12, 140, -12, -140])
@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
def test_scores_that_grow_along_the_keys(device, kernel, jump, band):
    """The row maximum rises (or falls) by `jump` powers of 2 every 64 keys, far past 2^127.

    Kernels that leave the maximum of a row as it is while its exponentials stay small must still
    neither overflow nor lose the keys that count.
    """
    case = Case(130, 130 if device == "cpu" else 1000, 2, 1, 64, *band, torch.float16)
    q, k, v, _, _ = make_inputs(case, device)
    q[..., 0] = 1
    k[..., 0] = torch.arange(case.sk, device=device)[:, None] * (jump * math.log(2) / 64)
    k[..., 1:] /= 8
    out, lse = flash_cuda.fwd(q, k, v, scale=1.0, kernel=kernel, **case.window)
    exact, exact_lse = references(q, k, v, scale=1.0, **case.window)[0]
    # Not the 2x rule: PyTorch's own scores, rounded to float16, err by half a unit here.
    assert (out.double() - exact).abs().max() <= v.abs().max() * 2**-9
    close_lse(lse, exact_lse)


@pytest.mark.parametrize("device, kernel", KERNELS)
def test_infinite_scores(device, kernel):
    """-inf scores have weight 0, as in plain softmax."""
    q, k, v, _, _ = make_inputs(Case(64, 65, 1, 1, 64, *FULL, torch.float16), device)
    q, k[:, 7, :, 0] = q.abs(), float("-inf")
    out, lse = flash_cuda.fwd(q, k, v, kernel=kernel)
    exact, baseline = references(q, k, v)
    close_enough(out, exact[0], baseline[0])
    close_lse(lse, exact[1])


@pytest.mark.parametrize("device, kernel", KERNELS)
def test_forward_is_repeatable(device, kernel):
    q, k, v, _, _ = make_inputs(Case(257, 513, 6, 2, 128, *CAUSAL, torch.bfloat16), device)
    first = flash_cuda.fwd(q, k, v, window_right=0, kernel=kernel)
    for _ in range(5):
        again = flash_cuda.fwd(q, k, v, window_right=0, kernel=kernel)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("device, kernel", KERNELS)
@pytest.mark.parametrize("heads, heads_k", HEADS)
def test_gqa_is_repeated_heads(device, kernel, heads, heads_k):
    q, k, v, _, _ = make_inputs(Case(65, 65, heads, heads_k, 64, *CAUSAL, torch.float16), device)
    group = heads // heads_k
    repeated = [t.repeat_interleave(group, dim=2) for t in (k, v)]
    actual = flash_cuda.attention(q, k, v, causal=True, kernel=kernel)
    expected = flash_cuda.attention(q, *repeated, causal=True, kernel=kernel)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(device, dtype):
    q, k, v, _, _ = make_inputs(Case(65, 65, 4, 2, 64, *CAUSAL, torch.float32), device)
    expected = flash_cuda.attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True)
    with torch.autocast(device, dtype=dtype):
        assert torch.equal(flash_cuda.attention(q, k, v, causal=True), expected)
        assert torch.equal(flash_cuda.attention(q.to(dtype), k, v, causal=True), expected)
        assert torch.equal(flash_cuda.fwd(q, k, v, window_right=0)[0], expected)
        leaf = q.clone().requires_grad_()
        out = flash_cuda.attention(leaf, k, v, causal=True)
    out.sum().backward()
    assert leaf.grad.dtype == torch.float32 and leaf.grad.isfinite().all()


def test_autocast_leaves_float64():
    q, k, v, _, _ = make_inputs(Case(5, 5, 2, 2, 8, *FULL, torch.float64), "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_cuda.attention(q, k, v).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_autocast_casts_no_other_kinds(dtype):
    q = torch.ones(1, 4, 1, 8).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (flash_cuda.attention, flash_cuda.fwd):
            with pytest.raises(TypeError, match="q: expected a floating point dtype, got"):
                call(q, q, q)


@pytest.mark.parametrize("band", BANDS)
def test_huge_window_is_open(band):
    """A window wider than the sequence is no window, up to the largest 64-bit integer."""
    q, k, v, _, _ = make_inputs(FEW_CASES[2], "cpu")
    wide = [2**63 - 1 if side == -1 else side for side in band]
    expected = flash_cuda.attention(q, k, v, window=band)
    assert torch.equal(flash_cuda.attention(q, k, v, window=tuple(wide)), expected)
