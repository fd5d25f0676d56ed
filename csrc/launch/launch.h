// The launchers: plain pointers and sizes in, CUDA error out. No torch here. `Element` is __half or __nv_bfloat16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/params.h"

namespace flash_cuda {

// What of the device decides between tiles.
struct DeviceLimits {
  int shared_memory;  // bytes a thread block may have
  int64_t l2_bytes;
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
};

template <class Element>
cudaError_t launch_v2_forward(const ForwardParams& params, const DeviceLimits& limits, cudaStream_t stream);

// Whether this build holds code for sm_90a and the current device runs it: what the hopper launchers need.
bool has_hopper_code();

template <class Element>
cudaError_t launch_hopper_forward(const ForwardParams& params, const DeviceLimits& limits, cudaStream_t stream);

// Elements of BackwardParams::dq_accumulator (float32; whole blocks of queries, the head dim of the tile) and turns
// (int32, deterministic mode only). Both are cleared by the launch.
struct BackwardWorkspace {
  int64_t dq_accumulator;
  int64_t turns;
};

BackwardWorkspace v2_backward_workspace(const Shape& shape, const DeviceLimits& limits);

template <class Element>
cudaError_t launch_v2_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream);

BackwardWorkspace hopper_backward_workspace(const Shape& shape);

template <class Element>
cudaError_t launch_hopper_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream);

}  // namespace flash_cuda
