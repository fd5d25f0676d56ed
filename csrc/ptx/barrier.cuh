// Named barriers of a thread block (PTX ISA, "bar.sync"). Barrier 0 is __syncthreads().
#pragma once

namespace flash_cuda::ptx {

// Waits until `threads` threads (whole warps) have come to barrier `id`, 1 to 15.
__device__ __forceinline__ void bar_sync(const int id, const int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_cuda::ptx
