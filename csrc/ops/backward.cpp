// flash_cuda::bwd on CUDA.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

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

constexpr const char* kOp = "flash_cuda.bwd";

// A gradient shaped like t with padded rows, or the empty tensor that stands for "not asked for".
Tensor allocate_gradient(const bool needed, const Tensor& t, const int head_dim) {
  if (!needed) return allocate(t, {0}, dtype_of(t));
  return allocate(t, {t.size(0), t.size(1), t.size(2), head_dim}, dtype_of(t));
}

void* pointer_if(const bool needed, const Tensor& t) { return needed ? t.data_ptr() : nullptr; }

Strides strides_if(const bool needed, const Tensor& t) { return needed ? strides_of(t) : Strides{}; }

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& lse, std::optional<Tensor> dlse,
                                            std::optional<double> scale, int64_t window_left, int64_t window_right,
                                            bool deterministic, bool need_dq, bool need_dk, bool need_dv,
                                            std::string kernel) {
  const Shape given = check_qkv(kOp, q, k, v);
  check_like(kOp, "dout", dout, "q", q);
  check_like(kOp, "out", out, "q", q);
  check_rows(kOp, "lse", lse, q);
  if (dlse.has_value()) check_rows(kOp, "dlse", *dlse, q);
  const Band band = check_window(kOp, given, window_left, window_right);
  const float score_scale = check_scale(kOp, scale, given.head_dim);
  const int device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const DeviceLimits limits = device_limits(kOp, device);
  const KernelFamily family = check_backward_kernel(kOp, kernel, given.head_dim, limits);

  Shape shape = given;
  shape.head_dim = padded_head_dim(given.head_dim);
  const Tensor dq = allocate_gradient(need_dq, q, shape.head_dim);
  const Tensor dk = allocate_gradient(need_dk, k, shape.head_dim);
  const Tensor dv = allocate_gradient(need_dv, v, shape.head_dim);
  if (need_dq || need_dk || need_dv) {
    const auto rows_of = family == KernelFamily::hopper ? readable_by_tma : readable;
    const Tensor q_rows = rows_of(q), k_rows = rows_of(k), v_rows = rows_of(v);
    const Tensor out_rows = readable(out), dout_rows = rows_of(dout);
    const Tensor lse_rows = torch::stable::contiguous(lse);
    const Tensor dlse_rows = dlse.has_value() ? torch::stable::contiguous(*dlse) : lse_rows;
    const LabKernels* v1 = family == KernelFamily::lab ? &lab_kernels(kOp) : nullptr;
    const bool is_hopper = family == KernelFamily::hopper;
    const BackwardWorkspace workspace = v1 != nullptr ? BackwardWorkspace{v1->v1_backward_workspace(shape, limits), 0}
                                        : is_hopper   ? hopper_backward_workspace(shape)
                                                      : v2_backward_workspace(shape, limits);
    const Tensor accumulator = allocate(q, {need_dq ? workspace.dq_accumulator : 0}, aoti_torch_dtype_float32());
    const Tensor row_delta = allocate(q, {shape.batch, shape.heads_q, shape.seqlen_q}, aoti_torch_dtype_float32());
    const bool ordered = deterministic && need_dq && v1 == nullptr;  // v1 is deterministic as it is
    const Tensor turns = allocate(q, {ordered ? workspace.turns : 0}, aoti_torch_dtype_int32());
    const BackwardParams params{shape,
                                band,
                                score_scale,
                                q_rows.data_ptr(),
                                k_rows.data_ptr(),
                                v_rows.data_ptr(),
                                out_rows.data_ptr(),
                                dout_rows.data_ptr(),
                                static_cast<const float*>(lse_rows.data_ptr()),
                                dlse.has_value() ? static_cast<const float*>(dlse_rows.data_ptr()) : nullptr,
                                pointer_if(need_dq, dq),
                                pointer_if(need_dk, dk),
                                pointer_if(need_dv, dv),
                                strides_of(q_rows),
                                strides_of(k_rows),
                                strides_of(v_rows),
                                strides_of(out_rows),
                                strides_of(dout_rows),
                                strides_if(need_dq, dq),
                                strides_if(need_dk, dk),
                                strides_if(need_dv, dv),
                                static_cast<float*>(row_delta.data_ptr()),
                                static_cast<float*>(accumulator.data_ptr()),
                                ordered ? static_cast<int*>(turns.data_ptr()) : nullptr};
    const bool is_half = q.scalar_type() == ScalarType::Half;
    const cudaStream_t stream = current_stream(device);
    if (v1 != nullptr) {
      check_cuda(kOp, v1->v1_backward(is_half, params, limits, stream));
    } else if (is_hopper) {
      check_cuda(kOp, (is_half ? launch_hopper_backward<__half> : launch_hopper_backward<__nv_bfloat16>)(params, limits,
                                                                                                         stream));
    } else {
      check_cuda(kOp,
                 (is_half ? launch_v2_backward<__half> : launch_v2_backward<__nv_bfloat16>)(params, limits, stream));
    }
  }
  return {cut_columns(dq, given.head_dim), cut_columns(dk, given.head_dim), cut_columns(dv, given.head_dim)};
}

}  // namespace
}  // namespace flash_cuda::ops

STABLE_TORCH_LIBRARY_IMPL(flash_cuda, CUDA, m) { m.impl("bwd", TORCH_BOX(&flash_cuda::ops::backward)); }
