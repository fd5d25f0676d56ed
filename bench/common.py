"""What every benchmark shares: speaking, arithmetic, the description of the machine, result files.

Nothing here needs a GPU, so that tests/test_bench.py can check it anywhere.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "bench" / "results"
SCHEMA = 1
NO_GPU_EXIT = 2
DEVICE = "cuda"  # the tests put "cpu" here to run the benchmarks' logic without a GPU


def say(*words: object) -> None:
    """Print and flush, so that a run which is cut short still shows all it did."""
    print(*words, flush=True)


def require_gpu(module: str) -> None:
    """Leave with one sentence and exit status 2 where there is no GPU to measure."""
    if not torch.cuda.is_available():
        say(
            f"{module} measures a CUDA GPU and torch sees none here, so nothing was run; "
            "`python -m flash_cuda doctor` says what is missing."
        )
        sys.exit(NO_GPU_EXIT)


def attention_flops(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, causal: bool
) -> float:
    """Forward floating-point operations as the FlashAttention papers count them.

    Two matrix products of 2*sq*sk*d each; causal counts half of them, whatever a kernel computes.
    """
    return 4.0 * batch * heads * seqlen_q * seqlen_k * head_dim * (0.5 if causal else 1.0)


# The backward has five matrix products where the forward has two.
BACKWARD_FLOPS = 2.5


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float32."""
    expected = expected.float()
    return float((actual.float() - expected).norm() / expected.norm().clamp_min(1e-30))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table; first column left-aligned, the others right-aligned."""
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + "|".join([":--"] + ["--:"] * (len(header) - 1)) + "|",
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an exception's text, which is what a table has room for."""
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0][:limit]}"


def context_is_lost() -> bool:
    """True after an error that leaves the CUDA context unusable (an illegal address, say)."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return True
    return False


def _output_of(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()
    return None


def git_commit() -> str:
    """FLASH_CUDA_COMMIT (for a machine that gets the tree without .git), else what git says."""
    if commit := os.environ.get("FLASH_CUDA_COMMIT"):
        return commit
    commit = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if _output_of("git", "status", "--porcelain", "-uno") else "")


def flash_cuda_version() -> str:
    try:
        import flash_cuda
    except ImportError:
        return "not importable"
    return getattr(flash_cuda, "__version__", "unknown")


def environment(peers: dict[str, str] | None = None) -> dict:
    """Everything a reader needs to judge a figure: machine, versions, commit, date."""
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        gpu = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "driver": (driver or "unknown").splitlines()[0],
        }
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "python": platform.python_version(),
        "flash_cuda": flash_cuda_version(),
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "peers": peers or {},
    }


def gpu_slug(environment: dict) -> str:
    """'NVIDIA H200' -> 'h200': the GPU's part of a result file's name."""
    name = (environment.get("gpu") or {}).get("name", "cpu")
    name = re.sub(r"\b(nvidia|geforce)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def describe(environment: dict) -> str:
    """One line for people: what was measured where."""
    gpu = environment.get("gpu")
    place = f"{gpu['name']}, driver {gpu['driver']}" if gpu else "CPU"
    peers = "; ".join(f"{name} {version}" for name, version in environment["peers"].items())
    line = (
        f"{place}, torch {environment['torch']} (CUDA {environment['cuda']}), "
        f"flash_cuda {environment['flash_cuda']} at commit {environment['commit']}, "
        f"{environment['date']}"
    )
    return line + (f"; peers: {peers}" if peers else "")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument(
        "--formats",
        default="json,md,png",
        help="result files to write, of json, md, png; empty for none. `python -m bench.report` "
        "makes md and png from json later, on any machine",
    )
    parser.add_argument("--name", default=None, help="name of the result files, before _<gpu>")


def write_results(result: dict, arguments: argparse.Namespace) -> None:
    """Write NAME_GPU.json and what bench.report derives from it."""
    from bench import report

    formats = [part for part in arguments.formats.split(",") if part]
    if not formats:
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    slug = gpu_slug(result["environment"])
    stem = arguments.out / f"{arguments.name or result['name']}_{slug}"
    if "json" in formats:
        path = stem.with_suffix(".json")
        path.write_text(json.dumps(result, indent=1) + "\n")
        say(f"wrote {path}")
    report.write(result, stem, markdown="md" in formats, chart="png" in formats)
