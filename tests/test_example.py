"""examples/train_gpt.py on the CPU path: it learns, resumes exactly, agrees with plain softmax."""

import json

import pytest
import torch

from bench import train_context, train_curves

train_gpt = train_context.example()

TINY = ["--device", "cpu", "--layers", "2", "--heads", "2", "--dim", "32", "--context", "48",
        "--batch", "4", "--lr", "0.01"]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only lose by a second thread, and badly so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def small_text(monkeypatch):
    """A slice of the real text: reading all of the standard library would be most of the time."""
    text = torch.frombuffer(bytearray(open(train_gpt.__file__, "rb").read()), dtype=torch.uint8)
    monkeypatch.setattr(train_gpt, "standard_library", lambda: (text, text[:2000], "this file"))


def run(*options: str, measure_only: bool = True):
    return train_gpt.train(train_gpt.parse([*TINY, *options]), measure_only)


def test_the_text_is_the_standard_library_and_split(monkeypatch):
    monkeypatch.undo()
    train, validation, digest = train_gpt.standard_library()
    assert len(train) > 1_000_000 and 0.01 < len(validation) / len(train) < 0.2
    assert train.dtype == torch.uint8 and len(digest) == 16
    assert b"def " in bytes(validation.tolist())


def test_training_learns_and_reports(tmp_path, capsys):
    log = tmp_path / "log.json"
    assert train_gpt.main([*TINY, "--steps", "40", "--log", str(log)]) == 0
    said = capsys.readouterr().out
    assert "step 40/40: loss" in said and "--- sample\ndef " in said
    report = json.loads(log.read_text())
    assert len(report["losses"]) == 40
    assert sum(report["losses"][-5:]) / 5 < report["losses"][0] - 1.0
    assert report["validation_loss"] < report["losses"][0]
    assert report["tokens_per_s"] > 0 and report["peak_gib"] > 0 and not report["oom"]


def test_a_resumed_run_goes_on_exactly(tmp_path):
    file = str(tmp_path / "run.pt")
    whole = run("--steps", "8")
    run("--steps", "5", "--checkpoint", file)
    resumed = run("--steps", "8", "--resume", file)
    assert resumed.losses == whole.losses


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    file = str(tmp_path / "run.pt")
    run("--steps", "1", "--checkpoint", file)
    with pytest.raises(SystemExit, match="was made with --context 48, not 32"):
        run("--steps", "2", "--context", "32", "--resume", file)


def test_loss_curves_of_the_attention_kinds_agree():
    kinds = ("standard", "flash_cuda", "sdpa", "sdpa-flash")
    curves = {kind: run("--steps", "10", "--attention", kind).losses for kind in kinds}
    for kind in kinds[1:]:
        assert train_curves.difference(curves[kind], curves["standard"])["max"] < 1e-3, kind


@pytest.mark.parametrize("kind", train_gpt.SDPA_BACKENDS)
def test_sdpa_runs_the_backend_that_is_asked_for_or_none(kind):
    """A CPU has the flash backend alone; it must not stand in for the others."""
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    attend = train_gpt.attention_of(kind, "auto")
    if kind != "sdpa-flash":
        with pytest.raises(RuntimeError, match="(?i)no (viable|available) (backend|kernel)"):
            attend(q, q, q)
        return
    assert "FlashAttention" in attend(q, q, q).grad_fn.next_functions[0][0].name()


def test_speed_is_that_of_the_median_step_after_the_warm_up():
    assert train_gpt.median_speed([9.0] * train_gpt.WARMUP_STEPS, 10) is None
    seconds = [9.0] * train_gpt.WARMUP_STEPS + [2.0, 2.0, 7.0]
    assert train_gpt.median_speed(seconds, 10) == 5.0


def test_running_out_of_memory_is_a_row(monkeypatch):
    def exhausted(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train_gpt, "attention_of", lambda kind, kernel: exhausted)
    report = run("--steps", "2", "--attention", "standard")
    assert report.oom
    assert train_gpt.describe(report) == "standard | context 48 | out of memory"


def test_context_sweep_and_curves_write_their_tables(tmp_path):
    options = [*TINY[2:], "--steps", "5", "--out", str(tmp_path), "--formats", "json,md"]
    contexts = ["--contexts", "16,32", "--kinds", "standard,flash_cuda"]
    assert train_context.main([*contexts, "--device", "cpu", *options]) == 0
    (page,) = tmp_path.glob("train_context_*.md")
    assert "| context | standard | flash_cuda |" in page.read_text()
    assert train_curves.main(["--kinds", "standard,flash_cuda", "--device", "cpu", *options]) == 0
    (page,) = tmp_path.glob("train_curves_*.md")
    assert "| standard and flash_cuda |" in page.read_text()


def test_a_kind_may_name_its_kernel(tmp_path, capsys):
    """A CPU has `auto` and `reference`; v1 is refused there, in a line that says so."""
    kinds = ["--kinds", "standard,flash_cuda:auto,flash_cuda:reference,flash_cuda:v1,sdpa-cudnn"]
    options = [*TINY, "--steps", "4", "--out", str(tmp_path), "--formats", "json,md"]
    assert train_curves.main([*kinds, *options]) == 0
    said = capsys.readouterr().out
    assert 'flash_cuda:v1 | context 48 | ValueError: flash_cuda.fwd: kernel "v1" runs on' in said
    assert "sdpa-cudnn | context 48 | RuntimeError: " in said
    result = json.loads(next(tmp_path.glob("train_curves_*.json")).read_text())
    runs = ["standard", "flash_cuda:auto", "flash_cuda:reference"]
    assert [row["attention"] for row in result["rows"]] == result["contestants"] == runs
    assert [row["settings"]["kernel"] for row in result["rows"]] == ["auto", "auto", "reference"]
    assert [pair["runs"] for pair in result["differences"]][-1] == runs[1:]
    assert result["differences"][-1]["max"] == 0.0  # the CPU's auto is the reference
    assert train_context.main([*kinds, "--contexts", "16", *options]) == 0
    page = next(tmp_path.glob("train_context_*.md")).read_text()
    assert "| context | standard | flash_cuda:auto | flash_cuda:reference | flash_cuda:v1 |" in page
    assert page.count(" tokens/s |") == 3 and page.rstrip().endswith("| - | - |")


@pytest.mark.parametrize("kind", ["sdpa:v2", "flash_cuda:", "flash", "sdpa-math"])
def test_a_kind_that_names_nothing_is_refused(kind):
    with pytest.raises(SystemExit):
        train_context.parse(kind, TINY)


def test_the_context_sweep_times_many_short_steps_and_few_long_ones():
    timed = [train_context.steps_of(2**n) - train_gpt.WARMUP_STEPS for n in (10, 12, 14, 15, 17)]
    assert timed == [32, 32, 8, 4, 2]


def test_gpu_and_cpu_have_their_own_defaults():
    on_cpu = train_gpt.parse(["--device", "cpu"])
    assert (on_cpu.dtype, on_cpu.context) == ("fp32", train_gpt.PRESETS["cpu"][0])
    on_gpu = train_gpt.parse(["--device", "cuda"])
    assert (on_gpu.dtype, on_gpu.context) == ("bf16", train_gpt.PRESETS["small"][0])
