// The device of a tensor: its limits, its current stream, and CUDA errors as exceptions.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "launch/launch.h"

namespace flash_cuda::ops {

// Limits of `device`, queried once. The environment variables FLASH_CUDA_SHARED_MEMORY_LIMIT (bytes) and
// FLASH_CUDA_MULTIPROCESSOR_LIMIT lower what tiles and grids are chosen by: the way to run a small device's kernels on
// a large one.
DeviceLimits device_limits(const char* op, int device);

// The compute capability as "9.0".
std::string capability_text(const DeviceLimits& limits);

// The stream that PyTorch is on for this device.
cudaStream_t current_stream(int device);

void check_cuda(const char* op, cudaError_t error);

}  // namespace flash_cuda::ops
