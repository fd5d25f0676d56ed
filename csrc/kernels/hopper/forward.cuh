// FlashAttention-2 forward (Dao 2023, Algorithm 1) for Hopper: TMA, wgmma, warp specialisation (FlashAttention-3, Shah
// et al. 2024, sections 3.1 and 3.2).
//
//   persistent thread blocks, which draw tiles of 64 x Warpgroups queries, longest first     grid: multiprocessors
//     a producer warp streams Q, K_j, V_j through rings in shared memory (forward_loads.cuh)
//     each consumer warpgroup owns 64 rows: O, m, l in registers
//       S = Q K_0^T;  P, m, l = softmax step of S (attention/interleaved_softmax.cuh)
//       for each further block of keys j
//         start S' = Q K_j^T and O = O + P V_(j-1) on the tensor cores
//         P', m, l = softmax step of S' as soon as it is there: half of the rows while O is still being summed
//       O = O + P V;  O = O / l;  lse = m + log l
//     tiles that need it are computed once more (recompute.cuh)
//
// Blocks of keys are visited from the right. Nothing orders the warpgroups among each other: one's exponentials fall
// beside another's products by themselves.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/interleaved_softmax.cuh"
#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "attention/tile_draw.cuh"
#include "kernels/hopper/config.h"
#include "kernels/hopper/forward_loads.cuh"
#include "kernels/hopper/output.cuh"
#include "kernels/hopper/recompute.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "tile/warp_gemm.cuh"
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

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& p, ForwardShared<Tile>& shared, const TileNote (&notes)[2],
                                      const int warpgroup)
      : p_(p),
        notes_(notes),
        notes_empty_(ptx::shared_address(shared.note_barriers.empty)),
        warpgroup_(warpgroup),
        q_tile_(ptx::shared_address(shared.q) + warpgroup * Query::kBytes),
        k_tiles_(ptx::shared_address(shared.k)),
        v_tiles_(ptx::shared_address(shared.v)),
        q_(shared.q_barriers),
        k_(shared.k_barriers),
        v_(shared.v_barriers),
        softmax_(p.scale * kLog2e) {}

  // All tiles of the thread block. True if this warp has marked rows.
  __device__ __forceinline__ bool run() {
    if (!next_tile()) return false;
    do {
      start();
      while (!closed_) step();
      finish();
    } while (next_tile());
    return marked_;
  }

 private:
  using Query = typename ForwardShared<Tile>::Query;
  using Key = typename ForwardShared<Tile>::Key;

  // One block of keys under way: what its arithmetic needs once the position has moved on.
  struct Block {
    int row_begin;
    int first_key;
    bool partial;      // some row does not see all of it
    bool closes;       // the last
    uint32_t q, k, v;  // barriers by which the stages go back
  };

  // Waits for Q of the next tile, and lets the blocks pass that only other warpgroups' rows see. False at the end.
  __device__ __forceinline__ bool next_tile() {
    q_.wait_full();
    const TileNote& note = notes_[q_.parity()];
    tile_ = note.rows;
    if (tile_.row_begin < 0) return false;
    const TileNote::Part part = note.parts[warpgroup_];
    tile_.row_begin += 64 * warpgroup_;
    first_block_ = part.first;
    block_ = part.last;
    pass_blocks(part.before);
    return true;
  }

  __device__ __forceinline__ void pass_blocks(const int count) {
#pragma unroll 1
    for (int i = __shfl_sync(0xffffffffu, count, 0); i > 0; --i) {  // known to be the same for the whole warp
      k_.wait_full();
      give_back(k_.empty());
      k_.advance();
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
    b.closes = block_ == first_block_;
    b.q = q_.empty();
    b.k = k_.empty();
    b.v = v_.empty();
    k_.advance();
    closed_ = b.closes;
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
    softmax_.exponents(s_, 0);
    softmax_.exponents(s_, 1);
    softmax_.exponentials(s_, 0);
    softmax_.exponentials(s_, 1);
    softmax_.add_block();
    pack();
    started_ = false;
    loaded_ = false;
  }

  // S' = Q K_j^T and P' beside O += P V of the block before.
  __device__ __forceinline__ void step() {
    // Both before the first product: no branch may stand between products under way.
    if (!loaded_) tile::RingCursor<Tile::kStages>::wait_both_full(k_, v_);
    ptx::wgmma_fence();
    issue_scores();
    issue_output();
    const Block b = pass_block();
    v_.advance();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_hold(s_[0]);
    begin_block(b);
    const bool first = softmax_.first_grew(s_);
    const bool second = softmax_.second_grew(s_);
    softmax_.exponentials(s_, 0);
    // P V of the block before is done by the time the first half of the rows is. The branches keep the compiler from
    // moving the wait for it up before the first half's exponentials, where the tensor cores would have nothing else to
    // do, and have everything that a half costs which grew beside the exponentials of the other.
    if (first) {
      second ? second_half<true, true>(b.v) : second_half<true, false>(b.v);
    } else {
      second ? second_half<false, true>(b.v) : second_half<false, false>(b.v);
    }
    started_ = true;
  }

  // Half 1 of the rows, O and P of the halves that grew; P is packed where it was read until now.
  template <bool First, bool Second>
  __device__ __forceinline__ void second_half(const uint32_t v_empty) {
    wait_for_output(v_empty);
    loaded_ = k_.is_full() & v_.is_full();
    const float first = First ? softmax_.follow_first() : 1.f;
    const float second = Second ? softmax_.follow_second() : 1.f;
    softmax_.exponents(s_, 1);
    softmax_.exponentials(s_, 1);
    if constexpr (First) tile::scale_half(o_, 0, first);
    if constexpr (Second) tile::scale_half(o_, 1, second);
    if constexpr (First) {
      tile::pack_operand_scaled<Element>(probabilities_, s_, first);
    } else {
      pack();
    }
    softmax_.add_block();
  }

  // O += P V of the last block.
  __device__ __forceinline__ void finish() {
    v_.wait_full();
    ptx::wgmma_fence();
    issue_output();
    wait_for_output(v_.empty());
    v_.advance();
    const TileNote& note = notes_[q_.parity()];
    const int after = note.parts[warpgroup_].after;
    const bool all_seen = note.all_seen[warpgroup_];
    ptx::mbarrier_arrive(notes_empty_ + 8 * q_.parity());  // every lane
    q_.advance();
    pass_blocks(after);
    store(all_seen);
  }

  // A result that is not finite may stem from a value that not all of these rows see, unless all see all of each block.
  __device__ __forceinline__ void store(const bool all_seen) {
    marked_ |= store_output<Element>(p_, tile_, o_, softmax_, all_seen ? Mark::kOverflow : Mark::kNonfinite);
  }

  __device__ __forceinline__ void issue_scores() {
    tile::multiply_rows_by_rows<Element, kHeadDim>(s_[0], q_tile_, k_tiles_ + k_.stage() * Key::kBytes);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_output() {
    tile::multiply_registers<Element>(o_[0], probabilities_, v_tiles_ + v_.stage() * Key::kBytes, started_);
    ptx::wgmma_commit_group();
  }

  // O is there: V goes back to the producer.
  __device__ __forceinline__ void wait_for_output(const uint32_t v_empty) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(o_[0]);
    give_back(v_empty);
  }

  // S is there: K, and after the last block Q, go back to the producer; masks.
  __device__ __forceinline__ void begin_block(const Block& b) {
    give_back(b.k);
    if (b.closes) give_back(b.q);
    if (b.partial) {
      mask_sides<64>(s_[0], p_.band, b.row_begin, threadIdx.x % 128 / 32 * 16, b.first_key, p_.shape.seqlen_k);
    }
    softmax_.begin(s_);
  }

  __device__ __forceinline__ void pack() {
    tile::pack_operand<Element, 1, kBlockN / 8>(reinterpret_cast<uint32_t (&)[1][kBlockN / 16][4]>(probabilities_), s_);
  }

  __device__ __forceinline__ static void give_back(const uint32_t empty_barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty_barrier);
  }

  const ForwardParams& p_;
  const TileNote (&notes_)[2];  // of this tile and the next
  uint32_t notes_empty_;
  int warpgroup_;
  uint32_t q_tile_, k_tiles_, v_tiles_;
  tile::RingCursor<1> q_;
  tile::RingCursor<Tile::kStages> k_, v_;
  RowTile tile_;
  int block_, first_block_;  // at hand; the last one of the tile that this warpgroup looks at
  bool closed_;              // the block before was the last of its tile
  bool started_ = false;     // O holds a sum
  bool loaded_ = false;      // K and V of the next products are known to have come
  bool marked_ = false;      // some rows of this warp are to be computed anew
  InterleavedSoftmax softmax_;
  tile::Accumulator<1, kBlockN / 8> s_;
  tile::Accumulator<1, kHeadDim / 8> o_;
  uint32_t probabilities_[kBlockN / 16][4];
};

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ TileOrder order,
                   const __grid_constant__ ForwardMaps maps, WorkQueue* const queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<Tile>*>(shared_bytes +
                                                         (-ptx::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  __shared__ TileNote notes[2];

  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tile::kWarpgroups;
    shared.q_barriers.init(kWarps);
    shared.note_barriers.init(32 * kWarps);
    shared.k_barriers.init(kWarps);
    shared.v_barriers.init(kWarps);
    ptx::mbarrier_init(ptx::shared_address(&shared.recompute_barrier), 1);
    shared.marked = 0;
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&maps.q);
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
  }
  __syncthreads();

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same for the whole warp
  if (warp >= 4 * Tile::kWarpgroups) {
    if constexpr (Tile::kTradesRegisters) ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
    if (warp == 4 * Tile::kWarpgroups) Producer<Tile>(maps, shared, notes).run(p, order, queue);
  } else {
    if constexpr (Tile::kTradesRegisters) ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    if (p.band.leaves_rows_unseen(p.shape.seqlen_q, p.shape.seqlen_k)) store_unseen<Element, Tile>(p);
    const bool marked = Consumer<Element, Tile>(p, shared, notes, warp / 4).run();
    Recompute<Element, Tile>(p, maps, shared).run(marked);
  }
#endif
}

}  // namespace flash_cuda::hopper
