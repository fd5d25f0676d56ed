// Asynchronous copies from global to shared memory (PTX ISA, "cp.async", sm_80 and later).
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// 16 bytes past L1; when `valid` is false nothing is read and the 16 bytes become zero.
__device__ __forceinline__ void cp_async_cg_16(const uint32_t shared, const void* global, const bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// 4 bytes; the same rule for `valid`.
__device__ __forceinline__ void cp_async_ca_4(const uint32_t shared, const void* global, const bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// Arrives at `barrier`, as one of the arrivals that it counts, when this thread's copies so far have come (sm_80 and
// later).
__device__ __forceinline__ void cp_async_arrive(const uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's groups are under way.
template <int Pending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace flash_cuda::ptx
