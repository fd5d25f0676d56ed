// An accumulator's way to global memory, without shared memory and without a barrier.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/math.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda::hopper {

// Of a row, the columns that this lane writes: 4 from here on in every 16. Neighbouring lanes trade halves of
// neighbouring column blocks, so that a quad writes 32 bytes of a row, a whole sector, with each store.
__device__ __forceinline__ int stored_column() {
  const int lane = threadIdx.x % 32;
  return lane % 2 * 8 + lane % 4 / 2 * 4;
}

// Row half `half` (0: rows 0..7, 1: rows 8..15) of a 16-row accumulator times `scale`; all lanes. `to` is
// stored_column() of the lane's row, of which `columns` columns from there on exist: none if the row does not. Their
// number is a multiple of 4, and the row's address one of 8 bytes. True if what was stored holds a NaN or an infinity.
template <class Element, int Blocks>
__device__ __forceinline__ bool store_row(Element* const to, const int columns, const tile::Accumulator<1, Blocks>& acc,
                                          const int half, const float scale) {
  const bool odd = threadIdx.x % 2 != 0;
  uint32_t zero = 0;
#pragma unroll
  for (int n = 0; n < Blocks; n += 2) {
    const float (&left)[4] = acc[0][n];
    const float (&right)[4] = acc[0][n + 1];
    const uint32_t a = ptx::cvt_rn_x2_f32<Element>(left[2 * half] * scale, left[2 * half + 1] * scale);
    const uint32_t b = ptx::cvt_rn_x2_f32<Element>(right[2 * half] * scale, right[2 * half + 1] * scale);
    zero = ptx::fma_x2<Element>(a, 0, ptx::fma_x2<Element>(b, 0, zero));  // not 0 once a factor was not finite
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
    // Not in an asm statement, which would have the address computed for each: they differ by constants.
    if (8 * n < columns) *reinterpret_cast<uint2*>(to + 8 * n) = make_uint2(odd ? theirs : a, odd ? b : theirs);
  }
  return zero != 0;
}

}  // namespace flash_cuda::hopper
