// Special registers.
#pragma once

namespace flash_cuda::ptx {

// blockIdx.x, read anew by every call: what is derived from it after a long loop is computed again instead of being
// carried through the loop in registers that the loop has better use for.
__device__ __forceinline__ unsigned ctaid_x() {
  unsigned x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

}  // namespace flash_cuda::ptx
