"""The constexpr geometry of the kernels (tests/host/module.cpp) against brute force; needs no GPU.

Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
"""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_cuda import io_model, tile_plan
from tests.host.load import flash_cuda_host

WIDTHS = [32, 64, 96, 128, 192, 256]  # columns of a tile
# (rows, columns) of the tiles of queries and of keys that the hopper kernel has
PANELS = [(64, c) for c in WIDTHS[1:]] + [(96, 96), (96, 192), (128, 64), (128, 128)]
LANES = np.arange(32)

examples = settings(deadline=None, max_examples=150)
# csrc/ops refuses longer sequences, so that the sums in band.h stay in 32 bits.
long = st.integers(1, 2**29 - 1) | st.just(2**29 - 1)
long_windows = st.integers(-1, 2**31 - 1) | st.sampled_from([-1, 2**31 - 1])
lengths = st.integers(0, 33)
windows = st.integers(-1, 40)
counts = st.integers(1, 6)
sizes = st.sampled_from([1, 2, 3, 5, 8, 16])


@pytest.fixture(scope="session")
def host(pytestconfig):
    return flash_cuda_host(pytestconfig.cache.mkdir("flash_cuda_host"))


def visible_pairs(sq, sk, left, right) -> np.ndarray:
    """(sq, sk) bool, from the definition of the window."""
    distance = np.arange(sk) - (np.arange(sq)[:, None] + sk - sq)
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def blocks_of(length: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


@examples
@given(sq=lengths, sk=lengths, left=windows, right=windows)
def test_band_is_the_window(host, sq, sk, left, right):
    band = host.band(sq, sk, left, right)
    seen = [[host.visible(*band, i, j) for j in range(sk)] for i in range(sq)]
    assert np.array_equal(np.array(seen, bool).reshape(sq, sk), visible_pairs(sq, sk, left, right))


@examples
@given(sq=lengths, sk=lengths, left=windows, right=windows, height=sizes, width=sizes)
def test_blocks_of_the_band_are_exact(host, sq, sk, left, right, height, width):
    """From either side, the same pairs: the deterministic backward counts its turns by them."""
    band = host.band(sq, sk, left, right)
    seen = visible_pairs(sq, sk, left, right)
    rows, keys = blocks_of(sq, height), blocks_of(sk, width)
    todo = {(m, n) for m, r in enumerate(rows) for n, c in enumerate(keys) if seen[r, c].any()}
    of_rows = [host.key_blocks(*band, r.start, r.stop, sk, width) for r in rows]
    of_keys = [host.query_blocks(*band, c.start, c.stop, sq, height) for c in keys]
    by_rows = {(m, n) for m, blocks in enumerate(of_rows) for n in range(*blocks)}
    by_keys = {(m, n) for n, blocks in enumerate(of_keys) for m in range(*blocks)}
    assert by_rows == todo and by_keys == todo


@examples
@given(sq=lengths, sk=lengths, left=windows, right=windows, height=sizes, width=sizes)
def test_covers_means_every_pair(host, sq, sk, left, right, height, width):
    band = host.band(sq, sk, left, right)
    seen = visible_pairs(sq, sk, left, right)
    for r in blocks_of(sq, height):
        for begin in range(0, sk + width, width):  # the last one hangs over, or lies past the end
            end = begin + width
            every = end <= sk and bool(seen[r, begin:end].all())
            assert host.covers(*band, r.start, r.stop, begin, end, sk) == every


@examples
@given(sq=long, sk=long, left=long_windows, right=long_windows, at=st.floats(0, 1))
def test_band_of_long_sequences_does_not_overflow(host, sq, sk, left, right, at):
    band = host.band(sq, sk, left, right)
    lower = sk - sq - (sq + sk if left < 0 else left)
    upper = sk - sq + (sq + sk if right < 0 else right)
    row, key = int(at * (sq - 1)), int(at * (sk - 1))
    assert host.leaves_rows_unseen(*band, sq, sk) == (upper < 0 or sq - 1 + lower >= sk)
    calls = [
        (host.key_blocks(*band, row, row + 128, sk, 64), row + lower, row + 128 + upper, sk),
        (host.query_blocks(*band, key, key + 128, sq, 64), key - upper, key + 128 - lower, sq),
    ]
    for (begin, end), first, last, length in calls:
        first, last = max(0, first), min(length, last)
        assert begin >= end if last <= first else (begin, end) == (first // 64, -(-last // 64))


def test_leaves_rows_unseen_is_exact(host):
    """For any count of rows but none, which is no tile."""
    sides = range(-1, 10)
    for sq, sk, left, right in product(range(1, 9), range(9), sides, sides):
        unseen = not visible_pairs(sq, sk, left, right).any(1).all()
        band = host.band(sq, sk, left, right)
        assert host.leaves_rows_unseen(*band, sq, sk) == unseen, (sq, sk, left, right)


def offsets(host, columns: int, rows: int = 64) -> np.ndarray:
    """(rows, chunks of 16 bytes): byte offsets of a tile's chunks."""
    at = [host.swizzle_offset(columns, r, c) for r in range(rows) for c in range(columns // 8)]
    return np.array(at).reshape(rows, -1)


@pytest.mark.parametrize("columns", WIDTHS)
def test_swizzle_is_a_bijection_without_bank_conflicts(host, columns):
    at = offsets(host, columns)
    assert np.array_equal(np.sort(at, axis=None), np.arange(at.size) * 16)
    # Copies and views step by multiples of 8 rows with an addition.
    assert np.array_equal(at[8:], at[:-8] + 8 * columns * 2)
    groups = np.lib.stride_tricks.sliding_window_view(at // 16 % 8, 8, axis=0)
    assert (np.sort(groups, axis=-1) == np.arange(8)).all()


@pytest.mark.parametrize("columns", WIDTHS)
def test_step_pairs_is_an_offset(host, columns):
    at = offsets(host, columns, rows=16)
    for base in (0, 128, 5 * 128):  # of the tile, which begins with a 128-byte line
        for (row, chunk), offset in np.ndenumerate(at):
            stepped = host.swizzle_step_pairs(columns, base + at[row, chunk % 2], chunk // 2)
            assert stepped == base + offset


def wanted_panels(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Byte offsets (rows, chunks) of panels back to back, without and with the swizzle of TMA.

    PTX ISA, "Swizzling modes", as address bits: 4..6 ^= 7..9 for rows of 128 bytes (chunk ^=
    row % 8), 4..5 ^= 7..8 for rows of 64 (chunk ^= row / 2 % 4).
    """
    chunks = 8 if columns % 64 == 0 else 4
    row, chunk = np.arange(rows)[:, None], np.arange(columns // 8)
    plain = chunk // chunks * rows * chunks * 16 + row * chunks * 16 + chunk % chunks * 16
    return plain, plain ^ (plain >> 7 & chunks - 1) << 4


@pytest.mark.parametrize("rows, columns", PANELS)
def test_panels_are_what_tma_writes(host, rows, columns):
    at = np.array(host.panels[rows, columns][0])
    assert np.array_equal(np.sort(at, axis=None), np.arange(rows * columns // 8) * 16)
    assert np.array_equal(at, wanted_panels(rows, columns)[1])
    groups = np.lib.stride_tricks.sliding_window_view(at // 16 % 8, 8, axis=0)
    assert (np.sort(groups, axis=-1) == np.arange(8)).all()


@pytest.mark.parametrize("rows, columns", PANELS)
def test_panel_steps_are_what_wgmma_reads(host, rows, columns):
    """It swizzles addresses itself: those of its descriptors are plain."""
    at, column_steps, row_steps, descriptor = (np.array(x) for x in host.panels[rows, columns])
    plain, _ = wanted_panels(rows, columns)
    assert np.array_equal(column_steps, plain[0, ::2])
    assert np.array_equal(row_steps, plain[::16, 0])
    for row in range(0, rows, 8):  # there the two are the same
        assert np.array_equal(at[row, ::2], at[row, 0] + column_steps)
    for chunk in range(columns // 8):
        assert np.array_equal(at[::16, chunk], at[0, chunk] + row_steps)
    wide = columns % 64 == 0
    panel = plain[0, 8 if wide else 4] if columns > 64 else rows * columns * 2
    fields = {"leading": (16, panel >> 4), "stride": (32, plain[8, 0] >> 4)}
    for name, (shift, value) in fields.items():
        assert int(descriptor) >> shift & 0x3FFF == value, name
    assert int(descriptor) >> 62 == (1 if wide else 2)
    assert int(descriptor) & 0xFFFF == 0  # the address


def test_accumulator_elements(host):
    at = np.array([[host.accumulator_element(lane, e) for e in range(4)] for lane in LANES])
    assert {tuple(x) for x in at.reshape(-1, 2)} == set(np.ndindex(16, 8))
    e = np.arange(4)
    assert np.array_equal(at[..., 0], LANES[:, None] // 4 + 8 * (e >= 2))
    assert np.array_equal(at[..., 1], LANES[:, None] % 4 * 2 + e % 2)


def operand_a() -> tuple[np.ndarray, np.ndarray]:
    """(m, k) of element [lane, i], i = 0..7: a0, a1 in register 0, ..."""
    i, lane = np.arange(8), LANES[:, None]
    return lane // 4 + 8 * (i % 4 >= 2), lane % 4 * 2 + i % 2 + 8 * (i >= 4)


def operands_b() -> tuple[np.ndarray, np.ndarray]:
    """(k, n) of element [lane, i]: b0..b3 of columns 0..7, then b0..b3 of columns 8..15."""
    i, lane = np.arange(8), LANES[:, None]
    return lane % 4 * 2 + i % 2 + 8 * (i % 4 >= 2), lane // 4 + 8 * (i >= 4)


def ldmatrix_x4(memory: np.ndarray, addresses: np.ndarray, trans: bool) -> np.ndarray:
    """(32, 8): what lane l gets, two elements a register; memory holds 16-bit elements."""
    assert (addresses % 16 == 0).all()
    matrices = memory[addresses[:, None] // 2 + np.arange(8)].reshape(4, 8, 8)
    matrices = matrices.transpose(0, 2, 1) if trans else matrices
    return matrices.reshape(4, 32, 2).transpose(1, 0, 2).reshape(32, 8)


@pytest.mark.parametrize("columns", WIDTHS)
def test_lane_rows_bring_the_operands_of_mma(host, columns):
    at = offsets(host, columns)
    tile = np.arange(64 * columns).reshape(64, columns)  # 64 rows; every element names itself
    memory = np.empty(tile.size, int)
    memory[(at[..., None] // 2 + np.arange(8)).ravel()] = tile.ravel()
    (a_m, a_k), (b_k, b_n) = operand_a(), operands_b()
    loads = [
        (host.lane_row_a, False, a_m, a_k),  # A stored [m][k]
        (host.lane_row_a, True, b_k, b_n),  # B stored [k][n]
        (host.lane_row_b, False, b_n, b_k),  # B stored [n][k]
        (host.lane_row_b, True, a_k, a_m),  # A stored [k][m]
    ]
    for lane_row, trans, row, column in loads:
        for block, pair in np.ndindex(4, columns // 16):
            lanes = [lane_row(lane) for lane in LANES]
            # As tile::LaneView: the address of the first block, stepped.
            steps = [host.swizzle_step_pairs(columns, at[r, c], pair) for r, c in lanes]
            addresses = np.array(steps) + block * 16 * columns * 2
            expected = tile[block * 16 + row, pair * 16 + column]
            assert np.array_equal(ldmatrix_x4(memory, addresses, trans), expected)


def test_accumulators_are_an_operand_as_they_are(host):
    """Two 16 x 8 accumulators side by side lie in the lanes as one 16 x 16 A operand."""
    at = np.array([[host.accumulator_element(lane, i % 4) for i in range(8)] for lane in LANES])
    m, k = operand_a()
    assert np.array_equal(at[..., 0], m) and np.array_equal(at[..., 1] + 8 * (np.arange(8) > 3), k)


@examples
@given(counts, counts, counts, st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_tile_order(host, blocks, heads, batches, per_phase, section, up):
    """Every tile once; phases, in them sections, in them the longest block of all heads first."""
    tiles = host.tile_order(blocks, heads, batches, per_phase, section, up)
    expected = []
    for phase in range(0, blocks, per_phase):
        for first in range(0, heads * batches, section):
            for step in range(phase, min(phase + per_phase, blocks)):
                block = step if up else blocks - 1 - step
                flat = range(first, min(first + section, heads * batches))
                expected += [(block, head % heads, head // heads) for head in flat]
    assert tiles == expected


@examples
@given(st.integers(0, 2**40), st.integers(0, 2**30), st.integers(1, 2**31 - 1))
def test_section_is_what_half_the_cache_holds(host, bytes_per_head, cache, heads):
    section = host.section_for(bytes_per_head, cache, heads)
    assert 1 <= section <= heads
    assert section == 1 or section * bytes_per_head <= cache // 2
    assert section == heads or (section + 1) * max(bytes_per_head, 1) > cache // 2


@examples
@given(counts, st.integers(1, 9), counts, st.booleans(), st.integers(0, 99), st.integers(0, 999))
def test_by_section(host, blocks, heads, batches, up, bytes_per_head, cache):
    """As few sections as the cache allows; in each all blocks, the longest of all heads first."""
    order = host.by_section(blocks, heads, batches, up, bytes_per_head, cache)
    total, width = heads * batches, order[4]
    most = host.section_for(bytes_per_head, cache * 4 // 3, total)
    assert width <= most and math.ceil(total / width) == math.ceil(total / most)
    tiles, expected = host.tile_order(*order[:6]), []
    for first in range(0, total, width):
        for block in range(blocks) if up else range(blocks - 1, -1, -1):
            flat = range(first, min(first + width, total))
            expected += [(block, head % heads, head // heads) for head in flat]
    assert tiles == expected
    assert set(tiles) == set(product(range(blocks), range(heads), range(batches)))


def shares(host, tiles, sweep, stride):
    """The tiles of each thread block."""
    taken = []
    for first in range(stride):
        index, share = first, []
        while index < tiles:
            share.append(index)
            index = host.tile_after(tiles, sweep, index, stride)
        taken.append(share)
    return taken


@examples
@given(st.integers(0, 700), st.integers(1, 150))
def test_fixed_shares_are_all_tiles(host, tiles, stride):
    """One tile a round for each thread block; first and last change places in every round."""
    taken = shares(host, tiles, 0, stride)
    for share in taken:
        assert [index // stride for index in share] == list(range(len(share)))
        assert all(a % stride + b % stride == stride - 1 for a, b in pairwise(share))
    assert sorted(index for share in taken for index in share) == list(range(tiles))


@examples
@given(st.integers(0, 700), st.integers(1, 300), st.integers(1, 150))
def test_fixed_shares_of_each_sweep_are_all_its_tiles(host, tiles, sweep, stride):
    """Of a sweep (of several, if short) no thread block has two tiles more than another."""
    taken = shares(host, tiles, sweep, stride)
    assert sorted(index for share in taken for index in share) == list(range(tiles))
    length = sweep if sweep >= stride else math.ceil(stride / sweep) * sweep
    for begin in range(0, tiles, length):
        counts = [sum(begin <= index < begin + length for index in share) for share in taken]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("blocks, heads", [(16, 256), (64, 32), (128, 16), (24, 60), (64, 8)])
def test_fixed_shares_weigh_alike(host, blocks, heads):
    """Causal tiles of several sections: the longest share is at most 4 % above the mean."""
    order = host.by_section(blocks, heads, 1, False, 2 * 128 * blocks * 128 * 2, 50 << 20)
    tiles, weights = host.tile_order(*order[:6]), []
    for share in shares(host, blocks * heads, order[6], 132):
        weights.append(sum(tiles[index][0] + 1 for index in share))
    assert max(weights) <= 1.04 * sum(weights) / len(weights)


def test_fixed_shares_of_the_most_tiles_do_not_wrap(host):
    for tiles, sweep, stride in product((2**31 - 1,), (0, 2**20, 2**31 - 2), (132, 2**16)):
        assert tiles <= host.tile_after(tiles, sweep, tiles - 1, stride) < tiles + 2 * stride


def test_kernel_head_dim(host):
    for head_dim in range(1, 257):
        assert host.kernel_head_dim(head_dim) == min(w for w in WIDTHS if w >= head_dim)


@examples
@given(st.integers(1, 2**28), st.integers(1, 256))
def test_paper_block_sizes(host, sram, head_dim):
    """B_c = ceil(M / 4d), B_r = min(B_c, d); Q_i and K_j fill at most a quarter of M, and a row."""
    columns = math.ceil(sram / (4 * head_dim))
    rows, found = host.paper_block_sizes(sram, head_dim)
    assert (rows, found) == (min(columns, head_dim), columns)
    assert rows * head_dim < sram / 4 + head_dim and columns * head_dim < sram / 4 + head_dim


def test_python_knows_the_budgets_and_tiles_of_the_headers(host):
    assert tuple(host.budgets_kb) == tile_plan.BUDGETS_KB
    for width in WIDTHS:
        assert io_model.V2_FORWARD[width] == host.v2_forward_tile(width)
        assert io_model.V2_BACKWARD[width] == host.v2_backward_tile(width)
    for width in (64, 128):
        assert io_model.V1_BACKWARD[width] == host.v1_backward_tile(width)
    for head_dim in range(1, 257):
        assert io_model.v2_width(head_dim) == host.kernel_head_dim(head_dim)
