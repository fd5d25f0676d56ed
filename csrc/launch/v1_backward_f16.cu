#include "launch/v1_backward.cuh"

template cudaError_t flash_cuda::launch_v1_backward<__half>(const BackwardParams&, const DeviceLimits&, cudaStream_t);
