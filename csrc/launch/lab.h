// The kernels of v1 and of the lab, as the extension flash_cuda._lab hands them to flash_cuda._C. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

#include "attention/params.h"
#include "attention/tile_plan.h"
#include "launch/launch.h"

namespace flash_cuda {

// One of the eight corners, and the shared memory that its block sizes come from.
struct LabChoice {
  bool kv_outer;  // else q_outer
  bool split_k;   // else split_q
  bool eager;     // else deferred
  int budget_kb;  // of kBudgetsKb; 0 = the default of the head dim and device
};

constexpr bool is_v1(const LabChoice& c) { return c.kv_outer && c.split_k && c.eager; }

// Element counts of the float32 workspace that goes with a choice.
struct LabWorkspace {
  int64_t row_sums;
  int64_t row_stats;
};

struct LabKernelFacts {
  int registers;
  int shared_bytes;
  int threads;
  int blocks_per_multiprocessor;
};

struct LabKernels {
  LabWorkspace (*forward_workspace)(const LabChoice&, const Shape&);
  cudaError_t (*forward)(const LabChoice&, bool is_half, const KvOuterForwardParams&, const DeviceLimits&,
                         cudaStream_t);
  cudaError_t (*forward_facts)(const LabChoice&, bool is_half, int head_dim, LabKernelFacts*);
  int64_t (*v1_backward_workspace)(const Shape&, const DeviceLimits&);
  cudaError_t (*v1_backward)(bool is_half, const BackwardParams&, const DeviceLimits&, cudaStream_t);
};

// The extension, and where in it flash_cuda._C finds the LabKernels.
inline constexpr const char* kLabModule = "flash_cuda._lab";
inline constexpr const char* kLabCapsule = "flash_cuda._lab.kernels";

// "v1" or "<kv_outer|q_outer>/<split_k|split_q>/<eager|deferred>", then perhaps "/<M>KB".
inline std::optional<LabChoice> parse_lab_name(std::string_view name) {
  const auto take = [&name](std::string_view word) {
    if (!name.starts_with(word)) return false;
    name.remove_prefix(word.size());
    return true;
  };
  LabChoice choice{true, true, true, 0};
  if (!take("v1")) {
    if (!(choice.kv_outer = take("kv_outer/")) && !take("q_outer/")) return std::nullopt;
    if (!(choice.split_k = take("split_k/")) && !take("split_q/")) return std::nullopt;
    if (!(choice.eager = take("eager")) && !take("deferred")) return std::nullopt;
  }
  if (name.empty()) return choice;
  if (!take("/") || name.starts_with("0") || !name.ends_with("KB")) return std::nullopt;
  const char* end = name.data() + name.size() - 2;
  const auto [rest, error] = std::from_chars(name.data(), end, choice.budget_kb);
  if (error != std::errc{} || rest != end || choice.budget_kb <= 0) return std::nullopt;
  return choice;
}

constexpr bool is_budget(int kb) {
  for (const int known : kBudgetsKb)
    if (kb == known) return true;
  return false;
}

// One loop order, element type and head dim: a .cu file each. With `facts` nothing is launched.
template <class Element, int HeadDim>
cudaError_t launch_kv_outer(const LabChoice& choice, const KvOuterForwardParams& params, const DeviceLimits& limits,
                            cudaStream_t stream, LabKernelFacts* facts);
template <class Element, int HeadDim>
cudaError_t launch_q_outer(const LabChoice& choice, const KvOuterForwardParams& params, const DeviceLimits& limits,
                           cudaStream_t stream, LabKernelFacts* facts);

template <class Element>
cudaError_t launch_v1_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream);
// Elements of BackwardParams::dq_accumulator.
int64_t v1_backward_workspace(const Shape& shape, const DeviceLimits& limits);

}  // namespace flash_cuda
