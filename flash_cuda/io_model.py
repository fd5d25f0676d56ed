"""Bytes that attention moves to and from global memory: the papers' theorems with constants.

What standard attention, the lab's kernels and v2 ask of global memory, caches not counted, with
ragged ends and the causal band. Elements are float16 or bfloat16. Letters as in the papers: B_r
rows of queries and B_c keys make a block. Traffic in shared memory: flash_cuda/tile_plan.py.
"""

from dataclasses import dataclass

from flash_cuda.tile_plan import ELEMENT, FLOAT, TilePlan, lab_width

# (B_r, B_c) of kernels by the width of their tile, where a thread block may have 163 KB: the first
# tile of each list in csrc/kernels/v1/config.h and csrc/kernels/v2/config.h.
V2_FORWARD = dict.fromkeys((32, 64, 96, 128), (128, 64)) | dict.fromkeys((192, 256), (64, 64))
V2_BACKWARD = {32: (64, 128), 64: (32, 128), 96: (64, 64), 128: (64, 128)}
V2_BACKWARD |= {192: (64, 64), 256: (64, 64)}
V1_BACKWARD = {width: V2_BACKWARD[width] for width in (64, 128)}


@dataclass(frozen=True)
class Traffic:
    """Bytes. `reduced` are those that float32 reductions (PTX red) send to the L2 cache."""

    read: int
    write: int
    reduced: int = 0

    @property
    def total(self) -> int:
        return self.read + self.write + self.reduced


@dataclass(frozen=True)
class Workload:
    """One call; lengths of 1 or more. causal: query i sees keys j <= i + seqlen_k - seqlen_q."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False

    @property
    def row(self) -> int:
        """Bytes of a row of q, k, v, out or a gradient."""
        return self.head_dim * ELEMENT


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _key_rows(work: Workload, B_r: int, B_c: int) -> int:
    """Keys that pass by all blocks of B_r queries of a head (Band::key_blocks)."""
    keys = 0
    for i in range(0, work.seqlen_q, B_r):
        row_end = min(i + B_r, work.seqlen_q)
        seen = max(0, row_end + work.seqlen_k - work.seqlen_q) if work.causal else work.seqlen_k
        keys += min(_blocks(seen, B_c) * B_c, work.seqlen_k)
    return keys


def _query_rows(work: Workload, B_r: int, B_c: int) -> tuple[int, int, int]:
    """Queries that pass by all KV blocks of a head; their blocks; of these, not the first visits.

    Some query sees each KV block, because the last one sees all keys; a block's queries reach to
    the last one (Band::query_blocks).
    """
    rows, visits = 0, []
    for j in range(0, work.seqlen_k, B_c):
        seen_from = max(0, j - (work.seqlen_k - work.seqlen_q)) if work.causal else 0
        rows += work.seqlen_q - seen_from // B_r * B_r
        visits.append(_blocks(work.seqlen_q, B_r) - seen_from // B_r)
    return rows, sum(visits), sum(visits[1:])


def v2_width(head_dim: int) -> int:
    """Columns of the v2 kernels' tiles for a head dim from 1 to 256."""
    return next(width for width in V2_FORWARD if width >= head_dim)


def standard_forward(work: Workload) -> Traffic:
    """Standard attention: S = Q K^T, P = softmax(S), O = P V, with S and P in global memory.

    A mask saves nothing. The query heads of a group share one product, which reads K and V once.
    Source: Dao et al. 2022, section 2.2, Algorithm 0.
    """
    queries, keys, scores = _standard_sizes(work)
    return Traffic(read=queries + 2 * keys + 2 * scores, write=queries + 2 * scores)


def standard_backward(work: Workload) -> Traffic:
    """dV = P^T dO; dP = dO V^T; dS = softmax's gradient of P, dP; dQ = dS K; dK = dS^T Q.

    P is kept from the forward. Source: Dao et al. 2022, appendix B.4, Algorithm 3.
    """
    queries, keys, scores = _standard_sizes(work)
    read = 3 * queries + 2 * keys + 5 * scores  # dO twice, Q; V, K; P twice, dP, dS twice
    return Traffic(read=read, write=queries + 2 * keys + 2 * scores)


def _standard_sizes(work: Workload) -> tuple[int, int, int]:
    """Bytes of Q, of K, of S."""
    rows = work.batch * work.heads_q * work.seqlen_q
    keys = work.batch * work.heads_kv * work.seqlen_k
    return rows * work.row, keys * work.row, rows * work.seqlen_k * ELEMENT


def v1_forward(work: Workload, B_c: int, strip: int) -> Traffic:
    """KV-outer forward (v1 and every kv_outer corner), one thread block for each query head.

    O (float32, as wide as the tile), m and l of a strip of queries go out and come back between
    two of its KV blocks. A strip is B_r rows for split-Q, strip_rows of the plan for split-K.
    Source: Dao et al. 2022, Algorithm 1.
    """
    rows, _, returns = _query_rows(work, strip, B_c)
    state = returns * strip * (lab_width(work.head_dim) + 2) * FLOAT
    heads = work.batch * work.heads_q
    return Traffic(
        read=heads * (work.row * (2 * work.seqlen_k + rows) + state),
        write=heads * (work.seqlen_q * (work.row + FLOAT) + state),
    )


def q_outer_forward(work: Workload, B_r: int, B_c: int) -> Traffic:
    """Q-outer forward, one thread block for each B_r queries of a head; O, m, l in registers.

    Source: Dao 2023, section 3.1, Algorithm 1.
    """
    heads = work.batch * work.heads_q
    read = heads * work.row * (work.seqlen_q + 2 * _key_rows(work, B_r, B_c))
    return Traffic(read, write=heads * work.seqlen_q * (work.row + FLOAT))


def v2_forward(work: Workload) -> Traffic:
    """The v2 forward kernel: q_outer_forward with its own tile (csrc/kernels/v2/config.h)."""
    return q_outer_forward(work, *V2_FORWARD[v2_width(work.head_dim)])


def lab_forward(corner: str, work: Workload, plan: TilePlan) -> Traffic:
    """Forward of a corner such as "kv_outer/split_k/eager", or of "v1", with the plan's blocks."""
    if corner.startswith("q_outer"):
        return q_outer_forward(work, plan.rows, plan.columns)
    return v1_forward(work, plan.columns, plan.rows if "split_q" in corner else plan.strip_rows)


def v1_backward(work: Workload, B_r: int, B_c: int) -> Traffic:
    """v1 backward, one thread block for each KV head; dQ (float32) comes and goes like v1's O.

    Q, dO, O and lse are read in every block; the kernel's blocks are in V1_BACKWARD.
    Source: Dao et al. 2022, appendix B.4, Algorithm 4.
    """
    rows, _, returns = _query_rows(work, B_r, B_c)
    sums = returns * B_r * lab_width(work.head_dim) * FLOAT
    heads, heads_kv = work.batch * work.heads_q, work.batch * work.heads_kv
    keys = heads_kv * 2 * work.row * work.seqlen_k  # K and V, dK and dV
    return Traffic(
        read=heads * (rows * (3 * work.row + FLOAT) + sums) + keys,
        write=heads * (work.seqlen_q * work.row + sums) + keys,
    )


def v2_backward(work: Workload, tile: tuple[int, int] | None = None) -> Traffic:
    """v2 backward: its prepare, main and finish kernels; without the turns of deterministic mode.

    tile: (B_r, B_c), None = the kernel's own. Source: Dao 2023, section 3.1, Algorithm 2.
    """
    width = v2_width(work.head_dim)
    B_r, B_c = tile or V2_BACKWARD[width]
    rows, visits, _ = _query_rows(work, B_r, B_c)
    block = B_r * width * FLOAT  # of dQ's sum
    sums = _blocks(work.seqlen_q, B_r) * block  # cleared by prepare, read by finish
    heads, heads_kv = work.batch * work.heads_q, work.batch * work.heads_kv
    keys = heads_kv * 2 * work.row * work.seqlen_k
    queries = work.seqlen_q * 2 * work.row + rows * (2 * work.row + 2 * FLOAT)  # prepare, main
    return Traffic(
        read=heads * (queries + sums) + keys,
        write=heads * (work.seqlen_q * (FLOAT + work.row) + sums) + keys,
        reduced=heads * visits * block,
    )


def standard_accesses(n: int, d: int) -> int:
    """Elements that standard attention moves, up to a constant: N d + N^2.

    Source: Dao et al. 2022, section 3.2, Theorem 2.
    """
    return n * d + n * n


def v1_accesses(n: int, d: int, sram: int) -> float:
    """Elements that v1 moves, up to a constant: N^2 d^2 / M with M elements of SRAM, d <= M <= N d.

    Source: Dao et al. 2022, section 3.2, Theorem 2; the backward: appendix B.4, Theorem 5.
    """
    return n * n * d * d / sram
