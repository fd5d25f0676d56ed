// When O is divided by l: one of the three choices of the lab.
#pragma once

#include "ptx/math.cuh"

namespace flash_cuda::lab {

__device__ __forceinline__ float inverse_or_zero(const float l) { return l == 0.f ? 0.f : ptx::rcp_approx_ftz(l); }

// `before` and `after` scale O at the start and at the end of a step over one block of keys, `final` at the very end.
// l is 0 as long as the row has seen no key: its O stays 0.

// After every step: O is the attention over the keys read so far (FlashAttention v1, Algorithm 1, line 12).
struct Eager {
  static __device__ __forceinline__ float before(const float l) { return l; }
  static __device__ __forceinline__ float after(const float l) { return inverse_or_zero(l); }
  static __device__ __forceinline__ float final(float) { return 1.f; }
};

// Once, at the end: O is a plain sum until then (FlashAttention-2, section 3.1.1).
struct Deferred {
  static __device__ __forceinline__ float before(float) { return 1.f; }
  static __device__ __forceinline__ float after(float) { return 1.f; }
  static __device__ __forceinline__ float final(const float l) { return inverse_or_zero(l); }
};

}  // namespace flash_cuda::lab
