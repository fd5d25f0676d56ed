"""Block sizes from _C.tile_plan, `python -m flash_cuda plan` and the `ab` command."""

import math
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from flash_cuda import cli, plan
from flash_cuda.tile_plan import BUDGETS_KB, tile_plan

# (B_r, B_c) of the kernels by head dim and budget, as csrc/attention/tile_plan.h rounds them.
BLOCKS = {
    (64, 48): (64, 96),
    (64, 99): (64, 192),
    (64, 163): (64, 320),
    (64, 227): (64, 448),
    (128, 48): (32, 32),
    (128, 99): (64, 64),
    (128, 163): (128, 128),
    (128, 227): (128, 192),
}


@pytest.mark.parametrize("kilobytes", BUDGETS_KB)
def test_the_papers_sizes(kilobytes):
    """B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d), with M in elements of two bytes."""
    for d in range(1, 129):
        found = tile_plan(d, kilobytes)
        columns = math.ceil(kilobytes * 1024 / 2 / (4 * d))
        assert (found.paper_rows, found.paper_columns) == (min(columns, d), columns)
        assert found.width == (64 if d <= 64 else 128)


@pytest.mark.parametrize("head_dim, kilobytes", BLOCKS)
def test_the_kernels_sizes(head_dim, kilobytes):
    found = tile_plan(head_dim, kilobytes)
    assert (found.rows, found.columns) == BLOCKS[head_dim, kilobytes]
    # Whole mma tiles, and no larger than the paper's.
    assert found.rows == found.split_q * 16 and found.rows <= found.paper_rows
    assert found.columns % (16 * found.split_k) == 0 and found.columns <= found.paper_columns
    assert found.rows % (found.teams * found.strip_rows) == 0
    assert found.strip_rows % (8 * found.split_k) == 0
    tiles = (found.rows + 2 * found.columns) * head_dim * 2
    for partition in ("split_k", "split_q"):
        assert tiles < found.shared_bytes(partition) <= kilobytes * 1024
        blocks, threads = found.blocks(partition), found.warps(partition) * 32
        assert blocks >= 1 and blocks * (found.shared_bytes(partition) + 1024) <= 228 * 1024
        assert blocks * threads <= 65536 // 64
    assert tile_plan(head_dim - 1, kilobytes).rows == found.rows
    assert found.default_kb in BUDGETS_KB and found.default_kb <= kilobytes


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((0, 48), "head_dim: expected 1 to 128, got 0"),
        ((129, 48), "head_dim: expected 1 to 128, got 129"),
        ((64, 50), "kilobytes: expected 48, 99, 163 or 227, got 50"),
    ],
)
def test_no_plan(arguments, text):
    with pytest.raises(ValueError, match=text):
        tile_plan(*arguments)


def rows_of(page: str) -> dict[str, list[str]]:
    """Cells by budget."""
    lines = (line.replace(" x ", "x").split() for line in page.splitlines())
    return {cells[0]: cells[1:] for cells in lines if cells and cells[0].endswith("KB")}


def test_command_line():
    command = [sys.executable, "-m", "flash_cuda", "plan", "--head-dim", "128", "--gpu", "h200"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    page = result.stdout
    assert page.startswith("H200: 132 SMs, 227 KB of shared memory per thread block, 228 per SM")
    assert "SRAM 33 MB, HBM 141 GB at 4.8 TB/s" in page
    assert f'kernel="v1" takes {tile_plan(128, 227).default_kb}KB here' in page
    rows = rows_of(page)
    assert list(rows) == ["48KB", "99KB", "163KB", "227KB"]
    assert rows["163KB"][:4] == ["83456", "128x163", "128x128", "2x4"]
    assert rows["48KB"][:4] == ["24576", "48x48", "32x32", "1x2"]
    for cells in rows.values():
        assert len(cells) == 13


def test_a_gpu_has_the_budgets_that_fit(monkeypatch, capsys):
    monkeypatch.setattr(plan, "local_gpu", lambda: None)
    assert cli.main(["plan", "--head-dim", "64"]) == 0
    pages = capsys.readouterr().out.split("\n\n")
    named = [page.split(":")[0] for page in pages if " SMs, " in page]
    assert named == ["A100", "H100", "H200", "B200"]
    assert "163KB" in pages[1] and "227KB" not in pages[1]
    for gpu in plan.GPUS.values():
        # SRAM of all SMs is what the specifications multiply: 192 KB on an A100, else 256.
        each = 192 if gpu.name == "A100" else 256
        assert gpu.sram_mb == pytest.approx(gpu.sms * each / 1024)


def test_more_memory_saves_traffic():
    """What the plan is for: a larger M, fewer passes over O."""
    for head_dim in (64, 128):
        intensity = [
            plan.operations_per_byte(plan.CORNERS["split_k"], head_dim, tile_plan(head_dim, m))
            for m in BUDGETS_KB
        ]
        assert intensity == sorted(intensity) and intensity[-1] > 3 * intensity[0]


def test_local_gpu(monkeypatch, capsys):
    """What the device says, the known figures of its model, and the compiled kernels' registers."""
    facts = SimpleNamespace(
        name="NVIDIA H200",
        multi_processor_count=132,
        shared_memory_per_block_optin=227 * 1024,
        shared_memory_per_multiprocessor=228 * 1024,
        total_memory=150_000_000_000,
    )
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan.torch.cuda, "get_device_properties", lambda index: facts)
    lab = ModuleType("flash_cuda._lab")
    asked = []

    def kernel_facts(name, head_dim, is_half):
        asked.append((name, head_dim, is_half))
        return 123, 40000, 128, 7

    lab.kernel_facts = kernel_facts
    monkeypatch.setitem(sys.modules, "flash_cuda._lab", lab)
    monkeypatch.setattr("flash_cuda._lab", lab, raising=False)
    assert cli.main(["plan", "--head-dim", "80"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("NVIDIA H200: 132 SMs") and "HBM 150 GB at 4.8 TB/s" in page
    for cells in rows_of(page).values():
        assert cells[5:7] == cells[10:12] == ["123", "7"]
    assert ("kv_outer/split_k/eager/99KB", 128, False) in asked and len(asked) == 8

    # A model that nobody listed, and a build without the lab's kernels.
    monkeypatch.setitem(sys.modules, "flash_cuda._lab", None)
    monkeypatch.delattr("flash_cuda._lab")
    facts.name, facts.shared_memory_per_block_optin = "NVIDIA RTX 4090", 99 * 1024
    assert cli.main(["plan", "--gpu", "local"]) == 0
    page = capsys.readouterr().out
    assert list(rows_of(page)) == ["48KB", "99KB"] and "<=" in page and "TB/s" not in page


def test_launch_bounds():
    gpu = plan.GPUS["h100"]
    base = tile_plan(128, 227)
    two = replace(base, split_k=4, teams=2, split_k_blocks=1, split_k_bytes=178 * 1024)
    assert plan.launch_bounds(two, "split_k", gpu) == (255, 1)
    four = replace(two, split_k_blocks=3, split_k_bytes=40 * 1024)
    assert plan.launch_bounds(four, "split_k", gpu) == (80, 3)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--head-dim", "129"], "head_dim: expected 1 to 128, got 129"),
        (["--head-dim", "0"], "head_dim: expected 1 to 128, got 0"),
        (["--gpu", "local"], "torch sees no GPU here; --gpu takes a100, h100, h200, b200"),
        (["--gpu", "tpu"], "invalid choice: 'tpu'"),
        (["extra"], "unrecognized arguments: extra"),
    ],
)
def test_mistakes_are_a_sentence(monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr(plan, "local_gpu", lambda: None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *arguments])
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_ab_forwards_its_arguments(monkeypatch, tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "ab.py").touch()
    given = []
    ab = ModuleType("bench.ab")
    ab.main = lambda arguments: given.append(arguments) or 3
    monkeypatch.setattr(cli, "SOURCES", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "bench.ab", ab)
    monkeypatch.setattr("bench.ab", ab, raising=False)
    assert cli.main(["ab", "--quick", "--sections", "a,b", "--help"]) == 3
    assert given == [["--quick", "--sections", "a,b", "--help"]]


def test_ab_needs_a_checkout(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "SOURCES", tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["ab"])
    assert "run it in a source checkout" in capsys.readouterr().err
