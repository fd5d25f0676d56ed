"""What the last run on a GPU covered, and whether it covered today's sources.

`pytest --gpu-report tests/gpu_report.json` writes the report; `python -m tests.gpu_report` compares
its hash with the sources and exits with 1 where they differ or a test had failed.
"""

import hashlib
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests" / "gpu_report.json"
FOLDERS = ("csrc", "flash_cuda", "tests")
FILES = ("setup.py", "pyproject.toml")
# By suffix and not by `git ls-files`: the GPU machine gets the sources without their repository.
SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h"}


def source_files() -> list[Path]:
    found = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    return sorted(path for path in found if path.is_file())


def source_hash() -> str:
    """SHA-256 over the path and content of each source file."""
    digest = hashlib.sha256()
    for path in source_files():
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def write(path: Path, counts: dict[str, int]) -> None:
    """Writes the report of a finished run; `counts` maps passed, failed, ... to numbers."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **counts,
        "sources": source_hash(),
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def verdict(path: Path = REPORT) -> tuple[bool, str]:
    """Whether the recorded run passed on a GPU with today's sources, and a sentence on it."""
    if not path.is_file():
        return False, f"no report: run `pytest --gpu-report {path.relative_to(ROOT)}` on a GPU"
    report = json.loads(path.read_text())
    ran = f"{report['passed']} passed, {report['skipped']} skipped on {report['gpu']}, "
    ran += f"torch {report['torch']}, {report['date']}"
    if report["gpu"] is None:
        return False, f"the recorded run saw no GPU: {ran}"
    if report["failed"] or report["error"]:
        return False, f"{report['failed']} failed, {report['error']} errors: {ran}"
    if report["sources"] != source_hash():
        return False, f"the sources have changed since the recorded run: {ran}"
    return True, f"the recorded run is of today's sources: {ran}"


if __name__ == "__main__":
    passed, sentence = verdict()
    print(sentence)
    sys.exit(0 if passed else 1)
