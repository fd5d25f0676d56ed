// Warps that work on one strip of queries together; the thread block may hold several such teams.
#pragma once

#include "ptx/barrier.cuh"

namespace flash_cuda::lab {

struct NoHook {
  __device__ void operator()() const {}
};

template <class Warps>
struct Team {
  static constexpr int kThreads = Warps::kTeamWarps * 32;
  int index;
  int warp;    // of this thread, in the team
  int thread;  // this one, in the team

  __device__ Team()
      : index(threadIdx.x / kThreads), warp(threadIdx.x % kThreads / 32), thread(threadIdx.x % kThreads) {}

  __device__ __forceinline__ void sync() const {
    if constexpr (Warps::kTeams == 1) {
      __syncthreads();
    } else {
      ptx::bar_sync(1 + index, kThreads);
    }
  }
};

}  // namespace flash_cuda::lab
