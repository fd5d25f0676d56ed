// FlashAttention-2 forward (Dao 2023, Algorithm 1) for Hopper: TMA, wgmma, warp specialisation (FlashAttention-3, Shah
// et al. 2024, sections 3.1 and 3.2).
//
//   persistent thread blocks; each takes tiles of 64 x Warpgroups queries, longest first        grid: multiprocessors
//     a producer warp streams Q, K_j, V_j through rings in shared memory
//     each consumer warpgroup owns 64 rows: O, m, l in registers
//       S = Q K_0^T;  P = softmax step of S
//       for each further block j: start S' = Q K_j^T and O += P V_(j-1);  P' = softmax step of S' meanwhile
//     O = O / l;  lse = m + log l
//
// Blocks of keys are visited from the right. The steps of a warpgroup run on from tile to tile: the first S of a tile
// and the last P V of the one before are in flight together, so the tensor cores do not wait for prologue or epilogue.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "attention/lazy_softmax.cuh"
#include "attention/tile_draw.cuh"
#include "kernels/hopper/config.h"
#include "kernels/hopper/forward_loads.cuh"
#include "kernels/hopper/output.cuh"
#include "kernels/hopper/recompute.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace flash_cuda::hopper {

// A warpgroup and its 64 rows of each tile.
//
// What is not arithmetic (the next position, waiting for its loads, which masks apply) is done while the products of a
// step run, because everything between the end of S = Q K^T and the next products is the critical path.
template <class Element, class Tile>
class Consumer {
  static constexpr int kHeadDim = Tile::kHeadDim;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kWarpgroups = Tile::kWarpgroups;
  static constexpr int kKeyTiles = kBlockN / 8;
  static constexpr bool kChained = Tile::kQueryStages > 1;  // steps run on from tile to tile

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& p, ForwardShared<Tile>& shared, const TileNote* notes,
                                      const int warpgroup)
      : p_(p),
        notes_(notes),
        warpgroup_(warpgroup),
        q_tiles_(ptx::shared_address(shared.q) + warpgroup * Query::kBytes),
        k_tiles_(ptx::shared_address(shared.k)),
        v_tiles_(ptx::shared_address(shared.v)),
        q_(shared.q_barriers),
        k_(shared.k_barriers),
        v_(shared.v_barriers),
        softmax_(p.scale * kLog2e),
        softmax_before_(p.scale * kLog2e) {}

  __device__ __forceinline__ void run() {
    if (!next_tile()) return;
    if constexpr (kChained) {
      start();
      while (!closed_ || next_tile()) step();
      finish();
    } else {
      do {
        start();
        while (!closed_) step();
        finish();
      } while (next_tile());
    }
    if (marked_) recompute_marked<Element, Tile::kBlockM>(p_);
  }

 private:
  using Query = typename ForwardShared<Tile>::Query;
  using Key = typename ForwardShared<Tile>::Key;

  // One block of keys under way: what its arithmetic needs once the position has moved on.
  struct Block {
    int row_begin;
    int first_key;
    bool partial;         // some row does not see all of it
    bool opens;           // the first of its tile,
    bool closes;          // the last
    RowTile tile_before;  // where O belongs that an opening block finds
    uint32_t q, k, v;     // barriers by which the stages go back
  };

  // Waits for Q of the next tile. False at the end.
  //
  // Blocks at the right end that only rows of other warpgroups see are let pass. At most as many as there are stages: V
  // of the tile before still holds one, and the producer could not go on beyond that.
  __device__ __forceinline__ bool next_tile() {
    q_.wait_full();
    const TileNote note = notes_[q_.stage()];
    tile_ = note.rows;
    if (tile_.row_begin < 0) return false;
    const BlockRange blocks = note.keys;
    tile_.row_begin += 64 * warpgroup_;
    const int own_end = tile_.row_begin >= p_.shape.seqlen_q
                            ? 0
                            : p_.band
                                  .key_blocks(tile_.row_begin, min_of(tile_.row_begin + 64, p_.shape.seqlen_q),
                                              p_.shape.seqlen_k, kBlockN)
                                  .end;
    first_block_ = blocks.begin;
    const int unseen = max_of(0, blocks.end - max_of(own_end, blocks.begin + 1));
    skipped_ = __shfl_sync(0xffffffffu, min_of(unseen, Tile::kStages), 0);  // known to be the same for the whole warp
    block_ = blocks.end - 1 - skipped_;
    for (int i = 0; i < skipped_; ++i) {
      k_.wait_full();
      give_back(k_.empty());
      k_.advance();
    }
    opens_ = true;
    return true;
  }

  // V of the blocks that next_tile() has let pass, in its turn.
  __device__ __forceinline__ void skip_values() {
    for (; skipped_ > 0; --skipped_) {
      v_.wait_full();
      give_back(v_.empty());
      v_.advance();
    }
  }

  // The block at hand, and on to the next one: of this tile, or closed_.
  __device__ __forceinline__ Block pass_block() {
    Block b;
    b.row_begin = tile_.row_begin;
    b.first_key = block_ * kBlockN;
    b.partial = !p_.band.covers(b.row_begin, b.row_begin + 64, b.first_key, b.first_key + kBlockN, p_.shape.seqlen_k);
    b.opens = opens_;
    b.closes = block_ == first_block_;
    b.tile_before = tile_before_;
    b.q = q_.empty();
    b.k = k_.empty();
    b.v = v_.empty();
    k_.advance();
    opens_ = false;
    closed_ = b.closes;
    if (closed_) {
      tile_before_ = tile_;
      q_.advance();
    }
    --block_;
    return b;
  }

  // S = Q K_j^T and P, with nothing else under way: the first block.
  __device__ __forceinline__ void start() {
    k_.wait_full();
    ptx::wgmma_fence();
    issue_scores();
    const Block b = pass_block();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(s_[0]);
    softmax_.clear();
    begin_block(b);
    if (softmax_.absorb(s_)) softmax_.rebase(s_);
    softmax_.add_block();
    pack();
    skip_values();
    started_ = false;
  }

  // S' = Q K_j^T and P' beside O += P V of the block before.
  __device__ __forceinline__ void step() {
    // Both before the first product: no branch may stand between products under way.
    tile::RingCursor<Tile::kStages>::wait_both_full(k_, v_);
    ptx::wgmma_fence();
    issue_scores();
    issue_output();
    const Block b = pass_block();
    v_.advance();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_hold(s_[0]);
    if (kChained && b.opens) {
      softmax_before_ = softmax_;
      softmax_.clear();
    }
    begin_block(b);
    // The wait stands in both branches: the compiler would otherwise move it up before the exponentials, and the tensor
    // cores would idle meanwhile.
    if (softmax_.absorb(s_)) {
      softmax_.rebase(s_);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_hold(o_[0]);
      if (!(kChained && b.opens)) softmax_.scale(o_);
    } else {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_hold(o_[0]);
    }
    softmax_.add_block();
    give_back(b.v);
    started_ = true;
    if (kChained && b.opens) {
      store(b.tile_before, softmax_before_);
      started_ = false;
    }
    pack();
    skip_values();
  }

  // O += P V of the last block.
  __device__ __forceinline__ void finish() {
    v_.wait_full();
    ptx::wgmma_fence();
    issue_output();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(o_[0]);
    give_back(v_.empty());
    v_.advance();
    store(tile_before_, softmax_);
  }

  // A result that is not finite may stem from a value that not all of these rows see, unless all see all of each block.
  __device__ __forceinline__ void store(const RowTile& at, LazySoftmax& softmax) {
    const BlockRange keys = key_blocks<Tile>(p_, at.row_begin - 64 * warpgroup_);
    const bool all_seen =
        p_.band.covers(at.row_begin, min_of(at.row_begin + 64, p_.shape.seqlen_q), keys.begin * kBlockN,
                       min_of(keys.end * kBlockN, p_.shape.seqlen_k), p_.shape.seqlen_k);
    marked_ |= store_output<Element>(p_, at, o_, softmax, !all_seen);
  }

  __device__ __forceinline__ void issue_scores() {
    tile::multiply_rows_by_rows<Element, kHeadDim>(s_[0], q_tiles_ + q_.stage() * (kWarpgroups * Query::kBytes),
                                                   k_tiles_ + k_.stage() * Key::kBytes);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_output() {
    tile::multiply_registers<Element>(o_[0], probabilities_, v_tiles_ + v_.stage() * Key::kBytes, started_);
    ptx::wgmma_commit_group();
  }

  // S is there: K, and after the last block Q, go back to the producer; masks.
  __device__ __forceinline__ void begin_block(const Block& b) {
    give_back(b.k);
    if (b.closes) give_back(b.q);
    if (b.partial) {
      mask_sides<64>(s_[0], p_.band, b.row_begin, threadIdx.x % 128 / 32 * 16, b.first_key, p_.shape.seqlen_k);
    }
  }

  __device__ __forceinline__ void pack() {
    tile::pack_operand<Element, 1, kBlockN / 8>(reinterpret_cast<uint32_t (&)[1][kBlockN / 16][4]>(probabilities_), s_);
  }

  __device__ __forceinline__ static void give_back(const uint32_t empty_barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty_barrier);
  }

  const ForwardParams& p_;
  const TileNote* notes_;
  int warpgroup_;
  uint32_t q_tiles_, k_tiles_, v_tiles_;
  tile::RingCursor<Tile::kQueryStages> q_;
  tile::RingCursor<Tile::kStages> k_, v_;
  RowTile tile_, tile_before_;  // of the block at hand; of O, when that block opens a tile
  int block_, first_block_, skipped_;
  bool opens_, closed_;   // the block at hand is the first of its tile; the block before was the last of its tile
  bool started_ = false;  // O holds a sum
  bool marked_ = false;   // some rows of this warp are to be computed anew
  LazySoftmax softmax_, softmax_before_;
  tile::Accumulator<1, kBlockN / 8> s_;
  tile::Accumulator<1, kHeadDim / 8> o_;
  uint32_t probabilities_[kBlockN / 16][4];
};

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ TileOrder order,
                   const __grid_constant__ ForwardMaps maps, WorkQueue* const queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<Tile>*>(shared_bytes +
                                                         (-ptx::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  __shared__ TileNote notes[Tile::kQueryStages];

  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tile::kWarpgroups;
    shared.q_barriers.init(kWarps);
    shared.k_barriers.init(kWarps);
    shared.v_barriers.init(kWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same for the whole warp
  if (warp >= 4 * Tile::kWarpgroups) {
    if constexpr (Tile::kMovesRegisters) ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
    if (threadIdx.x == Tile::kConsumerThreads) Producer<Tile>(maps, shared, notes).run(p, order, queue);
  } else {
    if constexpr (Tile::kMovesRegisters) ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    if (p.band.leaves_rows_unseen(p.shape.seqlen_q, p.shape.seqlen_k)) store_unseen<Element, Tile>(p);
    Consumer<Element, Tile>(p, shared, notes, warp / 4).run();
  }
#endif
}

}  // namespace flash_cuda::hopper
