"""Hardware counters by Nsight Compute: one profiled process for a whole list of calls.

The process (bench.lab.target) launches a marker before each call, which tells the calls apart in
ncu's list of kernels: some launch one kernel, v2's backward three.
"""

import csv
import glob
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import common, grid

MARKER = "spin_kernel"  # of torch.cuda._sleep
FAILED = "no kernel of flash_cuda ran: "
SECTOR = 32  # bytes of an L2 sector
# A name that this GPU or this ncu does not know costs nothing: its value reads n/a. Atomics that
# return a value are no part of these kernels; those that do not are reductions, "red".
L2_METRICS = {
    part: f"lts__t_sectors_srcunit_tex_op_{part}.sum" for part in ("read", "write", "red")
}
# What arrives at the SMs. L2 sends less: its request coalescer (LRC) answers neighbouring SMs that
# ask for the same sectors at the same time with one read.
SM_READ_METRIC = "l1tex__m_xbar2l1tex_read_bytes.sum"
DRAM_METRICS = {"read": "dram__bytes_read.sum", "write": "dram__bytes_write.sum"}
BYTE_METRICS = (*L2_METRICS.values(), *DRAM_METRICS.values(), SM_READ_METRIC)
SHARED_METRICS = {
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "conflicts_ld": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "conflicts_st": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "barrier_stall": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "all_stalls": "smsp__average_warp_latency_per_inst_issued.ratio",
    "instructions": "smsp__inst_executed.sum",
    "tensor_instructions": "sm__inst_executed_pipe_tensor.sum",
}


@dataclass(frozen=True)
class Call:
    """One call of an op to profile."""

    kernel: str
    cell: grid.Cell
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.kernel} {'backward' if self.backward else 'forward'} {self.cell}"


@dataclass
class Launch:
    """One kernel launch in ncu's list; None for a metric that reads n/a."""

    kernel: str
    metrics: dict[str, float | None] = field(default_factory=dict)


def find() -> str | None:
    """The ncu of the PATH, of a CUDA toolkit, or of an Nsight Compute of its own."""
    places = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
    found = (path for place in places for path in sorted(glob.glob(place), reverse=True))
    return shutil.which("ncu") or next(found, None)


def command(ncu: str, metrics: Sequence[str], log: str, calls: str) -> list[str]:
    """The profiled process; its kernels run on cold caches and at the clock the GPU has."""
    options = {
        "--profile-from-start": "off",
        "--clock-control": "none",
        "--cache-control": "all",
        "--replay-mode": "kernel",
        "--kernel-name-base": "demangled",
        "--kernel-name": f"regex:.*(flash_cuda|{MARKER}).*",
        "--print-kernel-base": "demangled",
        "--print-units": "base",
        "--metrics": ",".join(metrics),
        "--log-file": log,
    }
    flat = [word for option in options.items() for word in option]
    return [ncu, *flat, "--csv", sys.executable, "-m", "bench.lab.target", calls]


def number(text: str) -> float | None:
    """'1,234.5' -> 1234.5; what is no number (n/a, nan, empty) -> None."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if value == value else None


def parse(text: str) -> list[Launch]:
    """The launches in ncu's --csv output, in order; lines before the table are skipped."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    launches: dict[str, Launch] = {}
    for row in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        launch = launches.setdefault(row["ID"], Launch(row["Kernel Name"]))
        launch.metrics[row["Metric Name"]] = number(row["Metric Value"])
    return list(launches.values())


def by_call(launches: Sequence[Launch]) -> list[list[Launch]]:
    """The launches behind each marker."""
    groups: list[list[Launch]] = []
    for launch in launches:
        if MARKER in launch.kernel:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
    return groups


def total(launches: Sequence[Launch], metric: str) -> float | None:
    """A counter over the kernels of one call; an average exists for a single kernel alone."""
    values = [launch.metrics.get(metric) for launch in launches]
    if not values or None in values or (len(values) > 1 and not metric.endswith(".sum")):
        return None
    return sum(values)


def why_not(log: str, output: str) -> str:
    """ncu's own error, or else the last line that the process left."""
    lines = [line.strip() for line in (log + "\n" + output).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==")]
    reason = next(iter(errors), lines[-1] if lines else "it printed nothing")
    return reason.removeprefix("==ERROR==").strip()


def profile(
    calls: Sequence[Call], metrics: Sequence[str], timeout_s: float
) -> tuple[list[list[Launch]], str | None]:
    """Launches of each call, and in their place one sentence where ncu gave none."""
    ncu = find()
    if ncu is None:
        return [], (
            "ncu (Nsight Compute) is not on the PATH, in a toolkit under /usr/local or in "
            "/opt/nvidia, so no hardware counter was read."
        )
    with tempfile.TemporaryDirectory() as folder:
        log, wanted = Path(folder, "ncu.csv"), Path(folder, "calls.json")
        wanted.write_text(json.dumps([asdict(call) for call in calls]))
        try:
            done = subprocess.run(
                command(ncu, metrics, str(log), str(wanted)),
                cwd=common.REPOSITORY,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return [], f"ncu read no hardware counter: {common.one_line(error)}."
        text = log.read_text(errors="replace") if log.exists() else ""
    groups = by_call(parse(text))
    if len(groups) != len(calls):
        reason = why_not(text, done.stdout + done.stderr)
        return [], f"ncu read no hardware counter: {len(groups)} of {len(calls)} calls, {reason}"
    failures = [line for line in done.stdout.splitlines() if line.startswith(FAILED)]
    return groups, "  \n".join(failures) or None
