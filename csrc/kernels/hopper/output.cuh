// What a warpgroup writes: its 64 rows of O / l and lse, straight from the accumulator.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/interleaved_softmax.cuh"
#include "attention/params.h"
#include "kernels/hopper/rows.cuh"
#include "kernels/hopper/store_row.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda::hopper {

// A NaN that no arithmetic gives, different for each thread block: in place of the lse of the first of a warp's 16 rows
// it says that they are to be computed anew (recompute.cuh).
__device__ __forceinline__ float recompute_mark() { return __uint_as_float(0x7fe00000u | ptx::ctaid_x()); }

// Results that are not good enough: P out of the range of float32, or not finite, too.
enum class Mark { kNothing, kOverflow, kNonfinite };

// True if this warp has left a mark.
template <class Element, int Blocks>
__device__ __forceinline__ bool store_output(const ForwardParams& p, const RowTile& at, tile::Accumulator<1, Blocks>& o,
                                             InterleavedSoftmax& softmax, const Mark mark) {
  const int lane = threadIdx.x % 32;
  const int first_row = at.row_begin + threadIdx.x % 128 / 32 * 16 + lane / 4;
  Element* out = output_row<Element>(p, at, first_row) + stored_column();
  softmax.finish();
  bool useless = false;
  float lse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = first_row + 8 * half < p.shape.seqlen_q;
    lse[half] = softmax.lse(half);
    const bool nonfinite =
        store_row<Element>(out, exists ? p.shape.head_dim - stored_column() : 0, o, half, softmax.inverse_sum(half));
    useless |=
        exists && mark != Mark::kNothing && (softmax.overflowed(half) || (mark == Mark::kNonfinite && nonfinite));
    out += 8 * p.out_strides.row;
  }
  useless = __any_sync(0xffffffffu, useless);
  if (useless && lane == 0) lse[0] = recompute_mark();
  float* const to = lse_row(p, at, first_row);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (first_row + 8 * half < p.shape.seqlen_q && lane % 4 == 0) to[8 * half] = lse[half];
  }
  return useless;
}

// A tile of which no row sees a key; by all warpgroups.
template <class Element, class Tile>
__device__ void store_nothing(const ForwardParams& p, const RowTile& at) {
  const int last = min_of(at.row_begin + Tile::kBlockM, p.shape.seqlen_q);
  for (int row = at.row_begin + threadIdx.x / 32; row < last; row += 4 * Tile::kWarpgroups) {
    for (int column = threadIdx.x % 32 * 8; column < p.shape.head_dim; column += 256) {
      *reinterpret_cast<uint4*>(output_row<Element>(p, at, row) + column) = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x % 32 == 0) *lse_row(p, at, row) = -INFINITY;
  }
}

// Rows that see no key at all are written at the start, and not among the tiles.
template <class Element, class Tile>
__device__ __noinline__ void store_unseen(const ForwardParams& p) {
  const unsigned tiles = row_tiles<Tile>(p);  // below 2^31: no overflow
  for (unsigned index = ptx::ctaid_x(); index < tiles; index += ptx::nctaid_x()) {
    const RowTile at = row_tile<Tile>(p, index);
    const BlockRange keys = key_blocks<Tile>(p, at.row_begin);
    if (keys.end <= keys.begin) store_nothing<Element, Tile>(p, at);
  }
}

}  // namespace flash_cuda::hopper
