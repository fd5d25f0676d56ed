// Between the products of a backward: S^T and dP^T, keys along the rows and queries along the columns, become P^T and
// dS^T in the registers of a warp, are masked, and go to shared memory. And the terms of D = rowsum(dO * O).
#pragma once

#include <concepts>
#include <cstdint>

#include "attention/band.h"
#include "attention/softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/fragment.h"
#include "tile/swizzle.h"
#include "tile/warp_gemm.cuh"

namespace flash_cuda {

// Element i of S^T in turn becomes P^T = exp(scale * S - lse), by column pairs: each lse is read once. Beside dP^T.
template <int MTiles, int NTiles>
class Exponentiate {
  static constexpr int kPerPair = MTiles * 4;

 public:
  static constexpr int kElements = NTiles * kPerPair;

  __device__ Exponentiate(tile::Accumulator<MTiles, NTiles>& s, const float* lse, const float scale_log2)
      : s_(s), lse_(lse + tile::accumulator_element(threadIdx.x % 32, 0).column), scale_log2_(scale_log2) {}

  __device__ __forceinline__ void operator()(const int i) {
    const int n = i / kPerPair;
    if (i % kPerPair == 0) {
      const float2 lse = *reinterpret_cast<const float2*>(lse_ + 8 * n);
      log2_sum_[0] = lse.x * kLog2e;
      log2_sum_[1] = lse.y * kLog2e;
    }
    float& x = s_[i % kPerPair / 4][n][i % 4];
    x = ptx::ex2_approx_ftz(fmaf(x, scale_log2_, -log2_sum_[i % 2]));
  }

 private:
  tile::Accumulator<MTiles, NTiles>& s_;
  const float* lse_;
  float scale_log2_;
  float log2_sum_[2];
};

// S^T = K Q^T, which becomes P^T = exp(scale * S - lse) beside the products of dP^T = V dO^T. The rows are those of the
// warp's keys, the columns those of its queries; `lse` is its first query's.
template <class Element, int DimSteps, int Ahead, int MTiles, int NTiles, class View>
__device__ __forceinline__ void recompute_scores(tile::Accumulator<MTiles, NTiles>& s,
                                                 tile::Accumulator<MTiles, NTiles>& dp, const View& k_rows,
                                                 const View& v_rows, const View& q_columns, const View& dout_columns,
                                                 const float* lse, const float scale_log2) {
  tile::clear<MTiles, NTiles>(s);
  tile::clear<MTiles, NTiles>(dp);
  tile::warp_gemm<Element, DimSteps, Ahead, MTiles, NTiles>(
      s, [&](uint32_t (&a)[4], int m, int k) { k_rows.load(a, m, k); },
      [&](uint32_t (&b)[4], int pair, int k) { q_columns.load(b, pair, k); });
  Exponentiate<MTiles, NTiles> exponentiate(s, lse, scale_log2);
  constexpr int kSlices = DimSteps * NTiles / 2;
  constexpr int kPerSlice = (exponentiate.kElements + kSlices - 1) / kSlices;
  tile::warp_gemm<Element, DimSteps, Ahead, MTiles, NTiles>(
      dp, [&](uint32_t (&a)[4], int m, int k) { v_rows.load(a, m, k); },
      [&](uint32_t (&b)[4], int pair, int k) { dout_columns.load(b, pair, k); },
      [&](int slice) {
#pragma unroll
        for (int i = 0; i < kPerSlice; ++i) {
          if (slice * kPerSlice + i < exponentiate.kElements) exponentiate(slice * kPerSlice + i);
        }
      });
}

// dP^T becomes dS^T = P^T * (dP^T - D); delta(n): D of this lane's two columns of column tile n.
template <int MTiles, int NTiles, std::invocable<int> Delta>
__device__ __forceinline__ void differentiate_softmax(const tile::Accumulator<MTiles, NTiles>& p,
                                                      tile::Accumulator<MTiles, NTiles>& dp, const Delta& delta) {
#pragma unroll
  for (int n = 0; n < NTiles; ++n) {
    const float2 d = delta(n);
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - (e % 2 ? d.y : d.x));
  }
}

// The same; `delta` is the first query's.
template <int MTiles, int NTiles>
__device__ __forceinline__ void differentiate_softmax(const tile::Accumulator<MTiles, NTiles>& p,
                                                      tile::Accumulator<MTiles, NTiles>& dp, const float* delta) {
  const int column = tile::accumulator_element(threadIdx.x % 32, 0).column;
  differentiate_softmax<MTiles, NTiles>(
      p, dp, [&](const int n) { return *reinterpret_cast<const float2*>(delta + 8 * n + column); });
}

// P^T, dS^T of unseen pairs become 0. Selected, not multiplied: what an unseen pair computes may be NaN, and the lse
// of a row without keys is -inf.
template <int MTiles, int NTiles, class... Accumulators>
__device__ __forceinline__ void mask_transposed(const Band band, const int first_key, const int first_row,
                                                const int seqlen_k, Accumulators&... accumulators) {
  const tile::RowColumn mine = tile::accumulator_element(threadIdx.x % 32, 0);
#pragma unroll
  for (int r = 0; r < 2 * MTiles; ++r) {
    // Rows begin <= row < end see this lane's key, counted from the lane's first column.
    const int key = first_key + r / 2 * 16 + r % 2 * 8 + mine.row;
    const int begin = key - band.upper - first_row - mine.column;
    const int end = key < seqlen_k ? key - band.lower + 1 - first_row - mine.column : begin;
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * n + e < begin || 8 * n + e >= end) {
          ((accumulators[r / 2][n][2 * (r % 2) + e] = 0.f), ...);
        }
      }
  }
}

// The warp's part of a transposed score matrix, rounded, into a shared tile with a row per key.
template <class Element, int Columns, int MTiles, int NTiles>
__device__ __forceinline__ void store_scores(const uint32_t tile, const tile::Accumulator<MTiles, NTiles>& acc,
                                             const int first_row, const int first_column) {
  const tile::RowColumn mine = tile::accumulator_element(threadIdx.x % 32, 0);
#pragma unroll
  for (int r = 0; r < 2 * MTiles; ++r) {
    const int row = first_row + r / 2 * 16 + r % 2 * 8 + mine.row;
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
      ptx::st_shared_b32(tile + tile::Swizzle<Columns>::offset(row, first_column / 8 + n) + mine.column * 2,
                         ptx::cvt_rn_x2_f32<Element>(acc[r / 2][n][2 * (r % 2)], acc[r / 2][n][2 * (r % 2) + 1]));
    }
  }
}

// The dot product of two chunks of 8 elements, in float32.
template <class Element>
__device__ __forceinline__ float dot_chunk(const Element* a, const Element* b) {
  const uint4 a8 = *reinterpret_cast<const uint4*>(a);
  const uint4 b8 = *reinterpret_cast<const uint4*>(b);
  const auto* x = reinterpret_cast<const uint16_t*>(&a8);
  const auto* y = reinterpret_cast<const uint16_t*>(&b8);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += ptx::cvt_f32<Element>(x[i]) * ptx::cvt_f32<Element>(y[i]);
  return sum;
}

}  // namespace flash_cuda
