// A tile as the copy engine writes it and wgmma reads it: panels of 64 (or 32) columns, rows of a panel back to back,
// 16-byte chunks XORed with bits of the row number inside groups of 8 rows. Host and device; tests/test_host.py checks
// it against brute force.
#pragma once

#include <cstdint>

namespace flash_cuda::tile {

// `Columns` 16-bit elements, a multiple of 32. Panels as wide as divides the tile, at most the 128 bytes of the widest
// swizzle.
template <int Rows, int Columns>
struct Panels {
  static_assert(Columns % 32 == 0 && Rows % 8 == 0);
  static constexpr int kRows = Rows;
  static constexpr int kColumns = Columns % 64 == 0 ? 64 : 32;
  static constexpr int kCount = Columns / kColumns;
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kPanelBytes = Rows * kRowBytes;
  static constexpr int kBytes = kCount * kPanelBytes;
  static constexpr int kEightRows = 8 * kRowBytes;

  // Byte offset of `chunk` (8 elements) of `row` from the start of the tile.
  static constexpr int offset(int row, int chunk) {
    constexpr int kChunks = kRowBytes / 16;
    const int key = kChunks == 8 ? row & 7 : (row >> 1) & 3;
    return chunk / kChunks * kPanelBytes + row * kRowBytes + ((chunk % kChunks) ^ key) * 16;
  }

  // Bytes from one step of 16 along the contraction to the next: along the columns ...
  static constexpr int column_step(int step) {
    constexpr int kSteps = kColumns / 16;
    return step / kSteps * kPanelBytes + step % kSteps * 32;
  }
  // ... or along the rows.
  static constexpr int row_step(int step) { return step * 16 * kRowBytes; }

  // Matrix descriptor of wgmma (PTX ISA, "Matrix descriptor") without its address, for either direction of contraction.
  // Along the columns only the distance of 8-row groups counts; along the rows also that of the panels.
  static constexpr uint64_t kDescriptor =
      uint64_t{kPanelBytes >> 4} << 16 | uint64_t{kEightRows >> 4} << 32 | uint64_t{kRowBytes == 128 ? 1 : 2} << 62;
};

}  // namespace flash_cuda::tile
