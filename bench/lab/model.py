"""What flash_cuda.io_model and flash_cuda.tile_plan expect of one profiled call."""

from bench.lab.ncu import Call
from flash_cuda import io_model
from flash_cuda.tile_plan import ELEMENT, FLOAT, TilePlan, lab_width, shared_traffic, tile_plan

WAVEFRONT = 128  # bytes that shared memory moves at a time


def split_budget(kernel: str) -> tuple[str, int]:
    """'v1/99KB' -> ('v1', 99). ValueError where the name says no budget."""
    name, _, budget = kernel.rpartition("/")
    if not budget.endswith("KB"):
        raise ValueError(f"{kernel}: its budget is the device's choice, so its blocks are unknown")
    return name, int(budget.removesuffix("KB"))


def plan_of(call: Call) -> tuple[str, TilePlan]:
    name, budget = split_budget(call.kernel)
    return name, tile_plan(call.cell.head_dim, budget)


def workload(call: Call) -> io_model.Workload:
    c = call.cell
    return io_model.Workload(c.batch, c.heads, c.heads_kv, c.seqlen, c.seqlen, c.head_dim, c.causal)


def traffic(call: Call) -> dict[str, int]:
    """Bytes read, written and reduced between the SMs and the L2 cache."""
    work = workload(call)
    if call.kernel == "v2":
        expected = io_model.v2_backward(work) if call.backward else io_model.v2_forward(work)
    elif call.backward:
        blocks = io_model.V1_BACKWARD[lab_width(work.head_dim)]
        expected = io_model.v1_backward(work, *blocks)
    else:
        name, plan = plan_of(call)
        expected = io_model.lab_forward(name, work, plan)
    return {"read": expected.read, "write": expected.write, "reduced": expected.reduced}


def wavefronts(call: Call) -> float:
    """Wavefronts of a corner's forward in shared memory where no mask leaves blocks out."""
    name, plan = plan_of(call)
    step = shared_traffic(plan, "split_q" if "split_q" in name else "split_k")
    cell = call.cell
    steps = -(-cell.seqlen // plan.rows) * -(-cell.seqlen // plan.columns)
    return cell.batch * cell.heads * steps * (step.read + step.write) / WAVEFRONT


def row_bytes(head_dim: int, backward: bool, workspace: bool) -> int:
    """Bytes of a query's and a key's row in all tensors of a call, MHA."""
    tensors = (8 if backward else 4) * head_dim * ELEMENT + FLOAT
    return tensors + workspace * (lab_width(head_dim) + 2) * FLOAT  # O or dQ, and two numbers


def working_set(call: Call) -> int:
    """Bytes of the call's tensors and of its float32 workspace."""
    has_workspace = call.backward or call.kernel.startswith(("v1", "kv_outer"))
    cell = call.cell
    rows = cell.batch * cell.heads * cell.seqlen
    return rows * row_bytes(cell.head_dim, call.backward, has_workspace)
