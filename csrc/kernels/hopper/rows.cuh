// Rows of the output, and where they lie.
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

template <class Element>
__device__ __forceinline__ Element* output_row(const ForwardParams& p, const RowTile& at, const int row) {
  const Strides& s = p.out_strides;
  return static_cast<Element*>(p.out) + at.batch * s.batch + at.head * s.head + row * s.row;
}

__device__ __forceinline__ float* lse_row(const ForwardParams& p, const RowTile& at, const int row) {
  return p.lse + (int64_t{at.batch} * p.shape.heads_q + at.head) * p.shape.seqlen_q + row;
}

}  // namespace flash_cuda::hopper
