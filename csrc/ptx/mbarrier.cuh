// Barriers in shared memory that count threads and bytes (PTX ISA, "mbarrier", sm_90 and later).
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

__device__ __forceinline__ void mbarrier_init(const uint32_t barrier, const int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the initialisations, before the barriers are used by other threads or the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(const uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Without a branch: the compiler waits for products that are under way at one.
__device__ __forceinline__ void mbarrier_arrive_if(const uint32_t barrier, const bool condition) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(barrier),
      "r"(int{condition})
      : "memory");
}

// Arrives, and has the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(const uint32_t barrier, const int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of that parity is over; a fresh barrier's phase of parity 1 counts as over.
__device__ __forceinline__ void mbarrier_wait_parity(const uint32_t barrier, const uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether it is over: an answer that can be asked for early, and takes no time where it is needed.
__device__ __forceinline__ bool mbarrier_test_parity(const uint32_t barrier, const uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for two barriers, at the latency of one.
__device__ __forceinline__ void mbarrier_wait_parity_both(const uint32_t barrier0, const uint32_t parity0,
                                                          const uint32_t barrier1, const uint32_t parity1) {
  asm volatile(
      "{.reg .pred done0, done1;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done0, [%0], %1, 0x989680;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done1, [%2], %3, 0x989680;\n"
      "and.pred done0, done0, done1;\n"
      "@done0 bra over;\n"
      "bra again;\n"
      "over: }" ::"r"(barrier0),
      "r"(parity0), "r"(barrier1), "r"(parity1)
      : "memory");
}

}  // namespace flash_cuda::ptx
