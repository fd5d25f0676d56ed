#include "launch/v2_backward.cuh"

template cudaError_t flash_cuda::launch_v2_backward<__nv_bfloat16>(const BackwardParams&, const DeviceLimits&,
                                                                   cudaStream_t);

// The sizes do not depend on the element type; one translation unit holds them.
flash_cuda::BackwardWorkspace flash_cuda::v2_backward_workspace(const Shape& shape, const DeviceLimits& limits) {
  return workspace_of_tile(shape, limits);
}
