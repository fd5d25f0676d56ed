// Single-instruction arithmetic and conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_cuda::ptx {

// 2^x. Without .ftz the compiler adds a range test and two multiplications around the instruction.
__device__ __forceinline__ float ex2_approx_ftz(const float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float lg2_approx_ftz(const float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to within one unit in the last place. The division operator brings a branch for subnormal x.
__device__ __forceinline__ float rcp_approx_ftz(const float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two float32 to one packed pair of 16-bit elements, round to nearest even; `lo` is the lower half.
template <class Element>
__device__ __forceinline__ uint32_t cvt_rn_x2_f32(float lo, float hi);

template <>
__device__ __forceinline__ uint32_t cvt_rn_x2_f32<__half>(const float lo, const float hi) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t cvt_rn_x2_f32<__nv_bfloat16>(const float lo, const float hi) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}

// The same of both times `factor`. One statement: as three, the compiler merges the last with its like in another
// branch, and has values in other registers than where they were computed.
template <class Element>
__device__ __forceinline__ uint32_t cvt_rn_x2_f32(float lo, float hi, float factor);

template <>
__device__ __forceinline__ uint32_t cvt_rn_x2_f32<__half>(const float lo, const float hi, const float factor) {
  uint32_t packed;
  asm("{.reg .f32 l, h; mul.f32 l, %1, %3; mul.f32 h, %2, %3; cvt.rn.f16x2.f32 %0, h, l;}"
      : "=r"(packed)
      : "f"(lo), "f"(hi), "f"(factor));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t cvt_rn_x2_f32<__nv_bfloat16>(const float lo, const float hi, const float factor) {
  uint32_t packed;
  asm("{.reg .f32 l, h; mul.f32 l, %1, %3; mul.f32 h, %2, %3; cvt.rn.bf16x2.f32 %0, h, l;}"
      : "=r"(packed)
      : "f"(lo), "f"(hi), "f"(factor));
  return packed;
}

// a * b + c, of packed pairs of 16-bit elements.
template <class Element>
__device__ __forceinline__ uint32_t fma_x2(uint32_t a, uint32_t b, uint32_t c);

template <>
__device__ __forceinline__ uint32_t fma_x2<__half>(const uint32_t a, const uint32_t b, const uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

template <>
__device__ __forceinline__ uint32_t fma_x2<__nv_bfloat16>(const uint32_t a, const uint32_t b, const uint32_t c) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// The bits of one 16-bit element to float32, exactly.
template <class Element>
__device__ __forceinline__ float cvt_f32(uint16_t bits);

template <>
__device__ __forceinline__ float cvt_f32<__half>(const uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

template <>
__device__ __forceinline__ float cvt_f32<__nv_bfloat16>(const uint16_t bits) {
  return __uint_as_float(uint32_t{bits} << 16);
}

}  // namespace flash_cuda::ptx
