// Attention with the loop order of FlashAttention-2 (Dao 2023, Algorithm 1) and block sizes of v1, for the lab.
//
//   for each block of queries Q_i (one thread block each)      grid: one dimension, TileOrder
//     O = 0, l = 0, m = -inf                                   in registers
//     for each block of keys K_j, values V_j in the band
//       a step, as in kernels/v1/forward.cuh
//
// The step is `Warps`, SplitK or SplitQ; `Normalisation` is Eager or Deferred. With SplitQ and Deferred that is v2, as
// the plan's block sizes make it: there is room for one K_j and one V_j, and K_{j+1} is on its way as soon as the last
// warp has read K_j.
#pragma once

#include <cstdint>

#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/lab/row_state.cuh"
#include "kernels/lab/team.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"

namespace flash_cuda::lab {

template <class Tile, class Warps>
struct QOuterShared {
  tile::SharedTile<Tile::kRows, Tile::kHeadDim> q;
  tile::SharedTile<Tile::kColumns, Tile::kHeadDim> k;
  tile::SharedTile<Tile::kColumns, Tile::kHeadDim> v;
  unsigned char exchange[Warps::kTeams][Warps::kSharedBytes];
};

// The first to the end.
template <int Count, class State>
__device__ __forceinline__ void rotate(State (&states)[Count]) {
  const State first = states[0];
#pragma unroll
  for (int i = 1; i < Count; ++i) states[i - 1] = states[i];
  states[Count - 1] = first;
}

// The NaNs and infinities of values that were left out of the products, to the rows of this thread block that see them.
// Not inlined: rare.
template <class Element, class Tile>
__device__ __noinline__ void restore_rows(const ForwardParams& p, Element* out, const Element* v, const int row_begin,
                                          const int row_end) {
  const BlockRange blocks = p.band.key_blocks(row_begin, row_end, p.shape.seqlen_k, Tile::kColumns);
  __syncthreads();  // the rows were written by other warps
  for (int row = row_begin + threadIdx.x / 32; row < row_end; row += blockDim.x / 32) {
    for (int block = blocks.begin; block < blocks.end; ++block) {
      const int key = block * Tile::kColumns;
      if (p.band.covers(row_begin, row_end, key, key + Tile::kColumns, p.shape.seqlen_k)) continue;
      restore_nonfinite(out, p.out_strides.row, v, p.v_strides.row, p.band, row, row + 1, key,
                        min_of(key + Tile::kColumns, p.shape.seqlen_k), p.shape.head_dim);
    }
  }
}

template <class Element, class Tile, class Warps, class Normalisation>
__global__ void __launch_bounds__(Warps::kThreads, Warps::kMinBlocks)
    q_outer_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ TileOrder order) {
  constexpr int kStrips = Tile::kRows / Warps::kStripRows / Warps::kTeams;  // of a team
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<QOuterShared<Tile, Warps>*>(shared_bytes);
  const uint32_t q_tile = ptx::shared_address(&shared.q);
  const uint32_t k_tile = ptx::shared_address(&shared.k);
  const uint32_t v_tile = ptx::shared_address(&shared.v);
  const WorkTile work = order.tile(blockIdx.x);
  const Team<Warps> team;
  const int row_begin = work.block * Tile::kRows;
  const int row_end = min_of(row_begin + Tile::kRows, p.shape.seqlen_q);
  const int kv_head = work.head / p.shape.group();
  const auto* k = static_cast<const Element*>(p.k) + work.batch * p.k_strides.batch + kv_head * p.k_strides.head;
  const auto* v = static_cast<const Element*>(p.v) + work.batch * p.v_strides.batch + kv_head * p.v_strides.head;
  const BlockRange blocks = p.band.key_blocks(row_begin, row_end, p.shape.seqlen_k, Tile::kColumns);

  using KeyCopy = tile::TileCopy<Tile::kColumns, Tile::kHeadDim, Warps::kThreads>;
  const KeyCopy k_copy(threadIdx.x, p.k_strides.row, p.shape.head_dim);
  const KeyCopy v_copy(threadIdx.x, p.v_strides.row, p.shape.head_dim);
  const auto request = [&](const KeyCopy& copy, const uint32_t tile, const Element* rows, const int64_t stride,
                           const int block) {
    const int key = block * Tile::kColumns;
    if (block < blocks.end) copy.load_async(tile, rows + copy.offset() + key * stride, p.shape.seqlen_k - key);
    ptx::cp_async_commit_group();
  };
  {
    const auto* q = static_cast<const Element*>(p.q) + work.batch * p.q_strides.batch + work.head * p.q_strides.head +
                    row_begin * p.q_strides.row;
    const tile::TileCopy<Tile::kRows, Tile::kHeadDim, Warps::kThreads> copy(threadIdx.x, p.q_strides.row,
                                                                            p.shape.head_dim);
    copy.load_async(q_tile, q + copy.offset(), row_end - row_begin);
  }
  request(k_copy, k_tile, k, p.k_strides.row, blocks.begin);
  request(v_copy, v_tile, v, p.v_strides.row, blocks.begin);

  const float scale_log2 = p.scale * kLog2e;
  Warps warps(team, ptx::shared_address(&shared.exchange[team.index]), scale_log2);
  typename Warps::State state[kStrips];
#pragma unroll
  for (int i = 0; i < kStrips; ++i) state[i].clear();
  bool left_out = false;

  for (int block = blocks.begin; block < blocks.end; ++block) {
    const int key = block * Tile::kColumns;
    ptx::cp_async_wait_group<1>();
    __syncthreads();  // Q_i and K_j are there
    if constexpr (Warps::kTakesQueries) {
      if (block == blocks.begin) warps.take_queries(q_tile);
    }
    // A loop, with the states passed round: unrolled, the compiler puts off one strip's additions until the next one's.
#pragma unroll 1
    for (int i = 0; i < kStrips; ++i) {
      const int strip = i * Warps::kTeams + team.index;
      if constexpr (!Warps::kTakesQueries) {
        warps.take_queries(q_tile + strip * Warps::kStripRows * Tile::kHeadDim * int(sizeof(Element)));
      }
      if (i > 0) team.sync();  // the last strip's sums are read
      const auto keys_read = [&] {
        if (i < kStrips - 1) return;
        __syncthreads();  // no warp reads K_j any more
        request(k_copy, k_tile, k, p.k_strides.row, block + 1);
      };
      const auto values_needed = [&] {
        if (i > 0) return;
        // K_{j+1} has been requested by now if a team has one strip, and a step one part.
        ptx::cp_async_wait_group<kStrips == 1 && Warps::kParts == 1 ? 1 : 0>();
        __syncthreads();  // V_j is there
        // Where rows see the block only in part, P = 0 does not stop 0 * NaN: they do without the NaNs and infinities
        // of V.
        if (!p.band.covers(row_begin, row_end, key, key + Tile::kColumns, p.shape.seqlen_k) &&
            has_nonfinite<Element, Tile::kColumns, Tile::kHeadDim, Warps::kThreads>(v_tile)) {
          zero_nonfinite<Element, Tile::kColumns, Tile::kHeadDim, Warps::kThreads>(v_tile);
          left_out = true;
        }
      };
      warps.step(state[0], k_tile, v_tile, p.band, row_begin + strip * Warps::kStripRows, key, p.shape.seqlen_k,
                 keys_read, values_needed);
      rotate(state);
    }
    __syncthreads();  // no warp reads V_j any more
    request(v_copy, v_tile, v, p.v_strides.row, block + 1);
  }
  ptx::cp_async_wait_group<0>();

  auto* out = static_cast<Element*>(p.out) + work.batch * p.out_strides.batch + work.head * p.out_strides.head;
  float* lse = p.lse + (int64_t{work.batch} * p.shape.heads_q + work.head) * p.shape.seqlen_q;
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    const int row = row_begin + (i * Warps::kTeams + team.index) * Warps::kStripRows;
    state[i].template store_output<Normalisation>(out + row * p.out_strides.row, p.out_strides.row, lse + row,
                                                  p.shape.head_dim, p.shape.seqlen_q - row, scale_log2, warps.staging(),
                                                  team.warp);
  }
  if (left_out) restore_rows<Element, Tile>(p, out, v, row_begin, row_end);
}

}  // namespace flash_cuda::lab
