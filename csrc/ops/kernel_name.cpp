#include "ops/kernel_name.h"

#include <Python.h>

#include <iterator>
#include <stdexcept>

#include "ops/checks.h"

namespace flash_cuda::ops {
namespace {

constexpr const char* kBackwards = "auto, v2, v1[/<M>KB]";
constexpr const char* kForwards = "auto, v2, v1[/<M>KB], <kv_outer|q_outer>/<split_k|split_q>/<eager|deferred>[/<M>KB]";

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

// The lab's choice, or nothing for v2; checked as far as it does not depend on the op.
std::optional<LabChoice> parse(const char* op, const std::string& kernel, const int head_dim) {
  if (kernel == "auto" || kernel == "v2") return std::nullopt;
  if (kernel == "hopper") refuse(op, kernel, "is not built yet", kForwards);
  if (kernel == "reference") refuse(op, kernel, "runs on CPU tensors", kForwards);
  const auto choice = parse_lab_name(kernel);
  if (!choice.has_value()) fail(op, "kernel", std::string("one of ") + kForwards, "\"" + kernel + "\"");
  if (choice->budget_kb != 0 && !is_budget(choice->budget_kb)) {
    refuse(op, kernel, "has no tiles for that shared-memory budget", budgets(std::end(kBudgetsKb)[-1]));
  }
  if (head_dim > kMostLabHeadDim) {
    refuse(op, kernel,
           "serves head_dim from 1 to " + std::to_string(kMostLabHeadDim) + ", got " + std::to_string(head_dim),
           "auto, v2");
  }
  return choice;
}

}  // namespace

std::optional<LabChoice> check_forward_kernel(const char* op, const std::string& kernel, const int head_dim,
                                              const DeviceLimits& limits) {
  auto choice = parse(op, kernel, head_dim);
  if (!choice.has_value()) return choice;
  if (choice->budget_kb == 0) choice->budget_kb = default_budget_kb(head_dim, limits.shared_memory);
  const int most_kb = limits.shared_memory / 1024;
  if (choice->budget_kb > most_kb) {
    refuse(op, kernel,
           "needs " + std::to_string(choice->budget_kb) + " KB of shared memory per thread block, this GPU has " +
               std::to_string(most_kb),
           budgets(most_kb));
  }
  return choice;
}

bool check_backward_kernel(const char* op, const std::string& kernel, const int head_dim) {
  const auto choice = parse(op, kernel, head_dim);
  if (choice.has_value() && !is_v1(*choice)) refuse(op, kernel, "is forward only", kBackwards);
  return choice.has_value();
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
