// Deterministic mode: the order in which blocks of keys add to a block of dQ (v2::DqAccumulator), kept by two warps
// beside the consumers, so that those wait for barriers in shared memory only, and mostly not at all.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/hopper/backward_loads.cuh"
#include "kernels/v2/dq_accumulator.cuh"
#include "ptx/memory.cuh"
#include "tile/ring.cuh"

namespace flash_cuda::hopper {

// One thread each for await() and pass(), for the one tile of the thread block.
template <class Tile>
class BackwardTurns {
  using Shared = BackwardShared<Tile>;
  using Cursor = tile::RingCursor<kTurnStages>;
  static_assert(kTurnStages == 2);

 public:
  __device__ static void init(Shared& shared) {
    shared.turns.barriers.init(1);
    for (uint64_t& barrier : shared.turns.added) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), Tile::kConsumerThreads);
    }
  }

  // Consumers, with the address of Shared and the number of a turn: wait for it; have added. No fence: pass() is told
  // of the reductions through a barrier, and what it knows of is seen before what it releases.
  __device__ __forceinline__ static void wait(const uint32_t shared, const unsigned turn) {
    const uint32_t barriers = shared + offsetof(Shared, turns) + offsetof(BackwardTurnBarriers, barriers);
    ptx::mbarrier_wait_parity(barriers + turn % 2 * 8, turn / 2 % 2);
  }
  __device__ __forceinline__ static void end(const uint32_t shared, const unsigned turn) {
    ptx::mbarrier_arrive(shared + offsetof(Shared, turns) + offsetof(BackwardTurnBarriers, added) + turn % 2 * 8);
  }

  // Waits for this block's turn at each block of queries, and says so to the consumers.
  __device__ static void await(const BackwardParams& p, Shared& shared, const WorkTile& work) {
    Cursor ring(shared.turns.barriers);
    const Walk<Tile> walk(p, work);
    for (QueryStep at = walk.begin(); !walk.is_end(at); at = walk.next(at)) {
      const v2::DqAccumulator<Tile> accumulator(p, work.batch, at.head, at.block);
      ring.wait_empty();
      accumulator.wait_turns(p, accumulator.rank(p, work.block));
      ptx::mbarrier_arrive(ring.full());
      ring.advance();
    }
  }

  // Passes each turn on once all consumers have added.
  __device__ static void pass(const BackwardParams& p, Shared& shared, const WorkTile& work) {
    Cursor ring(shared.turns.barriers);
    const Walk<Tile> walk(p, work);
    uint32_t parity = 0;
    for (QueryStep at = walk.begin(); !walk.is_end(at); at = walk.next(at)) {
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.turns.added[ring.stage()]), parity);
      ptx::red_release_add(v2::DqAccumulator<Tile>(p, work.batch, at.head, at.block).turn(p), 1);
      ptx::mbarrier_arrive(ring.empty());
      ring.advance();
      if (ring.stage() == 0) parity ^= 1;
    }
  }
};

}  // namespace flash_cuda::hopper
