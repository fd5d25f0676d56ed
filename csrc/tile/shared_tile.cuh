// A tile of 16-bit elements in shared memory, and one lane's view of it for ldmatrix.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "tile/fragment.h"
#include "tile/swizzle.h"

namespace flash_cuda::tile {

// Storage: swizzled rows, aligned to a 128-byte line as the swizzle demands.
template <int Rows, int Columns>
struct alignas(128) SharedTile {
  static constexpr int kRows = Rows;
  static constexpr int kColumns = Columns;
  static constexpr int kBytes = Rows * Columns * 2;
  unsigned char bytes[kBytes];
};

// One lane's address into a tile of `Columns` columns. Blocks are 16 x 16: (row_block, pair) names rows 16 * row_block
// .., columns 16 * pair ...
template <int Columns>
class LaneView {
 public:
  __device__ LaneView(const uint32_t tile, const int first_row, const LaneRow lane_row)
      : address_(tile + Swizzle<Columns>::offset(first_row + lane_row.row, lane_row.chunk)) {}

  __device__ void load(uint32_t (&r)[4], const int row_block, const int pair) const {
    ptx::ldmatrix_x4(r, at(row_block, pair));
  }

  __device__ void load_transposed(uint32_t (&r)[4], const int row_block, const int pair) const {
    ptx::ldmatrix_x4_trans(r, at(row_block, pair));
  }

 private:
  __device__ uint32_t at(const int row_block, const int pair) const {
    return Swizzle<Columns>::step_pairs(address_, pair) + row_block * 16 * Swizzle<Columns>::kRowBytes;
  }

  uint32_t address_;
};

}  // namespace flash_cuda::tile
