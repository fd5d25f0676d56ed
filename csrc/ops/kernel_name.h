// The argument `kernel_name` of the ops: which kernel it means for a call. flash_cuda/kernel_names.py says the same for
// fake tensors.
#pragma once

#include <string>

#include "launch/lab.h"

namespace flash_cuda::ops {

enum class KernelFamily { v2, hopper, lab };

struct ForwardKernel {
  KernelFamily family;
  LabChoice lab{};  // of family lab, its budget settled
};

// The kernel that the name stands for on the current device: "auto" is hopper where it runs, else v2. Other names, and
// calls that the kernel cannot serve, are refused in words.
ForwardKernel check_forward_kernel(const char* op, const std::string& kernel, int head_dim, const DeviceLimits& limits);

// The same for a backward, where "auto" depends on the head dim too; of family lab it is v1.
KernelFamily check_backward_kernel(const char* op, const std::string& kernel, int head_dim, const DeviceLimits& limits);

// The kernels of flash_cuda._lab, which the first call loads.
const LabKernels& lab_kernels(const char* op);

}  // namespace flash_cuda::ops
