#include "launch/lab_forward.cuh"

template cudaError_t flash_cuda::launch_q_outer<__half, 64>(const LabChoice&, const KvOuterForwardParams&,
                                                            const DeviceLimits&, cudaStream_t, LabKernelFacts*);
