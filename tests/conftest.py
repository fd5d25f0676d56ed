"""Options and fixtures of all tests, the inputs they share, and the rule that judges accuracy."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_cuda import doctor, ops
from flash_cuda.reference import naive
from tests import gpu_report
from tests.cases import Case, SmallGpu

KEPT_BYTES = 1 << 30  # GPU memory that torch may keep from one test for the next


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-report",
        type=Path,
        metavar="PATH",
        help="write counts, GPU, versions and the hash of the tested sources to PATH (JSON)",
    )


def pytest_collection_modifyitems(config, items):
    reason = None
    if not torch.cuda.is_available():
        reason = "needs a CUDA GPU"
    elif not ops.HAS_CUDA_KERNELS:
        reason = "this build holds no CUDA kernels"
    no_hopper = reason
    if not reason and any(item.get_closest_marker("hopper") for item in items):
        no_hopper = doctor.forward_kernel("cuda")[1]
    for item in items:
        if item.get_closest_marker("large"):
            item.add_marker(pytest.mark.gpu)
            if config.pluginmanager.hasplugin("xdist"):
                # Two at a time would not fit: with --dist loadgroup one worker runs them all.
                item.add_marker(pytest.mark.xdist_group("large"))
        why_not = no_hopper if item.get_closest_marker("hopper") else reason
        if why_not and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=why_not))


def limit_gpu(kernel: str, monkeypatch) -> None:
    """What SmallGpu asks for, until the end of the test."""
    if isinstance(kernel, SmallGpu):
        monkeypatch.setenv("FLASH_CUDA_MULTIPROCESSOR_LIMIT", str(kernel.MULTIPROCESSORS))


@pytest.fixture(autouse=True)
def limit_gpu_of_parameter(request, monkeypatch):
    callspec = getattr(request.node, "callspec", None)
    limit_gpu(callspec.params.get("kernel") if callspec else None, monkeypatch)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Leaves the memory of a large test to the other workers, which share the GPU."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        # The exception of a test that failed holds its tensors, until the next test.
        for name in ("last_exc", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        gc.collect()
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    path = session.config.getoption("--gpu-report")
    is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist: the controller writes
    if path is None or is_worker:
        return
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    outcomes = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    gpu_report.write(path, {name: len(stats.get(name, ())) for name in outcomes})


def poison(device: str) -> None:
    """Leaves NaN in the memory of the next allocations: what a kernel fails to write shows."""
    # CUDA: torch's pools of small and of large blocks; CPU: malloc keeps only what is small.
    sizes = (1 << 12, 1 << 16, 1 << 19, 1 << 20, 3 << 20, 24 << 20)
    blocks = [
        torch.full((size // 4,), float("nan"), device=device)
        for size in (sizes if device == "cuda" else sizes[:2])
        for _ in range(4)
    ]
    del blocks


def make_inputs(case: Case, device: str, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, dout, dlse of a case; the mean is not zero, so that a lost term shows."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=case.dtype):
        return (torch.randn(shape, generator=generator) + 0.25).to(device, dtype)

    query = (case.batch, case.sq, case.heads, case.head_dim)
    key = (case.batch, case.sk, case.heads_k, case.head_dim)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    dlse = randn(case.batch, case.heads, case.sq, dtype=lse_dtype)
    return randn(*query), randn(*key), randn(*key), randn(*query), dlse


def references(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[tuple, tuple]:
    """(out, lse) in float64, and as PyTorch computes them in the dtype of the inputs."""
    exact = naive.attention(q.double(), k.double(), v.double(), **options)
    return exact, naive.attention(q, k, v, **options)


def gradients_of(function, q, k, v, dout, dlse=None) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of sum(out * dout) [+ sum(lse * dlse)] for function(q, k, v) -> (out, lse)."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = function(*inputs)
    outputs, weights = [out], [dout.to(out.dtype)]
    if dlse is not None:
        # A row without keys has lse = -inf whatever the inputs: its gradient is zero.
        outputs.append(lse)
        weights.append(dlse.to(lse.dtype))
    return torch.autograd.grad(outputs, inputs, weights)


def reference_gradients(q, k, v, dout, dlse=None, **options) -> tuple[tuple, tuple]:
    """(dq, dk, dv) in float64, and as PyTorch computes them in the dtype of the inputs."""

    def attend(q, k, v):
        return naive.attention(q, k, v, **options)

    exact = gradients_of(attend, q.double(), k.double(), v.double(), dout, dlse)
    return exact, gradients_of(attend, q, k, v, dout, dlse)


def close_enough(actual: Tensor, exact: Tensor, baseline: Tensor, name: str = "out") -> None:
    """The 2x rule: the error is at most twice that of PyTorch in the same dtype, plus a little.

    The little is half a rounding of the largest value for 16-bit types (64 for wider ones, whose
    sums differ in order) and 5e-5 for gradients whose exact value is zero.
    """
    assert actual.shape == exact.shape, f"{name}: {tuple(actual.shape)} != {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    roundings, floor = (0.5, 5e-5) if actual.dtype.itemsize == 2 else (64, 64 * eps)
    error = (actual.double() - exact).abs().max().item()
    unit = (baseline.double() - exact).abs().max().item()
    allowed = 2 * unit + roundings * eps * exact.abs().max().item() + floor
    assert error <= allowed, (
        f"{name}: error {error:.3g} > {allowed:.3g} (PyTorch errs by {unit:.3g})"
    )


def close_lse(actual: Tensor, exact: Tensor) -> None:
    """lse is float32 whatever the inputs: 1e-4 absolute and relative, -inf where no key is."""
    assert actual.shape == exact.shape
    dead = exact == float("-inf")
    assert torch.equal(actual == float("-inf"), dead)
    torch.testing.assert_close(actual[~dead].double(), exact[~dead], rtol=1e-4, atol=1e-4)
