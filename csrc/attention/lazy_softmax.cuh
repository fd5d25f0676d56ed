// Online softmax that follows the row maximum only as closely as it must, for kernels in which finding the maximum of
// every block would hold up the tensor cores. Same letters as softmax.cuh: m and l per row, normalised once at the end.
//
//   the first block in which a row sees a key:  m = its maximum there, or more if it sees few
//   every block:                                P = exp(S - m);  l = l + rowsum P
//   rarely, where rowsum P came out large:      m = the maximum of this block; P, l, O are divided by its p
//
// The result is exact, because P, l and O share whatever m they were summed under (FlashAttention-4 makes the same use
// of it, arXiv 2603.05451, section 3.1). Two things ask m to move. P must stay in range: float16 holds it up to 65504,
// the others up to 2^128; should S exceed m by more than that from one block to the next, the row is marked, and the
// kernel computes it anew. And P is rounded to 16 bits, unless it is 1, as it should be for a key that has most weight.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/softmax.cuh"
#include "ptx/math.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda {

// Two rows of a 16-row tile: halves 0 and 1 of this lane's accumulator. m is in units of log2, scale included.
class LazySoftmax {
 public:
  __device__ explicit LazySoftmax(const float scale_log2) : scale_log2_(scale_log2) {}

  __device__ __forceinline__ void clear() {
    settled_ = false;
    max_[0] = max_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0.f;
  }

  // Of each block before anything else: rows without an m get one.
  template <int NTiles>
  __device__ __forceinline__ void begin(const tile::Accumulator<1, NTiles>& s) {
    if (!settled_) anchor<NTiles>(s[0]);
  }

  // Scores of row half r become p. True if p of some such row of the warp came out large: rebase() must follow the
  // second half. (Never in a row's first block, where p is at most 1.)
  template <int NTiles>
  __device__ __forceinline__ bool absorb_half(tile::Accumulator<1, NTiles>& s, const int r) {
    const float m = max_[r] == -INFINITY ? 0.f : max_[r];  // p = exp2(-inf) = 0 where no key has been seen yet, not NaN
    block_sum_[r] = 0.f;
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[0][n][2 * r + e];
        x = ptx::ex2_approx_ftz(fmaf(x, scale_log2_, -m));
        block_sum_[r] += x;
      }
    return __any_sync(0xffffffffu, block_sum_[r] > kLargeSum);
  }

  // Before absorb_half(), for scores that may exceed m by any amount: m moves up where p would overflow, and nowhere
  // else, so that other rows keep their bits. The caller then has to scale() o.
  template <int NTiles>
  __device__ __forceinline__ void make_room(const tile::Accumulator<1, NTiles>& s) {
    begin(s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = max_[r] == -INFINITY ? 0.f : max_[r];
      const float excess = fmaf(row_max<NTiles>(s[0], r), scale_log2_, -m);
      move(r, is_overflow(ptx::ex2_approx_ftz(excess)) ? excess : 0.f);
      sum_[r] *= factor_[r];
    }
  }

  // Where p came out large, the largest becomes 1. Each row decides for itself: its bits depend on no other row.
  template <int NTiles>
  __device__ __forceinline__ void rebase(tile::Accumulator<1, NTiles>& s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = row_max<NTiles>(s[0], r);
      const float power = quad_max(block_sum_[r]) > kLargeSum ? ptx::lg2_approx_ftz(largest) : 0.f;
      move(r, is_overflow(largest) ? INFINITY : power);  // m = inf marks the row
      block_sum_[r] *= factor_[r];
      sum_[r] *= factor_[r];
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
        s[0][n][2 * r] *= factor_[r];
        s[0][n][2 * r + 1] *= factor_[r];
      }
    }
  }

  // O as rebase() left m.
  template <int OTiles>
  __device__ __forceinline__ void scale(tile::Accumulator<1, OTiles>& o) const {
#pragma unroll
    for (int n = 0; n < OTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][n][e] *= factor_[e / 2];
  }

  // After both halves, and rebase() where it was needed.
  __device__ __forceinline__ void add_block() { sum_[0] += block_sum_[0], sum_[1] += block_sum_[1]; }

  // Sums l over the quad; call once, after the last block.
  __device__ __forceinline__ void finish() { sum_[0] = quad_sum(sum_[0]), sum_[1] = quad_sum(sum_[1]); }

  // As OnlineSoftmax, for row half r.
  __device__ __forceinline__ float inverse_sum(const int r) const {
    return sum_[r] == 0.f ? 0.f : ptx::rcp_approx_ftz(sum_[r]);
  }
  __device__ __forceinline__ float lse(const int r) const {
    return sum_[r] == 0.f ? -INFINITY : (max_[r] + ptx::lg2_approx_ftz(sum_[r])) * kLn2;
  }
  // p left the range of float32: what row half r has summed up is worthless.
  __device__ __forceinline__ bool overflowed(const int r) const { return max_[r] == INFINITY; }

 private:
  // Of a lane's part of a row and block: more than it can be while no p exceeds 1, so that m stays where scores are
  // alike, and far inside the range of float16.
  static constexpr float kLargeSum = 64.f;

  // For rows that see no more than the first 8 keys of their first block: m by so few would soon have to move. A whole
  // number, so that p of their maximum is not rounded either.
  static constexpr float kHeadroom = 3.f;

  // Beyond it 1 / p would be lost as a subnormal number.
  __device__ __forceinline__ static bool is_overflow(const float p) { return p > 0x1p120f; }

  // The factor follows from m as it was rounded.
  __device__ __forceinline__ void move(const int r, const float power) {
    const float m = max_[r] + power;
    factor_[r] = power == 0.f ? 1.f : ptx::ex2_approx_ftz(max_[r] - m);
    max_[r] = m;
  }

  template <int NTiles>
  __device__ __forceinline__ void anchor(const float (&s)[NTiles][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float left = quad_max(fmaxf(s[0][2 * r], s[0][2 * r + 1]));  // all lanes take part in both
      const float right = row_max<NTiles, 1>(s, r);
      const float block_max = fmaf(fmaxf(left, right), scale_log2_, right == -INFINITY ? kHeadroom : 0.f);
      max_[r] = max_[r] == -INFINITY ? block_max : max_[r];
    }
    settled_ = __all_sync(0xffffffffu, max_[0] != -INFINITY && max_[1] != -INFINITY);
  }

  float scale_log2_;
  float max_[2];
  float sum_[2], block_sum_[2];  // of all blocks and of the last; this lane's part until finish()
  float factor_[2];              // of rebase()
  bool settled_;                 // every row of the warp has an m
};

}  // namespace flash_cuda
