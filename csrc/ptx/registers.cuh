// Special registers, and how many general ones a warpgroup has.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// blockIdx.x, read anew by every call: what is derived from it after a long loop is computed again instead of being
// carried through the loop in registers that the loop has better use for.
__device__ __forceinline__ unsigned ctaid_x() {
  unsigned x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// threadIdx.x, likewise.
__device__ __forceinline__ int tid_x() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// gridDim.x.
__device__ __forceinline__ unsigned nctaid_x() {
  unsigned x;
  asm("mov.u32 %0, %%nctaid.x;" : "=r"(x));
  return x;
}

// No instruction, but the compiler knows nothing of x after it: what follows from x is computed where it is used
// instead of being kept in registers from one use to the next.
__device__ __forceinline__ uint32_t forget(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Gives registers of this warpgroup back, down to `Count` a thread (a multiple of 8; sm_90a). All its warps.
template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Takes registers that others gave back, up to `Count` a thread; waits for them.
template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// One lane of a whole warp, always the same (sm_90 and later). The compiler knows that it is one, and does not loop
// over lanes around instructions that are a warp's, such as the copy engine's.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(elected));
  return elected != 0;
}
#endif

}  // namespace flash_cuda::ptx
