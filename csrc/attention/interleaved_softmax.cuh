// Online softmax under the running maximum (FlashAttention-2, Dao 2023, section 3.1: m after a block is the maximum of
// all scores so far, so that P of a row's largest key is 1 when it comes, and not rounded), for kernels in which
// looking for the maximum before the exponentials would hold up the tensor cores. Same letters as softmax.cuh.
//
// A lane holds two rows, one in each half of a 16-row tile. They find their new maximum in different ways, so that the
// exponentials can begin at once and end without anything after them:
//   half 0:  P = exp(S - m) under the m of the block before, beside the search for the maximum of both halves;
//            where it grew, P and l are divided by the P of the new maximum, beside the exponentials of half 1
//   half 1:  P = exp(S - m) under the new m
// The caller scales O of the halves that grew. The maximum is one of integers, three at a time: the bits of floats from
// 0 on are in their order, and of negative ones alone some negative number comes out, which is known not to be it.
#pragma once

#include <cmath>

#include "attention/softmax.cuh"
#include "ptx/math.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda {

// Two rows of a 16-row tile: halves 0 and 1 of this lane's accumulator. m is in units of log2, scale included.
class InterleavedSoftmax {
 public:
  __device__ explicit InterleavedSoftmax(const float scale_log2) : scale_log2_(scale_log2) {}

  __device__ __forceinline__ void clear() {
    settled_ = false;
    max_[0] = max_[1] = -INFINITY;
    offset_[0] = offset_[1] = sum_[0] = sum_[1] = 0.f;
  }

  // Of each block before anything else: what the maxima below cannot do.
  template <int NTiles>
  __device__ __forceinline__ void begin(const tile::Accumulator<1, NTiles>& s) {
    before_ = max_[1];
    if (!settled_) settle<NTiles>(s[0]);
  }

  // Half 0: S becomes log2 P under the m so far. True if some row of the warp exceeds it.
  template <int NTiles>
  __device__ __forceinline__ bool first_grew(tile::Accumulator<1, NTiles>& s) {
    exponents(s, 0);
    excess_ = integer_max<NTiles>(s[0], 0);
    return __any_sync(0xffffffffu, excess_ > kLeastExcess);
  }

  // Half 1: m is raised. True if some row's has grown.
  template <int NTiles>
  __device__ __forceinline__ bool second_grew(const tile::Accumulator<1, NTiles>& s) {
    raise(1, quad_max(integer_max<NTiles>(s[0], 1)) * scale_log2_);
    return __any_sync(0xffffffffu, max_[1] > before_);
  }

  // S of half r becomes log2 P, and log2 P becomes P.
  template <int NTiles>
  __device__ __forceinline__ void exponents(tile::Accumulator<1, NTiles>& s, const int r) const {
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) s[0][n][e] = fmaf(s[0][n][e], scale_log2_, offset_[r]);
  }
  template <int NTiles>
  __device__ __forceinline__ void exponentials(tile::Accumulator<1, NTiles>& s, const int r) {
    block_sum_[r] = 0.f;
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) block_sum_[r] += s[0][n][e] = ptx::ex2_approx_ftz(s[0][n][e]);
  }

  // After first_grew() or second_grew(): l under the new m, and the factor for O, and for P of half 0. It is 1 for rows
  // that have not grown, whatever the others of the warp do: a row's bits depend on no other row.
  __device__ __forceinline__ float follow_first() {
    const float excess = quad_max(excess_);
    const float m = max_[0] + (excess > kLeastExcess ? excess : 0.f);
    const float factor = ratio(max_[0], m);
    max_[0] = is_overflow(excess) ? INFINITY : m;  // marks the row
    offset_[0] = m == -INFINITY ? 0.f : -m;
    sum_[0] *= factor;
    block_sum_[0] *= factor;
    return factor;
  }
  __device__ __forceinline__ float follow_second() {
    const float factor = ratio(before_, max_[1]);
    sum_[1] *= factor;
    return factor;
  }

  // Before first_grew(), for scores that may exceed m by any amount: m of half 0 is raised at once where P would
  // overflow, and nowhere else, so that other rows keep their bits. The factor is for O.
  template <int NTiles>
  __device__ __forceinline__ float make_room(const tile::Accumulator<1, NTiles>& s) {
    const float before = max_[0], excess = fmaf(row_max<NTiles>(s[0], 0), scale_log2_, offset_[0]);
    if (is_overflow(excess)) raise(0, before + excess);
    sum_[0] *= ratio(before, max_[0]);
    return ratio(before, max_[0]);
  }

  __device__ __forceinline__ void add_block() { sum_[0] += block_sum_[0], sum_[1] += block_sum_[1]; }
  // After the last block: l of the row, not only this lane's part.
  __device__ __forceinline__ void finish() { sum_[0] = quad_sum(sum_[0]), sum_[1] = quad_sum(sum_[1]); }

  // As OnlineSoftmax, for row half r. l is at least 1 where a key was seen.
  __device__ __forceinline__ float inverse_sum(const int r) const {
    return sum_[r] == 0.f ? 0.f : ptx::rcp_approx_ftz(sum_[r]);
  }
  __device__ __forceinline__ float lse(const int r) const {
    return sum_[r] == 0.f ? -INFINITY : (max_[r] + ptx::lg2_approx_ftz(sum_[r])) * kLn2;
  }
  // P left the range of float32: what row half r has summed up is worthless.
  __device__ __forceinline__ bool overflowed(const int r) const { return max_[r] == INFINITY; }

 private:
  static constexpr float kLeastExcess = 0x1p-12f;  // of log2 P: less is P's rounding, for equal scores too
  __device__ __forceinline__ static bool is_overflow(const float excess) { return excess > 120.f; }  // 1 / P subnormal
  __device__ __forceinline__ static float ratio(const float before, const float after) {
    return before == after ? 1.f : ptx::ex2_approx_ftz(before - after);
  }
  __device__ __forceinline__ void raise(const int r, const float m) {
    max_[r] = fmaxf(max_[r], m);
    offset_[r] = max_[r] == -INFINITY ? 0.f : -max_[r];
  }
  template <int NTiles>
  __device__ __forceinline__ static float integer_max(const float (&s)[NTiles][4], const int r) {
    int top = __float_as_int(s[0][2 * r]);
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
      top = __vimax3_s32(top, __float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1]));
    }
    return __int_as_float(top);
  }

  // Rows that have seen no key get their first m, and those of half 1 below 0 the maximum that integers do not find.
  template <int NTiles>
  __device__ __forceinline__ void settle(const float (&s)[NTiles][4]) {
    const float first = row_max<NTiles>(s, 0) * scale_log2_;  // all lanes take part
    raise(0, max_[0] == -INFINITY ? first : -INFINITY);
    raise(1, row_max<NTiles>(s, 1) * scale_log2_);
    settled_ = __all_sync(0xffffffffu, max_[0] != -INFINITY && max_[1] >= 0.f);
  }

  float scale_log2_;
  float max_[2], offset_[2];     // m; -m, or 0 where no key has been seen: P = exp2(-inf) = 0 then, and not NaN
  float sum_[2], block_sum_[2];  // of all blocks and of the last; this lane's part until finish()
  float excess_, before_;        // of this block: largest log2 P of half 0 in this lane; m of half 1 before it
  bool settled_;                 // begin() has nothing to do
};

}  // namespace flash_cuda
