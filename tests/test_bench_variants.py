"""Variants of the Hopper kernels: how they are built, and that what is built is called rightly.

No GPU: launchers that run on the CPU stand for the kernels, nvcc is called where there is one.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bench import common, peers, tables, variant, variants
from bench.contestants import hidden
from build_support import toolkit
from flash_cuda.reference import naive
from tests.gpu_report import ROOT

LAUNCHERS = ROOT / "tests" / "variant_launchers.cpp"


@pytest.fixture(scope="module")
def cuda():
    found = toolkit.find(torch.version.cuda or "", log=lambda line: None)
    if found is None:
        pytest.skip("no CUDA toolkit")
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(variant, "FOLDER", tmp_path)
    monkeypatch.setattr(variants, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def libraries(cuda, tmp_path_factory):
    """A folder with both.so, and forward.so without the backward: LAUNCHERS behind ENTRY."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    made = tmp_path_factory.mktemp("variants")
    compiler = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", "-w", "-fvisibility=hidden"]
    sources = [f"-I{ROOT / 'csrc'}", f"-I{cuda.include}", str(variants.ENTRY), str(LAUNCHERS)]
    for name, options in (("both", ["-DVARIANT_BACKWARD"]), ("forward", [])):
        out = ["-o", str(made / f"{name}.so")]
        subprocess.run([*compiler, *options, *sources, *out], check=True)
    return made


@pytest.fixture
def on_cpu(libraries, monkeypatch):
    """variant:both and variant:forward, with the device of which LAUNCHERS want to hear."""
    monkeypatch.setattr(variant, "FOLDER", libraries)
    fields = dict(shared_memory=1, compute_capability=90, multiprocessors=3, l2_bytes=4, stream=5)
    monkeypatch.setattr(variant, "device_fields", lambda device: fields)


def inputs(batch=2, sq=5, sk=9, heads=4, heads_kv=2, d=16):
    shapes = ((batch, sq, heads, d), (batch, sk, heads_kv, d), (batch, sk, heads_kv, d))
    return [torch.randn(shape).bfloat16() for shape in shapes]


@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (True, (2, 0))])
def test_a_variant_gets_the_call(on_cpu, causal, window):
    q, k, v = inputs()
    mine = variant.contestant("variant:forward")
    out = mine.attend(q, k, v, causal, window=window)
    unseen = hidden(range(5), 5, 9, causal, window, "cpu")
    weights = (~unseen).float() / (~unseen).sum(1, keepdim=True)
    expected = torch.einsum("ij,bjhd->bihd", weights, v.float().repeat_interleave(2, dim=2))
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
    assert mine.unable(5, 9, causal, backward=True) == "this build has no backward"
    assert mine.unable(5, 9, causal, backward=False, window=True) is None
    out, lse = variant.Variant(variant.FOLDER / "forward.so").forward(q, k, v, window)
    assert out.shape == q.shape and lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_a_variant_of_strided_inputs(on_cpu):
    q, k, v = inputs()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    mine = variant.contestant("variant:forward")
    assert torch.equal(mine.attend(*strided, True), mine.attend(q, k, v, True))


def test_a_variant_gives_gradients(on_cpu):
    leaves = [x.requires_grad_() for x in inputs()]
    mine = variant.contestant("variant:both")
    assert mine.unable(5, 9, False, backward=True) is None
    out = mine.attend(*leaves, False)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    torch.testing.assert_close(dq.float(), dout.float() + out.float(), atol=3e-2, rtol=1e-2)
    assert torch.equal(dk, leaves[1]) and torch.equal(dv, leaves[2])


def test_a_variant_says_what_it_cannot_do(on_cpu):
    mine = variant.contestant("variant:forward")
    with pytest.raises(ValueError, match="bfloat16 kernels, got torch.float16"):
        mine.attend(*(x.half() for x in inputs()), False)
    with pytest.raises(FileNotFoundError, match="bench.variants has not made nowhere.so"):
        variant.contestant("variant:nowhere")


def test_a_failed_launch_is_an_error(on_cpu, monkeypatch):
    monkeypatch.setattr(variant, "device_fields", lambda device: {})
    with pytest.raises(RuntimeError, match="variant_forward: CUDA error 1"):
        variant.contestant("variant:forward").attend(*inputs(), False)


def test_variants_race_but_are_no_peers(on_cpu):
    found, missing = peers.discover("variant:both,sdpa-flash,variant:gone")
    assert [c.name for c in found] == ["variant:both", "sdpa-flash"]
    assert found[0].version.startswith("built ") and "gone.so" in missing["variant:gone"]
    assert tables.real_peers(["flash_cuda", "variant:both", "sdpa-flash"]) == ["sdpa-flash"]


# --- building


def fake_nvcc(folder: Path, script: str) -> Path:
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return nvcc


def test_the_command_names_what_is_built():
    plain = variants.command(Path("nvcc"), Path("there/csrc"), Path("a.so"), backward=False)
    assert "-Ithere/csrc" in plain and "there/csrc/launch/hopper_forward_bf16.cu" in plain
    assert str(variants.ENTRY) in plain and plain[-2:] == ["-o", "a.so"]
    assert not any("backward" in word.lower() for word in plain)
    both = variants.command(Path("nvcc"), Path("there/csrc"), Path("a.so"), backward=True)
    assert "there/csrc/launch/hopper_backward_bf16.cu" in both and "-DVARIANT_BACKWARD" in both
    for word in both:
        if word.startswith("there/csrc/launch/"):
            assert (ROOT / word.removeprefix("there/")).is_file()


def test_build_says_what_ptxas_says(folder, capsys):
    said = (
        "echo 'ptxas info : (C7510) wgmma serialised'; echo '8 bytes spill stores, 4 bytes spill'"
    )
    assert variants.build("a", str(ROOT / "csrc"), fake_nvcc(folder, said), False)
    out = capsys.readouterr().out
    assert "a: " in out and "spills: 8;" in out and out.strip().endswith("C7510")
    assert "C7510" in (folder / "a.log").read_text()
    assert variants.build("b", str(ROOT / "csrc"), fake_nvcc(folder, "true"), False)
    assert "spills: none; notes on wgmma and setmaxnreg: none" in capsys.readouterr().out


def test_a_failed_build_shows_the_error(folder, capsys):
    nvcc = fake_nvcc(folder, "echo 'forward.cuh(7): error: expected a ;' >&2; exit 1")
    assert not variants.build("a", str(ROOT / "csrc"), nvcc, False)
    assert "a: nvcc failed:\n  forward.cuh(7): error: expected a ;" in capsys.readouterr().out


def test_sources_are_folders_and_revisions(tmp_path, monkeypatch):
    with variants.headers(str(tmp_path)) as csrc:
        assert csrc == tmp_path.resolve()
    repository = tmp_path / "repository"
    (repository / "csrc" / "launch").mkdir(parents=True)
    (repository / "csrc" / "launch" / "launch.h").write_text("as it was\n")
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (repository / "csrc" / "launch" / "launch.h").write_text("as it is\n")
    monkeypatch.setattr(common, "REPOSITORY", repository)
    with variants.headers("HEAD") as csrc:
        assert (csrc / "launch" / "launch.h").read_text() == "as it was\n"
    assert not csrc.exists()
    with pytest.raises(ValueError, match="nope is no folder and no git revision with a csrc/"):
        with variants.headers("nope"):
            pass


def test_main_names_the_variants(cuda, folder, monkeypatch, capsys):
    built = []
    monkeypatch.setattr(variants, "build", lambda *words: built.append(words) or words[0] != "b")
    assert variants.main(["HEAD", "a=some/csrc", "--backward"]) == 0
    assert [(name, source, both) for name, source, _, both in built] == [
        ("HEAD", "HEAD", True),
        ("a", "some/csrc", True),
    ]
    assert variants.main(["b=HEAD", "origin/main"]) == 1
    assert built[-1][:2] == ("origin-main", "origin/main")
    monkeypatch.setattr(toolkit, "find", lambda *_, **__: None)
    assert variants.main(["HEAD"]) == common.NO_GPU_EXIT
    assert "docs/install.md" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.hopper
def test_a_variant_on_the_gpu_is_attention(cuda, folder):
    assert variants.build("now", str(ROOT / "csrc"), cuda.nvcc, backward=False)
    q, k, v = (torch.randn(1, 300, 4, 64, device="cuda").bfloat16() for _ in range(3))
    out = variant.contestant("variant:now").attend(q, k, v, True)
    expected = naive.attention(q, k, v, window_right=0)[0]
    assert common.relative_error(out, expected) < 1e-2
