// The float32 sum of dQ that the v1 backward keeps in global memory.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/scheduler.h"
#include "tile/swizzle.h"

namespace flash_cuda::v1 {

// Row 0 of a head of a tensor.
template <class Element>
__device__ __forceinline__ auto* head_of(Element* tensor, const Strides& s, const int batch, const int head) {
  return tensor + batch * s.batch + head * s.head;
}

// The float32 dQ of one block of queries in global memory, in the order of the accumulator registers: every step gives
// an element to the same thread, which reads what it has written.
template <class Tile>
struct DqBlock {
  static constexpr int kElements = Tile::kBlockM * Tile::kHeadDim;
  float4* tile;

  __device__ DqBlock(const BackwardParams& p, const int batch, const QueryStep at) {
    const int64_t head = int64_t{batch} * p.shape.heads_q + at.head;
    tile = reinterpret_cast<float4*>(p.dq_accumulator + (head * blocks(p.shape.seqlen_q) + at.block) * kElements);
  }
  static constexpr int blocks(int seqlen_q) { return blocks_of(seqlen_q, Tile::kBlockM); }
  static constexpr int64_t elements(const Shape& s) {
    return int64_t{s.batch} * s.heads_q * blocks(s.seqlen_q) * kElements;
  }
  // Element 0 of this lane in the 16 x 8 fragment of rows 16 * row_tile .., columns 8 * dim_tile ...
  __device__ float4& fragment(const int row_tile, const int dim_tile) const {
    return tile[(row_tile * (Tile::kHeadDim / 8) + dim_tile) * 32 + threadIdx.x % 32];
  }
};

// dQ of rows that see no key, and that no step visits.
template <class Element, class Tile>
__device__ void clear_unseen(const BackwardParams& p, const WorkTile& work) {
  const int group = p.shape.group();
  for (int row = threadIdx.x / 32; row < p.shape.seqlen_q; row += Tile::kWarps) {
    const int first = row / Tile::kBlockM * Tile::kBlockM;
    const BlockRange blocks =
        p.band.key_blocks(first, min_of(first + Tile::kBlockM, p.shape.seqlen_q), p.shape.seqlen_k, Tile::kBlockN);
    if (blocks.begin < blocks.end) continue;
    for (int head = work.head * group; head < (work.head + 1) * group; ++head) {
      Element* dq = head_of(static_cast<Element*>(p.dq), p.dq_strides, work.batch, head) + row * p.dq_strides.row;
      for (int c = threadIdx.x % 32 * tile::kChunkElements; c < p.shape.head_dim; c += 32 * tile::kChunkElements) {
        *reinterpret_cast<uint4*>(dq + c) = uint4{0, 0, 0, 0};
      }
    }
  }
}

}  // namespace flash_cuda::v1
