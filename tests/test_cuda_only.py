"""What only a GPU has: streams, graphs, devices, no synchronising, memory, grids, shared memory."""

import pytest
import torch

import flash_cuda
from tests.cases import CAUSAL, FULL, HEAD_DIMS, TILE_HEAD_DIMS, Case
from tests.conftest import (
    close_enough,
    close_lse,
    gradients_of,
    make_inputs,
    poison,
    reference_gradients,
    references,
)

pytestmark = pytest.mark.gpu

on_each_kernel = pytest.mark.parametrize(
    "kernel", [pytest.param("hopper", marks=pytest.mark.hopper), "v2"]
)
SMALL = Case(129, 257, 4, 2, 64, *CAUSAL, torch.bfloat16)
ROWS = 64  # the dq accumulator holds whole blocks of as many queries


def run(q, k, v, dout, dlse=None, kernel="auto", **options):
    """out, lse, dq, dk, dv of the raw ops, deterministic; `kernel` is that of the forward."""
    out, lse = flash_cuda.fwd(q, k, v, window_right=0, kernel=kernel)
    options = {"window_right": 0, "deterministic": True, **options}
    return (out, lse, *flash_cuda.bwd(dout, q, k, v, out, lse, dlse=dlse, **options))


def same(actual, expected):
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@on_each_kernel
def test_side_stream(kernel):
    """The op runs on the current stream: after its earlier work, before its later work."""
    inputs = make_inputs(SMALL, "cuda")
    expected = run(*inputs, kernel=kernel)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(t) for t in inputs]
        torch.cuda._sleep(50_000_000)
        for slow, ready in zip(late, inputs, strict=True):
            slow.copy_(ready)
        actual = run(*late, kernel=kernel)
        for slow in late:
            slow.zero_()
    stream.synchronize()
    same(actual, expected)


@on_each_kernel
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 59, 128, 256])
def test_graph(kernel, deterministic, head_dim):
    """Captured once, replayed with other inputs: the results are those of an eager call."""
    case = Case(129, 257, 4, 2, head_dim, *CAUSAL, torch.bfloat16)
    static = make_inputs(case, "cuda")
    options = {"kernel": kernel, "deterministic": deterministic}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*static, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*static, **options)
    for seed in (1, 2, 3):
        fresh = make_inputs(case, "cuda", seed)
        for place, value in zip(static, fresh, strict=True):
            place.copy_(value)
        graph.replay()
        expected = run(*fresh, **options)
        if deterministic:
            same(captured, expected)
        for actual, e in zip(captured, expected, strict=True):
            torch.testing.assert_close(actual, e, rtol=0.02, atol=0.02)


@on_each_kernel
def test_graph_of_a_training_step(kernel):
    q, k, v, dout, _ = make_inputs(SMALL, "cuda")
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def step():
        options = {"causal": True, "deterministic": True, "kernel": kernel}
        flash_cuda.attention(*leaves, **options).backward(dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    expected = [t.grad.clone() for t in leaves]
    for t in leaves:
        t.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    same([t.grad for t in leaves], expected)


@on_each_kernel
def test_never_synchronises(kernel):
    inputs = make_inputs(SMALL, "cuda")
    leaves = [t.requires_grad_() for t in inputs[:3]]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*(t.detach() for t in inputs), kernel=kernel)
        flash_cuda.attention(*leaves, causal=True, kernel=kernel).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_each_kernel
def test_returns_before_the_gpu_is_done(kernel):
    inputs = make_inputs(SMALL, "cuda")
    run(*inputs, kernel=kernel)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    run(*inputs, kernel=kernel)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@on_each_kernel
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_case_31_other_device(kernel):
    """FA #54, #1782, flashinfer #452, #924: tensors on cuda:1 while cuda:0 is current."""
    inputs = make_inputs(SMALL, "cuda:0")
    expected = run(*inputs, kernel=kernel)
    actual = run(*(t.to("cuda:1") for t in inputs), kernel=kernel)
    assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda:1") for t in actual)
    same([t.to("cuda:0") for t in actual], expected)
    q, k, v, _, _ = inputs
    with pytest.raises(RuntimeError, match="k: expected device cuda:0 like q, got cuda:1"):
        flash_cuda.fwd(q, k.to("cuda:1"), v)


def _allocated(function):
    """(result, bytes that it left allocated, bytes that it had allocated at most), as asked for."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = function()
    after = torch.cuda.memory_stats()
    current, peak = (after[f"requested_bytes.all.{what}"] for what in ("current", "peak"))
    return result, current - before, peak - before


def _bytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def _up(value, step):
    return (value + step - 1) // step * step


@on_each_kernel
@pytest.mark.parametrize("head_dim", TILE_HEAD_DIMS)
@pytest.mark.parametrize("seqlen", [1000, 4096])
def test_memory(kernel, head_dim, seqlen):
    """Forward: out, lse. Backward: dq, dk, dv, one float32 dq accumulator and row vector."""
    case = Case(seqlen, seqlen, 8, 2, head_dim, *CAUSAL, torch.bfloat16)
    q, k, v, dout, _ = make_inputs(case, "cuda")
    options = {"window_right": 0, "kernel": kernel}
    (out, lse), left, peak = _allocated(lambda: flash_cuda.fwd(q, k, v, **options))
    assert left == peak == _bytes(out, lse)
    gradients, left, peak = _allocated(
        lambda: flash_cuda.bwd(dout, q, k, v, out, lse, window_right=0)
    )
    assert left == _bytes(*gradients)
    row_vector = 4 * case.batch * case.heads * seqlen
    accumulator = 4 * case.batch * case.heads * _up(seqlen, ROWS) * head_dim
    assert peak == left + accumulator + row_vector
    (dq, dk, dv), left, peak = _allocated(
        lambda: flash_cuda.bwd(
            dout, q, k, v, out, lse, window_right=0, need_dq=False, need_dk=False
        )
    )
    assert left == _bytes(dv) and peak == left + row_vector


def test_out_of_memory_is_torchs_own_error():
    q = torch.empty(1, 1 << 20, 16, 64, device="cuda", dtype=torch.float16)  # 2 GiB
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="flash_cuda: CUDA out of memory"):
            flash_cuda.attention(q, q[:, :8], q[:, :8])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@on_each_kernel
def test_memory_of_views(kernel):
    """Slices of one projection, columns and transposed tensors are read where they lie."""
    qkv = torch.randn(2, 1024, 3, 8, 64, device="cuda", dtype=torch.float16)
    heads_first = torch.randn(3, 2, 8, 1024, 64, device="cuda", dtype=torch.float16)
    columns = [t[..., 16:48] for t in qkv.unbind(2)]
    for views in (qkv.unbind(2), columns, [t.transpose(1, 2) for t in heads_first]):
        (out, lse), _, peak = _allocated(lambda t=views: flash_cuda.fwd(*t, kernel=kernel))
        assert peak == _bytes(out, lse)


@on_each_kernel
@pytest.mark.parametrize("batch, heads", [(70000, 1), (1, 70000), (300, 300)])
def test_no_grid_limit(kernel, batch, heads):
    """More than 65,535 batches times heads."""
    torch.manual_seed(0)
    shape = (batch, 3, heads, 32)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(4)]
    poison("cuda")
    actual = run(*inputs, kernel=kernel)
    last = run(*(t[-1:, :, -1:].contiguous() for t in inputs), kernel=kernel)
    same([t[-1:, :, -1:] for t in (actual[0], *actual[2:])], [last[0], *last[2:]])
    assert all(t.isfinite().all() for t in actual)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("band", [FULL, CAUSAL, (3000, 0)])
def test_deterministic_over_many_waves(head_dim, band):
    """Blocks that wait for their turn are many times those that run at once."""
    case = Case(8192, 8192, 16, 8, head_dim, *band, torch.bfloat16, 1)
    q, k, v, dout, _ = make_inputs(case, "cuda")
    out, lse = flash_cuda.fwd(q, k, v, **case.window)

    def gradients(deterministic):
        return flash_cuda.bwd(dout, q, k, v, out, lse, deterministic=deterministic, **case.window)

    first = gradients(True)
    same(gradients(True), first)
    same(gradients(True), first)
    for actual, expected in zip(gradients(False), first, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


@on_each_kernel
@pytest.mark.parametrize("batch, sq, sk", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty_and_padded(kernel, batch, sq, sk):
    """Head dims that are padded, where there is nothing to pad."""
    q, dout = (torch.randn(batch, sq, 2, 59, device="cuda", dtype=torch.float16) for _ in "qo")
    k, v = (torch.randn(batch, sk, 1, 59, device="cuda", dtype=torch.float16) for _ in "kv")
    out, lse, *gradients = run(q, k, v, dout, kernel=kernel)
    assert (out == 0).all() and (lse == float("-inf")).all()
    assert all(
        (g == 0).all() and g.shape == t.shape for g, t in zip(gradients, (q, k, v), strict=True)
    )


@on_each_kernel
@pytest.mark.large
def test_more_than_2_31_elements_in_one_sequence(kernel):
    """Row offsets within one batch and head pass 2^31 in slices of a very wide tensor."""
    q, k, v, dout, _ = make_inputs(Case(257, 257, 2, 2, 64, *CAUSAL, torch.float16, 1), "cuda")
    expected = run(q, k, v, dout, kernel=kernel)
    wide = torch.empty(1, 257, (2**31 // 256 + 8) // 8 * 8, device="cuda", dtype=torch.float16)
    views = []
    for n, t in enumerate((q, k, v, dout)):
        view = wide[..., n * 128 : (n + 1) * 128].unflatten(2, (2, 64))
        views.append(view.copy_(t))
    assert views[0].stride(1) * 256 > 2**31
    same(run(*views, kernel=kernel), expected)
    del wide, views
    torch.cuda.empty_cache()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("band", [FULL, CAUSAL])
@pytest.mark.parametrize("deterministic", [False, True])
def test_99_kb_of_shared_memory(monkeypatch, head_dim, band, deterministic):
    """The tiles for GPUs of compute capability 8.6 and 8.9 (99 KB a block), forced on this one.

    "auto" is v2 then, on Hopper too.
    """
    monkeypatch.setenv("FLASH_CUDA_SHARED_MEMORY_LIMIT", "101376")
    case = Case(257, 385, 4, 2, head_dim, *band, torch.bfloat16)
    q, k, v, dout, dlse = make_inputs(case, "cuda")
    poison("cuda")
    window = (case.left, case.right)

    def attend(q, k, v):
        return flash_cuda.attention(
            q, k, v, window=window, return_lse=True, deterministic=deterministic
        )

    exact, baseline = references(q, k, v, **case.window)
    out, lse = attend(q, k, v)
    assert torch.equal(out, flash_cuda.attention(q, k, v, window=window, kernel="v2"))
    close_enough(out, exact[0], baseline[0])
    close_lse(lse, exact[1])
    exact, baseline = reference_gradients(q, k, v, dout, dlse, **case.window)
    actual = gradients_of(attend, q, k, v, dout, dlse)
    for name, a, e, b in zip(("dq", "dk", "dv"), actual, exact, baseline, strict=True):
        close_enough(a, e, b, name)
