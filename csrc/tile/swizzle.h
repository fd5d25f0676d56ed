// Where a 16-byte chunk of a tile row lies in shared memory.
//
// ldmatrix reads 8 rows of one chunk column at a time, and shared memory has 32 banks of 4 bytes (8 chunks). Rows are
// stored back to back; the chunk index is XORed with bits of the row number so that any 8 consecutive rows of a chunk
// column fall into 8 different bank groups. Host and device share this file: tests/test_host.py checks it against brute
// force.
#pragma once

namespace flash_cuda::tile {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkElements = 8;  // of 16 bits

// A tile row of `Columns` 16-bit elements; Columns is a multiple of 32.
template <int Columns>
struct Swizzle {
  static_assert(Columns % 32 == 0);
  static constexpr int kRowBytes = Columns * 2;
  static constexpr int kRowChunks = Columns / kChunkElements;
  // The XOR stays inside an atom: 8 chunks (one 128-byte line) when rows are whole lines, else 4, where two rows share
  // a line.
  static constexpr int kAtomChunks = Columns % 64 == 0 ? 8 : 4;

  static constexpr int key(int row) { return kAtomChunks == 8 ? row & 7 : (row >> 1) & 3; }

  // Byte offset of `chunk` of `row` from the start of the tile.
  static constexpr int offset(int row, int chunk) { return row * kRowBytes + (chunk ^ key(row)) * kChunkBytes; }

  // offset(row, chunk + 2 * pair) from offset(row, chunk), for chunk 0 or 1: the pair is XORed inside an atom and added
  // across atoms, so `pair` costs one XOR with a constant once the loop over it is unrolled.
  static constexpr unsigned step_pairs(unsigned offset_of_row, int pair) {
    const int chunk = 2 * pair;
    return (offset_of_row ^ ((chunk % kAtomChunks) * kChunkBytes)) + chunk / kAtomChunks * (kAtomChunks * kChunkBytes);
  }
};

}  // namespace flash_cuda::tile
