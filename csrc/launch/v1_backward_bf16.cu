#include "launch/v1_backward.cuh"

template cudaError_t flash_cuda::launch_v1_backward<__nv_bfloat16>(const BackwardParams&, const DeviceLimits&,
                                                                   cudaStream_t);

int64_t flash_cuda::v1_backward_workspace(const Shape& shape, const DeviceLimits& limits) {
  return visit_v1_backward_tile(shape.head_dim, limits,
                                [&](auto tile) { return v1::DqBlock<decltype(tile)>::elements(shape); });
}
