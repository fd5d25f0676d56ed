"""`python -m flash_cuda doctor`."""

import subprocess
import sys

import pytest
import torch

from flash_cuda import cli, doctor


def test_command_line():
    result = subprocess.run(
        [sys.executable, "-m", "flash_cuda", "doctor"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert all(line.startswith("OK    ") for line in lines)
    assert f"torch {torch.__version__}" in result.stdout
    assert "forward and backward on cpu" in lines[-1]


def test_a_wrong_kernel_is_found(monkeypatch, capsys):
    right = doctor.flash_cuda.attention
    monkeypatch.setattr(
        doctor.flash_cuda, "attention", lambda *tensors, **options: right(*tensors, **options) * 1.1
    )
    assert cli.main(["doctor"]) == 1
    assert "FAIL  forward and backward on cpu" in capsys.readouterr().out


def test_nan_is_found(monkeypatch, capsys):
    right = doctor.flash_cuda.attention
    monkeypatch.setattr(
        doctor.flash_cuda,
        "attention",
        lambda *tensors, **options: right(*tensors, **options) * float("nan"),
    )
    assert cli.main(["doctor"]) == 1


def test_an_exception_is_one_line_with_a_remedy(monkeypatch, capsys):
    def broken(*tensors, **options):
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(doctor.flash_cuda, "attention", broken)
    assert cli.main(["doctor"]) == 1
    failure, remedy = capsys.readouterr().out.splitlines()[-2:]
    assert failure.endswith("RuntimeError: no kernel image is available")
    assert remedy.startswith("      -> ")


@pytest.mark.gpu
def test_gpu_lines():
    texts = [str(finding) for finding in doctor.findings()]
    assert any("GPU 0: " in t and "compute capability" in t and "driver" in t for t in texts)
    assert sum("forward and backward on cuda:0" in t for t in texts) == 2
    kernel, why = doctor.forward_kernel("cuda:0")
    backward = "hopper (v2 up to head_dim 32)" if kernel == "hopper" else "v2"
    said = f'GPU 0: kernel "auto" takes {kernel} forward, {backward} backward'
    assert f"OK    {said} ({why})" if why else f"OK    {said}" in texts


@pytest.mark.parametrize(
    "refusal",
    [
        'kernel "hopper" needs compute capability 9.0, this GPU has 8.0',
        'kernel "hopper" is not in this build: rebuild with TORCH_CUDA_ARCH_LIST=9.0a',
    ],
)
def test_why_auto_is_not_hopper(monkeypatch, refusal):
    def fwd(*tensors, kernel):
        assert kernel == "hopper" and all(t.numel() == 0 for t in tensors)
        raise RuntimeError(f"flash_cuda.fwd: {refusal}; available here: auto, v2\nmore")

    monkeypatch.setattr(doctor.flash_cuda, "fwd", fwd)
    assert doctor.forward_kernel("cpu") == ("v2", refusal)


def test_usage():
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
