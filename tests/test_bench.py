"""The benchmarks' arithmetic, tables, files and control flow, on a machine without a GPU."""

import contextlib
import json
import math
import sys
import types

import pytest
import torch

from bench import (
    accuracy,
    backward,
    charts,
    common,
    forward,
    gqa,
    grid,
    memory,
    overhead,
    peers,
    race,
    readme,
    report,
    small,
    timing,
    train_curves,
    train_step,
)
from bench import all as bench_all
from bench.contestants import hidden


def standard_contestant(name: str, attend=peers.standard_attention, **options) -> peers.Contestant:
    return peers.Contestant(name, "1.0", attend, **options)


def race_these(monkeypatch, mine: peers.Contestant, found: list, missing: dict | None = None):
    """Let every benchmark find these contestants."""
    monkeypatch.setattr(peers, "ours", lambda kernel: mine)
    monkeypatch.setattr(peers, "discover", lambda *_: (found, missing or {}))


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
    assert timing.launches_per_round([13_000.0, 13_000.0], budget_s=1.0) == 6
    assert timing.launches_per_round([1e6], budget_s=1.0) == 4  # long: the least
    assert timing.ROUNDS * timing.LEAST_LAUNCHES >= 24


@pytest.mark.parametrize("sq, sk", [(7, 7), (5, 9), (9, 5), (1, 6)])
def test_visible_pairs_are_those_of_the_mask(sq, sk):
    for left in (-1, 0, 2, 20):
        for right in (-1, 0, 3):
            seen = ~hidden(range(sq), sq, sk, False, (left, right), "cpu")
            assert grid.visible_pairs(sq, sk, left, right) == int(seen.sum())


def test_a_window_counts_the_pairs_that_it_shows():
    cell = grid.Cell(1, 16384, 16, 16, 128, True, "bf16", window=1024)
    assert cell.band() == {"window": (1024, 0)}
    pairs = 1024 * 1025 // 2 + (16384 - 1024) * 1025
    assert cell.flops() == 4 * 16 * pairs * 128
    assert str(cell) == "d128 causal w1024 s16384 b1 h16"
    both_sides = grid.Cell(1, 64, 2, 2, 16, False, "bf16", window=8)
    assert both_sides.band() == {"window": (8, 8)}
    assert grid.Cell(1, 64, 2, 2, 16, True, "bf16").band() == {}


def test_loss_curves_are_compared_step_by_step():
    gap = train_curves.difference([3.0, 2.0, 1.0], [3.0, 2.5, 1.1])
    assert gap["max"] == pytest.approx(0.5)
    assert gap["mean"] == pytest.approx(0.2)


# --- files


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
    with pytest.raises(ValueError, match="expected sdpa-flash, .* or variant:NAME, got fa9"):
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
    reason = peer.unable(8, 8, causal=True, backward=False, window=True)
    assert reason == "it has no sliding window"


@pytest.mark.parametrize("returns_lse, open_side", [(False, -1), (True, None)])  # FA3, FA4
def test_flash_attention_packages_get_their_window(returns_lse, open_side, monkeypatch):
    calls = []

    def flash_attn_func(q, k, v, causal=False, window_size=("?", "?")):
        calls.append((causal, window_size))
        return (q, "lse") if returns_lse else q

    package = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "fa_like", package)
    peer = peers._flash_attention_package("fa", "fa_like", "nothing", open_side=open_side)
    assert peer.has_window and peer.version == "version unknown"
    q = torch.randn(1, 2, 3, 4)
    assert peer.attend(q, q, q, True) is q
    assert peer.attend(q, q, q, True, window=(1024, 0)) is q
    assert peer.attend(q, q, q, False, window=(-1, 3)) is q
    open_window = (open_side, open_side)
    assert calls == [(True, open_window), (True, (1024, 0)), (False, (open_side, 3))]


def test_windows_of_standard_attention_and_of_ours_agree():
    q, k, v = (torch.randn(1, 9, heads, 8) for heads in (4, 2, 2))
    mine = peers.ours()
    assert mine.has_window
    for causal, window in ((True, (3, 0)), (False, (2, 2)), (True, (-1, -1))):
        expected = peers.standard_attention(q, k, v, causal, window=window)
        torch.testing.assert_close(mine.attend(q, k, v, causal, window=window), expected)
        in_parts = peers.standard_attention(q, k, v, causal, window=window, rows=4)
        torch.testing.assert_close(in_parts, expected)


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
    assert order[3:12] == [1, 2, 3, 2, 1, 3, 3, 1, 2]  # another begins; every second backwards


# --- whole benchmarks


@pytest.mark.parametrize(
    "module", [forward, backward, memory, overhead, small, gqa, accuracy, bench_all]
)
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


def fa3_and_broken() -> list[peers.Contestant]:
    return [standard_contestant("fa3"), standard_contestant("broken", broken)]


def wrong(q, k, v, causal):
    return peers.standard_attention(q, k, v, causal) * 1.5


@pytest.mark.parametrize(
    "module, name, factor",
    [(forward, "forward", 1.0), (backward, "backward", 2.5), (train_step, "train_step", 3.5)],
)
def test_a_grid_survives_peers_and_writes_its_files(
    module, name, factor, without_gpu, monkeypatch, tmp_path, capsys
):
    contestants = [
        standard_contestant("good"),
        standard_contestant("broken", broken),
        standard_contestant("wrong", wrong),
    ]
    mine = standard_contestant("flash_cuda")
    race_these(monkeypatch, mine, contestants, {"fa3": "not installed"})
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
    flops = common.attention_flops(2, 2, 32, 32, 16, causal=False) * factor
    assert first["tflops"] == round(flops / 10.0 * 1e-6, 2)
    page = path.with_suffix(".md").read_text()
    assert "| d16 causal s64 b1 h2/1 | 10.0 |" in page and "2.00x" in page
    assert "- wrong: disagrees" in page
    assert "TFLOP/s (x best peer)" in readme.compact_grid(result)
    assert "0 (2.00x)" in readme.compact_grid(result)


def test_windows_are_raced_by_those_who_have_them(without_gpu, monkeypatch, tmp_path, capsys):
    mine = standard_contestant("flash_cuda", has_window=True)
    other = standard_contestant("sdpa", lambda q, k, v, causal: q)
    race_these(monkeypatch, mine, [other, standard_contestant("fa4", has_window=True)])
    shapes = ["--d", "16", "--seq", "32", "--tokens", "32", "--hidden", "32", "--window", "5"]
    assert forward.main([*shapes, "--out", str(tmp_path), "--formats", "json"]) == 0
    said = capsys.readouterr().out
    assert "sdpa left out of d16 causal w5 s32 b1 h2: it has no sliding window" in said
    (path,) = tmp_path.glob("forward_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [r["window"] for r in rows] == [5] * 4
    assert rows[2]["tflops"] == round(4 * 2 * 16 * (5 * 6 // 2 + 27 * 6) / 10.0 * 1e-6, 2)


def test_a_peer_that_compiles_first_is_named(without_gpu, monkeypatch, capsys):
    monkeypatch.setattr(race, "SLOW_START_S", -1.0)
    contestant = standard_contestant("fa4")
    event = race.Event("forward", forward.prepare, "forward")
    racing = race.Race(event, [contestant], budget_s=1.0)
    racing.run(grid.Cell(1, 8, 2, 2, 8, True, "bf16"), seed=0, ceiling=800.0)
    assert "fa4 took 0.0 s before its first run of d8 causal s8 b1 h2" in capsys.readouterr().out
    assert len(racing.rows) == 1


def test_small_shapes_are_timed_by_graph_replay(without_gpu, monkeypatch, tmp_path):
    captured = []

    def fake_capture(run, calls):
        captured.append(calls)
        return run, run()

    monkeypatch.setattr(small, "capture", fake_capture)
    monkeypatch.setattr(small, "SHAPES", ((1, 16, 2, 8, True), (2, 8, 2, 8, False)))
    race_these(monkeypatch, standard_contestant("flash_cuda"), fa3_and_broken())
    assert small.main(["--bar", "best:2.0:2.0", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("small_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert set(captured) == {small.CALLS}
    assert [r["us"] for r in rows] == [10.0 / small.CALLS, 20.0 / small.CALLS] * 2
    page = path.with_suffix(".md").read_text()
    assert "| d8 causal s16 b1 h2 | 0.5 |" in page and "L2 warm" in page


def test_gqa_compares_each_contestant_with_itself(without_gpu, monkeypatch, tmp_path, capsys):
    race_these(monkeypatch, standard_contestant("flash_cuda"), fa3_and_broken())
    options = ["--d", "8", "--seq", "16,32", "--tokens", "32", "--heads", "4", "--heads-kv", "2,1"]
    assert gqa.main([*options, "--out", str(tmp_path), "--bar", "0.99"]) == 1
    said = capsys.readouterr().out
    assert "broken left out of d8 full s16 b2 h4" in said and "bar 0.99: MISSED" in said
    (path,) = tmp_path.glob("gqa_*.json")
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 4 * 2 * 3
    # The stand-in for the clock gives lane i 10 (i + 1) us; a contestant has three lanes.
    assert result["summary"]["flash_cuda 4/2"]["geometric_mean"] == 0.5
    assert result["summary"]["fa3 4/1"]["min"] == round(40 / 60, 4)
    page = path.with_suffix(".md").read_text()
    assert "| shape |  | us | TFLOP/s | x with 2 key heads | x with 1 key heads |" in page
    assert "| d8 causal s32 b1 h4 | flash_cuda | 10.0 | 0 | 0.500x | 0.333x |" in page


def test_gqa_refuses_heads_that_are_shared_wrongly(without_gpu):
    cells = [grid.Cell(1, 8, 4, heads_kv, 8, True, "bf16") for heads_kv in (4, 2, 1)]
    assert len(gqa.runs_of(standard_contestant("right"), cells)) == 3

    def wrong_groups(q, k, v, causal):
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat(1, 1, groups, 1) for x in (k, v))  # in turn, not side by side
        return peers.standard_attention(q, k, v, causal)

    with pytest.raises(ValueError, match="h4/2: disagrees"):
        gqa.runs_of(standard_contestant("wrong", wrong_groups), cells)


def test_accuracy_is_judged_against_a_peer(without_gpu, monkeypatch, tmp_path, capsys):
    def precise(q, k, v, causal):
        wide = (x.double() for x in (q, k, v))
        return peers.standard_attention(*wide, causal).to(q.dtype)

    race_these(monkeypatch, standard_contestant("flash_cuda", precise), fa3_and_broken())
    options = ["--d", "16", "--batch", "1", "--seqlen", "48", "--heads", "2", "--causal", "0,1"]
    options += ["--out", str(tmp_path)]
    assert accuracy.main([*options, "--bar", "fa3:1.001"]) == 0
    said = capsys.readouterr().out
    assert "bar fa3:1.001: passed" in said and "(8 cases)" in said
    assert "broken left out of d16 full bf16 normal" in said
    (path,) = tmp_path.glob("accuracy_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * 8 and all(0 < r["rmse"] < 0.05 for r in rows)
    assert "| d16 causal fp16 outliers |" in path.with_suffix(".md").read_text()
    assert accuracy.check_bar(rows, "fa3", ("flash_cuda", 1.001)) == 1
    nan = [{**r, "rmse": math.nan} if r["contestant"] == "flash_cuda" else r for r in rows]
    assert accuracy.check_bar(nan, "flash_cuda", ("fa3", 1.001)) == 1
    assert accuracy.check_bar(rows, "flash_cuda", ("fa4", 1.001)) == 1  # ran no case
    assert accuracy.main([*options, "--gradients", "--bar", "fa3:1.001"]) == 0
    (path,) = tmp_path.glob("gradient_accuracy_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3 * 2 * 8 and {row["of"] for row in rows} == {"dq", "dk", "dv"}
    assert "| d16 causal fp16 outliers dk |" in path.with_suffix(".md").read_text()


def test_outliers_are_one_in_a_thousand_and_ten_times_as_wide(without_gpu):
    shape = (1, 1000, 10, 16)
    plain, outliers = (
        accuracy.draw(shape, kind, torch.bfloat16, seed=3)[0].double() for kind in accuracy.INPUTS
    )
    assert plain.std() == pytest.approx(1.0, abs=0.02) and plain.abs().max() < 6
    assert (outliers.abs() > 6).double().mean() == pytest.approx(0.001 * 0.55, rel=0.5)
    both = [accuracy.draw(shape, "normal", dtype, 5)[1] for dtype in (torch.half, torch.double)]
    torch.testing.assert_close(both[0].double(), both[1], rtol=1e-3, atol=1e-6)


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


def test_overhead_shows_kernels_side_by_side(without_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(overhead, "SHAPE", (1, 8, 2, 8))
    options = ["--peers", "none", "--calls", "1", "--loops", "2", "--out", str(tmp_path)]
    kernels = ["--kernel", "reference,auto,v2"]  # v2 is not for the CPU: left out, not judged
    assert overhead.main([*options, *kernels, "--bar", "1e6"]) == 1
    said = capsys.readouterr().out
    assert "| flash_cuda.attention, kernel reference |" in said
    assert "bar 1000000.0: attention no_grad, auto - reference:" in said
    assert "v2 - reference: +nan us MISSED" in said
    assert overhead.main([*options, "--kernel", "reference,auto", "--bar", "1e6"]) == 0


def test_all_runs_each_benchmark_with_what_it_knows(without_gpu, monkeypatch, tmp_path):
    commands = []

    def fake_run(command, cwd):
        commands.append(command[2:])
        return types.SimpleNamespace(returncode=command[2] == "bench.memory")

    monkeypatch.setattr(bench_all.subprocess, "run", fake_run)
    options = ["--peers", "fa3", "--kernel", "v2", "--out", str(tmp_path), "--grid", "quick"]
    assert bench_all.main(options) == 1
    by_name = {command[0].removeprefix("bench."): command[1:] for command in commands}
    assert tuple(by_name) == bench_all.NAMES
    assert all("--kernel" in command for command in by_name.values())
    assert {n for n, c in by_name.items() if "--peers" not in c} == set(bench_all.WITHOUT_PEERS)
    assert {n for n, c in by_name.items() if "--grid" in c} == {"forward", "backward", "train_step"}


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
