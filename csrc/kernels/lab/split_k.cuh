// Split-K warps (FlashAttention v1; named so in FlashAttention-2, section 3.3): the warps of a team divide the keys of
// a block, each computes with all queries of a strip, and what they get is added up through shared memory.
//
// Each warp owns the sums of kOwnRows halves (8 rows) of the strip. It takes the strip's halves in an order of its own,
// half h ^ (warp * kOwnRows) as its h-th: its own ones are its first, and so in registers that are known at compile
// time.
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

template <class Element, class Tile, class Normalisation>
class SplitK {
  static constexpr int kDimTiles = Tile::kHeadDim / 8;
  static constexpr int kDimSteps = Tile::kHeadDim / 16;
  static constexpr int kWarps = Tile::kPlan.split_k;
  static constexpr int kSlice = Tile::kColumns / kWarps;  // keys of a warp
  static constexpr int kRowTiles = Tile::kPlan.strip_rows / 16;
  static constexpr int kHalves = 2 * kRowTiles;  // of 8 rows
  static constexpr int kOwnRows = kHalves / kWarps;
  // The head dim in as many passes as keep the sums in registers.
  static constexpr int kPasses = Tile::kHeadDim / TilePlan::kExchangedDims;
  static constexpr int kPassTiles = kDimTiles / kPasses;
  // One half's sums of one warp, lane by lane, two elements a lane: for every column of 8.
  static constexpr int kHalfBytes = 8 * TilePlan::kExchangedDims * 4;
  static constexpr int kInboxBytes = (kWarps - 1) * kOwnRows * kHalfBytes;
  using Dim = tile::LaneView<Tile::kHeadDim>;
  static_assert(kSlice % 16 == 0 && kOwnRows * kWarps == kHalves && kHalves <= 4);

 public:
  static constexpr int kTeams = Tile::kPlan.teams;
  static constexpr int kTeamWarps = kWarps;
  static constexpr int kThreads = kTeams * kTeamWarps * 32;
  static constexpr int kMinBlocks = resident_blocks(Tile::kBudgetKb, kThreads);
  static constexpr int kStripRows = Tile::kPlan.strip_rows;
  // An inbox for each warp, then (m, l) of every row from every warp.
  static constexpr int kSharedBytes = Tile::kPlan.exchange_bytes() / kTeams;
  static constexpr bool kTakesQueries = false;
  static constexpr int kParts = 1;
  using State = RowState<kOwnRows, kDimTiles>;
  static_assert(kSharedBytes == kWarps * kInboxBytes + kWarps * kStripRows * 8);

  __device__ SplitK(const Team<SplitK>& team, const uint32_t shared, const float scale_log2)
      : team_(team), shared_(shared), scale_log2_(scale_log2) {}

  // 8 * kOwnRows rows of shared memory that are this warp's own between a step and the next one: its inbox.
  __device__ uint32_t staging() const { return shared_ + team_.warp * kInboxBytes; }

  __device__ void take_queries(const uint32_t strip_tile) { strip_tile_ = strip_tile; }

  // As SplitQ::step. Passes a barrier of the team, after which no warp reads the strip's queries, and calls
  // queries_read(). Between two steps of a team another barrier must lie.
  template <class KeysRead, class ValuesNeeded, class QueriesRead = NoHook>
  __device__ __forceinline__ void step(State& state, const uint32_t k_tile, const uint32_t v_tile, const Band band,
                                       const int strip_row, const int first_key, const int seqlen_k,
                                       KeysRead&& keys_read, ValuesNeeded&& values_needed,
                                       QueriesRead&& queries_read = {}) {
    const int lane = threadIdx.x % 32;
    const int slice = team_.warp * kSlice;
    const int key = first_key + slice;

    // S~ = Q K~^T over this warp's keys
    tile::Accumulator<kRowTiles, kSlice / 8> s;
    tile::clear<kRowTiles, kSlice / 8>(s);
    const tile::LaneRow lane_row = tile::lane_row_a(lane);
    const Dim q_view(strip_tile_, 0, {lane_row.row ^ first_own_half() % 2 * 8, lane_row.chunk});
    const Dim k_view(k_tile, slice, tile::lane_row_b(lane));
    tile::warp_gemm<Element, kDimSteps, 1, kRowTiles, kSlice / 8>(
        s, [&](uint32_t (&a)[4], int m, int step) { q_view.load(a, m ^ first_own_half() / 2, step); },
        [&](uint32_t (&b)[4], int pair, int step) { k_view.load(b, pair, step); });
    keys_read();

    // m~ = rowmax S~, P~ = exp(S~ - m~), l~ = rowsum P~
    if (!band.covers(strip_row, strip_row + kStripRows, key, key + kSlice, seqlen_k)) {
      mask_scores<kRowTiles, kSlice / 8>(s, band, strip_row, key, seqlen_k, first_own_half());
    }
    float2 statistics[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const float m = row_max<kSlice / 8>(s[h / 2], h % 2);
      statistics[h] = make_float2(m, exponentiate_row<kSlice / 8>(s[h / 2], h % 2, WeightUnder(m, scale_log2_)));
    }
    publish_statistics(statistics);
    uint32_t probabilities[kRowTiles][kSlice / 16][4];
    tile::pack_operand<Element, kRowTiles, kSlice / 8>(probabilities, s);

    // O~ = P~ V~, added up over the warps
    values_needed();
    float factor[kOwnRows][kWarps];
    const Dim v_view(v_tile, slice, tile::lane_row_a(lane));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      tile::Accumulator<kRowTiles, kPassTiles> sums;
      tile::clear<kRowTiles, kPassTiles>(sums);
      tile::warp_gemm<Element, kSlice / 16, 1, kRowTiles, kPassTiles>(
          sums, [&](uint32_t (&a)[4], int m, int step) { tile::copy_fragment(a, probabilities[m][step]); },
          [&](uint32_t (&b)[4], int pair, int step) { v_view.load_transposed(b, step, pass * kPassTiles / 2 + pair); });
      if (pass > 0) team_.sync();  // the last pass's sums are read
      publish(sums);
      team_.sync();
      if (pass == 0) {
        queries_read();
#pragma unroll
        for (int r = 0; r < kOwnRows; ++r) merge_statistics(state, r, factor[r]);
      }
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) add_up(state, pass, r, sums, factor[r]);
    }
  }

 private:
  __device__ int first_own_half() const { return team_.warp * kOwnRows; }
  // The warps of the team in turn; 0 is this one.
  __device__ int peer(const int turn) const { return team_.warp ^ turn; }
  __device__ uint32_t row_statistics(const int warp, const int row) const {
    return shared_ + kWarps * kInboxBytes + (warp * kStripRows + row) * 8;
  }
  // This lane's place in own half r of `owner`, as its peer of that turn has summed it.
  __device__ uint32_t inbox(const int owner, const int turn, const int r) const {
    return shared_ + owner * kInboxBytes + ((turn - 1) * kOwnRows + r) * kHalfBytes + threadIdx.x % 32 * 8;
  }

  // m~ and l~ of every row to shared memory, from the lane of the row's quad that stands for its half. One store for
  // all halves: branches between them would keep their exponentials apart.
  __device__ __forceinline__ void publish_statistics(const float2 (&statistics)[kHalves]) const {
    const int half = threadIdx.x % 4;
    float2 mine = statistics[0];
#pragma unroll
    for (int h = 1; h < kHalves; ++h) {
      mine.x = half == h ? statistics[h].x : mine.x;
      mine.y = half == h ? statistics[h].y : mine.y;
    }
    const int row = (half ^ first_own_half()) * 8 + int(threadIdx.x) % 32 / 4;
    if (half < kHalves) ptx::st_shared_v2_f32(row_statistics(team_.warp, row), mine);
  }

  // The halves of other warps to their owners.
  __device__ __forceinline__ void publish(const tile::Accumulator<kRowTiles, kPassTiles>& sums) const {
#pragma unroll
    for (int h = kOwnRows; h < kHalves; ++h) {
      const int turn = h / kOwnRows;
      const uint32_t half = inbox(peer(turn), turn, h % kOwnRows);
#pragma unroll
      for (int n = 0; n < kPassTiles; ++n) {
        const float* x = &sums[h / 2][n][h % 2 * 2];
        ptx::st_shared_v2_f32(half + n * 256, make_float2(x[0], x[1]));
      }
    }
  }

  // Brings m and l of row r of the state forward, and O under the new m; `factor` are the weights of the warps' sums.
  __device__ __forceinline__ void merge_statistics(State& state, const int r, float (&factor)[kWarps]) const {
    const int row = State::row_in_strip(team_.warp, r);
    float2 part[kWarps];  // m~, l~
    float m = state.m[r];
#pragma unroll
    for (int turn = 0; turn < kWarps; ++turn) {
      part[turn] = ptx::ld_shared_v2_f32(row_statistics(peer(turn), row));
      m = fmaxf(m, part[turn].x);
    }
    const WeightUnder weight(m, scale_log2_);
    const float alpha = weight(state.m[r]);
    float l = alpha * state.l[r];
#pragma unroll
    for (int turn = 0; turn < kWarps; ++turn) {
      factor[turn] = weight(part[turn].x);
      l += factor[turn] * part[turn].y;
    }
    const float after = Normalisation::after(l);
    state.scale(r, alpha * Normalisation::before(state.l[r]) * after);
#pragma unroll
    for (int turn = 0; turn < kWarps; ++turn) factor[turn] *= after;
    state.m[r] = m;
    state.l[r] = l;
  }

  __device__ __forceinline__ void add_up(State& state, const int pass, const int r,
                                         const tile::Accumulator<kRowTiles, kPassTiles>& sums,
                                         const float (&factor)[kWarps]) const {
#pragma unroll
    for (int turn = 0; turn < kWarps; ++turn) {
#pragma unroll
      for (int n = 0; n < kPassTiles; ++n) {
        const float2 x = turn == 0 ? make_float2(sums[r / 2][n][r % 2 * 2], sums[r / 2][n][r % 2 * 2 + 1])
                                   : ptx::ld_shared_v2_f32(inbox(team_.warp, turn, r) + n * 256);
        float* o = &state.o[0][pass * kPassTiles + n][2 * r];
        o[0] = fmaf(x.x, factor[turn], o[0]);
        o[1] = fmaf(x.y, factor[turn], o[1]);
      }
    }
  }

  Team<SplitK> team_;
  uint32_t shared_;
  float scale_log2_;
  uint32_t strip_tile_ = 0;
};

}  // namespace flash_cuda::lab
