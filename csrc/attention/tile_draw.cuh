// How the thread blocks of a persistent kernel come to their tiles.
#pragma once

#include <cstdint>

#include "attention/scheduler.h"
#include "ptx/registers.cuh"

namespace flash_cuda {

// In global memory, all 0 between kernels; launch/work_queue.h owns them.
struct WorkQueue {
  unsigned drawn;
  unsigned finished;
};

// The tiles of one thread block, for one thread: with a queue, whoever is free takes the next tile of the order;
// without one, each takes a fixed share. Either way the first tile is the block's own number.
class TileDraw {
 public:
  __device__ TileDraw(const TileOrder& order, WorkQueue* queue)
      : order_(order), queue_(queue), index_(ptx::ctaid_x()) {}

  // False when all tiles are taken.
  __device__ bool next(WorkTile& work) {
    if (queue_ != nullptr && drawn_) index_ = ptx::nctaid_x() + atomicAdd(&queue_->drawn, 1u);
    if (queue_ == nullptr && drawn_) index_ = order_.after(index_, ptx::nctaid_x());
    drawn_ = true;
    if (index_ >= unsigned(order_.tiles())) {
      if (queue_ != nullptr && atomicAdd(&queue_->finished, 1u) == ptx::nctaid_x() - 1) *queue_ = {0, 0};
      return false;
    }
    work = order_.tile(index_);
    return true;
  }

 private:
  const TileOrder& order_;
  WorkQueue* queue_;
  bool drawn_ = false;
  unsigned index_;  // fewer than 2^31 tiles, so that a draw past the end does not wrap
};

// The same in every lane, and known to be so: the compiler keeps the results of reductions in uniform registers.
__device__ __forceinline__ WorkTile uniform(const WorkTile& work) {
  return {__reduce_max_sync(0xffffffffu, work.block), __reduce_max_sync(0xffffffffu, work.head),
          __reduce_max_sync(0xffffffffu, work.batch)};
}

// For a whole warp, of which one lane draws. block < 0: all tiles are taken, or it is not to draw.
__device__ __forceinline__ WorkTile draw_for_warp(TileDraw& draw, const bool draws = true) {
  WorkTile work{-1, 0, 0};
  if (threadIdx.x % 32 == 0 && draws && !draw.next(work)) work.block = -1;
  return uniform(work);
}

}  // namespace flash_cuda
