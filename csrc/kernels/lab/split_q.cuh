// Split-Q warps (FlashAttention-2, section 3.3): every warp owns 16 rows of queries and reads all keys and values. No
// warp needs another one's results.
#pragma once

#include <cstdint>

#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "kernels/lab/row_state.cuh"
#include "kernels/lab/team.cuh"
#include "kernels/lab/tile.h"
#include "tile/shared_tile.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda::lab {

// The least number of equal parts of `keys` keys, multiples of 16, that have at most `most` each.
constexpr int parts_of(int keys, int most) {
  int parts = 1;
  while (keys / parts > most || keys % (16 * parts) != 0) ++parts;
  return parts;
}

template <class Element, class Tile, class Normalisation>
class SplitQ {
  static constexpr int kDimTiles = Tile::kHeadDim / 8;
  static constexpr int kDimSteps = Tile::kHeadDim / 16;
  // Keys whose scores are in registers at a time.
  static constexpr int kMostKeys = Tile::kHeadDim <= 64 ? 192 : 64;
  static constexpr int kOwnRows = 2;
  using Dim = tile::LaneView<Tile::kHeadDim>;

 public:
  static constexpr int kTeams = 1;
  static constexpr int kTeamWarps = Tile::kPlan.split_q;
  static constexpr int kThreads = kTeamWarps * 32;
  static constexpr int kMinBlocks = resident_blocks(Tile::kBudgetKb, kThreads);
  static constexpr int kStripRows = Tile::kRows;
  static constexpr int kSharedBytes = Tile::kPlan.output_bytes(Tile::kHeadDim);
  static constexpr bool kTakesQueries = true;                         // take_queries() copies them into registers
  static constexpr int kParts = parts_of(Tile::kColumns, kMostKeys);  // of a block of keys
  using State = RowState<kOwnRows, kDimTiles>;

  // `shared`: this team's kSharedBytes.
  __device__ SplitQ(const Team<SplitQ>& team, const uint32_t shared, const float scale_log2)
      : team_(team), staging_(shared + team.warp * 16 * Tile::kHeadDim * 2), scale_log2_(scale_log2) {}

  // 16 rows of shared memory that are this warp's own outside step().
  __device__ uint32_t staging() const { return staging_; }

  __device__ __forceinline__ void take_queries(const uint32_t strip_tile) {
    const Dim view(strip_tile, team_.warp * 16, tile::lane_row_a(threadIdx.x % 32));
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step) view.load(queries_[step], 0, step);
  }

  // One step of the algorithm: `state` after the block of keys in k_tile and v_tile, whose first one is `first_key`.
  // Calls keys_read() when this warp reads K no more, values_needed() before it reads V.
  template <class KeysRead, class ValuesNeeded, class QueriesRead = NoHook>
  __device__ __forceinline__ void step(State& state, const uint32_t k_tile, const uint32_t v_tile, const Band band,
                                       const int strip_row, const int first_key, const int seqlen_k,
                                       KeysRead&& keys_read, ValuesNeeded&& values_needed, QueriesRead&& = {}) {
    constexpr int kPartKeys = Tile::kColumns / kParts;
    const int lane = threadIdx.x % 32;
    const int row = strip_row + team_.warp * 16;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) state.scale(r, Normalisation::before(state.l[r]));
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      // S = Q K^T
      tile::Accumulator<1, kPartKeys / 8> s;
      tile::clear<1, kPartKeys / 8>(s);
      const Dim k_view(k_tile, part * kPartKeys, tile::lane_row_b(lane));
      tile::warp_gemm<Element, kDimSteps, 1, 1, kPartKeys / 8>(
          s, [&](uint32_t (&a)[4], int, int step) { tile::copy_fragment(a, queries_[step]); },
          [&](uint32_t (&b)[4], int pair, int step) { k_view.load(b, pair, step); });
      if (part == kParts - 1) keys_read();

      // P = exp(S - m); l and O under the new m
      const int key = first_key + part * kPartKeys;
      if (!band.covers(row, row + 16, key, key + kPartKeys, seqlen_k)) {
        mask_scores<1, kPartKeys / 8>(s, band, row, key, seqlen_k);
      }
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        const float m = fmaxf(state.m[r], row_max<kPartKeys / 8>(s[0], r));
        const WeightUnder weight(m, scale_log2_);
        const float alpha = weight(state.m[r]);
        state.scale(r, alpha);
        state.l[r] = alpha * state.l[r] + exponentiate_row<kPartKeys / 8>(s[0], r, weight);
        state.m[r] = m;
      }
      uint32_t probabilities[1][kPartKeys / 16][4];
      tile::pack_operand<Element, 1, kPartKeys / 8>(probabilities, s);

      // O += P V
      if (part == 0) values_needed();
      const Dim v_view(v_tile, part * kPartKeys, tile::lane_row_a(lane));
      tile::warp_gemm<Element, kPartKeys / 16, 1, 1, kDimTiles>(
          state.o, [&](uint32_t (&a)[4], int, int step) { tile::copy_fragment(a, probabilities[0][step]); },
          [&](uint32_t (&b)[4], int pair, int step) { v_view.load_transposed(b, step, pair); });
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) state.scale(r, Normalisation::after(state.l[r]));
  }

 private:
  Team<SplitQ> team_;
  uint32_t staging_;
  float scale_log2_;
  uint32_t queries_[kDimSteps][4];
};

}  // namespace flash_cuda::lab
