#include "launch/v2_forward.cuh"

template cudaError_t flash_cuda::launch_v2_forward<__nv_bfloat16>(const ForwardParams&, const DeviceLimits&,
                                                                  cudaStream_t);
