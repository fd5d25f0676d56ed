// FlashAttention-2 backward (Dao 2023, Algorithm 2) on mma.sync, for sm_80 and later.
//
//   for each block of keys K_j, values V_j (one thread block each)    grid: one dimension, TileOrder by KV head
//     dK = 0, dV = 0                                                  in registers
//     for each query head of the group, each Q_i, dO_i in the band
//       P^T = exp(K_j Q_i^T - lse);  dP^T = V_j dO_i^T;  dS^T = P^T * (dP^T - D)
//       dV += P^T dO_i;  dK += dS^T Q_i;  dQ_i += dS K_j              dQ_i by float32 reductions in global memory
//     dK = scale * dK                                                 (backward_finish_kernel scales dQ)
//
// Scores are computed transposed, keys along the rows: P^T and dS^T then have the layout of the A operand of dV and dK.
// All query heads of a group pass through one thread block, so dK and dV need no reduction over heads.
#pragma once

#include <cstdint>

#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "attention/backward_scores.cuh"
#include "kernels/v2/config.h"
#include "kernels/v2/dq_accumulator.cuh"
#include "kernels/v2/restore_dv.cuh"
#include "ptx/registers.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda::v2 {

template <class Tile>
struct BackwardShared {
  tile::SharedTile<Tile::kBlockN, Tile::kHeadDim> k;  // holds dK on the way out
  tile::SharedTile<Tile::kBlockN, Tile::kHeadDim> v;  // holds dV on the way out
  tile::SharedTile<Tile::kBlockM, Tile::kHeadDim> q[Tile::kStages];
  tile::SharedTile<Tile::kBlockM, Tile::kHeadDim> dout[Tile::kStages];
  tile::SharedTile<Tile::kBlockN, Tile::kBlockM> p;   // P^T
  tile::SharedTile<Tile::kBlockN, Tile::kBlockM> ds;  // dS^T
  float lse[Tile::kStages][Tile::kBlockM];
  float delta[Tile::kStages][Tile::kBlockM];
  int key_block;  // for thread 0 in deterministic mode; here and not in a register of the loop
};

// Starts the copies of Q, dO, lse and D of one block of queries into a stage, and commits them as one group.
template <class Element, class Tile>
__device__ __forceinline__ void load_queries(BackwardShared<Tile>& shared, const int stage, const BackwardParams& p,
                                             const int batch, const QueryStep at) {
  using Copy = tile::TileCopy<Tile::kBlockM, Tile::kHeadDim, Tile::kThreads>;
  const int row = at.block * Tile::kBlockM;
  const int valid = p.shape.seqlen_q - row;
  const auto load = [&](auto& shared_tile, const void* tensor, const Strides& strides) {
    const Copy copy(threadIdx.x, strides.row, p.shape.head_dim);
    copy.load_async(ptx::shared_address(&shared_tile),
                    static_cast<const Element*>(tensor) + batch * strides.batch + at.head * strides.head +
                        row * strides.row + copy.offset(),
                    valid);
  };
  load(shared.q[stage], p.q, p.q_strides);
  load(shared.dout[stage], p.dout, p.dout_strides);
  // Rows past the end read as lse = D = 0 with Q = dO = 0: P = 1, dP = 0, and nothing is added anywhere.
  const int64_t first = p.shape.row_index(batch, at.head, row);
  for (int i = threadIdx.x; i < Tile::kBlockM; i += Tile::kThreads) {
    ptx::cp_async_ca_4(ptx::shared_address(&shared.lse[stage][i]), p.lse + first + i, i < valid);
    ptx::cp_async_ca_4(ptx::shared_address(&shared.delta[stage][i]), p.row_delta + first + i, i < valid);
  }
  ptx::cp_async_commit_group();
}

// Starts the copy of the block's rows of K or V, (batch, seqlen_k, heads_kv, head_dim).
template <class Element, class Tile>
__device__ __forceinline__ void load_keys(const uint32_t shared_tile, const void* tensor, const Strides& strides,
                                          const Shape& shape, const WorkTile& work, const int key_begin,
                                          const int key_end) {
  const tile::TileCopy<Tile::kBlockN, Tile::kHeadDim, Tile::kThreads> copy(threadIdx.x, strides.row, shape.head_dim);
  copy.load_async(shared_tile,
                  static_cast<const Element*>(tensor) + work.batch * strides.batch + work.head * strides.head +
                      key_begin * strides.row + copy.offset(),
                  key_end - key_begin);
}

// One pass over this thread block's keys. The first one returns true, and has written neither dK nor dV, if a NaN or an
// infinity came out where some query sees some key and not another: it may stem from a query or dO that does not see
// the key. The careful pass leaves such elements of Q and dO out of the products and then adds those of dO to the dV of
// the keys that are seen (dK gets its NaN through dS). It leaves dQ as the first one made it.
template <bool Careful, class Element, class Tile>
__device__ __forceinline__ bool backward_pass(const BackwardParams& p, const TileOrder& order) {
  constexpr int kWarpsAcross = Tile::kWarps / Tile::kWarpsN;  // along queries for S^T, along the head dim for dK, dV
  constexpr int kKeyTiles = Tile::kBlockN / 16 / Tile::kWarpsN;
  constexpr int kQueryTiles = Tile::kBlockM / 8 / kWarpsAcross;
  constexpr int kDimTiles = Tile::kHeadDim / 8 / kWarpsAcross;
  constexpr int kDimSteps = Tile::kHeadDim / 16;
  constexpr int kDqWarpsAcross = Tile::kWarps / Tile::kWarpsM;
  constexpr int kDqRowTiles = Tile::kBlockM / 16 / Tile::kWarpsM;
  constexpr int kDqDimTiles = Tile::kHeadDim / 8 / kDqWarpsAcross;
  constexpr bool kScoresInRegisters = kWarpsAcross == 1;  // a warp has all queries of its keys: P^T, dS^T are operands
  using Dim = tile::LaneView<Tile::kHeadDim>;
  using Scores = tile::LaneView<Tile::kBlockM>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<Tile>*>(shared_bytes);

  const WorkTile work = order.tile(ptx::ctaid_x());
  if (threadIdx.x == 0) shared.key_block = work.block;
  const int first_head = work.head * p.shape.group();
  const int key_begin = work.block * Tile::kBlockN;
  const int key_end = min_of(key_begin + Tile::kBlockN, p.shape.seqlen_k);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_key = warp % Tile::kWarpsN * 16 * kKeyTiles;     // rows of S^T, dK, dV
  const int warp_query = warp / Tile::kWarpsN * 8 * kQueryTiles;  // columns of S^T
  const int warp_dim = warp / Tile::kWarpsN * 8 * kDimTiles;      // columns of dK, dV
  const int dq_row = warp % Tile::kWarpsM * 16 * kDqRowTiles;     // rows and columns of dQ
  const int dq_dim = warp / Tile::kWarpsM * 8 * kDqDimTiles;

  const BlockRange blocks = p.band.query_blocks(key_begin, key_end, p.shape.seqlen_q, Tile::kBlockM);
  const int end_head = first_head + p.shape.group();
  QueryStep at{blocks.end > blocks.begin ? first_head : end_head, blocks.begin};
  const uint32_t k_tile = ptx::shared_address(&shared.k);
  const uint32_t v_tile = ptx::shared_address(&shared.v);
  if (at.head < end_head) {
    load_keys<Element, Tile>(k_tile, p.k, p.k_strides, p.shape, work, key_begin, key_end);
    load_keys<Element, Tile>(v_tile, p.v, p.v_strides, p.shape, work, key_begin, key_end);
    load_queries<Element, Tile>(shared, 0, p, work.batch, at);
  }
  const uint32_t p_tile = ptx::shared_address(&shared.p);
  const uint32_t ds_tile = ptx::shared_address(&shared.ds);
  const Dim k_rows(k_tile, warp_key, tile::lane_row_a(lane));  // K as A of S^T
  const Dim v_rows(v_tile, warp_key, tile::lane_row_a(lane));
  const Scores p_rows(p_tile, warp_key, tile::lane_row_a(lane));  // P^T as A of dV
  const Scores ds_rows(ds_tile, warp_key, tile::lane_row_a(lane));

  tile::Accumulator<kKeyTiles, kDimTiles> dk;
  tile::Accumulator<kKeyTiles, kDimTiles> dv;
  tile::clear<kKeyTiles, kDimTiles>(dk);
  tile::clear<kKeyTiles, kDimTiles>(dv);

  for (int stage = 0; at.head < end_head; stage = (stage + 1) % Tile::kStages) {
    const QueryStep upcoming = at.next(blocks);
    const int row_begin = at.block * Tile::kBlockM;
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // Q_i and dO_i are there, and no warp reads P^T, dS^T or the other stage any more
    if constexpr (Tile::kStages == 2) {
      if (upcoming.head < end_head) load_queries<Element, Tile>(shared, 1 - stage, p, work.batch, upcoming);
    }
    const uint32_t q_tile = ptx::shared_address(&shared.q[stage]);
    const uint32_t dout_tile = ptx::shared_address(&shared.dout[stage]);

    // S^T = K Q^T, dP^T = V dO^T
    tile::Accumulator<kKeyTiles, kQueryTiles> s;
    tile::Accumulator<kKeyTiles, kQueryTiles> dp;
    const Dim q_columns(q_tile, warp_query, tile::lane_row_b(lane));
    const Dim dout_columns(dout_tile, warp_query, tile::lane_row_b(lane));
    recompute_scores<Element, kDimSteps, Tile::kAhead, kKeyTiles, kQueryTiles>(
        s, dp, k_rows, v_rows, q_columns, dout_columns, shared.lse[stage] + warp_query, p.scale * kLog2e);

    // P^T and dS^T
    differentiate_softmax<kKeyTiles, kQueryTiles>(s, dp, shared.delta[stage] + warp_query);
    const bool partial = !p.band.covers(row_begin, min_of(row_begin + Tile::kBlockM, p.shape.seqlen_q), key_begin,
                                        key_begin + Tile::kBlockN, p.shape.seqlen_k);
    if (partial) {
      mask_transposed<kKeyTiles, kQueryTiles>(p.band, key_begin + warp_key, row_begin + warp_query, p.shape.seqlen_k, s,
                                              dp);
    }
    if constexpr (!kScoresInRegisters) {
      store_scores<Element, Tile::kBlockM, kKeyTiles, kQueryTiles>(p_tile, s, warp_key, warp_query);
    }
    store_scores<Element, Tile::kBlockM, kKeyTiles, kQueryTiles>(ds_tile, dp, warp_key, warp_query);
    __syncthreads();
    if constexpr (Careful) {
      if (partial) {
        zero_nonfinite<Element, Tile::kBlockM, Tile::kHeadDim, Tile::kThreads>(q_tile);
        zero_nonfinite<Element, Tile::kBlockM, Tile::kHeadDim, Tile::kThreads>(dout_tile);
      }
    }

    // dV += P^T dO, dK += dS^T Q
    const Dim dout_rows(dout_tile, 0, tile::lane_row_a(lane));
    const Dim q_rows(q_tile, 0, tile::lane_row_a(lane));
    const auto dout_operand = [&](uint32_t (&b)[4], int pair, int k) {
      dout_rows.load_transposed(b, k, warp_dim / 16 + pair);
    };
    const auto q_operand = [&](uint32_t (&b)[4], int pair, int k) {
      q_rows.load_transposed(b, k, warp_dim / 16 + pair);
    };
    if constexpr (kScoresInRegisters) {
      uint32_t packed[kKeyTiles][kQueryTiles / 2][4];
      const auto operand = [&](uint32_t (&a)[4], int m, int k) { tile::copy_fragment(a, packed[m][k]); };
      tile::pack_operand<Element, kKeyTiles, kQueryTiles>(packed, s);
      tile::warp_gemm<Element, Tile::kBlockM / 16, Tile::kAhead, kKeyTiles, kDimTiles>(dv, operand, dout_operand);
      tile::pack_operand<Element, kKeyTiles, kQueryTiles>(packed, dp);
      tile::warp_gemm<Element, Tile::kBlockM / 16, Tile::kAhead, kKeyTiles, kDimTiles>(dk, operand, q_operand);
    } else {
      tile::warp_gemm<Element, Tile::kBlockM / 16, Tile::kAhead, kKeyTiles, kDimTiles>(
          dv, [&](uint32_t (&a)[4], int m, int k) { p_rows.load(a, m, k); }, dout_operand);
      tile::warp_gemm<Element, Tile::kBlockM / 16, Tile::kAhead, kKeyTiles, kDimTiles>(
          dk, [&](uint32_t (&a)[4], int m, int k) { ds_rows.load(a, m, k); }, q_operand);
    }

    // dQ += dS K
    if (!Careful && p.dq != nullptr) {
      tile::Accumulator<kDqRowTiles, kDqDimTiles> dq;
      const Scores ds_columns(ds_tile, 0, tile::lane_row_b(lane));
      const Dim k_columns(k_tile, 0, tile::lane_row_a(lane));
      const auto multiply = [&] {
        tile::clear<kDqRowTiles, kDqDimTiles>(dq);
        tile::warp_gemm<Element, Tile::kBlockN / 16, Tile::kAhead, kDqRowTiles, kDqDimTiles>(
            dq, [&](uint32_t (&a)[4], int m, int k) { ds_columns.load_transposed(a, k, dq_row / 16 + m); },
            [&](uint32_t (&b)[4], int pair, int k) { k_columns.load_transposed(b, k, dq_dim / 16 + pair); });
      };
      multiply();
      if (partial && __syncthreads_or(has_nonfinite<kDqRowTiles, kDqDimTiles>(dq))) {
        // dS = 0 does not stop 0 * NaN: once more without the NaNs and infinities of K. Rows that see one have a NaN in
        // dS.
        zero_nonfinite<Element, Tile::kBlockN, Tile::kHeadDim, Tile::kThreads>(k_tile);
        multiply();
        __syncthreads();
        const WorkTile here = order.tile(ptx::ctaid_x());  // as work: not kept in registers for this
        const int first_key = here.block * Tile::kBlockN;
        load_keys<Element, Tile>(k_tile, p.k, p.k_strides, p.shape, here, first_key,
                                 min_of(first_key + Tile::kBlockN, p.shape.seqlen_k));
        ptx::cp_async_commit_group();  // waited for, like Q and dO, at the top of the loop
      }
      const DqAccumulator<Tile> accumulator(p, work.batch, at.head, at.block);
      const auto sync = [] { __syncthreads(); };
      accumulator.wait_turn(p, shared.key_block, sync);
      accumulator.add(dq, dq_row, dq_dim);
      accumulator.pass_turn(p, sync);
    }
    if constexpr (Tile::kStages == 1) {
      __syncthreads();  // the one stage is free again
      if (upcoming.head < end_head) load_queries<Element, Tile>(shared, 0, p, work.batch, upcoming);
    }
    at = upcoming;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // K, V are no longer read
  if constexpr (!Careful) {
    const bool all_seen =
        p.band.covers(blocks.begin * Tile::kBlockM, min_of(blocks.end * Tile::kBlockM, p.shape.seqlen_q), key_begin,
                      key_begin + Tile::kBlockN, p.shape.seqlen_k);
    const bool bad = has_nonfinite<kKeyTiles, kDimTiles>(dk) || has_nonfinite<kKeyTiles, kDimTiles>(dv);
    if (!all_seen && __syncthreads_or(bad)) return true;
  }

  // dK and dV through shared memory and out in whole rows. Two or more warps share a row: a barrier, not a __syncwarp.
  const WorkTile here = order.tile(ptx::ctaid_x());  // the same as work, not kept in registers meanwhile
  tile::scale<kKeyTiles, kDimTiles>(dk, p.scale);
  store_scores<Element, Tile::kHeadDim, kKeyTiles, kDimTiles>(k_tile, dk, warp_key, warp_dim);
  store_scores<Element, Tile::kHeadDim, kKeyTiles, kDimTiles>(v_tile, dv, warp_key, warp_dim);
  __syncthreads();
  const auto store = [&](void* tensor, const Strides& strides, const uint32_t shared_tile) {
    if (tensor == nullptr) return;
    const int first_key = here.block * Tile::kBlockN;
    auto* rows =
        static_cast<Element*>(tensor) + here.batch * strides.batch + here.head * strides.head + first_key * strides.row;
    for (int row = warp * 16; row < Tile::kBlockN; row += Tile::kWarps * 16) {
      tile::store_rows<Tile::kHeadDim, 16>(shared_tile, rows, strides.row, row, p.shape.seqlen_k - first_key,
                                           p.shape.head_dim);
    }
  };
  store(p.dk, p.dk_strides, k_tile);
  store(p.dv, p.dv_strides, v_tile);
  if constexpr (Careful) restore_dv<Element, Tile>(p, here);
  return false;
}

// Not inlined: what the rare pass shares with the first one would otherwise be kept in registers through the first
// one's loop.
template <class Element, class Tile>
__device__ __noinline__ void backward_again(const BackwardParams& p, const TileOrder& order) {
  backward_pass<true, Element, Tile>(p, order);
}

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ TileOrder order) {
  if (backward_pass<false, Element, Tile>(p, order)) backward_again<Element, Tile>(p, order);
}

}  // namespace flash_cuda::v2
