// What the two kinds of consumers of the Hopper backward (backward.cuh, backward_wide.cuh) have in common: the parts of
// a step in the registers of one warpgroup, with 64 keys along its rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/backward_scores.cuh"
#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/hopper/backward_loads.cuh"
#include "kernels/hopper/backward_turns.cuh"
#include "kernels/v2/dq_accumulator.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "tile/warp_gemm.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace flash_cuda::hopper {

template <class Element, class Tile, DqSum Sum>
class BackwardConsumer {
 protected:
  using Shared = BackwardShared<Tile>;
  using Key = typename Shared::Key;
  using Query = typename Shared::Query;
  using Score = typename Shared::Score;
  static constexpr bool kSums = Sum != DqSum::kNone;
  static constexpr bool kTakesTurns = Sum == DqSum::kInOrder;
  static constexpr int kHeadDim = Tile::kHeadDim;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kQueryTiles = kBlockM / 8;
  using Scores = tile::Accumulator<1, kQueryTiles>;
  using Gradient = tile::Accumulator<1, kHeadDim / 8>;
  using Operand = uint32_t[1][kBlockM / 16][4];
  using Rows = float2[kQueryTiles];  // lse2 or D of the queries in this lane's columns

  __device__ __forceinline__ BackwardConsumer(const BackwardParams& p, const BackwardMaps& maps, Shared& shared,
                                              const unsigned tile_number, const BackwardNote& note, const int warpgroup)
      : p_(p),
        maps_(maps),
        shared_(shared),
        tile_number_(tile_number),
        work_(note.work),
        warpgroup_(warpgroup),
        first_key_(note.work.block * kBlockN + first_row()),
        base_(ptx::shared_address(&shared)),
        queries_(shared.query_barriers, note.steps_before),
        score_block_(note.steps_before % Tile::kScoreBlocks),
        score_parity_(note.steps_before / Tile::kScoreBlocks % 2) {}

  // Of this warpgroup's keys among those of the tile.
  __device__ __forceinline__ int first_row() const { return Tile::kSplitsKeys ? 64 * warpgroup_ : 0; }
  // K, and V unless that is apart.
  __device__ __forceinline__ int key_stage() const { return tile_number_ % Tile::kKeyStages; }
  __device__ __forceinline__ void give_keys_back() const {
    ptx::mbarrier_arrive(tile::RingCursor<Tile::kKeyStages>(shared_.key_barriers, tile_number_).empty());
  }
  // Where V is apart.
  __device__ __forceinline__ void wait_values(const BackwardNote& note) const {
    tile::RingCursor<1>(shared_.value_barriers, note.loads_before).wait_full();
  }
  __device__ __forceinline__ void give_values_back_if(const bool condition) const {
    ptx::mbarrier_arrive_if(tile::RingCursor<1>(shared_.value_barriers).empty(), condition);
  }
  __device__ __forceinline__ uint32_t key_tile(const int offset = 0) const {
    return tile_at(offsetof(Shared, k) + key_stage() * Key::kBytes + offset);
  }
  __device__ __forceinline__ uint32_t value_tile(const int offset = 0) const {
    return tile_at(offsetof(Shared, v) + (Tile::kValuesApart ? 0 : key_stage() * Key::kBytes) + offset);
  }

  __device__ __forceinline__ void give_queries_back() {
    ptx::mbarrier_arrive(queries_.empty());
    queries_.advance();
  }

  // Of a tile at this offset in shared memory. Forgotten, or the compiler would keep all descriptors of a product from
  // one step to the next.
  __device__ __forceinline__ uint32_t tile_at(const int offset) const { return ptx::forget(base_ + offset); }
  __device__ __forceinline__ uint32_t q_tile() const {
    return tile_at(offsetof(Shared, q) + queries_.stage() * Query::kBytes);
  }
  __device__ __forceinline__ uint32_t dout_tile() const {
    return tile_at(offsetof(Shared, dout) + queries_.stage() * Query::kBytes);
  }
  __device__ __forceinline__ static int warp_row() { return threadIdx.x % 128 / 32 * 16; }

  // Before the first dQ. A key with a NaN or an infinity must not reach the dQ of rows that do not see it, and dS = 0
  // does not stop it: then BackwardAgain does everything, and the other steps are skipped.
  __device__ __forceinline__ bool keys_are_bad(const Walk<Tile>& walk) const {
    if (walk.all_seen(p_, work_)) return false;
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared_.checked_barriers[key_stage()]),
                              tile_number_ / Tile::kKeyStages % 2);
    return __any_sync(0xffffffffu, shared_.bad_keys[key_stage()] != 0);
  }
  // At the end of a tile, each warpgroup for itself; is_bad: its dK or dV holds a NaN or an infinity.
  template <class IsBad>
  __device__ __forceinline__ void list_if_bad(const Walk<Tile>& walk, const IsBad& is_bad) const {
    if (walk.all_seen(p_, work_)) return;
    const bool bad_keys = shared_.bad_keys[key_stage()] != 0;
    const bool lists = bad_keys ? warpgroup_ == 0 : ptx::bar_red_or(2 + warpgroup_, 128, is_bad());
    if (lists && ptx::tid_x() % 128 == 0) {
      shared_.again.entries[atomicAdd(&shared_.again.count, 1u)] = {work_, bad_keys ? Again::kAll : Again::kGradients};
    }
  }
  __device__ __forceinline__ void skip(const Walk<Tile>& walk, QueryStep at) {
    for (; !walk.is_end(at); at = walk.next(at)) {
      queries_.wait_full();
      give_queries_back();
      if (kSums && (Tile::kSplitsKeys || warpgroup_ == 1)) announce_ds();  // as each step does
      advance_ds();
    }
  }

  // Some query of the block does not see some of this warpgroup's keys.
  __device__ __forceinline__ bool is_partial(const QueryStep& at) const {
    const int row_begin = at.block * kBlockM;
    return !p_.band.covers(row_begin, min_of(row_begin + kBlockM, p_.shape.seqlen_q), first_key_, first_key_ + 64,
                           p_.shape.seqlen_k);
  }
  template <class... Accumulators>
  __device__ __forceinline__ void mask(const QueryStep& at, Accumulators&... accumulators) const {
    mask_transposed<1, kQueryTiles>(p_.band, first_key_ + warp_row(), at.block * kBlockM, p_.shape.seqlen_k,
                                    accumulators...);
  }

  // Loaded where it is written: ahead of a wait, as shared memory is slow while products read it.
  __device__ __forceinline__ void load_rows(Rows& rows, const int offset) const {
    const uint32_t first = base_ + offset + queries_.stage() * kBlockM * 4 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) rows[n] = ptx::ld_shared_v2_f32(first + 32 * n);
  }

  // S^T becomes P^T.
  __device__ __forceinline__ void exponentiate(Scores& s, const Rows& lse2) const {
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[0][n][e] = ptx::ex2_approx_ftz(fmaf(s[0][n][e], maps_.scale_log2, -(e % 2 ? lse2[n].y : lse2[n].x)));
  }

  // dP^T becomes dS^T = P^T * (dP^T - D).
  __device__ __forceinline__ static void differentiate(const Scores& p, Scores& dp, const Rows& delta) {
    differentiate_softmax<1, kQueryTiles>(p, dp, [&](const int n) { return delta[n]; });
  }

  // The ring of blocks of dS^T: score_block_ is of this step, and its barrier says with this parity that all have
  // written to it; last_block() is of the step before.
  __device__ __forceinline__ uint32_t score_barrier(const int block) const {
    return base_ + offsetof(Shared, score_barriers) + 8 * block;
  }
  __device__ __forceinline__ int last_block() const {
    return score_block_ == 0 ? Tile::kScoreBlocks - 1 : score_block_ - 1;
  }
  __device__ __forceinline__ void wait_last_ds() const {
    if constexpr (!kSums) return;
    ptx::mbarrier_wait_parity(score_barrier(last_block()), score_block_ == 0 ? score_parity_ ^ 1 : score_parity_);
  }
  __device__ __forceinline__ void advance_ds() {
    if (++score_block_ == Tile::kScoreBlocks) {
      score_block_ = 0;
      score_parity_ ^= 1;
    }
  }

  // dS^T of a warp's 16 keys, a row of queries each: for dQ, a step later.
  __device__ __forceinline__ void store_ds(const Operand& ds) const {
    const int lane = threadIdx.x % 32;
    // Steps of 16 queries are XORed to the address, as the swizzle does it: the tile is aligned to its period.
    const uint32_t first = base_ + offsetof(Shared, ds) + score_block_ * Score::kBytes +
                           Score::offset(first_row() + warp_row() + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      ptx::stmatrix_x4((first ^ k % 4 * 32) + k / 4 * Score::kPanelBytes, ds[0][k]);
    }
    ptx::fence_proxy_async();
  }
  __device__ __forceinline__ void announce_ds() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(score_barrier(score_block_));
  }
  __device__ __forceinline__ void put_ds(const Operand& ds) const {
    if constexpr (!kSums) return;
    store_ds(ds);
    announce_ds();
  }

  // dQ = dS K of the step before; this warpgroup's 64 rows or Columns columns.
  template <int Columns>
  __device__ __forceinline__ void multiply_dq(tile::Accumulator<1, Columns / 8>& dq) const {
    const int rows = Tile::kSplitsRows ? warpgroup_ * Score::kPanelBytes : 0;
    const int columns = Tile::kSplitsRows ? 0 : warpgroup_ * (Tile::kDqColumns / Key::kColumns * Key::kPanelBytes);
    tile::multiply_columns_by_columns<Element, Score, Key>(
        dq[0], tile_at(offsetof(Shared, ds) + last_block() * Score::kBytes + rows), key_tile(columns));
    ptx::wgmma_commit_group();
  }

  // The index of a block of queries among all of them, in 32 bits: one register from a step to the next.
  __device__ __forceinline__ int sum_of(const QueryStep& at) const {
    return (work_.batch * p_.shape.heads_q + at.head) * v2::DqAccumulator<Tile>::blocks(p_.shape.seqlen_q) + at.block;
  }

  // Deterministic mode (backward_turns.cuh): a turn is both warpgroups' add_dq() of a step, in whatever order. With no
  // products under way: a loop between them would have the compiler wait for each.
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (kTakesTurns) BackwardTurns<Tile>::wait(base_, turns_);
  }
  // Before dQ of the step before: both warpgroups' dS^T of it is there, and so the step before that is over for both
  // (of three blocks of dS^T, the one that is written next is free); and it is this block of keys' turn to add.
  __device__ __forceinline__ void wait_for_others() const {
    wait_last_ds();
    wait_turn();
  }
  template <int Columns>
  __device__ __forceinline__ void add_dq(const int at, const tile::Accumulator<1, Columns / 8>& dq) {
    const v2::DqAccumulator<Tile> accumulator(p_, at);
    float* const sum = accumulator.element((Tile::kSplitsRows ? 4 * warpgroup_ : 0) + warp_row() / 16,
                                           Tile::kSplitsRows ? 0 : Tile::kDqColumns / 8 * warpgroup_, 0);
#pragma unroll
    for (int n = 0; n < Columns / 8; ++n) ptx::red_add_v4_f32(sum + 128 * n, dq[0][n]);
    if constexpr (kTakesTurns) BackwardTurns<Tile>::end(base_, turns_++);
  }

  // dQ of the step before, with no products under way.
  template <int Columns>
  __device__ __forceinline__ void finish_dq(const int at) {
    if constexpr (!kSums) return;
    tile::Accumulator<1, Columns / 8> dq;
    ptx::wgmma_fence();
    multiply_dq<Columns>(dq);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dq[0]);
    wait_turn();
    add_dq<Columns>(at, dq);
  }

  // As store_output(): a quad writes 32 bytes of a row with each store.
  __device__ __forceinline__ void store(void* const tensor, const Strides& strides, const Gradient& acc,
                                        const float scale) const {
    if (tensor == nullptr) return;
    const int thread = ptx::tid_x(), lane = thread % 32;
    const int odd = lane % 2;
    const int column = odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_key_ + thread % 128 / 32 * 16 + half * 8 + lane / 4;
      auto* const out = static_cast<Element*>(tensor) + work_.batch * strides.batch + work_.head * strides.head +
                        row * strides.row + column;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 2) {
        const float (&left)[4] = acc[0][n];
        const float (&right)[4] = acc[0][n + 1];
        const uint32_t a = ptx::cvt_rn_x2_f32<Element>(left[2 * half] * scale, left[2 * half + 1] * scale);
        const uint32_t b = ptx::cvt_rn_x2_f32<Element>(right[2 * half] * scale, right[2 * half + 1] * scale);
        const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
        ptx::st_global_v2_b32(out + 8 * n, make_uint2(odd ? theirs : a, odd ? b : theirs),
                              row < p_.shape.seqlen_k && 8 * n + column < p_.shape.head_dim);
      }
    }
  }

  const BackwardParams& p_;
  const BackwardMaps& maps_;
  Shared& shared_;
  unsigned tile_number_;  // of those of this thread block
  WorkTile work_;
  int warpgroup_;
  int first_key_;
  uint32_t base_;  // of shared_: all tiles lie at fixed distances from it
  tile::RingCursor<Tile::kStages> queries_;
  int score_block_;
  uint32_t score_parity_;
  unsigned turns_ = 0;  // in deterministic mode, where a thread block has one tile
};

}  // namespace flash_cuda::hopper
