// The copy engine: tiles of tensors that a tensor map describes (PTX ISA, "cp.async.bulk.tensor", sm_90 and later).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_cuda::ptx {

// The box of `map` at element (column, row, head, batch) to `shared`. What lies outside the tensor becomes zero; the
// whole box is counted on `barrier`. One thread.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(const uint32_t shared, const CUtensorMap* map,
                                                        const uint32_t barrier, const int column, const int row,
                                                        const int head, const int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// After ordinary writes to shared memory that the copy engine or wgmma are to see, or to overwrite: each writing
// thread, before the barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace flash_cuda::ptx
