#include "launch/hopper_forward.cuh"

template cudaError_t flash_cuda::launch_hopper_forward<__half>(const ForwardParams&, const DeviceLimits&, cudaStream_t);
