"""The benchmarks' arithmetic, tables, files and control flow, on a machine without a GPU."""

import contextlib
import json
import math

import pytest
import torch

from bench import all as bench_all
from bench import (
    backward,
    charts,
    common,
    forward,
    memory,
    overhead,
    peers,
    race,
    readme,
    report,
    tables,
    timing,
    train_curves,
)

SPECIMEN = {"batch": 2, "heads": 4, "heads_kv": 4, "head_dim": 64, "dtype": "bf16"}


def row(contestant: str, seqlen: int, us: float, causal: bool = False) -> dict:
    return {
        **SPECIMEN,
        "seqlen": seqlen,
        "causal": causal,
        "contestant": contestant,
        "us": us,
        "tflops": 1000 / us,
        "percent_of_ceiling": 50.0,
        "spread": 0.01,
        "samples": 30,
        "late": False,
    }


def standard_contestant(name: str, attend=peers.standard_attention, **options) -> peers.Contestant:
    return peers.Contestant(name, "1.0", attend, **options)


@pytest.fixture
def without_gpu(monkeypatch):
    """Run a benchmark's whole main on the CPU: GPU clocks and counters are stand-ins."""
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "require_gpu", lambda module: None)
    monkeypatch.setattr(common, "context_is_lost", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "flush_buffer", lambda: torch.empty(8))
    monkeypatch.setattr(timing, "matmul_ceiling_tflops", lambda: 800.0)

    def fake_race(runs, flush, budget_s):
        for run in runs:
            run()
        return [timing.Timing.of([10.0 * (i + 1)] * 3, False) for i in range(len(runs))]

    monkeypatch.setattr(timing, "time_in_turn", fake_race)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only lose by a second thread
    yield
    torch.set_num_threads(threads)


# --- arithmetic


def test_flops_of_the_forward_are_those_of_the_papers():
    assert common.attention_flops(1, 1, 1, 1, 1, causal=False) == 4
    assert common.attention_flops(2, 3, 5, 7, 11, causal=False) == 4 * 2 * 3 * 5 * 7 * 11
    full = common.attention_flops(1, 16, 16384, 16384, 128, causal=False)
    assert common.attention_flops(1, 16, 16384, 16384, 128, causal=True) == full / 2
    assert common.BACKWARD_FLOPS == 2.5


def test_geometric_mean():
    assert common.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert common.geometric_mean(x for x in (1.0, 4.0)) == pytest.approx(2.0)
    assert math.isnan(common.geometric_mean([]))


def test_promised_bytes_count_each_tensor_of_the_contract():
    out, lse = 1024 * 16 * 128 * 2, 1024 * 16 * 4
    promised = memory.promised_bytes(1, 1024, 16, 4, 128)
    assert promised["forward"] == out + lse
    dq, dk_dv, accumulator = out, 2 * out // 4, 2 * out
    assert promised["training"] == out + lse + dq + dk_dv + accumulator + lse


def test_launches_keep_to_the_budget():
    assert timing.launches_per_round([10.0, 10.0], budget_s=1.0) == 8  # short: the most there are
    assert timing.launches_per_round([21_000.0, 21_000.0], budget_s=1.0) == 3
    assert timing.launches_per_round([1e6], budget_s=1.0) == 2  # long: the least


def test_loss_curves_are_compared_step_by_step():
    gap = train_curves.difference([3.0, 2.0, 1.0], [3.0, 2.5, 1.1])
    assert gap["max"] == pytest.approx(0.5)
    assert gap["mean"] == pytest.approx(0.2)


# --- tables and summaries


def test_table_prints_shape_time_speed_ceiling_and_ratios():
    names = ["flash_cuda", "sdpa-flash", "fa3"]
    line = tables.race_row(
        "d64", [row("flash_cuda", 512, 10.0), row("sdpa-flash", 512, 12.5)], names
    )
    assert line == "| d64 | 10.0 | 100 | 50 | 1.25x (80) | - |"
    assert tables.race_header(names).startswith("| shape | flash_cuda us | TFLOP/s | % of matmul |")
    without_ours = tables.race_row("d64", [row("fa3", 512, 10.0)], names)
    assert without_ours == "| d64 | - | - | - | - | - (100) |"


def test_summary_gives_geometric_mean_and_least_cell():
    rows = [
        row("flash_cuda", 512, 10.0),
        row("sdpa-flash", 512, 20.0),
        row("flash_cuda", 1024, 10.0),
        row("sdpa-flash", 1024, 5.0),
        row("flash_cuda", 4096, 10.0),  # the peer failed here: not counted
    ]
    summary = tables.summarize(rows, ["flash_cuda", "sdpa-flash", "fa3"])
    assert set(summary) == {"sdpa-flash"}
    assert summary["sdpa-flash"] == {
        "geometric_mean": 1.0,
        "min": 0.5,
        "min_cell": "d64 full s1024 b2 h4",
        "cells": 2,
    }
    assert "geometric mean 1.000x" in tables.summary_text(summary, "flash_cuda")
    assert tables.check_bar(summary, "sdpa-flash:0.9:0.5") == 0
    assert tables.check_bar(summary, "sdpa-flash:1.05:0.5") == 1
    assert tables.check_bar(summary, "ours:fp16:1.0:0.5") == 1  # ran no cell


def test_readme_markers_are_filled_and_only_they():
    text = "a\n<!-- bench:forward -->\nold\n<!-- /bench:forward -->\nb\n"
    filled = readme.fill(text, "forward", "new \\1")
    assert filled == "a\n<!-- bench:forward -->\nnew \\1\n<!-- /bench:forward -->\nb\n"
    assert readme.fill(text, "memory", "x") == text
    marked = (common.REPOSITORY / "README.md").read_text()
    for name in readme.RENDER:
        assert readme.fill(marked, name, "measured") != marked, f"README.md has no {name} marker"


# --- peers


def test_peers_that_are_not_here_become_reasons():
    found, missing = peers.discover("sdpa-flash,fa2,fa3,fa4")
    assert {c.name for c in found} | set(missing) == {"sdpa-flash", "fa2", "fa3", "fa4"}
    assert "sdpa-flash" not in missing
    assert all(missing.values())
    assert peers.discover("none") == ([], {})


def test_unknown_peer_is_an_error_that_lists_the_names():
    with pytest.raises(ValueError, match="expected sdpa-flash, .* or ours:VARIANT, got fa9"):
        peers.discover("fa9")


def test_own_variants_are_peers():
    found, missing = peers.discover("ours:fp16,ours:deterministic,ours:v2")
    assert not missing
    names = [contestant.name for contestant in found]
    assert names == ["ours:fp16", "ours:deterministic", "ours:v2"]
    assert found[0].dtype is torch.float16


def test_top_left_causal_peers_sit_out_where_the_masks_differ():
    peer = standard_contestant("sdpa", top_left_causal=True)
    assert peer.unable(8, 8, causal=True, backward=False) is None
    assert peer.unable(8, 9, causal=False, backward=False) is None
    assert "top-left" in peer.unable(8, 9, causal=True, backward=False)
    forward_only = standard_contestant("fa3", has_backward=False)
    assert "backward" in forward_only.unable(8, 8, causal=False, backward=True)


@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_and_sdpa_agree_with_groups(causal):
    q, k, v = (torch.randn(2, 9, heads, 8) for heads in (4, 2, 2))
    expected = peers.sdpa_on_views(q, k, v, causal)
    torch.testing.assert_close(peers.standard_attention(q, k, v, causal), expected)


def test_disagreement_catches_wrong_and_nan():
    right = torch.randn(4, 8)
    assert race.disagreement((right,), (right * 1.001,)) is None
    assert "result 0" in race.disagreement((right,), (right * 1.1,))
    assert race.disagreement((right,), (right * math.nan,)) is not None


# --- timing


def test_a_spin_that_ends_too_early_is_doubled(monkeypatch):
    slept = []

    class FakeEvent:
        def __init__(self, enable_timing=False):
            pass

        def record(self):
            pass

        def query(self):
            return len(slept) < 3

        def elapsed_time(self, end):
            return 0.5

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runs = []
    lane = timing.Lane(lambda: runs.append(1))
    assert lane.sample(2, torch.ones(4)) == [500.0, 500.0]
    first = timing.FIRST_SPIN_CYCLES
    assert slept == [first, 2 * first, 4 * first]
    assert not lane.late
    assert len(runs) == 6


def test_contestants_are_timed_in_turn(monkeypatch):
    order = []

    def fake_sample(self, launches, flush):
        order.append(self.run())
        return [float(self.run())] * launches

    monkeypatch.setattr(timing.Lane, "sample", fake_sample)
    times = timing.time_in_turn([lambda: 1, lambda: 2, lambda: 3], torch.ones(1), 1.0)
    assert [t.median for t in times] == [1.0, 2.0, 3.0]
    assert all(t.samples == timing.ROUNDS * 8 for t in times)
    assert order[3:12] == [1, 2, 3, 2, 3, 1, 3, 1, 2]


# --- whole benchmarks


@pytest.mark.parametrize("module", [forward, backward, memory, overhead, bench_all])
def test_without_a_gpu_one_sentence_and_status_2(module, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as leaving:
        module.main([])
    assert leaving.value.code == common.NO_GPU_EXIT
    said = capsys.readouterr().out.strip()
    assert "measures a CUDA GPU" in said and "\n" not in said


def broken(q, k, v, causal):
    raise RuntimeError("this peer is broken\nand says so at length")


def wrong(q, k, v, causal):
    return peers.standard_attention(q, k, v, causal) * 1.5


@pytest.mark.parametrize("module, name", [(forward, "forward"), (backward, "backward")])
def test_a_grid_survives_peers_and_writes_its_files(
    module, name, without_gpu, monkeypatch, tmp_path, capsys
):
    contestants = [
        standard_contestant("good"),
        standard_contestant("broken", broken),
        standard_contestant("wrong", wrong),
    ]
    monkeypatch.setattr(peers, "ours", lambda kernel: standard_contestant("flash_cuda"))
    monkeypatch.setattr(peers, "discover", lambda *_: (contestants, {"fa3": "not installed"}))
    shapes = ["--d", "16", "--seq", "32,64", "--tokens", "64", "--hidden", "32", "--gqa", "2"]
    status = module.main([*shapes, "--out", str(tmp_path), "--bar", "good:1.5:1.5"])
    said = capsys.readouterr().out
    assert status == 0 and "bar good:1.5:1.5: passed" in said
    assert "not here: fa3 (not installed)" in said
    assert "broken left out of d16 full s32 b2 h2/1: RuntimeError: this peer is broken\n" in said
    assert "wrong left out of d16 full s32 b2 h2/1: disagrees" in said
    (path,) = tmp_path.glob(f"{name}_*.json")
    result = json.loads(path.read_text())
    assert result["schema"] == common.SCHEMA and result["name"] == name
    assert {"gpu", "torch", "cuda", "commit", "date", "peers", "flash_cuda"} <= set(
        result["environment"]
    )
    assert len(result["rows"]) == 2 * 4 and len(result["skipped"]) == 2 * 4
    assert result["summary"]["good"]["geometric_mean"] == 2.0
    first = result["rows"][0]
    factor = common.BACKWARD_FLOPS if module is backward else 1.0
    flops = common.attention_flops(2, 2, 32, 32, 16, causal=False) * factor
    assert first["tflops"] == round(flops / 10.0 * 1e-6, 2)
    page = path.with_suffix(".md").read_text()
    assert "| d16 causal s64 b1 h2/1 | 10.0 |" in page and "2.00x" in page
    assert "- wrong: disagrees" in page
    assert "2.00x" not in readme.compact_grid(result)  # only SDPA's flash stands in the README


def test_memory_table_says_where_the_promise_was_missed(without_gpu, monkeypatch, tmp_path, capsys):
    promised = memory.promised_bytes(1, 64, 2, 2, 16)
    peaks = iter([(None, None), (None, None), (promised["forward"], 7), (None, 2**20)])
    monkeypatch.setattr(memory, "measure", lambda *_: next(peaks))
    racing = [standard_contestant("flash_cuda"), standard_contestant("standard")]
    monkeypatch.setattr(memory, "contestants", lambda kernel: racing)
    options = ["--tokens", "64", "--heads", "2", "--d", "16", "--out", str(tmp_path)]
    assert memory.main(options) == 1
    assert "and 7" in capsys.readouterr().out
    (path,) = tmp_path.glob("memory_*.md")
    assert "| 64 | 0.0 | 0.0 | out of memory |" in path.read_text()


def test_memory_measures_forward_and_training(without_gpu, monkeypatch):
    calls = []

    def fake_peak(call):
        call()
        calls.append(call.__name__)
        return len(calls)

    monkeypatch.setattr(memory, "peak_beyond_inputs", fake_peak)
    assert memory.measure(standard_contestant("standard"), (1, 16, 2, 1, 8), True) == (1, 2)


def test_overhead_runs_every_phase(without_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(overhead, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setattr(overhead, "SHAPE", (1, 8, 2, 8))
    contestants = [
        standard_contestant("sdpa-flash"),
        standard_contestant("other"),
        standard_contestant("broken", broken),
    ]
    monkeypatch.setattr(peers, "discover", lambda *_: (contestants, {}))
    status = overhead.main(["--calls", "1", "--loops", "2", "--out", str(tmp_path)])
    assert status == 0
    (path,) = tmp_path.glob("overhead_*.json")
    rows = {r["contestant"]: r for r in json.loads(path.read_text())["rows"]}
    assert all(rows["sdpa-flash"][phase] > 0 for phase in overhead.PHASES)
    assert all(rows["flash_cuda.attention"][phase] > 0 for phase in overhead.PHASES)
    assert all(rows["broken"][phase] is None for phase in overhead.PHASES)


def test_every_result_kind_has_a_page_and_charts_draw(tmp_path):
    assert set(charts.CHARTS) <= set(report.MARKDOWN) and set(readme.RENDER) <= set(report.MARKDOWN)
    pytest.importorskip("matplotlib")
    result = {
        "schema": 1,
        "name": "memory",
        "shape": "b1",
        "environment": common.environment(),
        "contestants": ["flash_cuda", "standard"],
        "rows": [
            {
                "tokens": tokens,
                "contestant": name,
                "forward": 2**20,
                "training": None if name == "standard" else 2**21,
                "promised": {"forward": 2**20, "training": 2**21},
            }
            for tokens in (1024, 2048)
            for name in ("flash_cuda", "standard")
        ],
    }
    path = tmp_path / "memory_cpu.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path)]) == 0
    assert "| 1,024 | 2.0 | 2.0 | out of memory |" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").stat().st_size > 1000
