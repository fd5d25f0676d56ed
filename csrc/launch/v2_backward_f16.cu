#include "launch/v2_backward.cuh"

template cudaError_t flash_cuda::launch_v2_backward<__half>(const BackwardParams&, const DeviceLimits&, cudaStream_t);
