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

// The same for one 16-row tile of a warp, at `warp_row` of a group of rows that starts at first_row and shares its
// branches; one side of the band at a time, because few blocks need both.
template <int GroupRows, int NTiles>
__device__ __forceinline__ void mask_sides(float (&s)[NTiles][4], const Band band, const int first_row,
                                           const int warp_row, const int first_key, const int seqlen_k) {
  const tile::RowColumn mine = tile::accumulator_element(threadIdx.x % 32, 0);
  const int row = first_row + warp_row + mine.row;
  const int column = first_key + mine.column;
  if (min_of(first_row + band.upper + 1, seqlen_k) < first_key + 8 * NTiles) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = min_of(row + 8 * half + band.upper + 1, seqlen_k) - column;
#pragma unroll
      for (int n = 0; n < NTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e >= end) s[n][2 * half + e] = -INFINITY;
    }
  }
  if (first_row + GroupRows - 1 + band.lower > first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = row + 8 * half + band.lower - column;
#pragma unroll
      for (int n = 0; n < NTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e < begin) s[n][2 * half + e] = -INFINITY;
    }
  }
}

}  // namespace flash_cuda
