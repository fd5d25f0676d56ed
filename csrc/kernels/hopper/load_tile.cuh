// Loads of tiles by the copy engine, panel by panel. One thread.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace flash_cuda::hopper {

// A panel of the rows from `row` on of one head, to its place in a tile in shared memory.
template <class Panels>
__device__ __forceinline__ void load_panel(const void* tile, const int panel, const CUtensorMap* map,
                                           const uint32_t barrier, const int row, const int head, const int batch) {
  ptx::cp_async_bulk_tensor_4d(ptx::shared_address(tile) + panel * Panels::kPanelBytes, map, barrier,
                               panel * Panels::kColumns, row, head, batch);
}

template <class Panels>
__device__ __forceinline__ void load_tile(const void* tile, const CUtensorMap* map, const uint32_t barrier,
                                          const int row, const int head, const int batch) {
#pragma unroll
  for (int panel = 0; panel < Panels::kCount; ++panel) load_panel<Panels>(tile, panel, map, barrier, row, head, batch);
}

}  // namespace flash_cuda::hopper
