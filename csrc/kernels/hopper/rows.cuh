// Rows of a tile, what they see, and where their results lie.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flash_cuda::hopper {

// Rows from row_begin on, of one head.
struct RowTile {
  int row_begin;
  int head;
  int batch;
};

// Tile `index` of all, counted head by head.
template <class Tile>
__device__ __forceinline__ RowTile row_tile(const ForwardParams& p, const int index) {
  const int blocks = blocks_of(p.shape.seqlen_q, Tile::kBlockM);
  const int flat_head = index / blocks;
  return {index % blocks * Tile::kBlockM, flat_head % p.shape.heads_q, flat_head / p.shape.heads_q};
}

// All of them; fits, or nothing would have been launched.
template <class Tile>
__device__ __forceinline__ int row_tiles(const ForwardParams& p) {
  return blocks_of(p.shape.seqlen_q, Tile::kBlockM) * p.shape.heads_q * p.shape.batch;
}

// Blocks of keys that some row of the tile sees.
template <class Tile>
__device__ __forceinline__ BlockRange key_blocks(const ForwardParams& p, const int row_begin) {
  return p.band.key_blocks(row_begin, min_of(row_begin + Tile::kBlockM, p.shape.seqlen_q), p.shape.seqlen_k,
                           Tile::kBlockN);
}

template <class Element>
__device__ __forceinline__ Element* output_row(const ForwardParams& p, const RowTile& at, const int row) {
  const Strides& s = p.out_strides;
  return static_cast<Element*>(p.out) + at.batch * s.batch + at.head * s.head + row * s.row;
}

__device__ __forceinline__ float* lse_row(const ForwardParams& p, const RowTile& at, const int row) {
  return p.lse + p.shape.row_index(at.batch, at.head, row);
}

}  // namespace flash_cuda::hopper
