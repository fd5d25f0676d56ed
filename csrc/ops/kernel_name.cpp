#include "ops/kernel_name.h"

#include <Python.h>

#include <iterator>
#include <stdexcept>

#include "kernels/hopper/config.h"
#include "launch/head_dim.h"
#include "ops/checks.h"
#include "ops/device.h"

namespace flash_cuda::ops {
namespace {

// What an error lists as available.
constexpr const char* kBackwards = "auto, v2, v1[/<M>KB]";
constexpr const char* kBackwardsOnHopper = "auto, hopper, v2, v1[/<M>KB]";
constexpr const char* kForwards = "auto, v2, v1[/<M>KB], <kv_outer|q_outer>/<split_k|split_q>/<eager|deferred>[/<M>KB]";
constexpr const char* kForwardsOnHopper =
    "auto, hopper, v2, v1[/<M>KB], <kv_outer|q_outer>/<split_k|split_q>/<eager|deferred>[/<M>KB]";

constexpr int kHopperCapability = 90;       // exactly: machine code of sm_90a runs on no later GPU
constexpr int kHopperSharedMemoryKb = 227;  // what such a GPU has; less only by FLASH_CUDA_SHARED_MEMORY_LIMIT

[[noreturn]] void refuse(const char* op, const std::string& kernel, const std::string& why,
                         const std::string& available) {
  throw std::runtime_error(std::string(op) + ": kernel \"" + kernel + "\" " + why + "; available here: " + available);
}

// The budgets up to `most_kb`.
std::string budgets(const int most_kb) {
  std::string text;
  for (const int kb : kBudgetsKb)
    if (kb <= most_kb) text += (text.empty() ? "" : ", ") + std::to_string(kb) + "KB";
  return text;
}

std::string needs_shared_memory(const int kb, const DeviceLimits& limits) {
  return "needs " + std::to_string(kb) + " KB of shared memory per thread block, this GPU has " +
         std::to_string(limits.shared_memory / 1024);
}

bool hopper_runs(const DeviceLimits& limits) {
  return limits.compute_capability == kHopperCapability && limits.shared_memory >= kHopperSharedMemoryKb * 1024 &&
         has_hopper_code();
}

std::string why_hopper_does_not_run(const DeviceLimits& limits) {
  if (limits.compute_capability != kHopperCapability) {
    return "needs compute capability 9.0, this GPU has " + capability_text(limits);
  }
  if (limits.shared_memory < kHopperSharedMemoryKb * 1024) return needs_shared_memory(kHopperSharedMemoryKb, limits);
  return "is not in this build: rebuild with TORCH_CUDA_ARCH_LIST=9.0a";
}

// The choice that a name of the lab stands for, checked as far as it does not depend on the op; `available` is what an
// error lists.
LabChoice parse_lab(const char* op, const std::string& kernel, const int head_dim, const DeviceLimits& limits,
                    const char* available) {
  if (kernel == "reference") refuse(op, kernel, "runs on CPU tensors", available);
  const auto choice = parse_lab_name(kernel);
  if (!choice.has_value()) fail(op, "kernel", std::string("one of ") + available, "\"" + kernel + "\"");
  if (choice->budget_kb != 0 && !is_budget(choice->budget_kb)) {
    refuse(op, kernel, "has no tiles for that shared-memory budget", budgets(std::end(kBudgetsKb)[-1]));
  }
  if (head_dim > kMostLabHeadDim) {
    refuse(op, kernel,
           "serves head_dim from 1 to " + std::to_string(kMostLabHeadDim) + ", got " + std::to_string(head_dim),
           hopper_runs(limits) ? "auto, hopper, v2" : "auto, v2");
  }
  return *choice;
}

}  // namespace

ForwardKernel check_forward_kernel(const char* op, const std::string& kernel, const int head_dim,
                                   const DeviceLimits& limits) {
  if (kernel == "v2") return {KernelFamily::v2};
  if (kernel == "auto") return {hopper_runs(limits) ? KernelFamily::hopper : KernelFamily::v2};
  if (kernel == "hopper") {
    if (!hopper_runs(limits)) refuse(op, kernel, why_hopper_does_not_run(limits), kForwards);
    return {KernelFamily::hopper};
  }
  LabChoice lab = parse_lab(op, kernel, head_dim, limits, hopper_runs(limits) ? kForwardsOnHopper : kForwards);
  if (lab.budget_kb == 0) lab.budget_kb = default_budget_kb(head_dim, limits.shared_memory);
  const int most_kb = limits.shared_memory / 1024;
  if (lab.budget_kb > most_kb) refuse(op, kernel, needs_shared_memory(lab.budget_kb, limits), budgets(most_kb));
  return {KernelFamily::lab, lab};
}

KernelFamily check_backward_kernel(const char* op, const std::string& kernel, const int head_dim,
                                   const DeviceLimits& limits) {
  if (kernel == "v2") return KernelFamily::v2;
  if (kernel == "auto") {
    // Below its narrowest tile, hopper's sum of dQ would take more memory than v2's.
    const int width = visit_head_dim(head_dim, [](auto d) { return int(d); });
    return width >= hopper::kLeastBackwardHeadDim && hopper_runs(limits) ? KernelFamily::hopper : KernelFamily::v2;
  }
  if (kernel == "hopper") {
    if (!hopper_runs(limits)) refuse(op, kernel, why_hopper_does_not_run(limits), kBackwards);
    return KernelFamily::hopper;
  }
  const char* available = hopper_runs(limits) ? kBackwardsOnHopper : kBackwards;
  if (!is_v1(parse_lab(op, kernel, head_dim, limits, available))) refuse(op, kernel, "is forward only", available);
  return KernelFamily::lab;
}

const LabKernels& lab_kernels(const char* op) {
  static const LabKernels* kernels = nullptr;
  const PyGILState_STATE gil = PyGILState_Ensure();
  if (kernels == nullptr) {
    PyObject* module = PyImport_ImportModule(kLabModule);  // PyCapsule_Import() would import flash_cuda alone
    if (module != nullptr) kernels = static_cast<const LabKernels*>(PyCapsule_Import(kLabCapsule, 0));
    Py_XDECREF(module);
    PyErr_Clear();
  }
  PyGILState_Release(gil);
  if (kernels == nullptr) {
    throw std::runtime_error(std::string(op) +
                             ": the extension flash_cuda._lab with this kernel cannot be loaded; "
                             "`python -c \"import flash_cuda._lab\"` says why");
  }
  return *kernels;
}

}  // namespace flash_cuda::ops
