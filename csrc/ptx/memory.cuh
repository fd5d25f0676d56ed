// Loads, stores and reductions with an explicit state space, width or memory order.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// Shared-memory address as the 32-bit number that ldmatrix, cp.async and st.shared take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void st_shared_b32(const uint32_t address, const uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4(const uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_v4(const uint32_t address, const uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ float2 ld_shared_v2_f32(const uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void ld_shared_v4_f32(float (&value)[4], const uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void st_shared_v4_f32(const uint32_t address, const float (&value)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(value[0]), "f"(value[1]), "f"(value[2]),
               "f"(value[3])
               : "memory");
}

__device__ __forceinline__ void st_shared_v2_f32(const uint32_t address, const float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ uint16_t ld_shared_u16(const uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

// Volatile: issued where it stands, so that what follows hides its latency.
__device__ __forceinline__ float4 ld_global_v4_f32(const float* global) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(global)
               : "memory");
  return v;
}

// A store without a branch: nothing happens unless `valid`. 8-byte aligned.
__device__ __forceinline__ void st_global_v2_b32(void* global, const uint2 v, const bool valid) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %3, 0;\n"
      "@p st.global.v2.b32 [%0], {%1,%2};}" ::"l"(global),
      "r"(v.x), "r"(v.y), "r"(int{valid})
      : "memory");
}

// *global += value, no result.
__device__ __forceinline__ void red_add_f32(float* global, const float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// global[0..3] += value[0..3] in one instruction (sm_90 and later); 16-byte aligned.
__device__ __forceinline__ void red_add_v4_f32(float* global, const float (&value)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(global), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
}
#endif

__device__ __forceinline__ int ld_acquire(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

__device__ __forceinline__ void red_release_add(int* global, const int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

}  // namespace flash_cuda::ptx
