"""Block sizes of v1 and the lab for a shared-memory budget, and their traffic in shared memory."""

from dataclasses import dataclass

BUDGETS_KB = (48, 99, 163, 227)  # kBudgetsKb of csrc/attention/tile_plan.h
ELEMENT = 2  # bytes of float16, bfloat16
FLOAT = 4


@dataclass(frozen=True)
class TilePlan:
    """csrc/attention/tile_plan.h for one head dim and budget; sizes in rows and keys, or bytes."""

    width: int  # columns of the tiles: the head dim of the kernel
    paper_rows: int  # B_r = min(ceil(M / 4d), d)
    paper_columns: int  # B_c = ceil(M / 4d)
    rows: int  # B_r and B_c of the kernel
    columns: int
    split_k: int  # warps of a team, which divide the keys of a block
    teams: int
    strip_rows: int  # queries that a team works on at a time
    split_q: int  # split-Q warps, 16 rows each
    split_k_bytes: int  # shared memory of a thread block
    split_q_bytes: int
    split_k_blocks: int  # thread blocks on an SM of 228 KB that the launch bounds promise
    split_q_blocks: int
    default_kb: int  # the budget that kernel="v1" takes on a device with no more than this one

    def warps(self, partition: str) -> int:
        return self.split_k * self.teams if partition == "split_k" else self.split_q

    def shared_bytes(self, partition: str) -> int:
        return self.split_k_bytes if partition == "split_k" else self.split_q_bytes

    def blocks(self, partition: str) -> int:
        return self.split_k_blocks if partition == "split_k" else self.split_q_blocks


def lab_width(head_dim: int) -> int:
    """Columns of the lab kernels' tiles for a head dim from 1 to 128."""
    return 64 if head_dim <= 64 else 128


def tile_plan(head_dim: int, kilobytes: int) -> TilePlan:
    """The plan for a head dim from 1 to 128 and a budget of BUDGETS_KB; ValueError for others.

    Source: Dao et al. 2022, Algorithm 1, line 1; rounding in csrc/attention/tile_plan.h.
    """
    from flash_cuda import _C  # here, so that all the arithmetic around it needs no extension

    return TilePlan(*_C.tile_plan(head_dim, kilobytes))


@dataclass(frozen=True)
class SharedTraffic:
    """Bytes in shared memory, and barriers that a warp passes, for one step of a thread block."""

    read: int
    write: int
    barriers: int


def shared_traffic(plan: TilePlan, partition: str) -> SharedTraffic:
    """What the warps of "split_k" or "split_q" do in shared memory for B_r queries by B_c keys.

    Reads of Q, K and V by ldmatrix, and the exchange of split-K; not what fills or drains tiles.
    Split-Q: each warp reads its 16 queries and all of K, V. Split-K, for each strip: each warp
    reads all queries of the strip and its own slice of K, V; hands on its float32 sums of the rows
    that others add up (all but 1 / split_k), m and l of all rows; and reads as much. Barriers are
    those of the KV-outer kernels: split-K has two for each 64 columns of sums.
    Source: Dao 2023, section 3.3.
    """
    row = plan.width * ELEMENT
    keys = 2 * plan.columns * row
    if partition == "split_q":
        return SharedTraffic(plan.rows * row + plan.split_q * keys, 0, barriers=2)
    strips = plan.rows // plan.strip_rows
    queries = plan.rows * row * plan.split_k
    exchange = plan.rows * ((plan.split_k - 1) * plan.width + 2 * plan.split_k) * FLOAT
    barriers = 2 * (plan.width // 64) * strips // plan.teams
    return SharedTraffic(queries + strips * keys + exchange, exchange, barriers)
