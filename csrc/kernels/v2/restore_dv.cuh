// The end of a careful pass of the backward. The Hopper backward's, too.
#pragma once

#include <cstdint>

#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"

namespace flash_cuda::v2 {

// After a careful pass: the NaNs and infinities of dO that were left out of P^T dO, to the keys that they see. Each
// warp does the rows of dV that it has stored.
template <class Element, class Tile>
__device__ void restore_dv(const BackwardParams& p, const WorkTile& at) {
  if (p.dv == nullptr) return;
  const int first_key = at.block * Tile::kBlockN;
  const int end_key = min_of(first_key + Tile::kBlockN, p.shape.seqlen_k);
  const BlockRange blocks = p.band.query_blocks(first_key, end_key, p.shape.seqlen_q, Tile::kBlockM);
  auto* dv = static_cast<Element*>(p.dv) + at.batch * p.dv_strides.batch + at.head * p.dv_strides.head;
  const Band transposed{-p.band.upper, -p.band.lower};  // key j is seen by query i iff j - upper <= i <= j - lower
  __syncwarp();
  for (QueryStep step{at.head * p.shape.group(), blocks.begin}; step.head < (at.head + 1) * p.shape.group();
       step = step.next(blocks)) {
    const int row = step.block * Tile::kBlockM;
    const int end_row = min_of(row + Tile::kBlockM, p.shape.seqlen_q);
    if (p.band.covers(row, end_row, first_key, first_key + Tile::kBlockN, p.shape.seqlen_k)) continue;
    const auto* dout =
        static_cast<const Element*>(p.dout) + at.batch * p.dout_strides.batch + step.head * p.dout_strides.head;
    for (int key = first_key + int(threadIdx.x) / 32 * 16; key < end_key; key += Tile::kWarps * 16) {
      restore_nonfinite(dv, p.dv_strides.row, dout, p.dout_strides.row, transposed, key, min_of(key + 16, end_key), row,
                        end_row, p.shape.head_dim);
    }
  }
}

}  // namespace flash_cuda::v2
