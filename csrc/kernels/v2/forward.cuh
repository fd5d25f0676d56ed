// FlashAttention-2 forward (Dao 2023, Algorithm 1) on mma.sync, for sm_80 and later.
//
//   for each block of queries Q_i (one thread block each)      grid: one dimension, TileOrder
//     O = 0, l = 0, m = -inf                                   in registers; each warp owns rows ("split-Q")
//     for each block of keys K_j, values V_j in the band
//       S = Q_i K_j^T;  m' = max(m, rowmax S);  P = exp(S - m')
//       l = e^(m - m') l + rowsum P;  O = e^(m - m') O + P V_j
//     O = O / l;  lse = m + log l                              one division, at the end
//
// K_j and V_j alternate through a ring of shared-memory slots filled by cp.async. No warp ever needs another warp's
// rows; the barriers only guard the ring.
#pragma once

#include <cstdint>

#include "attention/mask.cuh"
#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "attention/softmax.cuh"
#include "kernels/v2/config.h"
#include "ptx/registers.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda::v2 {

template <class Tile>
struct ForwardShared {
  tile::SharedTile<Tile::kBlockM, Tile::kHeadDim> q;  // holds O on the way out
  tile::SharedTile<Tile::kBlockN, Tile::kHeadDim> ring[Tile::kSlots];
};

// K_0, V_0, K_1, V_1, ... of the blocks [begin, end) through the slots of the ring, kSlots - 1 tiles ahead of their
// use.
template <class Element, class Tile>
class KeyValueRing {
  static constexpr int kSlotBytes = tile::SharedTile<Tile::kBlockN, Tile::kHeadDim>::kBytes;
  static constexpr int kAhead = Tile::kSlots - 1;
  using Copy = tile::TileCopy<Tile::kBlockN, Tile::kHeadDim, Tile::kThreads>;

 public:
  __device__ KeyValueRing(const uint32_t slots, const ForwardParams& p, const Element* k, const Element* v,
                          const BlockRange blocks)
      : p_(p),
        slots_(slots),
        key_copy_(threadIdx.x, p.k_strides.row, p.shape.head_dim),
        value_copy_(threadIdx.x, p.v_strides.row, p.shape.head_dim),
        key_(k + key_copy_.offset()),
        value_(v + value_copy_.offset()),
        end_row_(min_of(blocks.end * Tile::kBlockN, p.shape.seqlen_k)) {
    issue<true, 0>(blocks.begin, 0);
    if constexpr (kAhead > 1) issue<true, 1>(blocks.begin, 1);
    if constexpr (kAhead > 2) issue<true, 2>(blocks.begin, 2);
  }

  // Shared-memory address of K (IsKey) or V of `block`, once it is there for every warp. To be called in the order of
  // the tiles: the barrier in it says that the previous tile's slot is free, and that slot is filled anew.
  template <bool IsKey>
  __device__ uint32_t acquire(const int block) {
    ptx::cp_async_wait_group<kAhead - 1>();
    __syncthreads();
    issue<IsKey, kAhead>(block, slot_ == 0 ? kAhead : slot_ - 1);
    const uint32_t tile = slots_ + slot_ * kSlotBytes;
    slot_ = slot_ == kAhead ? 0 : slot_ + 1;
    return tile;
  }

 private:
  // Requests the tile that comes `Distance` after K (FromKey) or V of `block`. Commits one group in any case, past the
  // end an empty one or one of zeros, so that the count of pending groups stays true.
  template <bool FromKey, int Distance>
  __device__ __forceinline__ void issue(const int block, const int slot) {
    constexpr int kPlace = Distance + (FromKey ? 0 : 1);
    const int row = (block + kPlace / 2) * Tile::kBlockN;
    if (Tile::kPastEnd == PastEnd::kRequestZeros || row < end_row_) {
      const uint32_t tile = slots_ + slot * kSlotBytes;
      if constexpr (kPlace % 2 == 0) {
        key_copy_.load_async(tile, key_ + row * p_.k_strides.row, end_row_ - row);
      } else {
        value_copy_.load_async(tile, value_ + row * p_.v_strides.row, end_row_ - row);
      }
    }
    ptx::cp_async_commit_group();
  }

  const ForwardParams& p_;
  uint32_t slots_;
  Copy key_copy_;
  Copy value_copy_;
  const Element* key_;
  const Element* value_;
  int end_row_;
  int slot_ = 0;  // of the tile to be read next
};

// The rows of this thread block, and where its head starts.
template <class Element, class Tile>
struct ForwardPlace {
  WorkTile work;
  int row_begin;
  int row_end;

  __device__ ForwardPlace(const ForwardParams& p, const TileOrder& order)
      : work(order.tile(ptx::ctaid_x())),
        row_begin(work.block * Tile::kBlockM),
        row_end(min_of(row_begin + Tile::kBlockM, p.shape.seqlen_q)) {}

  // Blocks of keys that some row sees; whether every row sees all of them whole.
  __device__ BlockRange key_blocks(const ForwardParams& p) const {
    return p.band.key_blocks(row_begin, row_end, p.shape.seqlen_k, Tile::kBlockN);
  }
  __device__ bool all_seen(const ForwardParams& p) const {
    const BlockRange blocks = key_blocks(p);
    return p.band.covers(row_begin, row_end, blocks.begin * Tile::kBlockN, blocks.end * Tile::kBlockN,
                         p.shape.seqlen_k);
  }

  // Row 0 of the head in a tensor of queries, of keys (or values).
  __device__ int64_t query_head(const Strides& s) const { return work.batch * s.batch + work.head * s.head; }
  __device__ int64_t key_head(const Strides& s, const int group) const {
    return work.batch * s.batch + work.head / group * s.head;
  }
};

// On the way out: O / l through shared memory, in this warp's own rows of Q, and out in whole rows; lse straight from
// registers.
template <class Element, class Tile, int MTiles, int DimTiles>
__device__ __forceinline__ void store_output(const ForwardParams& p, const ForwardPlace<Element, Tile>& at,
                                             const uint32_t q_tile, const int warp_row,
                                             const tile::Accumulator<MTiles, DimTiles>& o,
                                             const OnlineSoftmax<MTiles>& softmax) {
  const tile::RowColumn mine = tile::accumulator_element(threadIdx.x % 32, 0);
#pragma unroll
  for (int r = 0; r < 2 * MTiles; ++r) {
    const int row = warp_row + r / 2 * 16 + r % 2 * 8 + mine.row;
    const float scale = softmax.inverse_sum(r);
#pragma unroll
    for (int n = 0; n < DimTiles; ++n) {
      const float (&c)[4] = o[r / 2][n];
      ptx::st_shared_b32(q_tile + tile::Swizzle<Tile::kHeadDim>::offset(row, n) + mine.column * 2,
                         ptx::cvt_rn_x2_f32<Element>(c[2 * (r % 2)] * scale, c[2 * (r % 2) + 1] * scale));
    }
    if (mine.column == 0 && at.row_begin + row < at.row_end) {
      const int64_t head_rows = p.shape.row_index(at.work.batch, at.work.head, 0);
      p.lse[head_rows + at.row_begin + row] = softmax.lse(r);
    }
  }
  __syncwarp();
  auto* out = static_cast<Element*>(p.out) + at.query_head(p.out_strides) + at.row_begin * p.out_strides.row;
  tile::store_rows<Tile::kHeadDim, 16 * MTiles>(q_tile, out, p.out_strides.row, warp_row, at.row_end - at.row_begin,
                                                p.shape.head_dim);
}

// After a careful pass: the NaNs and infinities that were left out of P V, to the rows of this warp that see them.
template <class Element, class Tile>
__device__ void restore_output(const ForwardParams& p, const ForwardPlace<Element, Tile>& at, const int first_row,
                               const int last_row) {
  const BlockRange blocks = at.key_blocks(p);
  auto* out = static_cast<Element*>(p.out) + at.query_head(p.out_strides);
  const auto* v = static_cast<const Element*>(p.v) + at.key_head(p.v_strides, p.shape.group());
  __syncwarp();
  for (int block = blocks.begin; block < blocks.end; ++block) {
    const int key = block * Tile::kBlockN;
    if (p.band.covers(at.row_begin, at.row_end, key, key + Tile::kBlockN, p.shape.seqlen_k)) continue;
    restore_nonfinite(out, p.out_strides.row, v, p.v_strides.row, p.band, first_row, last_row, key,
                      min_of(key + Tile::kBlockN, p.shape.seqlen_k), p.shape.head_dim);
  }
}

// O and the softmax state of this warp's rows over all blocks of keys that the band reaches: the loop of Algorithm 1.
//
// Careful leaves NaNs and infinities out of the values of blocks that rows see only in part: P = 0 does not stop 0 *
// NaN.
template <bool Careful, class Element, class Tile, int MTiles, int DimTiles>
__device__ __forceinline__ void attend(const ForwardParams& p, const ForwardPlace<Element, Tile>& at,
                                       const uint32_t q_tile, const uint32_t slots, const int warp_row,
                                       tile::Accumulator<MTiles, DimTiles>& o, OnlineSoftmax<MTiles>& softmax) {
  constexpr int kKeyTiles = Tile::kBlockN / 8;
  constexpr int kDimSteps = Tile::kHeadDim / 16;
  using Dim = tile::LaneView<Tile::kHeadDim>;
  const int lane = threadIdx.x % 32;
  const auto* k = static_cast<const Element*>(p.k) + at.key_head(p.k_strides, p.shape.group());  // [seqlen_k, head_dim]
  const auto* v = static_cast<const Element*>(p.v) + at.key_head(p.v_strides, p.shape.group());  // [seqlen_k, head_dim]
  const BlockRange blocks = at.key_blocks(p);
  const Dim q_view(q_tile, warp_row, tile::lane_row_a(lane));
  uint32_t q_fragments[MTiles][Tile::kQInRegisters ? kDimSteps : 1][4];

  tile::clear<MTiles, DimTiles>(o);
  softmax.clear();
  KeyValueRing<Element, Tile> ring(slots, p, k, v, blocks);
  for (int block = blocks.begin; block < blocks.end; ++block) {
    const int first_key = block * Tile::kBlockN;

    // S = Q K^T
    const Dim k_view(ring.template acquire<true>(block), 0, tile::lane_row_b(lane));
    if constexpr (Tile::kQInRegisters) {
      if (block == blocks.begin) {
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
          for (int step = 0; step < kDimSteps; ++step) q_view.load(q_fragments[m][step], m, step);
      }
    }
    tile::Accumulator<MTiles, kKeyTiles> s;
    tile::clear<MTiles, kKeyTiles>(s);
    tile::warp_gemm<Element, kDimSteps, Tile::kKeysAhead, MTiles, kKeyTiles>(
        s,
        [&](uint32_t (&a)[4], int m, int step) {
          if constexpr (Tile::kQInRegisters) {
            tile::copy_fragment(a, q_fragments[m][step]);
          } else {
            q_view.load(a, m, step);
          }
        },
        [&](uint32_t (&b)[4], int pair, int step) { k_view.load(b, pair, step); });

    // P = exp(S - m), O and l rescaled
    const bool partial =
        !p.band.covers(at.row_begin, at.row_end, first_key, first_key + Tile::kBlockN, p.shape.seqlen_k);
    if (partial) {
      mask_scores<MTiles, kKeyTiles>(s, p.band, at.row_begin + warp_row, first_key, p.shape.seqlen_k);
    }
    softmax.update(s, o);
    uint32_t probabilities[MTiles][kKeyTiles / 2][4];
    tile::pack_operand<Element, MTiles, kKeyTiles>(probabilities, s);

    // O += P V
    const uint32_t v_tile = ring.template acquire<false>(block);
    if constexpr (Careful) {
      if (partial) zero_nonfinite<Element, Tile::kBlockN, Tile::kHeadDim, Tile::kThreads>(v_tile);
    }
    const Dim v_view(v_tile, 0, tile::lane_row_a(lane));
    tile::warp_gemm<Element, kKeyTiles / 2, Tile::kValuesAhead, MTiles, DimTiles>(
        o, [&](uint32_t (&a)[4], int m, int step) { tile::copy_fragment(a, probabilities[m][step]); },
        [&](uint32_t (&b)[4], int pair, int step) { v_view.load_transposed(b, step, pair); });
  }
  ptx::cp_async_wait_group<0>();
}

// One pass over this thread block's rows. The first pass returns true, and has written nothing, if a NaN or an infinity
// came out where some row sees a block only in part: it may stem from a value that the row does not see. The careful
// pass leaves such values out of the products and then adds them to the rows that do see them.
template <bool Careful, class Element, class Tile>
__device__ __forceinline__ bool forward_pass(const ForwardParams& p, const TileOrder& order) {
  constexpr int kMTiles = Tile::kBlockM / 16 / Tile::kWarps;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<Tile>*>(shared_bytes);
  const uint32_t q_tile = ptx::shared_address(&shared.q);
  const int warp_row = threadIdx.x / 32 * 16 * kMTiles;  // this warp's first row in the block

  const ForwardPlace<Element, Tile> at(p, order);
  if constexpr (!Careful) {
    const auto* q = static_cast<const Element*>(p.q) + at.query_head(p.q_strides) +
                    at.row_begin * p.q_strides.row;  // [seqlen_q - row_begin, head_dim]
    const tile::TileCopy<Tile::kBlockM, Tile::kHeadDim, Tile::kThreads> copy(threadIdx.x, p.q_strides.row,
                                                                             p.shape.head_dim);
    copy.load_async(q_tile, q + copy.offset(), at.row_end - at.row_begin);
  }
  tile::Accumulator<kMTiles, Tile::kHeadDim / 8> o;
  OnlineSoftmax<kMTiles> softmax(p.scale * kLog2e);
  attend<Careful>(p, at, q_tile, ptx::shared_address(&shared.ring), warp_row, o, softmax);

  const ForwardPlace<Element, Tile> here(p, order);  // the same place, not kept in registers meanwhile
  if constexpr (!Careful) {
    if (!here.all_seen(p) && __syncthreads_or(has_nonfinite<kMTiles, Tile::kHeadDim / 8>(o))) return true;
  }
  softmax.finish();
  if (here.key_blocks(p).end <= here.key_blocks(p).begin) {
    __syncthreads();  // no step of a loop has waited for other warps' part of the Q tile
  }
  store_output(p, here, q_tile, warp_row, o, softmax);
  if constexpr (Careful) {
    restore_output(p, here, here.row_begin + warp_row, min_of(here.row_end, here.row_begin + warp_row + 16 * kMTiles));
  }
  return false;
}

// Not inlined: what the rare pass shares with the first one would otherwise be kept in registers through the first
// one's loop.
template <class Element, class Tile>
__device__ __noinline__ void forward_again(const ForwardParams& p, const TileOrder& order) {
  forward_pass<true, Element, Tile>(p, order);
}

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ TileOrder order) {
  if (forward_pass<false, Element, Tile>(p, order)) forward_again<Element, Tile>(p, order);
}

}  // namespace flash_cuda::v2
