// The band applied to the scores a warp holds in registers.
#pragma once

#include <cmath>

#include "attention/band.h"
#include "tile/fragment.h"
#include "tile/warp_gemm.cuh"

namespace flash_cuda {

// s[m][n] holds queries first_row + 16 m .. (rows of the accumulator) against keys first_key + 8 n ..; unseen pairs
// become -inf. The warp may have taken the 8-row halves in another order, half h ^ flip as its h-th.
template <int MTiles, int NTiles>
__device__ __forceinline__ void mask_scores(tile::Accumulator<MTiles, NTiles>& s, const Band band, const int first_row,
                                            const int first_key, const int seqlen_k, const int flip = 0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2 * MTiles; ++r) {
    // Keys begin <= key < end are seen, counted from this lane's first column.
    const int row = first_row + (r ^ flip) * 8 + tile::accumulator_element(lane, 0).row;
    const int column = first_key + tile::accumulator_element(lane, 0).column;
    const int begin = row + band.lower - column;
    const int end = min_of(row + band.upper + 1, seqlen_k) - column;
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * n + e < begin || 8 * n + e >= end) s[r / 2][n][2 * (r % 2) + e] = -INFINITY;
      }
  }
}

}  // namespace flash_cuda
