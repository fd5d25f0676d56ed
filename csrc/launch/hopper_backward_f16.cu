#include "launch/hopper_backward.cuh"

template cudaError_t flash_cuda::launch_hopper_backward<__half>(const BackwardParams&, const DeviceLimits&,
                                                                cudaStream_t);
