// Matrix products of one warp on mma.sync: operands as fragments, accumulators in registers.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace flash_cuda::tile {

// A 16 * MTiles by 8 * NTiles accumulator; element (m, n, e) as in accumulator_element().
template <int MTiles, int NTiles>
using Accumulator = float[MTiles][NTiles][4];

template <int MTiles, int NTiles>
__device__ __forceinline__ void clear(Accumulator<MTiles, NTiles>& acc) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
}

template <int MTiles, int NTiles>
__device__ __forceinline__ void scale(Accumulator<MTiles, NTiles>& acc, const float factor) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] *= factor;
}

// An operand that is in registers already, for load_a.
__device__ __forceinline__ void copy_fragment(uint32_t (&to)[4], const uint32_t (&from)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = from[i];
}

struct NoSideWork {
  __device__ void operator()(int) const {}
};

// acc += A B over KSteps steps of 16. load_a(fragment, m, k) brings a 16 x 16 block of A, load_b(fragments, n_pair, k)
// a 16 x 16 block of B (two 16 x 8 operands). B is loaded `Ahead` blocks, A one k-step before its product, so that the
// latency of shared memory hides behind the tensor cores. side_work(i), i = 0 .. KSteps * NTiles / 2 - 1, is called
// between the products: the place for arithmetic that does not depend on them.
template <class Element, int KSteps, int Ahead, int MTiles, int NTiles, class LoadA, class LoadB,
          class SideWork = NoSideWork>
__device__ __forceinline__ void warp_gemm(Accumulator<MTiles, NTiles>& acc, LoadA&& load_a, LoadB&& load_b,
                                          SideWork&& side_work = {}) {
  static_assert(NTiles % 2 == 0);
  constexpr int kPairs = NTiles / 2;
  constexpr int kBlocks = KSteps * kPairs;
  constexpr int kBuffers = Ahead + 1;
  uint32_t a[2][MTiles][4];
  uint32_t b[kBuffers][4];
#pragma unroll
  for (int m = 0; m < MTiles; ++m) load_a(a[0][m], m, 0);
#pragma unroll
  for (int i = 0; i < Ahead && i < kBlocks; ++i) load_b(b[i], i % kPairs, i / kPairs);
#pragma unroll
  for (int k = 0; k < KSteps; ++k) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int i = k * kPairs + pair;
      if (i + Ahead < kBlocks) {
        load_b(b[(i + Ahead) % kBuffers], (i + Ahead) % kPairs, (i + Ahead) / kPairs);
      }
      if (pair == 0 && k + 1 < KSteps) {
#pragma unroll
        for (int m = 0; m < MTiles; ++m) load_a(a[(k + 1) % 2][m], m, k + 1);
      }
      const uint32_t (&operands)[4] = b[i % kBuffers];
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc[m][2 * pair], a[k % 2][m], operands[0], operands[1]);
        ptx::mma_m16n8k16<Element>(acc[m][2 * pair + 1], a[k % 2][m], operands[2], operands[3]);
      }
      side_work(i);
    }
  }
}

// The A fragment of k-step k from an accumulator whose columns are that k: the layouts agree, only the width changes.
template <class Element, int MTiles, int NTiles>
__device__ __forceinline__ void pack_operand(uint32_t (&packed)[MTiles][NTiles / 2][4],
                                             const Accumulator<MTiles, NTiles>& acc) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int k = 0; k < NTiles / 2; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&c)[4] = acc[m][2 * k + half];
        packed[m][k][2 * half] = ptx::cvt_rn_x2_f32<Element>(c[0], c[1]);
        packed[m][k][2 * half + 1] = ptx::cvt_rn_x2_f32<Element>(c[2], c[3]);
      }
}

// The same, with rows 0..7 of each 16 times `factor`.
template <class Element, int NTiles>
__device__ __forceinline__ void pack_operand_scaled(uint32_t (&packed)[NTiles / 2][4],
                                                    const Accumulator<1, NTiles>& acc, const float factor) {
#pragma unroll
  for (int n = 0; n < NTiles; ++n) {
    const float (&c)[4] = acc[0][n];
    packed[n / 2][n % 2 * 2] = ptx::cvt_rn_x2_f32<Element>(c[0], c[1], factor);
    packed[n / 2][n % 2 * 2 + 1] = ptx::cvt_rn_x2_f32<Element>(c[2], c[3]);
  }
}

// Rows 8 * half on of a 16-row accumulator.
template <int NTiles>
__device__ __forceinline__ void scale_half(Accumulator<1, NTiles>& acc, const int half, const float factor) {
#pragma unroll
  for (int n = 0; n < NTiles; ++n)
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) acc[0][n][e] *= factor;
}

}  // namespace flash_cuda::tile
