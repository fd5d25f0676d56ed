// Online softmax of the rows a warp owns (Milakov & Gimelshein 2018; FlashAttention-2, section 3.1): m and l per row in
// registers, normalised once at the end.
#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/math.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Reduction over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The maximum of row half `half` (0: rows 0..7, 1: rows 8..15) of a 16-row tile of scores from column 8 * First on: the
// quad's row.
template <int NTiles, int First = 0>
__device__ __forceinline__ float row_max(const float (&s)[NTiles][4], const int half) {
  float x = fmaxf(s[First][2 * half], s[First][2 * half + 1]);
#pragma unroll
  for (int n = First + 1; n < NTiles; ++n) x = fmaxf(x, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
  return quad_max(x);
}

// Rows of MTiles 16-row tiles: this lane holds row halves (m, half), the quad holds whole rows.
template <int MTiles>
class OnlineSoftmax {
 public:
  __device__ explicit OnlineSoftmax(const float scale_log2) : scale_log2_(scale_log2) {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < 2 * MTiles; ++r) {
      row_max_[r] = -INFINITY;
      row_sum_[r] = 0.f;
    }
  }

  // Scores s become p = exp(scale * (s - m)); o and l are brought to the new m when it moved.
  //
  // m need not be the maximum itself, only close enough that p does not overflow: a row's m, l and o are left as they
  // are while no p of the row would exceed 2^kSlack. The result is the same: l and o share whatever m they were summed
  // under. The decision is the row's own, so that no row's bits depend on another's; only the branch is the warp's.
  template <int NTiles, int OTiles>
  __device__ __forceinline__ void update(tile::Accumulator<MTiles, NTiles>& s, tile::Accumulator<MTiles, OTiles>& o) {
    float block_max[2 * MTiles];
    bool grew = false;
#pragma unroll
    for (int r = 0; r < 2 * MTiles; ++r) {
      block_max[r] = row_max<NTiles>(s[r / 2], r % 2);
      grew |= exceeds(block_max[r], r);
    }
    if (__any_sync(0xffffffffu, grew)) rescale(block_max, o);
#pragma unroll
    for (int r = 0; r < 2 * MTiles; ++r) {
      // A row that has seen no key yet has m = -inf; 0 in its place gives p = exp2(-inf) = 0 and not exp2(NaN).
      const float m = row_max_[r] == -INFINITY ? 0.f : row_max_[r] * scale_log2_;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < NTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[r / 2][n][2 * (r % 2) + e];
          x = ptx::ex2_approx_ftz(fmaf(x, scale_log2_, -m));
          sum += x;
        }
      row_sum_[r] += sum;
    }
  }

  // Sums l over the quad; call once, after the last block.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2 * MTiles; ++r) row_sum_[r] = quad_sum(row_sum_[r]);
  }

  // 1 / l, and 0 for a row that saw no key, so that its output is 0.
  __device__ __forceinline__ float inverse_sum(const int r) const {
    return row_sum_[r] == 0.f ? 0.f : 1.f / row_sum_[r];
  }

  // log(sum exp(scale * s)), -inf for a row that saw no key.
  __device__ __forceinline__ float lse(const int r) const {
    return row_sum_[r] == 0.f ? -INFINITY : row_max_[r] * scale_log2_ * kLn2 + logf(row_sum_[r]);
  }

 private:
  static constexpr float kSlack = 8.f;

  // False where both are -inf: a row that has seen no key yet stays as it is.
  __device__ __forceinline__ bool exceeds(const float block_max, const int r) const {
    return (block_max - row_max_[r]) * scale_log2_ > kSlack;
  }

  template <int OTiles>
  __device__ __forceinline__ void rescale(const float (&block_max)[2 * MTiles], tile::Accumulator<MTiles, OTiles>& o) {
#pragma unroll
    for (int r = 0; r < 2 * MTiles; ++r) {
      const bool moves = exceeds(block_max[r], r);
      const float alpha = moves ? ptx::ex2_approx_ftz((row_max_[r] - block_max[r]) * scale_log2_) : 1.f;  // 0 at first
      if (moves) row_max_[r] = block_max[r];
      row_sum_[r] *= alpha;
#pragma unroll
      for (int n = 0; n < OTiles; ++n) {
        o[r / 2][n][2 * (r % 2)] *= alpha;
        o[r / 2][n][2 * (r % 2) + 1] *= alpha;
      }
    }
  }

  float scale_log2_;
  float row_max_[2 * MTiles];
  float row_sum_[2 * MTiles];  // this lane's part until finish()
};

}  // namespace flash_cuda
