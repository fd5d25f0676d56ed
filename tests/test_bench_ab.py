"""bench.ab on a machine without a GPU: effects, ncu's output, models, tables, control flow."""

import json
import math
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch

from bench import ab, charts, common, grid, peers, readme, report, timing
from bench.lab import counter_tables, counters, effects, model, ncu, races, summary, tables, target
from flash_cuda import io_model, tile_plan

# Blocks that no real plan has, so that a test sees where each number goes.
PLAN = tile_plan.TilePlan(128, 100, 100, 64, 96, 2, 2, 32, 4, 90_000, 80_000, 1, 1, 227)
H200 = counters.Gpu(sms=132, l2_bytes=50 << 20, shared_bytes=227 * 1024)
CELL = grid.Cell(2, 192, 3, 3, 128, False, "bf16")


@pytest.fixture
def fixed_plan(monkeypatch):
    monkeypatch.setattr(model, "tile_plan", lambda head_dim, kilobytes: PLAN)


# --- effects


def times_with(gains: dict[str, float], noise=lambda: 0.0, rounds: int = 6) -> dict:
    """Times whose log speed is the sum of the terms' logs, over rounds that drift together."""
    times = {corner: [] for corner in effects.CORNERS}
    for turn in range(rounds):
        for place, corner in enumerate(effects.CORNERS):
            log_speed = 0.0
            for name, (order, signs) in effects.contrast_terms().items():
                log_speed += math.log(gains.get(name, 1.0)) * signs[place] / 2**order
            drift = 0.02 * turn
            times[corner].append(100 * math.exp(drift + noise() - log_speed))
    return times


def test_corners_and_the_two_that_have_names():
    assert len(effects.CORNERS) == 8
    assert effects.V1 == "kv_outer/split_k/eager" and effects.V2 == "q_outer/split_q/deferred"


def test_known_effects_are_found():
    gains = {"loop order": 1.5, "normalisation": 1.1, "loop order x warp partition": 1.2}
    gains["loop order x warp partition x normalisation"] = 0.9
    (found, pooled) = effects.effects_of_cells([times_with(gains)])
    assert len(found) == 7 and found == pooled
    for effect in found:
        expected = gains.get(effect["name"], 1.0)
        assert effect["ratio"] == pytest.approx(expected)
        assert effect["low"] == pytest.approx(expected) == pytest.approx(effect["high"])
        assert effect["order"] == effect["name"].count(" x ") + 1


def test_an_interaction_is_what_both_gain_over_the_product_of_single_gains():
    times = dict.fromkeys(effects.CORNERS, (60.0, 60.0))
    for normalisation in ("eager", "deferred"):
        times[f"q_outer/split_k/{normalisation}"] = (30.0, 30.0)  # 2x alone
        times[f"kv_outer/split_q/{normalisation}"] = (20.0, 20.0)  # 3x alone
        times[f"q_outer/split_q/{normalisation}"] = (15.0, 15.0)  # 4x and not 6x together
    found = {effect["name"]: effect for effect in effects.effects_of_cells([times])[0]}
    assert found[effects.CONJECTURE]["ratio"] == pytest.approx(4 / 6)
    assert found["loop order"]["ratio"] == pytest.approx(math.sqrt(2 * 4 / 3))
    assert found["loop order x warp partition x normalisation"]["ratio"] == pytest.approx(1)


def test_cells_are_pooled_by_geometric_mean():
    cells = [times_with({"loop order": 1.5}), times_with({"loop order": 6.0})]
    *_, pooled = effects.effects_of_cells(cells)
    assert pooled[0]["ratio"] == pytest.approx(3.0)
    assert effects.effects_of_cells([]) == []


def test_a_missing_corner_is_named():
    times = times_with({})
    del times["q_outer/split_k/eager"]
    with pytest.raises(ValueError, match="no times of q_outer/split_k/eager"):
        effects.contrasts(times)


@pytest.mark.parametrize(
    "freedom, quantile", [(1, 12.706), (2, 4.303), (5, 2.571), (11, 2.201), (30, 2.042)]
)
def test_student_quantiles_are_those_of_the_tables(freedom, quantile):
    assert effects.student_quantile(freedom) == pytest.approx(quantile, abs=5e-4)
    assert effects.student_probability(quantile, freedom) == pytest.approx(0.95, abs=1e-4)
    assert effects.student_quantile(0) == math.inf


def test_intervals_cover_the_truth_as_often_as_they_say():
    random = numpy.random.default_rng(0)
    gains = {"warp partition": 1.3, effects.CONJECTURE: 1.05}
    covered = {"warp partition": 0, effects.CONJECTURE: 0, "normalisation": 0}
    trials = 1500
    for _ in range(trials):
        times = times_with(gains, noise=lambda: random.normal(0, 0.01), rounds=5)
        for name, observed in effects.contrasts(times).items():
            if name in covered:
                found = effects.effect(name, observed)
                covered[name] += found.low <= gains.get(name, 1.0) <= found.high
    for count in covered.values():
        assert 0.93 <= count / trials <= 0.97


def test_the_verdict_says_whether_the_intervals_exclude_one():
    def joint(ratio: float, low: float, high: float) -> effects.Effect:
        return effects.Effect(effects.CONJECTURE, 2, ratio, low, high)

    apart, level = joint(1.2, 1.1, 1.3), joint(1.0, 0.9, 1.1)
    words = effects.verdict([apart, level], ["d64", "d128"])
    assert "- d64: both together gain 1.200 times" in words and "excludes 1" in words
    assert "(0.900 to 1.100): the interval includes 1" in words
    assert "In 1 of 2 cells the interval excludes 1" in words
    assert "every cell" in effects.verdict([apart], ["d64"])
    assert "the conjecture stands" in effects.verdict([level], ["d64"])


# --- ncu

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
READ, WRITE, REDUCED = ncu.L2_METRICS.values()


def csv_rows(launch: int, kernel: str, **values: str) -> str:
    start = f'"{launch}","77","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)",'
    start += '"(528, 1, 1)","0","9.0","Command line profiler metrics"'
    return "".join(f'{start},"{name}","sector","{value}"\n' for name, value in values.items())


SPIN = "at::cuda::<unnamed>::spin_kernel(long)"
FORWARD = "void flash_cuda::v2::forward_kernel<__half, flash_cuda::Tile<(int)64, 128>>(Params)"
SAMPLE = (
    "==PROF== Connected to process 77 (/usr/bin/python3.12)\n"
    '==PROF== Profiling "spin_kernel" - 0: 0%....50%....100% - 2 passes\n'
    "==PROF== Disconnected from process 77\n"
    + HEADER
    + "\n"
    + csv_rows(0, SPIN, **{READ: "5", WRITE: "0"})
    + csv_rows(1, FORWARD, **{READ: "1,234,567", WRITE: "1,024", REDUCED: "0"})
    + csv_rows(1, FORWARD, **{"dram__bytes_read.sum": "9,000", "dram__bytes_write.sum": "n/a"})
    + csv_rows(2, SPIN, **{READ: "5"})
    + csv_rows(3, "flash_cuda::prepare()", **{READ: "10", "x.ratio": "1.5"})
    + csv_rows(4, "flash_cuda::main()", **{READ: "20.5", "x.ratio": "2.5"})
    + csv_rows(5, SPIN, **{READ: "5"})
    + "==WARNING== No section was collected\n"
)


def test_ncu_csv_becomes_launches_by_call():
    launches = ncu.parse(SAMPLE)
    assert len(launches) == 6 and launches[1].kernel == FORWARD
    assert launches[1].metrics[READ] == 1_234_567
    assert launches[1].metrics["dram__bytes_write.sum"] is None
    one, three, none = ncu.by_call(launches)
    assert [len(group) for group in (one, three, none)] == [1, 2, 0]
    assert ncu.total(three, READ) == 30.5
    assert ncu.total(three, "x.ratio") is None  # an average of two kernels
    assert ncu.total(three[:1], "x.ratio") == 1.5
    assert ncu.total(one, "unknown") is None and ncu.total(none, READ) is None


def test_ncu_values():
    assert ncu.number("1,234.5") == 1234.5 and ncu.number("0") == 0
    assert [ncu.number(text) for text in ("n/a", "(!) n/a", "nan", "", "no data")] == [None] * 5
    assert ncu.parse("==ERROR== no table\n") == [] and ncu.parse("") == []


def test_ncu_is_asked_for_flash_cuda_and_the_markers_alone():
    words = ncu.command("/bin/ncu", ["a.sum", "b.sum"], "log", "calls.json")
    options = " ".join(words)
    assert "--profile-from-start off" in options and "--clock-control none" in options
    assert "--cache-control all" in options and "--metrics a.sum,b.sum" in options
    assert f"regex:.*(flash_cuda|{ncu.MARKER}).*" in words and "--csv" in words
    assert words[-3:] == ["-m", "bench.lab.target", "calls.json"]


def fake_ncu(tmp_path, monkeypatch, text: str, said: str = "", status: int = 0) -> None:
    """An ncu that writes `text` where the real one writes its table."""
    (tmp_path / "table").write_text(text)
    script = tmp_path / "ncu"
    script.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        "log = sys.argv[sys.argv.index('--log-file') + 1]\n"
        "assert json.loads(pathlib.Path(sys.argv[-1]).read_text())[0]['cell']['seqlen']\n"
        f"pathlib.Path(log).write_text(pathlib.Path({str(tmp_path / 'table')!r}).read_text())\n"
        f"print({said!r})\nsys.exit({status})\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(ncu, "find", lambda: str(script))


CALLS = [ncu.Call("v1/99KB", CELL), ncu.Call("v2", CELL, True), ncu.Call("v9", CELL)]


def test_profile_gives_the_launches_of_each_call(tmp_path, monkeypatch):
    said = f"{ncu.FAILED}v9 forward: ValueError: no such kernel"
    fake_ncu(tmp_path, monkeypatch, SAMPLE, said)
    groups, sentence = ncu.profile(CALLS, ncu.BYTE_METRICS, 30)
    assert [len(group) for group in groups] == [1, 2, 0]
    assert sentence == said


def test_a_refused_or_missing_ncu_is_one_sentence(tmp_path, monkeypatch):
    refused = (
        "==PROF== Connected to process 77\n==ERROR== ERR_NVGPUCTRPERM - The user does not have "
        "permission to access NVIDIA GPU Performance Counters.\n"
    )
    fake_ncu(tmp_path, monkeypatch, refused, status=1)
    groups, sentence = ncu.profile(CALLS, ncu.BYTE_METRICS, 30)
    assert groups == [] and "0 of 3 calls, ERR_NVGPUCTRPERM - The user" in sentence
    fake_ncu(tmp_path, monkeypatch, SAMPLE.split('"2"')[0])
    assert "1 of 3 calls" in ncu.profile(CALLS, ncu.BYTE_METRICS, 30)[1]
    monkeypatch.setattr(ncu, "find", lambda: None)
    groups, sentence = ncu.profile(CALLS, ncu.BYTE_METRICS, 30)
    assert groups == [] and sentence.startswith("ncu (Nsight Compute) is not on the PATH")
    monkeypatch.setattr(ncu, "find", lambda: str(tmp_path / "absent"))
    assert "FileNotFoundError" in ncu.profile(CALLS, ncu.BYTE_METRICS, 30)[1]


def test_the_profiled_process_marks_each_call(tmp_path, monkeypatch, capsys):
    happened = []
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "require_gpu", lambda module: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: happened.append("marker"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: happened.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: happened.append("stop"))

    def prepare(kernel, cell, tensors, backward):
        if kernel == "v9":
            raise ValueError("no such kernel")
        assert [tensor.shape for tensor in tensors] == [(2, 192, 3, 128)] * 4
        return lambda: happened.append(f"{kernel} {backward}"), ()

    monkeypatch.setattr(races, "prepare", prepare)
    path = tmp_path / "calls.json"
    path.write_text(json.dumps([ncu.asdict(call) for call in CALLS]))
    assert target.main([str(path)]) == 0
    first, second, third = (
        ["start", "marker", *mid, "stop"] for mid in (["v1/99KB False"], ["v2 True"], [])
    )
    assert happened == first + second + third
    assert f"{ncu.FAILED}v9 forward d128 full s192 b2 h3: ValueError" in capsys.readouterr().out


# --- models


def test_the_model_of_a_call_is_io_model_on_its_blocks(fixed_plan):
    work = io_model.Workload(2, 3, 3, 192, 192, 128)

    def as_dict(expected: io_model.Traffic) -> dict:
        return {"read": expected.read, "write": expected.write, "reduced": expected.reduced}

    for corner in ("v1", "q_outer/split_k/eager", "kv_outer/split_q/deferred"):
        expected = io_model.lab_forward(corner, work, PLAN)
        assert model.traffic(ncu.Call(f"{corner}/99KB", CELL)) == as_dict(expected)
    assert model.traffic(ncu.Call("v2", CELL)) == as_dict(io_model.v2_forward(work))
    backward = model.traffic(ncu.Call("v2", CELL, True))
    assert backward == as_dict(io_model.v2_backward(work)) and backward["reduced"] > 0
    with pytest.raises(ValueError, match="its budget is the device's choice"):
        model.traffic(ncu.Call("v1", CELL))


def test_wavefronts_are_the_models_bytes_of_every_step(fixed_plan):
    steps = 2 * 3 * (192 // 64) * (192 // 96)
    for partition in ("split_k", "split_q"):
        step = tile_plan.shared_traffic(PLAN, partition)
        call = ncu.Call(f"q_outer/{partition}/eager/99KB", CELL)
        assert model.wavefronts(call) == steps * (step.read + step.write) / 128
    assert model.wavefronts(ncu.Call("v1/99KB", CELL)) > 0


def test_working_set_counts_tensors_and_workspace():
    rows = 2 * 3 * 192
    assert model.working_set(ncu.Call("v2", CELL)) == rows * (4 * 128 * 2 + 4)
    assert model.working_set(ncu.Call("v1/99KB", CELL)) == rows * (4 * 256 + 4 + 4 * 128 + 8)
    assert model.working_set(ncu.Call("v2", CELL, True)) > rows * 8 * 128 * 2


def test_the_sizes_of_the_byte_section_lie_on_both_sides_of_the_cache():
    l2 = H200.l2_bytes
    sizes = {model.working_set(call) for call in counters.byte_calls(H200, quick=False)}
    assert min(sizes) > l2 // 8 and max(sizes) > 8 * l2
    forward = [call for call in counters.byte_calls(H200, quick=False) if not call.backward]
    assert all(min(sizes) <= model.working_set(call) for call in forward)
    small = [call for call in forward if model.working_set(call) < l2]
    assert {call.cell.head_dim for call in small} == {64, 128}
    kernels = {call.kernel for call in forward}
    assert {f"{corner}/227KB" for corner in effects.CORNERS[1:]} | {"v1/227KB", "v2"} <= kernels


def test_a_counted_kernel_names_the_budget_that_the_device_has():
    assert H200.with_budget("v1", 128) == "v1/227KB" and H200.with_budget("v1", 64) == "v1/163KB"
    a100 = counters.Gpu(sms=108, l2_bytes=40 << 20, shared_bytes=163 * 1024)
    assert a100.with_budget("v1", 128) == "v1/163KB"


def test_byte_rows_hold_measurement_and_model(fixed_plan):
    values = dict(zip(ncu.BYTE_METRICS, (100.0, 50.0, 0.0, 1200.0, 400.0, 3300.0), strict=True))
    row = counters.byte_row("bytes", ncu.Call("v1/99KB", CELL), [ncu.Launch("k", values)])
    assert row["l2"] == {"read": 3200, "write": 1600, "reduced": 0} and row["l2_total"] == 4800
    assert row["sm_read"] == 3300 and row["sm_total"] == 4900
    assert row["dram_total"] == 1600 and row["dram_over_l2"] == pytest.approx(1 / 3)
    assert row["model"]["read"] > 0 and row["launches"] == 1
    unknown = {**values, ncu.L2_METRICS["red"]: None}
    assert counter_tables.agreement([row, row]).startswith("Measured over model: v1 0.0")
    row = counters.byte_row("bytes", ncu.Call("v1", CELL), [ncu.Launch("k", unknown)])
    assert counter_tables.agreement([row]) == ""
    assert row["l2_total"] is None and row["dram_over_l2"] is None and row["model"] is None
    assert "n/a" in counter_tables.traffic_row(row)


# --- the page


def timed(
    section: str, contestant: str, us: float, seqlen: int = 2048, head_dim: int = 128
) -> dict:
    cell = grid.Cell(2, seqlen, 8, 8, head_dim, False, "bf16")
    row = {"section": section, "contestant": contestant, "us": us, "tflops": 100.0, "late": False}
    return {**row, **ncu.asdict(cell)}


def test_bars_have_one_width_and_are_as_long_as_their_value():
    assert tables.bar(0.5, 1) == "█" * 12 + "░" * 12
    assert tables.bar(1, 1) == "█" * 24 and tables.bar(0.001, 1) == "░" * 24


def test_corner_times_are_geometric_means_over_v1s_slowest_first():
    rows = [timed("factorial", effects.V1, 10.0, n) for n in (2048, 4096)]
    rows += [timed("factorial", effects.V2, us, n) for us, n in ((2.0, 2048), (8.0, 4096))]
    rows += [timed("factorial", "v2", 2.5), timed("budget", "v2", 1.0)]
    lines = tables.corner_times({"rows": rows}).splitlines()
    assert lines[2] == f"| {effects.V1} | 1.00 | 1.00 to 1.00 | {'█' * 24} |"
    assert lines[3] == f"| {effects.V2} | 0.40 | 0.20 to 0.80 | {tables.bar(0.4, 1)} |"
    assert lines[4].startswith("| v2 (1 of 2 cells) | 0.25 | ") and len(lines) == 5


def test_the_budget_bars_compare_kernels_on_one_shape():
    rows = [timed("budget", "v1/48KB", 40.0), timed("budget", "v1/227KB", 10.0)]
    rows += [timed("budget", "v1/48KB", 4.0, head_dim=64)]
    lines = tables.budget({"rows": rows, "bytes": []}).splitlines()[-3:]
    assert [line.count("█") for line in lines] == [24, 6, 24]


def test_the_summary_shows_one_head_dim_and_v2_over_v1():
    rows = [
        timed("parallel", name, 10.0, head_dim=d) for name in (effects.V1, "v2") for d in (64, 128)
    ]
    rows += [timed("backward", "v1", 30.0), timed("backward", "v2", 10.0)]
    rows += [timed("backward", "v2", 10.0, 4096)]
    result = {"rows": rows, "bytes": [], "shared": [], "sms": 132}
    assert "d64" in tables.parallel(result) and "d64" not in summary.parallel(result)
    assert "d128" in summary.parallel(result)
    (line,) = summary.backward(result).splitlines()[2:]
    assert line.startswith("| d128 full s2048 b2 h8 | 16 | 30.0 us, 100 | 10.0 us, 100 | 3.00x | ")
    assert line.count("█") == 8


# --- the command


def test_sections_go_by_letter_or_name():
    assert ab.chosen_sections("c,a") == ["factorial", "shared"]
    assert ab.chosen_sections("bytes") == ["bytes"]
    with pytest.raises(ab.argparse.ArgumentTypeError, match=r"a \(factorial\), .* got 'z'"):
        ab.chosen_sections("a,z")


def test_entries_fill_the_gpu_and_name_their_kernels():
    for section in ab.TIMED:
        for entry in races.entries(section, sms=132, quick=False):
            assert entry.kernels[0] == "v2" and entry.backward == (section == "backward")
    factorial = races.entries("factorial", sms=132, quick=False)
    assert len(factorial) == 8
    assert all(e.cell.batch * e.cell.heads == 528 and e.cell.heads == 16 for e in factorial)
    parallel = races.entries("parallel", sms=132, quick=True)
    assert [e.cell.batch * e.cell.heads for e in parallel] == [1, 4, 16, 64, 132, 528, 1056]


def test_without_a_gpu_one_sentence_and_status_2(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as leaving:
        ab.main([])
    assert leaving.value.code == common.NO_GPU_EXIT
    assert "bench.ab measures a CUDA GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ab.main(["--rounds", "1"])


@pytest.fixture
def laboratory(monkeypatch, fixed_plan):
    """bench.ab on the CPU: tiny cells, plain attention under every name, invented times."""
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "require_gpu", lambda module: None)
    monkeypatch.setattr(common, "context_is_lost", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "flush_buffer", lambda: torch.empty(8))
    device = SimpleNamespace(
        multi_processor_count=2, L2_cache_size=50 << 20, shared_memory_per_block_optin=227 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)

    def tiny(pairs, seqlen, head_dim, causal, dtype="bf16"):
        return grid.Cell(pairs, seqlen // 256, 1, 1, head_dim, causal, dtype)

    def prepare(kernel, cell, tensors, backward):
        if kernel.endswith("/227KB"):
            raise RuntimeError("227 KB are more than this device has")
        out = peers.standard_attention(*tensors[:3], cell.causal)
        wrong = kernel == "v1/48KB"
        return lambda: None, (out * 2 if wrong else out,)

    def sample(lanes, flush, launches, rounds):
        return [
            [[10.0 + i + 0.01 * r] * launches for r in range(rounds)] for i in range(len(lanes))
        ]

    monkeypatch.setattr(races, "cell", tiny)
    monkeypatch.setattr(races, "prepare", prepare)
    monkeypatch.setattr(timing, "sample_in_turn", sample)


def invented_counters(calls, metrics, timeout_s):
    values = {name: 2.0**24 for name in metrics}
    return [[ncu.Launch("flash_cuda::k", values)] for _ in calls], None


@pytest.mark.parametrize("profile", [invented_counters, lambda *_: ([], "ncu was refused.")])
def test_the_whole_run_writes_json_page_and_chart(
    profile, laboratory, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(ncu, "profile", profile)
    assert ab.main(["--quick", "--rounds", "3", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("ab_*.json")
    result = json.loads(path.read_text())
    page = path.with_suffix(".md").read_text()
    assert page in capsys.readouterr().out + "\n"
    for title, _ in tables.SECTIONS.values():
        assert f"## {title}" in page
    assert page.count("Nothing was measured.") == (0 if profile is invented_counters else 2)
    assert ("ncu was refused." in page) == (profile is not invented_counters)
    assert "| loop order x warp partition | " in page and "Conjecture: " in page
    assert "- v1/227KB (budget): RuntimeError: 227 KB are more" in page
    assert "- v1/48KB (budget): disagrees: result 0" in page
    row = next(r for r in result["rows"] if r["contestant"] == effects.V1)
    assert row["section"] == "factorial" and len(row["rounds_us"]) == 3
    assert result["effects"][0]["effects"][0]["name"] == "loop order"
    if profile is invented_counters:
        assert {r["section"] for r in result["bytes"]} == {"bytes", "budget"}
        assert "v1 backward" in page and len(result["shared"]) == 8


def test_sections_that_were_not_asked_for_leave_no_trace(laboratory, tmp_path):
    assert ab.main(["--quick", "--sections", "e", "--rounds", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("ab_*.json")
    page = path.with_suffix(".md").read_text()
    assert "## Sequence parallelism" in page and "## The eight corners" not in page
    assert "v2 over v1" in page and "Left out" not in page


def test_the_figure_has_a_panel_for_each_question(laboratory, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ncu, "profile", invented_counters)
    assert ab.main(["--quick", "--rounds", "3", "--out", str(tmp_path), "--formats", "json"]) == 0
    (path,) = tmp_path.glob("ab_*.json")
    assert "ab" in report.MARKDOWN and "ab" in charts.CHARTS
    assert report.main([str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_readme_and_the_lab_page_are_filled_with_the_sections_that_were_run(
    laboratory, monkeypatch, tmp_path
):
    monkeypatch.setattr(ncu, "profile", invented_counters)
    (tmp_path / "docs").mkdir()
    unmeasured = "Not measured yet."

    def fill(options: list[str]) -> list[str]:
        markers = ["ab", *(f"ab_{section}" for section in ab.SECTIONS)]
        blank = {"README.md": markers[:1], "docs/lab.md": markers}
        for page, names in blank.items():
            marked = [f"<!-- bench:{n} -->\n{unmeasured}\n<!-- /bench:{n} -->\n" for n in names]
            (tmp_path / page).write_text("".join(marked))
        output = ["--out", str(tmp_path), "--formats", "json"]
        assert ab.main(["--quick", "--rounds", "3", *output, *options]) == 0
        where = ["--results", str(tmp_path), "--gpu", "cpu", "--root", str(tmp_path)]
        assert readme.main(where) == 0
        return [(tmp_path / page).read_text() for page in blank]

    front, lab = fill([])
    assert unmeasured not in front + lab
    assert f"| {effects.V1} | 1.00 |" in front and "<sub>CPU" in front
    assert "| loop order x warp partition | " in lab and "Conjecture: " in lab
    assert "bf16, 3 rounds" in lab and lab.count("<sub>") == 1 and "| v1 backward | d128" in lab
    front, lab = fill(["--sections", "e"])
    assert unmeasured in front and lab.count(unmeasured) == 5


def test_the_lab_page_has_a_marker_for_each_section():
    text = (common.REPOSITORY / "docs" / "lab.md").read_text()
    for marker in ("ab", *(f"ab_{section}" for section in ab.SECTIONS)):
        assert readme.fill(text, marker, "measured") != text
    assert list(summary.SECTIONS) == list(tables.SECTIONS) == list(ab.SECTIONS)
