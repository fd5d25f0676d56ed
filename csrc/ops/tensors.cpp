#include "ops/tensors.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_cuda::ops {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;

bool rows_are_aligned(const Tensor& t) {
  if (t.stride(3) != 1 && t.size(3) > 1) return false;
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) return false;
  for (int64_t i = 0; i < 3; ++i)
    if (t.size(i) > 1 && t.stride(i) % kRowAlignment != 0) return false;
  return true;
}

constexpr int64_t kTmaStrideLimit = (int64_t{1} << 40) / kElementBytes;  // in elements, exclusive

bool tensor_map_can_describe(const Tensor& t) {
  for (int64_t i = 0; i < 3; ++i)
    if (t.size(i) > 1 && (t.stride(i) <= 0 || t.stride(i) >= kTmaStrideLimit)) return false;
  return true;
}

}  // namespace

Tensor readable(const Tensor& t) {
  const int64_t padding = padded_head_dim(int(t.size(3))) - t.size(3);
  if (padding != 0) {
    const std::array<int64_t, 2> pad{0, padding};
    return torch::stable::contiguous(torch::stable::pad(t, IntHeaderOnlyArrayRef(pad.data(), pad.size())));
  }
  if (t.numel() == 0 || rows_are_aligned(t)) return t;
  // contiguous() returns a contiguous tensor as it is, misaligned or not: then only clone() moves it.
  const Tensor rows = torch::stable::contiguous(t);
  return rows_are_aligned(rows) ? rows : torch::stable::clone(rows);
}

Tensor readable_by_tma(const Tensor& t) {
  Tensor rows = readable(t);
  if (rows.numel() == 0 || tensor_map_can_describe(rows)) return rows;
  return torch::stable::contiguous(rows);
}

Tensor allocate(const Tensor& like, const std::initializer_list<int64_t> sizes, const int32_t dtype) {
  std::array<int64_t, 4> strides{};
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides.at(i) = stride;
    stride *= std::max<int64_t>(sizes.begin()[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(int64_t(sizes.size()), sizes.begin(), strides.data(), dtype,
                               aoti_torch_device_type_cuda(), like.get_device_index(), &handle) != AOTI_TORCH_SUCCESS) {
    // The stable ABI keeps the type of the exception to itself; flash_cuda/ops.py knows this one by its text.
    throw std::runtime_error("flash_cuda: CUDA out of memory allocating " + std::to_string(stride) + " elements");
  }
  return Tensor(handle);
}

Tensor cut_columns(const Tensor& t, const int head_dim) {
  if (t.dim() != 4 || t.size(3) == head_dim) return t;
  Tensor padded = t;
  // Not contiguous(): it would keep the padded strides of dimensions of size 1.
  Tensor cut = allocate(t, {t.size(0), t.size(1), t.size(2), head_dim}, dtype_of(t));
  return torch::stable::copy_(cut, torch::stable::narrow(padded, 3, 0, head_dim));
}

int32_t dtype_of(const Tensor& t) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

Strides strides_of(const Tensor& t) {
  // A dimension of size 1 may have any stride, an odd one too; nothing is ever a step away along it.
  const auto stride = [&](int64_t dim) { return t.size(dim) > 1 ? t.stride(dim) : 0; };
  return {stride(0), stride(1), stride(2)};
}

}  // namespace flash_cuda::ops
