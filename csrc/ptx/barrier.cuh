// Named barriers of a thread block (PTX ISA, "bar.sync"). Barrier 0 is __syncthreads().
#pragma once

namespace flash_cuda::ptx {

// Waits until `threads` threads (whole warps) have come to barrier `id`, 1 to 15.
__device__ __forceinline__ void bar_sync(const int id, const int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts as having come to it, without waiting.
__device__ __forceinline__ void bar_arrive(const int id, const int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar_sync, and whether any of the threads came with `predicate`.
__device__ __forceinline__ bool bar_red_or(const int id, const int threads, const bool predicate) {
  int any;
  asm volatile(
      "{.reg .pred mine, all; setp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, mine;\n"
      "selp.b32 %0, 1, 0, all;}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(int{predicate})
      : "memory");
  return any != 0;
}

}  // namespace flash_cuda::ptx
