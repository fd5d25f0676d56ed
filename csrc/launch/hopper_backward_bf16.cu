#include "launch/hopper_backward.cuh"

template cudaError_t flash_cuda::launch_hopper_backward<__nv_bfloat16>(const BackwardParams&, const DeviceLimits&,
                                                                       cudaStream_t);

// The sizes do not depend on the element type; one translation unit holds them.
flash_cuda::BackwardWorkspace flash_cuda::hopper_backward_workspace(const Shape& shape) {
  return hopper_workspace_of_tile(shape);
}
