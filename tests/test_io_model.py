"""flash_cuda.io_model against a simulation that walks each algorithm and counts what it touches."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_cuda import io_model, kernel_names, tile_plan
from flash_cuda.io_model import Traffic, Workload

examples = settings(deadline=None, max_examples=120)
lengths = st.integers(1, 41)
sizes = st.sampled_from([1, 2, 3, 5, 8, 16])
workloads = st.builds(
    lambda batch, heads_kv, group, sq, sk, head_dim, causal: Workload(
        batch, heads_kv * group, heads_kv, sq, sk, head_dim, causal
    ),
    batch=st.integers(1, 2),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    sq=lengths,
    sk=lengths,
    head_dim=st.sampled_from([1, 40, 64, 72, 128]),
    causal=st.booleans(),
)


class Memory:
    """Global memory of one head: counts the rows that are touched, by tensor.

    Tensors of the caller end with the sequence; those of the workspace, `padded`, have whole
    blocks.
    """

    def __init__(self, **bytes_per_row: int):
        self.bytes_per_row = bytes_per_row
        self.rows = {kind: Counter() for kind in ("read", "write", "reduced")}

    def touch(self, kind: str, names: str, block: range, length: int | None = None):
        """`length` None: padded."""
        rows = len(block) if length is None else max(0, min(block.stop, length) - block.start)
        for name in names.split():
            self.rows[kind][name] += rows

    def traffic(self, heads: int) -> Traffic:
        return Traffic(
            *(
                heads * sum(count * self.bytes_per_row[name] for name, count in rows.items())
                for rows in self.rows.values()
            )
        )


def add(*parts: Traffic) -> Traffic:
    return Traffic(*(sum(getattr(p, f) for p in parts) for f in ("read", "write", "reduced")))


def blocks(length: int, size: int) -> list[range]:
    """Whole blocks: the last one may hang over."""
    return [range(begin, begin + size) for begin in range(0, length, size)]


def visible(work: Workload) -> np.ndarray:
    i, j = np.arange(work.seqlen_q)[:, None], np.arange(work.seqlen_k)
    return (j <= i + work.seqlen_k - work.seqlen_q) | (not work.causal)


def pairs(work: Workload, B_r: int, B_c: int) -> set[tuple[range, range]]:
    """(queries, keys) of the blocks with something to do."""
    seen = visible(work)
    return {
        (rows, keys)
        for rows in blocks(work.seqlen_q, B_r)
        for keys in blocks(work.seqlen_k, B_c)
        if seen[rows.start : rows.stop, keys.start : keys.stop].any()
    }


def simulate_kv_outer(work: Workload, B_c: int, strip: int, width: int) -> Traffic:
    row = work.head_dim * 2
    memory = Memory(q=row, k=row, v=row, out=row, lse=4, O=width * 4, ml=8)
    todo = pairs(work, strip, B_c)
    strips, columns = blocks(work.seqlen_q, strip), blocks(work.seqlen_k, B_c)
    left = Counter(rows for rows, _ in todo)
    kept = set()  # strips whose O, m, l are in the workspace
    for keys in columns:
        mine = [rows for rows in strips if (rows, keys) in todo]
        if mine:
            memory.touch("read", "k v", keys, work.seqlen_k)
        for rows in mine:
            memory.touch("read", "q", rows, work.seqlen_q)
            if rows in kept:
                memory.touch("read", "O ml", rows)
            left[rows] -= 1
            if left[rows]:
                memory.touch("write", "O ml", rows)
                kept.add(rows)
            else:
                memory.touch("write", "out lse", rows, work.seqlen_q)
    for rows in strips:
        if not any((rows, keys) in todo for keys in columns):  # no key at all: O = 0
            memory.touch("write", "out lse", rows, work.seqlen_q)
    return memory.traffic(work.batch * work.heads_q)


def simulate_q_outer(work: Workload, B_r: int, B_c: int) -> Traffic:
    row = work.head_dim * 2
    memory = Memory(q=row, k=row, v=row, out=row, lse=4)
    todo = pairs(work, B_r, B_c)
    for rows in blocks(work.seqlen_q, B_r):
        memory.touch("read", "q", rows, work.seqlen_q)
        for keys in blocks(work.seqlen_k, B_c):
            if (rows, keys) in todo:
                memory.touch("read", "k v", keys, work.seqlen_k)
        memory.touch("write", "out lse", rows, work.seqlen_q)
    return memory.traffic(work.batch * work.heads_q)


def simulate_backward(work: Workload, B_r: int, B_c: int, width: int, v1: bool) -> Traffic:
    row = work.head_dim * 2
    of_queries = Memory(q=row, dout=row, out=row, lse=4, delta=4, dq=row, dq_sum=width * 4)
    of_keys = Memory(k=row, v=row, dk=row, dv=row)
    todo = pairs(work, B_r, B_c)
    queries, columns = blocks(work.seqlen_q, B_r), blocks(work.seqlen_k, B_c)
    left = Counter(rows for rows, _ in todo)
    kept = set()
    for rows in queries if not v1 else ():  # prepare
        of_queries.touch("read", "out dout", rows, work.seqlen_q)
        of_queries.touch("write", "delta", rows, work.seqlen_q)
        of_queries.touch("write", "dq_sum", rows)
    for keys in columns:
        mine = [rows for rows in queries if (rows, keys) in todo]
        if mine:
            of_keys.touch("read", "k v", keys, work.seqlen_k)
        for rows in mine:
            once = "q dout out lse" if v1 else "q dout lse delta"
            of_queries.touch("read", once, rows, work.seqlen_q)
            if not v1:
                of_queries.touch("reduced", "dq_sum", rows)
                continue
            if rows in kept:
                of_queries.touch("read", "dq_sum", rows)
            left[rows] -= 1
            if left[rows]:
                of_queries.touch("write", "dq_sum", rows)
                kept.add(rows)
            else:
                of_queries.touch("write", "dq", rows, work.seqlen_q)
        of_keys.touch("write", "dk dv", keys, work.seqlen_k)
    for rows in queries:
        if not v1:  # finish
            of_queries.touch("read", "dq_sum", rows)
        if not v1 or not any((rows, keys) in todo for keys in columns):
            of_queries.touch("write", "dq", rows, work.seqlen_q)
    return add(
        of_queries.traffic(work.batch * work.heads_q), of_keys.traffic(work.batch * work.heads_kv)
    )


def width_of(head_dim: int, widths: tuple[int, ...]) -> int:
    return min(w for w in widths if w >= head_dim)


@examples
@given(workloads, sizes, sizes)
def test_forwards(work, B_r, B_c):
    width = width_of(work.head_dim, (64, 128))
    assert io_model.v1_forward(work, B_c, B_r) == simulate_kv_outer(work, B_c, B_r, width)
    assert io_model.q_outer_forward(work, B_r, B_c) == simulate_q_outer(work, B_r, B_c)


@examples
@given(workloads, sizes, sizes)
def test_backwards(work, B_r, B_c):
    width = width_of(work.head_dim, (64, 128))
    assert io_model.v1_backward(work, B_r, B_c) == simulate_backward(work, B_r, B_c, width, True)
    width = width_of(work.head_dim, (32, 64, 96, 128, 192, 256))
    expected = simulate_backward(work, B_r, B_c, width, False)
    assert io_model.v2_backward(work, (B_r, B_c)) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim, rows", [(32, 128), (128, 128), (200, 64), (256, 64)])
def test_v2_has_its_own_tile(head_dim, rows, causal):
    work = Workload(1, 2, 1, 300, 333, head_dim, causal)
    assert io_model.v2_forward(work) == simulate_q_outer(work, rows, 64)
    own = io_model.V2_BACKWARD[io_model.v2_width(head_dim)]
    assert io_model.v2_backward(work) == io_model.v2_backward(work, own)


def test_corners_take_their_blocks_from_the_plan():
    work = Workload(1, 1, 1, 777, 777, 128)
    plan = tile_plan.tile_plan(128, 163)
    assert (plan.rows, plan.columns, plan.strip_rows) == (128, 128, 32)
    v1 = io_model.v1_forward(work, B_c=128, strip=32)
    for corner in kernel_names.LAB_KERNELS:
        split_q = io_model.v1_forward(work, B_c=128, strip=128)
        q_outer = io_model.q_outer_forward(work, 128, 128)
        kv_outer = split_q if "split_q" in corner else v1
        expected = q_outer if corner.startswith("q_outer") else kv_outer
        assert io_model.lab_forward(corner, work, plan) == expected


def test_standard_attention_by_hand():
    """N = 1000, d = 64, 2 heads on 1 KV head, in elements: Q, dO, dQ, O of 128,000; S of 2e6."""
    work = Workload(1, 2, 1, 1000, 1000, 64)
    q, k, s = 128_000, 64_000, 2_000_000
    forward = Traffic(read=2 * (q + k + s + s + k), write=2 * (s + s + q))
    assert io_model.standard_forward(work) == forward
    # dV = P^T dO; dP = dO V^T; dS of P, dP; dQ = dS K; dK = dS^T Q
    read = (s + q) + (q + k) + (s + s) + (s + k) + (s + q)
    assert io_model.standard_backward(work) == Traffic(2 * read, 2 * (k + s + s + q + k))
    assert io_model.standard_forward(replace(work, causal=True)) == forward


def test_theorems_are_the_leading_terms():
    """At long N the exact counts grow as the theorems say, whatever the constants."""
    short, long = (Workload(1, 1, 1, n, n, 64) for n in (1 << 15, 1 << 17))
    v1 = [io_model.v1_forward(work, 96, 64).total for work in (short, long)]
    standard = [io_model.standard_forward(work).total for work in (short, long)]
    growth = io_model.v1_accesses(1 << 17, 64, 24576) / io_model.v1_accesses(1 << 15, 64, 24576)
    assert v1[1] / v1[0] == pytest.approx(growth, rel=0.01)
    assert io_model.v1_accesses(4096, 64, 50000) * 2 == io_model.v1_accesses(4096, 64, 25000)
    growth = io_model.standard_accesses(1 << 17, 64) / io_model.standard_accesses(1 << 15, 64)
    assert standard[1] / standard[0] == pytest.approx(growth, rel=0.01)
    assert v1[1] < standard[1]


def test_shared_traffic_by_hand():
    """head_dim 128, 163 KB: 128 x 128 blocks, strips of 32 for two teams of 4; 8 split-Q warps."""
    plan = tile_plan.tile_plan(128, 163)
    tile = 128 * 128 * 2  # bytes of Q_i, K_j or V_j
    split_q = tile_plan.shared_traffic(plan, "split_q")
    assert split_q == tile_plan.SharedTraffic(read=tile + 8 * 2 * tile, write=0, barriers=2)
    strips, sums = 4, 3 * 32 * 128 * 4  # three warps' rows go to another warp
    exchange = strips * (sums + 4 * 32 * 8)
    split_k = tile_plan.shared_traffic(plan, "split_k")
    assert split_k.read == 4 * tile + strips * 2 * tile + exchange
    assert split_k.write == exchange
    assert split_k.barriers == 4 * strips // plan.teams
