// FlashAttention v1 backward (Dao et al. 2022, Algorithm 4) on mma.sync, for sm_80 and later.
//
//   for each block of keys K_j, values V_j              one thread block for each (batch, KV head), which does it all
//     dK = 0, dV = 0                                    in registers
//     for each query head of the group, each Q_i, dO_i, O_i in the band
//       D_i = rowsum(dO_i * O_i) - dlse_i               computed again in every block of keys
//       P^T = exp(K_j Q_i^T - lse_i);  dP^T = V_j dO_i^T;  dS^T = P^T * (dP^T - D_i)
//       dV += P^T dO_i;  dK += dS^T Q_i
//       dQ_i = dQ_i + dS K_j                            read from and written to global memory; nobody else adds to it
//     dK = scale * dK
//
// Scores are transposed and the warps form the same grids as in kernels/v2/backward.cuh, which differs in the loop over
// j (there, a thread block each), in D_i (there, computed before) and in dQ (there, summed by reductions).
#pragma once

#include <cstdint>

#include "attention/backward_scores.cuh"
#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/v1/config.h"
#include "kernels/v1/dq_block.cuh"
#include "ptx/registers.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda::v1 {

template <class Tile>
struct BackwardShared {
  struct Stage {
    tile::SharedTile<Tile::kBlockM, Tile::kHeadDim> q;
    tile::SharedTile<Tile::kBlockM, Tile::kHeadDim> dout;
    tile::SharedTile<Tile::kBlockM, Tile::kHeadDim> out;
    float lse[Tile::kBlockM];
    float dlse[Tile::kBlockM];
  };
  tile::SharedTile<Tile::kBlockN, Tile::kHeadDim> k;
  tile::SharedTile<Tile::kBlockN, Tile::kHeadDim> v;
  Stage stage[Tile::kStages];
  tile::SharedTile<Tile::kBlockN, Tile::kBlockM> p;   // P^T; with dS^T, room for a complete dQ_i on its way out
  tile::SharedTile<Tile::kBlockN, Tile::kBlockM> ds;  // dS^T
  float delta[Tile::kBlockM];
  bool left_out;  // NaNs and infinities of dO, in this block of keys; here and not in a register of the loop
  static_assert(2 * Tile::kBlockN >= Tile::kHeadDim);
};

// Starts the copy of rows from `row` on, at most Rows of them, to a shared tile.
template <class Element, int Rows, class Tile>
__device__ __forceinline__ void load_rows(const uint32_t shared_tile, const void* tensor, const Strides& strides,
                                          const int batch, const int head, const int row, const int seqlen,
                                          const int head_dim) {
  const tile::TileCopy<Rows, Tile::kHeadDim, Tile::kThreads> copy(threadIdx.x, strides.row, head_dim);
  copy.load_async(
      shared_tile,
      head_of(static_cast<const Element*>(tensor), strides, batch, head) + row * strides.row + copy.offset(),
      seqlen - row);
}

// Starts the copies of what step (i, j) reads of block i, and commits them as one group.
template <class Element, class Tile>
__device__ __forceinline__ void load_queries(typename BackwardShared<Tile>::Stage& stage, const BackwardParams& p,
                                             const int batch, const QueryStep at) {
  const int row = at.block * Tile::kBlockM;
  const auto load = [&](auto& shared_tile, const void* tensor, const Strides& strides) {
    load_rows<Element, Tile::kBlockM, Tile>(ptx::shared_address(&shared_tile), tensor, strides, batch, at.head, row,
                                            p.shape.seqlen_q, p.shape.head_dim);
  };
  load(stage.q, p.q, p.q_strides);
  load(stage.dout, p.dout, p.dout_strides);
  load(stage.out, p.out, p.out_strides);
  // Rows past the end read as zeros throughout: P = 1, dP = D = 0, and nothing is added anywhere.
  const int64_t first = (int64_t{batch} * p.shape.heads_q + at.head) * p.shape.seqlen_q + row;
  for (int i = threadIdx.x; i < Tile::kBlockM; i += Tile::kThreads) {
    const bool valid = row + i < p.shape.seqlen_q;
    const bool has_dlse = p.dlse != nullptr;
    ptx::cp_async_ca_4(ptx::shared_address(&stage.lse[i]), p.lse + first + i, valid);
    ptx::cp_async_ca_4(ptx::shared_address(&stage.dlse[i]), has_dlse ? p.dlse + first + i : p.lse, has_dlse && valid);
  }
  ptx::cp_async_commit_group();
}

// D_i of the stage's rows.
template <class Element, class Tile>
__device__ __forceinline__ void compute_delta(float (&delta)[Tile::kBlockM],
                                              const typename BackwardShared<Tile>::Stage& stage) {
  using Map = tile::Swizzle<Tile::kHeadDim>;
  constexpr int kLanes = Map::kRowChunks;  // of a row: 8 or 16
  static_assert(32 % kLanes == 0);
  const int chunk = threadIdx.x % kLanes;
#pragma unroll
  for (int first = 0; first < Tile::kBlockM; first += Tile::kThreads / kLanes) {
    const int row = first + int(threadIdx.x) / kLanes;
    const int offset = Map::offset(row, chunk);
    float sum = 0.f;
    if (row < Tile::kBlockM) {
      sum = dot_chunk(reinterpret_cast<const Element*>(stage.out.bytes + offset),
                      reinterpret_cast<const Element*>(stage.dout.bytes + offset));
    }
#pragma unroll
    for (int width = kLanes / 2; width > 0; width /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
    if (chunk == 0 && row < Tile::kBlockM) delta[row] = sum - stage.dlse[row];
  }
}

// A finished shared tile of Rows rows to the rows from `row` on of a tensor; every warp takes 16 in turn.
template <class Element, int Rows, class Tile>
__device__ __forceinline__ void store_block(const uint32_t shared_tile, void* tensor, const Strides& strides,
                                            const int batch, const int head, const int row, const int seqlen,
                                            const int head_dim) {
  Element* rows = head_of(static_cast<Element*>(tensor), strides, batch, head) + row * strides.row;
  for (int first = threadIdx.x / 32 * 16; first < Rows; first += Tile::kWarps * 16) {
    tile::store_rows<Tile::kHeadDim, 16>(shared_tile, rows, strides.row, first, seqlen - row, head_dim);
  }
}

// The NaNs and infinities of dO that were left out of P^T dO, to the keys that they see. Not inlined: rare.
template <class Element, class Tile>
__device__ __noinline__ void restore_dv(const BackwardParams& p, const TileOrder& order, const int first_key) {
  const WorkTile work = order.tile(ptx::ctaid_x());
  __syncthreads();  // the rows were written by other warps
  const int end_key = min_of(first_key + Tile::kBlockN, p.shape.seqlen_k);
  const BlockRange blocks = p.band.query_blocks(first_key, end_key, p.shape.seqlen_q, Tile::kBlockM);
  const int group = p.shape.group();
  const Band transposed{-p.band.upper, -p.band.lower};  // key j is seen by query i iff j - upper <= i <= j - lower
  Element* dv = head_of(static_cast<Element*>(p.dv), p.dv_strides, work.batch, work.head);
  for (QueryStep at{work.head * group, blocks.begin}; at.head < (work.head + 1) * group; at = at.next(blocks)) {
    const int row = at.block * Tile::kBlockM;
    const int end_row = min_of(row + Tile::kBlockM, p.shape.seqlen_q);
    if (p.band.covers(row, end_row, first_key, first_key + Tile::kBlockN, p.shape.seqlen_k)) continue;
    const auto* dout = head_of(static_cast<const Element*>(p.dout), p.dout_strides, work.batch, at.head);
    for (int key = first_key + int(threadIdx.x) / 32; key < end_key; key += Tile::kWarps) {
      restore_nonfinite(dv, p.dv_strides.row, dout, p.dout_strides.row, transposed, key, key + 1, row, end_row,
                        p.shape.head_dim);
    }
  }
}

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ TileOrder order) {
  constexpr int kWarpsAcross = Tile::kWarps / Tile::kWarpsN;  // along queries for S^T, along the head dim for dK, dV
  constexpr int kKeyTiles = Tile::kBlockN / 16 / Tile::kWarpsN;
  constexpr int kQueryTiles = Tile::kBlockM / 8 / kWarpsAcross;
  constexpr int kDimTiles = Tile::kHeadDim / 8 / kWarpsAcross;
  constexpr int kDimSteps = Tile::kHeadDim / 16;
  constexpr int kDqRowTiles = Tile::kBlockM / 16 / Tile::kWarpsM;
  constexpr int kDqDimTiles = Tile::kHeadDim / 8 / (Tile::kWarps / Tile::kWarpsM);
  using Dim = tile::LaneView<Tile::kHeadDim>;
  using Scores = tile::LaneView<Tile::kBlockM>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<Tile>*>(shared_bytes);
  const WorkTile work = order.tile(blockIdx.x);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_key = warp % Tile::kWarpsN * 16 * kKeyTiles;     // rows of S^T, dK, dV
  const int warp_query = warp / Tile::kWarpsN * 8 * kQueryTiles;  // columns of S^T
  const int warp_dim = warp / Tile::kWarpsN * 8 * kDimTiles;      // columns of dK, dV
  const int dq_row = warp % Tile::kWarpsM * kDqRowTiles;          // tiles of dQ
  const int dq_dim = warp / Tile::kWarpsM * kDqDimTiles;
  const uint32_t k_tile = ptx::shared_address(&shared.k);
  const uint32_t v_tile = ptx::shared_address(&shared.v);
  const uint32_t p_tile = ptx::shared_address(&shared.p);
  const uint32_t ds_tile = ptx::shared_address(&shared.ds);
  const int end_head = (work.head + 1) * p.shape.group();
  const auto load_keys = [&](const uint32_t shared_tile, const void* tensor, const Strides& strides, const int key) {
    load_rows<Element, Tile::kBlockN, Tile>(shared_tile, tensor, strides, work.batch, work.head, key, p.shape.seqlen_k,
                                            p.shape.head_dim);
  };
  if (p.dq != nullptr) clear_unseen<Element, Tile>(p, work);

  for (int block = 0; block * Tile::kBlockN < p.shape.seqlen_k; ++block) {
    const int key_begin = block * Tile::kBlockN;
    const int key_end = min_of(key_begin + Tile::kBlockN, p.shape.seqlen_k);
    const BlockRange blocks = p.band.query_blocks(key_begin, key_end, p.shape.seqlen_q, Tile::kBlockM);
    QueryStep at{blocks.end > blocks.begin ? work.head * p.shape.group() : end_head, blocks.begin};
    __syncthreads();  // dK_{j-1} and dV_{j-1} have left the tiles of K and V
    if (at.head < end_head) {
      load_keys(k_tile, p.k, p.k_strides, key_begin);
      load_keys(v_tile, p.v, p.v_strides, key_begin);
      load_queries<Element, Tile>(shared.stage[0], p, work.batch, at);
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    const auto covers = [&](const int row_begin, const int row_end) {
      return p.band.covers(row_begin, min_of(row_end, p.shape.seqlen_q), key_begin, key_begin + Tile::kBlockN,
                           p.shape.seqlen_k);
    };
    // Where queries see the keys only in part, P = dS = 0 does not stop 0 * NaN.
    const bool careful_keys = !covers(blocks.begin * Tile::kBlockM, blocks.end * Tile::kBlockM) &&
                              has_nonfinite<Element, Tile::kBlockN, Tile::kHeadDim, Tile::kThreads>(k_tile);
    if (threadIdx.x == 0) shared.left_out = false;  // set after the next barrier at the earliest

    tile::Accumulator<kKeyTiles, kDimTiles> dk;
    tile::Accumulator<kKeyTiles, kDimTiles> dv;
    tile::clear<kKeyTiles, kDimTiles>(dk);
    tile::clear<kKeyTiles, kDimTiles>(dv);
    for (int slot = 0; at.head < end_head; slot = (slot + 1) % Tile::kStages) {
      auto& stage = shared.stage[slot];
      const QueryStep upcoming = at.next(blocks);
      const int row_begin = at.block * Tile::kBlockM;
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // block i is there, and no warp reads P^T, dS^T or the other stage any more
      if constexpr (Tile::kStages == 2) {
        if (upcoming.head < end_head) {
          load_queries<Element, Tile>(shared.stage[1 - slot], p, work.batch, upcoming);
        }
      }
      const uint32_t q_tile = ptx::shared_address(&stage.q);
      const uint32_t dout_tile = ptx::shared_address(&stage.dout);
      compute_delta<Element, Tile>(shared.delta, stage);

      // S^T = K Q^T, dP^T = V dO^T
      tile::Accumulator<kKeyTiles, kQueryTiles> s;
      tile::Accumulator<kKeyTiles, kQueryTiles> dp;
      const Dim k_rows(k_tile, warp_key, tile::lane_row_a(lane));
      const Dim v_rows(v_tile, warp_key, tile::lane_row_a(lane));
      const Dim q_columns(q_tile, warp_query, tile::lane_row_b(lane));
      const Dim dout_columns(dout_tile, warp_query, tile::lane_row_b(lane));
      recompute_scores<Element, kDimSteps, Tile::kAhead, kKeyTiles, kQueryTiles>(
          s, dp, k_rows, v_rows, q_columns, dout_columns, stage.lse + warp_query, p.scale * kLog2e);
      __syncthreads();  // every D_i is there

      // P^T and dS^T
      differentiate_softmax<kKeyTiles, kQueryTiles>(s, dp, shared.delta + warp_query);
      const bool partial = !covers(row_begin, row_begin + Tile::kBlockM);
      if (partial) {
        mask_transposed<kKeyTiles, kQueryTiles>(p.band, key_begin + warp_key, row_begin + warp_query, p.shape.seqlen_k,
                                                s, dp);
      }
      store_scores<Element, Tile::kBlockM, kKeyTiles, kQueryTiles>(p_tile, s, warp_key, warp_query);
      store_scores<Element, Tile::kBlockM, kKeyTiles, kQueryTiles>(ds_tile, dp, warp_key, warp_query);
      __syncthreads();
      if (partial) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t tile = i == 0 ? q_tile : dout_tile;
          if (!has_nonfinite<Element, Tile::kBlockM, Tile::kHeadDim, Tile::kThreads>(tile)) continue;
          zero_nonfinite<Element, Tile::kBlockM, Tile::kHeadDim, Tile::kThreads>(tile);
          shared.left_out = true;
        }
      }

      // dV += P^T dO, dK += dS^T Q
      const Scores p_rows(p_tile, warp_key, tile::lane_row_a(lane));
      const Scores ds_rows(ds_tile, warp_key, tile::lane_row_a(lane));
      const Dim dout_rows(dout_tile, 0, tile::lane_row_a(lane));
      const Dim q_rows(q_tile, 0, tile::lane_row_a(lane));
      tile::warp_gemm<Element, Tile::kBlockM / 16, Tile::kAhead, kKeyTiles, kDimTiles>(
          dv, [&](uint32_t (&a)[4], int m, int k) { p_rows.load(a, m, k); },
          [&](uint32_t (&b)[4], int pair, int k) { dout_rows.load_transposed(b, k, warp_dim / 16 + pair); });
      tile::warp_gemm<Element, Tile::kBlockM / 16, Tile::kAhead, kKeyTiles, kDimTiles>(
          dk, [&](uint32_t (&a)[4], int m, int k) { ds_rows.load(a, m, k); },
          [&](uint32_t (&b)[4], int pair, int k) { q_rows.load_transposed(b, k, warp_dim / 16 + pair); });

      // dQ_i += dS K_j
      if (p.dq != nullptr) {
        const BlockRange visits = p.band.key_blocks(row_begin, min_of(row_begin + Tile::kBlockM, p.shape.seqlen_q),
                                                    p.shape.seqlen_k, Tile::kBlockN);
        const DqBlock<Tile> sums(p, work.batch, at);
        tile::Accumulator<kDqRowTiles, kDqDimTiles> dq;
        if (block == visits.begin) {
          tile::clear<kDqRowTiles, kDqDimTiles>(dq);
        } else {
#pragma unroll
          for (int m = 0; m < kDqRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < kDqDimTiles; ++n) {
              const float4 x = sums.fragment(dq_row + m, dq_dim + n);
              dq[m][n][0] = x.x, dq[m][n][1] = x.y, dq[m][n][2] = x.z, dq[m][n][3] = x.w;
            }
        }
        if (careful_keys && partial) zero_nonfinite<Element, Tile::kBlockN, Tile::kHeadDim, Tile::kThreads>(k_tile);
        const Scores ds_columns(ds_tile, 0, tile::lane_row_b(lane));
        const Dim k_columns(k_tile, 0, tile::lane_row_a(lane));
        tile::warp_gemm<Element, Tile::kBlockN / 16, Tile::kAhead, kDqRowTiles, kDqDimTiles>(
            dq, [&](uint32_t (&a)[4], int m, int k) { ds_columns.load_transposed(a, k, dq_row + m); },
            [&](uint32_t (&b)[4], int pair, int k) { k_columns.load_transposed(b, k, dq_dim / 2 + pair); });
        if (careful_keys && partial) {
          __syncthreads();
          load_keys(k_tile, p.k, p.k_strides, key_begin);
          ptx::cp_async_commit_group();  // waited for, like block i + 1, at the top of the loop
        }
        if (block + 1 < visits.end) {
#pragma unroll
          for (int m = 0; m < kDqRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < kDqDimTiles; ++n) {
              sums.fragment(dq_row + m, dq_dim + n) = make_float4(dq[m][n][0], dq[m][n][1], dq[m][n][2], dq[m][n][3]);
            }
        } else {
          tile::scale<kDqRowTiles, kDqDimTiles>(dq, p.scale);
          __syncthreads();  // P^T and dS^T are no longer read
          store_scores<Element, Tile::kHeadDim, kDqRowTiles, kDqDimTiles>(p_tile, dq, dq_row * 16, dq_dim * 8);
          __syncthreads();
          store_block<Element, Tile::kBlockM, Tile>(p_tile, p.dq, p.dq_strides, work.batch, at.head, row_begin,
                                                    p.shape.seqlen_q, p.shape.head_dim);
        }
      }
      if constexpr (Tile::kStages == 1) {
        __syncthreads();  // the one stage is free again
        if (upcoming.head < end_head) load_queries<Element, Tile>(shared.stage[0], p, work.batch, upcoming);
      }
      at = upcoming;
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // K and V are no longer read

    // dK and dV through their tiles and out in whole rows.
    tile::scale<kKeyTiles, kDimTiles>(dk, p.scale);
    store_scores<Element, Tile::kHeadDim, kKeyTiles, kDimTiles>(k_tile, dk, warp_key, warp_dim);
    store_scores<Element, Tile::kHeadDim, kKeyTiles, kDimTiles>(v_tile, dv, warp_key, warp_dim);
    __syncthreads();
    if (p.dk != nullptr) {
      store_block<Element, Tile::kBlockN, Tile>(k_tile, p.dk, p.dk_strides, work.batch, work.head, key_begin,
                                                p.shape.seqlen_k, p.shape.head_dim);
    }
    if (p.dv != nullptr) {
      store_block<Element, Tile::kBlockN, Tile>(v_tile, p.dv, p.dv_strides, work.batch, work.head, key_begin,
                                                p.shape.seqlen_k, p.shape.head_dim);
      if (shared.left_out) restore_dv<Element, Tile>(p, order, key_begin);
    }
  }
}

}  // namespace flash_cuda::v1
