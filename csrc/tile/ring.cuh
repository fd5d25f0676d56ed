// A ring of stages in shared memory between a producer (the copy engine) and consumers: per stage one barrier that says
// full and one that says empty.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace flash_cuda::tile {

template <int Stages>
struct RingBarriers {
  uint64_t full[Stages];
  uint64_t empty[Stages];

  // One thread, before any other uses the ring. `consumers` release a stage, each once; `producers` fill it.
  __device__ void init(const int consumers, const int producers = 1) {
#pragma unroll
    for (int i = 0; i < Stages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&full[i]), producers);
      ptx::mbarrier_init(ptx::shared_address(&empty[i]), consumers);
    }
  }
};

// Where one side stands in the ring.
template <int Stages>
class RingCursor {
 public:
  // passed: how many stages this side has been through before.
  __device__ explicit RingCursor(const RingBarriers<Stages>& barriers, const unsigned passed = 0)
      : full_(ptx::shared_address(barriers.full)), stage_(passed % Stages), parity_(passed / Stages % 2) {}

  __device__ int stage() const { return stage_; }
  __device__ uint32_t parity() const { return parity_; }

  // Consumers: waits for the stage's data. They give the stage back by arriving at empty(), each once.
  __device__ static void wait_both_full(const RingCursor& a, const RingCursor& b) {
    ptx::mbarrier_wait_parity_both(a.full(), a.parity_, b.full(), b.parity_);
  }
  __device__ bool is_full() const { return ptx::mbarrier_test_parity(full(), parity_); }
  __device__ void wait_full() const { ptx::mbarrier_wait_parity(full(), parity_); }
  __device__ uint32_t empty() const { return full_ + 8 * (Stages + stage_); }

  // Producer: waits until the stage is free (at first it is), announces `bytes`; the copies then name full().
  __device__ void wait_empty() const { ptx::mbarrier_wait_parity(empty(), parity_ ^ 1); }
  __device__ void expect(const int bytes) const { ptx::mbarrier_arrive_expect_tx(full(), bytes); }
  __device__ uint32_t full() const { return full_ + 8 * stage_; }

  // Waits until all stages are.
  __device__ void wait_all_empty() const {
    RingCursor next = *this;
    for (int i = 0; i < Stages; ++i, next.advance()) next.wait_empty();
  }

  __device__ void advance() {
    if (++stage_ == Stages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  uint32_t full_;
  int stage_;
  uint32_t parity_;
};

}  // namespace flash_cuda::tile
