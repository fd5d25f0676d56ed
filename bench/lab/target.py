"""The process that ncu profiles: `python -m bench.lab.target CALLS.json`.

Each call runs once to warm up and once between the profiler's marks, behind a marker.
"""

import gc
import json
import sys
from pathlib import Path

import torch

from bench import common, grid
from bench.lab import ncu, races


def run(call: ncu.Call, seed: int) -> None:
    """Profile one call; one that fails leaves its marker without kernels behind it."""
    launch = None
    try:
        tensors = grid.inputs(call.cell, grid.DTYPES[call.cell.dtype], seed)
        launch, _ = races.prepare(call.kernel, call.cell, tensors, call.backward)
        torch.cuda.synchronize()
    except Exception as error:
        common.say(f"{ncu.FAILED}{call}: {common.one_line(error)}")
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    if launch is not None:
        launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(argv: list[str]) -> int:
    common.require_gpu("bench.lab.target")
    with torch.no_grad():
        for seed, call in enumerate(json.loads(Path(argv[0]).read_text())):
            run(ncu.Call(**{**call, "cell": grid.Cell(**call["cell"])}), seed)
            gc.collect()
            torch.cuda.empty_cache()  # ncu saves and restores what is allocated
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
