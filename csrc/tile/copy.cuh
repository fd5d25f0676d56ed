// Copies of a tile between global and shared memory by all threads of a block, 16 bytes at a time.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "tile/swizzle.h"

namespace flash_cuda::tile {

// The chunks of a Rows x Columns tile that one of `Threads` threads moves. Neighbouring threads take neighbouring
// chunks of one atom of a row (128 or 64 bytes), then the next rows.
template <int Rows, int Columns, int Threads>
class TileCopy {
  using Map = Swizzle<Columns>;
  static constexpr int kPanels = Map::kRowChunks / Map::kAtomChunks;
  static constexpr int kRowsPerPass = Threads / Map::kAtomChunks;
  static constexpr int kPasses = (Rows + kRowsPerPass - 1) / kRowsPerPass;
  // The swizzle key of a thread's rows must not change from pass to pass.
  static_assert(kRowsPerPass % 8 == 0);

 public:
  // row_stride in elements of 16 bits; `columns` valid ones, a multiple of 8: the rest of the tile is filled with
  // zeros.
  __device__ TileCopy(const int thread, const int64_t row_stride, const int columns)
      : row_(thread / Map::kAtomChunks),
        excess_(thread % Map::kAtomChunks * kChunkElements - columns),
        shared_offset_(Map::offset(row_, thread % Map::kAtomChunks)),
        columns_(columns),
        row_stride_(row_stride) {}

  // Elements from row 0 of a tile in global memory to this thread's first chunk.
  __device__ int64_t offset() const { return row_ * row_stride_ + excess_ + columns_; }

  // Starts the copy of rows [0, valid_rows) of a tile to `shared`; rows beyond become zero. `source` is this thread's
  // own: row 0 of the tile plus offset().
  template <class Element>
  __device__ void load_async(const uint32_t shared, const Element* source, const int valid_rows) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, source += kRowsPerPass * row_stride_) {
      const int row = row_ + pass * kRowsPerPass;
      if (Rows % kRowsPerPass != 0 && row >= Rows) break;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int step = panel * Map::kAtomChunks * kChunkElements;
        ptx::cp_async_cg_16(shared + shared_offset_ + pass * kRowsPerPass * Map::kRowBytes + step * 2, source + step,
                            row < valid_rows && excess_ + step < 0);
      }
    }
  }

 private:
  int row_;
  int excess_;  // of this thread's first column over the valid ones: negative inside
  int shared_offset_;
  int columns_;
  int64_t row_stride_;
};

// One warp writes `Rows` rows of a shared tile, from `first_row` on, to global memory (row 0 = first row of
// the tile). The rows must have been written by the same warp (a __syncwarp lies between) or before a barrier.
template <int Columns, int Rows, class Element>
__device__ void store_rows(const uint32_t shared, Element* global, const int64_t row_stride, const int first_row,
                           const int valid_rows, const int columns) {
  using Map = Swizzle<Columns>;
  constexpr int kChunks = Rows * Map::kRowChunks;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = lane; i < kChunks; i += 32) {
    const int row = first_row + i / Map::kRowChunks;
    const int chunk = i % Map::kRowChunks;
    if (row < valid_rows && chunk * kChunkElements < columns) {
      *reinterpret_cast<uint4*>(global + row * row_stride + chunk * kChunkElements) =
          ptx::ld_shared_v4(shared + Map::offset(row, chunk));
    }
  }
}

}  // namespace flash_cuda::tile
