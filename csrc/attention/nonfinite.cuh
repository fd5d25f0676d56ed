// Isolation: a NaN or an infinity in keys or values that a row does not see must not reach it. Masked probabilities are
// 0, but the tensor core computes 0 * NaN = NaN; these are the slow paths taken once such a result has been noticed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/band.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/swizzle.h"
#include "tile/warp_gemm.cuh"

namespace flash_cuda {

// x - x is 0 for finite x and NaN otherwise, and NaN survives the sum.
template <int MTiles, int NTiles>
__device__ __forceinline__ bool has_nonfinite(const tile::Accumulator<MTiles, NTiles>& acc) {
  float sum = 0.f;
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum += acc[m][n][e] - acc[m][n][e];
  return !(sum == 0.f);
}

template <class Element>
inline constexpr uint32_t kExponentBits = 0;
template <>
inline constexpr uint32_t kExponentBits<__half> = 0x7c00;
template <>
inline constexpr uint32_t kExponentBits<__nv_bfloat16> = 0x7f80;

template <class Element>
__device__ __forceinline__ bool is_nonfinite(const uint32_t bits) {
  return (bits & kExponentBits<Element>) == kExponentBits<Element>;
}

// Eight elements, NaNs and infinities replaced by 0.
template <class Element>
__device__ __forceinline__ uint4 without_nonfinite(uint4 chunk) {
  for (uint32_t* pair : {&chunk.x, &chunk.y, &chunk.z, &chunk.w}) {
    if (is_nonfinite<Element>(*pair & 0xffffu)) *pair &= 0xffff0000u;
    if (is_nonfinite<Element>(*pair >> 16)) *pair &= 0xffffu;
  }
  return chunk;
}

template <class Element>
__device__ __forceinline__ bool has_nonfinite(const uint4 chunk) {
  bool found = false;
  for (const uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) {
    found |= is_nonfinite<Element>(pair) || is_nonfinite<Element>(pair >> 16);
  }
  return found;
}

// Whether this thread's part of `bytes` of shared memory holds one: of `threads` threads it is number `thread`. Without
// their signs, numbers are in the order of their bits, and those above are not finite.
template <class Element>
__device__ __forceinline__ bool has_nonfinite(const uint32_t from, const int bytes, const int thread,
                                              const int threads) {
  uint32_t most = 0;  // of either half
  for (int i = thread * tile::kChunkBytes; i < bytes; i += threads * tile::kChunkBytes) {
    const uint4 chunk = ptx::ld_shared_v4(from + i);
    for (const uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) most = __vmaxu2(most, pair & 0x7fff7fffu);
  }
  return is_nonfinite<Element>(most) || is_nonfinite<Element>(most >> 16);
}

// Copies `bytes` of shared memory, NaNs and infinities replaced by 0; `to` may be `from`. By `threads` threads, of
// which this is number `thread`; barriers are the caller's.
template <class Element>
__device__ __forceinline__ void copy_finite(const uint32_t to, const uint32_t from, const int bytes, const int thread,
                                            const int threads) {
#pragma unroll 1
  for (int i = thread * tile::kChunkBytes; i < bytes; i += threads * tile::kChunkBytes) {
    ptx::st_shared_v4(to + i, without_nonfinite<Element>(ptx::ld_shared_v4(from + i)));
  }
}

// Replaces every NaN and infinity of a shared tile by 0. All `Threads` threads of the block call it, between their
// other accesses.
template <class Element, int Rows, int Columns, int Threads>
__device__ void zero_nonfinite(const uint32_t shared_tile) {
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < Rows * Columns / tile::kChunkElements; i += Threads) {
    const uint32_t chunk = shared_tile + i * tile::kChunkBytes;
    ptx::st_shared_v4(chunk, without_nonfinite<Element>(ptx::ld_shared_v4(chunk)));
  }
  __syncthreads();
}

// Whether a shared tile holds a NaN or an infinity: the same for all `Threads` threads of the block, who all call it
// once the tile is there.
template <class Element, int Rows, int Columns, int Threads>
__device__ bool has_nonfinite(const uint32_t shared_tile) {
  bool found = false;
#pragma unroll 4
  for (int i = threadIdx.x; i < Rows * Columns / tile::kChunkElements; i += Threads) {
    found |= has_nonfinite<Element>(ptx::ld_shared_v4(shared_tile + i * tile::kChunkBytes));
  }
  return __syncthreads_or(found);
}

// After a pass without them: adds the NaNs and infinities of the values that each row sees to its output in global
// memory. The warp does rows [row_begin, row_end), which it has written itself; keys [key_begin, key_end) are those
// that lost their values.
template <class Element>
__device__ void restore_nonfinite(Element* out, const int64_t out_stride, const Element* v, const int64_t v_stride,
                                  const Band band, const int row_begin, const int row_end, const int key_begin,
                                  const int key_end, const int head_dim) {
#pragma unroll 1
  for (int row = row_begin; row < row_end; ++row) {
    const int last = min_of(key_end, row + band.upper + 1);
#pragma unroll 1
    for (int key = max_of(key_begin, row + band.lower); key < last; ++key) {
#pragma unroll 1
      for (int c = threadIdx.x % 32; c < head_dim; c += 32) {
        const uint16_t value = reinterpret_cast<const uint16_t*>(v + key * v_stride)[c];
        if (!is_nonfinite<Element>(value)) continue;
        auto* sum = reinterpret_cast<uint16_t*>(out + row * out_stride) + c;
        *sum = uint16_t(ptx::cvt_rn_x2_f32<Element>(ptx::cvt_f32<Element>(*sum) + ptx::cvt_f32<Element>(value), 0.f));
      }
    }
  }
}

}  // namespace flash_cuda
