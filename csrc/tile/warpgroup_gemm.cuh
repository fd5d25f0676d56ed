// Matrix products of one warpgroup on wgmma: 64 rows, B (and A) in shared memory by panels, the sum in registers.
// Asynchronous: fences, groups and waits are the caller's.
#pragma once

#include <cstdint>

#include "ptx/wgmma.cuh"
#include "tile/panel.h"

namespace flash_cuda::tile {

// `tile` is the address of a tile in units of 16 bytes, which is what a step adds to: one 32-bit addition each, the
// upper half is a constant.
template <class Panels>
__device__ __forceinline__ uint64_t descriptor(const uint32_t tile, const int step_bytes) {
  return uint64_t{uint32_t(Panels::kDescriptor >> 32)} << 32 | uint32_t(tile + (step_bytes >> 4));
}

template <class Panels>
__device__ __forceinline__ uint32_t descriptor_base(const uint32_t tile) {
  return uint32_t(Panels::kDescriptor) | tile >> 4;
}

// acc (64 x N) = A B^T; A (64 x Depth, of a tile of RowsA rows) and B (N x Depth) lie in shared memory as rows of Depth
// elements. `a` is the address of A's first row, a multiple of 8 rows from the tile's.
template <class Element, int Depth, int RowsA = 64, int Blocks>
__device__ __forceinline__ void multiply_rows_by_rows(float (&acc)[Blocks][4], const uint32_t a, const uint32_t b) {
  constexpr int kN = 8 * Blocks;
  using A = Panels<RowsA, Depth>;
  using B = Panels<kN, Depth>;
  const uint32_t first_a = descriptor_base<A>(a), first_b = descriptor_base<B>(b);
#pragma unroll
  for (int step = 0; step < Depth / 16; ++step) {
    ptx::Wgmma<Element, kN, 0, 0>::shared_a(acc, descriptor<A>(first_a, A::column_step(step)),
                                            descriptor<B>(first_b, B::column_step(step)), step > 0);
  }
}

// acc (64 x N) = A^T B; A is one panel of a tile, B panels of another (A, B: tile::Panels of the whole tiles), both
// with as many rows along the contraction.
template <class Element, class A, class B, int Blocks>
__device__ __forceinline__ void multiply_columns_by_columns(float (&acc)[Blocks][4], const uint32_t a,
                                                            const uint32_t b) {
  static_assert(A::kRows == B::kRows && A::kColumns == 64 && 8 * Blocks % B::kColumns == 0);
  const uint32_t first_a = descriptor_base<A>(a), first_b = descriptor_base<B>(b);
#pragma unroll
  for (int step = 0; step < A::kRows / 16; ++step) {
    ptx::Wgmma<Element, 8 * Blocks, 1, 1>::shared_a(acc, descriptor<A>(first_a, A::row_step(step)),
                                                    descriptor<B>(first_b, B::row_step(step)), step > 0);
  }
}

// acc (64 x N) = or += A B; A (64 x 16 Steps) in registers as wgmma wants it, B (16 Steps x N) in shared memory as rows
// of N elements.
template <class Element, int Steps, int Blocks>
__device__ __forceinline__ void multiply_registers(float (&acc)[Blocks][4], const uint32_t (&a)[Steps][4],
                                                   const uint32_t b, const bool accumulate) {
  constexpr int kN = 8 * Blocks;
  using B = Panels<16 * Steps, kN>;
  const uint32_t first_b = descriptor_base<B>(b);
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
    ptx::Wgmma<Element, kN, 0, 1>::register_a(acc, a[step], descriptor<B>(first_b, B::row_step(step)),
                                              step > 0 || accumulate);
  }
}

}  // namespace flash_cuda::tile
