// Tensors as the kernels want them: rows of a multiple of 8 elements, 16-byte aligned.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>

#include "attention/params.h"

namespace flash_cuda::ops {

using torch::stable::Tensor;

inline constexpr int kRowAlignment = 8;  // elements of 16 bits in 16 bytes

constexpr int padded_head_dim(int head_dim) { return (head_dim + kRowAlignment - 1) / kRowAlignment * kRowAlignment; }

// t itself where a kernel can read it in place, else one copy: padded with zeros when head_dim is not a multiple of 8,
// contiguous when the last dimension is strided or rows are not 16-byte aligned. (batch, seqlen, heads, head_dim).
Tensor readable(const Tensor& t);

// As readable(), for a kernel that reads by TMA: also copied when a dimension longer than 1 has stride 0 (expand) or a
// stride of 2^40 bytes or more, which a tensor map cannot say.
Tensor readable_by_tma(const Tensor& t);

// Uninitialised and contiguous, on the GPU of `like`, at most 4 dimensions; dtype as dtype_of() or
// aoti_torch_dtype_...() say it. Straight to the allocator: the stable ABI's new_empty looks its operator up by name at
// every call.
Tensor allocate(const Tensor& like, std::initializer_list<int64_t> sizes, int32_t dtype);

int32_t dtype_of(const Tensor& t);

// The first head_dim columns of a padded tensor as a contiguous one; t itself when there is nothing to cut.
Tensor cut_columns(const Tensor& t, int head_dim);

Strides strides_of(const Tensor& t);

}  // namespace flash_cuda::ops
