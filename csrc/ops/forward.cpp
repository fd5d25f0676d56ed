// flash_cuda::fwd on CUDA.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "launch/launch.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/kernel_name.h"
#include "ops/tensors.h"

namespace flash_cuda::ops {
namespace {

using torch::headeronly::ScalarType;

constexpr const char* kOp = "flash_cuda.fwd";

cudaError_t launch_lab(const LabChoice& choice, const bool is_half, const ForwardParams& params, const Tensor& q,
                       const DeviceLimits& limits, const cudaStream_t stream) {
  const LabKernels& kernels = lab_kernels(kOp);
  const LabWorkspace sizes = kernels.forward_workspace(choice, params.shape);
  const Tensor sums = allocate(q, {sizes.row_sums}, aoti_torch_dtype_float32());
  const Tensor stats = allocate(q, {sizes.row_stats}, aoti_torch_dtype_float32());
  const KvOuterForwardParams lab_params{params, static_cast<float*>(sums.data_ptr()),
                                        static_cast<float*>(stats.data_ptr())};
  return kernels.forward(choice, is_half, lab_params, limits, stream);
}

cudaError_t launch(const ForwardKernel& kernel, const bool is_half, const ForwardParams& params, const Tensor& q,
                   const DeviceLimits& limits, const cudaStream_t stream) {
  switch (kernel.family) {
    case KernelFamily::hopper:
      return (is_half ? launch_hopper_forward<__half> : launch_hopper_forward<__nv_bfloat16>)(params, limits, stream);
    case KernelFamily::v2:
      return (is_half ? launch_v2_forward<__half> : launch_v2_forward<__nv_bfloat16>)(params, limits, stream);
    case KernelFamily::lab:
      return launch_lab(kernel.lab, is_half, params, q, limits, stream);
  }
  return cudaErrorNotSupported;
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale,
                                   int64_t window_left, int64_t window_right, std::string kernel_name) {
  const Shape given = check_qkv(kOp, q, k, v);
  const Band band = check_window(kOp, given, window_left, window_right);
  const float score_scale = check_scale(kOp, scale, given.head_dim);
  const int device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const DeviceLimits limits = device_limits(kOp, device);
  const ForwardKernel kernel = check_forward_kernel(kOp, kernel_name, given.head_dim, limits);

  Shape shape = given;
  shape.head_dim = padded_head_dim(given.head_dim);
  const auto rows_of = kernel.family == KernelFamily::hopper ? readable_by_tma : readable;
  const Tensor q_rows = rows_of(q), k_rows = rows_of(k), v_rows = rows_of(v);
  const Tensor out = allocate(q, {shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim}, dtype_of(q));
  const Tensor lse = allocate(q, {shape.batch, shape.heads_q, shape.seqlen_q}, aoti_torch_dtype_float32());
  const ForwardParams params{shape,
                             band,
                             score_scale,
                             q_rows.data_ptr(),
                             k_rows.data_ptr(),
                             v_rows.data_ptr(),
                             out.data_ptr(),
                             static_cast<float*>(lse.data_ptr()),
                             strides_of(q_rows),
                             strides_of(k_rows),
                             strides_of(v_rows),
                             strides_of(out)};
  const bool is_half = q.scalar_type() == ScalarType::Half;
  check_cuda(kOp, launch(kernel, is_half, params, q, limits, current_stream(device)));
  return {cut_columns(out, given.head_dim), lse};
}

}  // namespace
}  // namespace flash_cuda::ops

STABLE_TORCH_LIBRARY_IMPL(flash_cuda, CUDA, m) { m.impl("fwd", TORCH_BOX(&flash_cuda::ops::forward)); }
