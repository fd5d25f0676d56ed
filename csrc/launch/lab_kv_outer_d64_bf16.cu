#include "launch/lab_forward.cuh"

template cudaError_t flash_cuda::launch_kv_outer<__nv_bfloat16, 64>(const LabChoice&, const KvOuterForwardParams&,
                                                                    const DeviceLimits&, cudaStream_t, LabKernelFacts*);
