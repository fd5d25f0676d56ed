// What the backward does row by row, before and after the main kernel: D = rowsum(dO * O) - dlse with the clearing of
// dQ's sum, and dQ = scale * sum in the element type. One thread block per block of queries of one head.
#pragma once

#include <cstdint>

#include "attention/backward_scores.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/v2/dq_accumulator.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"

namespace flash_cuda::v2 {

inline constexpr int kRowThreads = 256;

// From the end: the next kernel begins with what this one touches last, and finds it in the L2 cache.
__device__ __forceinline__ WorkTile last_tile_first(const TileOrder& order) {
  return order.tile(gridDim.x - 1 - blockIdx.x);
}

template <class Element, class Tile>
__global__ void __launch_bounds__(kRowThreads)
    backward_prepare_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ TileOrder order) {
  // Enough lanes for the chunks of a row, a power of two so that a warp shuffle can sum them.
  constexpr int kChunks = Tile::kHeadDim / tile::kChunkElements;
  constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  const WorkTile work = last_tile_first(order);
  const int row_begin = work.block * Tile::kBlockM;
  const int row_end = min_of(row_begin + Tile::kBlockM, p.shape.seqlen_q);
  const int column = threadIdx.x % kLanes * tile::kChunkElements;
  const auto* out =
      static_cast<const Element*>(p.out) + work.batch * p.out_strides.batch + work.head * p.out_strides.head;
  const auto* dout =
      static_cast<const Element*>(p.dout) + work.batch * p.dout_strides.batch + work.head * p.dout_strides.head;
  const int64_t head_rows = p.shape.row_index(work.batch, work.head, 0);

  for (int first = row_begin; first < row_end; first += kRowThreads / kLanes) {
    const int row = first + int(threadIdx.x) / kLanes;
    float delta = 0.f;
    if (row < row_end && column < p.shape.head_dim) {
      delta = dot_chunk(out + row * p.out_strides.row + column, dout + row * p.dout_strides.row + column);
    }
#pragma unroll
    for (int width = kLanes / 2; width > 0; width /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, width);
    if (row < row_end && column == 0) {
      p.row_delta[head_rows + row] = delta - (p.dlse == nullptr ? 0.f : p.dlse[head_rows + row]);
    }
  }

  if (p.dq == nullptr) return;
  const DqAccumulator<Tile> accumulator(p, work.batch, work.head, work.block);
  accumulator.clear(threadIdx.x, kRowThreads);
  if (p.turns != nullptr && threadIdx.x == 0) accumulator.reset_turn(p);
}

// A warp does 16 rows of 64 columns (of all, where they are not a multiple of 64): many warps, each with few loads
// under way, rather than few with many.
template <class Tile>
inline constexpr int kFinishColumns = Tile::kHeadDim % 64 == 0 ? 64 : Tile::kHeadDim;
template <class Tile>
inline constexpr int kFinishThreads = Tile::kBlockM / 16 * (Tile::kHeadDim / kFinishColumns<Tile>)*32;

template <class Element, class Tile>
__global__ void __launch_bounds__(kFinishThreads<Tile>)
    backward_finish_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ TileOrder order) {
  constexpr int kColumns = kFinishColumns<Tile>;
  __shared__ tile::SharedTile<Tile::kBlockM, kColumns> parts[Tile::kHeadDim / kColumns];
  const WorkTile work = last_tile_first(order);
  const int row_begin = work.block * Tile::kBlockM;
  const int first_row = threadIdx.x / 32 % (Tile::kBlockM / 16) * 16;
  const int part = threadIdx.x / 32 / (Tile::kBlockM / 16);
  const uint32_t rows_tile = ptx::shared_address(&parts[part]);
  const tile::RowColumn mine = tile::accumulator_element(threadIdx.x % 32, 0);
  const DqAccumulator<Tile> accumulator(p, work.batch, work.head, work.block);
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    alignas(16) float dq[4];
    accumulator.read(dq, first_row / 16, part * (kColumns / 8) + n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::st_shared_b32(
          rows_tile + tile::Swizzle<kColumns>::offset(first_row + half * 8 + mine.row, n) + mine.column * 2,
          ptx::cvt_rn_x2_f32<Element>(dq[2 * half] * p.scale, dq[2 * half + 1] * p.scale));
    }
  }
  __syncwarp();
  auto* out = static_cast<Element*>(p.dq) + work.batch * p.dq_strides.batch + work.head * p.dq_strides.head +
              row_begin * p.dq_strides.row + part * kColumns;
  tile::store_rows<kColumns, 16>(rows_tile, out, p.dq_strides.row, first_row,
                                 min_of(Tile::kBlockM, p.shape.seqlen_q - row_begin),
                                 p.shape.head_dim - part * kColumns);
}

}  // namespace flash_cuda::v2
