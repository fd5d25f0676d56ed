// O, m and l of the rows that a lane owns: what a step over one block of keys brings forward. Q-outer kernels keep it
// in registers from step to step, KV-outer kernels in global memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/copy.cuh"
#include "tile/swizzle.h"

namespace flash_cuda::lab {

// exp(scale * (m_part - m)), the weight of a part of a row's keys that was summed under m_part. 0 takes the place of
// m = -inf (no key yet): the weight is then 0 and not NaN.
class WeightUnder {
 public:
  __device__ __forceinline__ WeightUnder(const float m, const float scale_log2)
      : scaled_max_(m == -INFINITY ? 0.f : m * scale_log2), scale_log2_(scale_log2) {}
  __device__ __forceinline__ float operator()(const float score) const {
    return ptx::ex2_approx_ftz(fmaf(score, scale_log2_, -scaled_max_));
  }

 private:
  float scaled_max_;
  float scale_log2_;
};

// Scores of row half `half` become probabilities; their sum over the quad's row.
template <int NTiles>
__device__ __forceinline__ float exponentiate_row(float (&s)[NTiles][4], const int half, const WeightUnder& weight) {
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < NTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = s[n][2 * half + e];
      x = weight(x);
      sum += x;
    }
  return quad_sum(sum);
}

// Warp w of those that share a strip of queries owns the 8-row halves w * OwnRows .. of its 16-row tiles; a lane owns
// one row of each half, in columns 8 n + 2 (lane % 4) and the next one. With two halves that is an accumulator.
template <int OwnRows, int DimTiles>
struct RowState {
  static_assert(OwnRows == 1 || OwnRows == 2);
  static constexpr int kColumns = 8 * DimTiles;
  static constexpr int kQuads = DimTiles / 2;  // groups of 4 elements of a row, for 16-byte accesses

  float o[1][DimTiles][2 * OwnRows];
  float m[OwnRows];
  float l[OwnRows];

  static __device__ __forceinline__ int row_in_strip(const int warp, const int r) {
    return (warp * OwnRows + r) * 8 + int(threadIdx.x) % 32 / 4;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < OwnRows; ++r) {
      m[r] = -INFINITY;
      l[r] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < DimTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2 * OwnRows; ++e) o[0][n][e] = 0.f;
  }

  __device__ __forceinline__ void scale(const int r, const float factor) {
#pragma unroll
    for (int n = 0; n < DimTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) o[0][n][2 * r + e] *= factor;
  }

  // The state of a strip in global memory: O in the order of the registers, so that a warp's access is whole lines, and
  // (m, l) row by row. `o_strip` and `ml_strip` are the strip's own. A barrier of the thread block lies between a store
  // and the load of the next block of keys: with two teams it may be another warp's.
  __device__ __forceinline__ void load(const float* o_strip, const float* ml_strip, const int warp) {
    const float* source = o_strip + (warp * OwnRows * kQuads * 32 + threadIdx.x % 32) * 4;
#pragma unroll
    for (int r = 0; r < OwnRows; ++r) {
      const float2 ml = reinterpret_cast<const float2*>(ml_strip)[row_in_strip(warp, r)];
      m[r] = ml.x;
      l[r] = ml.y;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float4 x = ptx::ld_global_v4_f32(source + (r * kQuads + i) * 128);
        o[0][2 * i][2 * r] = x.x;
        o[0][2 * i][2 * r + 1] = x.y;
        o[0][2 * i + 1][2 * r] = x.z;
        o[0][2 * i + 1][2 * r + 1] = x.w;
      }
    }
  }

  __device__ __forceinline__ void store(float* o_strip, float* ml_strip, const int warp) const {
    auto* target = reinterpret_cast<float4*>(o_strip) + warp * OwnRows * kQuads * 32 + threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < OwnRows; ++r) {
      if (threadIdx.x % 4 == 0) {
        reinterpret_cast<float2*>(ml_strip)[row_in_strip(warp, r)] = make_float2(m[r], l[r]);
      }
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        target[(r * kQuads + i) * 32] =
            make_float4(o[0][2 * i][2 * r], o[0][2 * i][2 * r + 1], o[0][2 * i + 1][2 * r], o[0][2 * i + 1][2 * r + 1]);
      }
    }
  }

  // The finished rows: O and lse to global memory, O through `staging`, this warp's own 8 * OwnRows rows of shared
  // memory. `out` and `lse` are those of the strip's first row; `valid_rows` of the strip exist.
  template <class Normalisation, class Element>
  __device__ __forceinline__ void store_output(Element* out, const int64_t row_stride, float* lse, const int head_dim,
                                               const int valid_rows, const float scale_log2, const uint32_t staging,
                                               const int warp) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // other lanes have read what lies in `staging`
#pragma unroll
    for (int r = 0; r < OwnRows; ++r) {
      const float factor = Normalisation::final(l[r]);
#pragma unroll
      for (int n = 0; n < DimTiles; ++n) {
        ptx::st_shared_b32(staging + tile::Swizzle<kColumns>::offset(r * 8 + lane / 4, n) + lane % 4 * 4,
                           ptx::cvt_rn_x2_f32<Element>(o[0][n][2 * r] * factor, o[0][n][2 * r + 1] * factor));
      }
      const int row = row_in_strip(warp, r);
      if (lane % 4 == 0 && row < valid_rows) {
        lse[row] = l[r] == 0.f ? -INFINITY : m[r] * scale_log2 * kLn2 + logf(l[r]);
      }
    }
    __syncwarp();
    const int first_row = warp * OwnRows * 8;
    tile::store_rows<kColumns, 8 * OwnRows>(staging, out + first_row * row_stride, row_stride, 0,
                                            valid_rows - first_row, head_dim);
    __syncwarp();
  }
};

}  // namespace flash_cuda::lab
