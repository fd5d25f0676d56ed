// The argument `kernel_name` of the ops: which kernel it means for a call. flash_cuda/checks.py says the same for fake
// tensors.
#pragma once

#include <optional>
#include <string>

#include "launch/lab.h"

namespace flash_cuda::ops {

// The lab's choice that the name stands for, its budget settled; nothing for v2, which "auto" means. Other names, and
// calls that the kernel cannot serve, are refused in words.
std::optional<LabChoice> check_forward_kernel(const char* op, const std::string& kernel, int head_dim,
                                              const DeviceLimits& limits);

// Whether the name stands for v1; else it is v2.
bool check_backward_kernel(const char* op, const std::string& kernel, int head_dim);

// The kernels of flash_cuda._lab, which the first call loads.
const LabKernels& lab_kernels(const char* op);

}  // namespace flash_cuda::ops
