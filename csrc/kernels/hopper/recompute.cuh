// The slow way for the 16 rows of a warp whose first result is not to be used: P left the range of float32
// (LazySoftmax), or a NaN or an infinity came out where a row does not see all keys, so that it may stem from a value
// that the row must not see. Straight from global memory, on mma.sync, without the copy engine and the other warps.
//
// Nothing is remembered on the way: the warp leaves a mark in place of the first row's lse, and looks for its marks
// after its last tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/mask.cuh"
#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/softmax.cuh"
#include "kernels/hopper/rows.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda::hopper {

// A NaN that no arithmetic gives, different for each thread block.
__device__ __forceinline__ float recompute_mark() { return __uint_as_float(0x7fe00000u | ptx::ctaid_x()); }

// Two neighbouring elements of a row, 0 outside.
__device__ __forceinline__ uint32_t load_pair(const void* row, const int column, const bool exists) {
  return exists ? *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(row) + column) : 0u;
}

// The same of two rows, one element each; optionally without NaNs and infinities.
template <class Element>
__device__ __forceinline__ uint32_t load_across(const uint16_t* values, const int64_t stride, const bool upper,
                                                const bool lower, const bool finite_only) {
  uint32_t a = upper ? values[0] : 0, b = lower ? values[stride] : 0;
  if (finite_only && is_nonfinite<Element>(a)) a = 0;
  if (finite_only && is_nonfinite<Element>(b)) b = 0;
  return a | b << 16;
}

// Rows [at.row_begin, last_row) against all keys, 16 at a time; O in chunks of 64 columns, each with its own pass, so
// that no head dim needs more registers than another.
template <class Element>
__device__ __noinline__ void recompute_rows(const ForwardParams& p, const RowTile at, const int last_row) {
  constexpr int kKeys = 16, kColumns = 64;
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2;
  const int head_dim = p.shape.head_dim, seqlen_k = p.shape.seqlen_k;
  const int64_t key_head = at.head / p.shape.group();
  const auto* q = static_cast<const Element*>(p.q) + at.batch * p.q_strides.batch + at.head * p.q_strides.head;
  const auto* k = static_cast<const Element*>(p.k) + at.batch * p.k_strides.batch + key_head * p.k_strides.head;
  const auto* v = static_cast<const Element*>(p.v) + at.batch * p.v_strides.batch + key_head * p.v_strides.head;
  const BlockRange blocks = p.band.key_blocks(at.row_begin, last_row, seqlen_k, kKeys);
  const auto partial = [&](const int key) {
    return !p.band.covers(at.row_begin, last_row, key, min_of(key + kKeys, seqlen_k), seqlen_k);
  };

#pragma unroll 1
  for (int chunk = 0; chunk < head_dim; chunk += kColumns) {
    tile::Accumulator<1, kColumns / 8> o;
    tile::clear<1, kColumns / 8>(o);
    OnlineSoftmax<1> softmax(p.scale * kLog2e);
    softmax.clear();
#pragma unroll 1
    for (int key = blocks.begin * kKeys; key < blocks.end * kKeys; key += kKeys) {
      tile::Accumulator<1, 2> s;
      tile::clear<1, 2>(s);
#pragma unroll 1
      for (int step = 0; step < head_dim; step += 16) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = at.row_begin + group + i % 2 * 8, column = step + pair + i / 2 * 8;
          a[i] = load_pair(q + row * p.q_strides.row, column, row < last_row && column < head_dim);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int row = key + 8 * n + group;
          const Element* keys = k + row * p.k_strides.row;
          ptx::mma_m16n8k16<Element>(s[0][n], a, load_pair(keys, step + pair, row < seqlen_k),
                                     load_pair(keys, step + pair + 8, row < seqlen_k && step + 8 < head_dim));
        }
      }
      mask_scores<1, 2>(s, p.band, at.row_begin, key, seqlen_k);
      softmax.update(s, o);
      uint32_t probabilities[1][1][4];
      tile::pack_operand<Element, 1, 2>(probabilities, s);
      const bool finite_only = partial(key);
      const int row = key + pair;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = chunk + 8 * n + group;
        const auto* values = reinterpret_cast<const uint16_t*>(v + row * p.v_strides.row) + column;
        const auto load = [&](const int below) {
          return load_across<Element>(values + below * p.v_strides.row, p.v_strides.row,
                                      column < head_dim && row + below < seqlen_k,
                                      column < head_dim && row + below + 1 < seqlen_k, finite_only);
        };
        ptx::mma_m16n8k16<Element>(o[0][n], probabilities[0][0], load(0), load(8));
      }
    }
    softmax.finish();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row_begin + group + 8 * half;
      if (row >= last_row) continue;
      const float scale = softmax.inverse_sum(half);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        if (chunk + 8 * n >= head_dim) break;
        *reinterpret_cast<uint32_t*>(output_row<Element>(p, at, row) + chunk + 8 * n + pair) =
            ptx::cvt_rn_x2_f32<Element>(o[0][n][2 * half] * scale, o[0][n][2 * half + 1] * scale);
      }
      if (pair == 0) *lse_row(p, at, row) = softmax.lse(half);
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int key = blocks.begin * kKeys; key < blocks.end * kKeys; key += kKeys) {
    if (!partial(key)) continue;
    restore_nonfinite(output_row<Element>(p, at, 0), p.out_strides.row, v, p.v_strides.row, p.band, at.row_begin,
                      last_row, key, min_of(key + kKeys, seqlen_k), head_dim);
  }
}

// One warp, after its last tile: all 16-row strips that it has marked, wherever they are.
template <class Element, int BlockM>
__device__ __noinline__ void recompute_marked(const ForwardParams& p) {
  const int warp_row = threadIdx.x / 32 * 16;
  const int blocks = blocks_of(p.shape.seqlen_q, BlockM);
  const unsigned tiles = unsigned(blocks) * p.shape.heads_q * p.shape.batch;  // below 2^31: launch/hopper_forward.cuh
  const auto tile_of = [&](const unsigned index) {
    const unsigned flat_head = index / blocks;
    return RowTile{int(index % blocks) * BlockM + warp_row, int(flat_head % p.shape.heads_q),
                   int(flat_head / p.shape.heads_q)};
  };
  __syncwarp();
#pragma unroll 1
  for (unsigned first = 0; first < tiles; first += 32) {
    const unsigned index = first + threadIdx.x % 32;
    const RowTile mine = tile_of(index);
    const bool found = index < tiles && mine.row_begin < p.shape.seqlen_q &&
                       __float_as_uint(*lse_row(p, mine, mine.row_begin)) == __float_as_uint(recompute_mark());
#pragma unroll 1
    for (unsigned marked = __ballot_sync(0xffffffffu, found); marked != 0; marked &= marked - 1) {
      const RowTile at = tile_of(first + __ffs(int(marked)) - 1);
      recompute_rows<Element>(p, at, min_of(at.row_begin + 16, p.shape.seqlen_q));
    }
  }
}

}  // namespace flash_cuda::hopper
