// Argument checks of the CUDA ops. Every failure is one Python exception that names the op, the argument, what was
// expected and what was got; flash_cuda/checks.py says the same for the CPU path. Nothing has been launched or
// allocated by then.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "attention/params.h"

namespace flash_cuda::ops {

using torch::stable::Tensor;

inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kMaxSeqlen = int64_t{1} << 29;  // Band sums stay in 32 bits

[[noreturn]] void fail(const char* op, const char* argument, const std::string& expected, const std::string& got);

std::string shape_text(const Tensor& t);

// q, k, v agree with each other; their sizes.
Shape check_qkv(const char* op, const Tensor& q, const Tensor& k, const Tensor& v);

// t has the dtype, device and sizes of `like`.
void check_like(const char* op, const char* argument, const Tensor& t, const char* like_name, const Tensor& like);

// float32 rows (batch, heads_q, seqlen_q) on q's device.
void check_rows(const char* op, const char* argument, const Tensor& t, const Tensor& q);

Band check_window(const char* op, const Shape& shape, int64_t window_left, int64_t window_right);

// The scale of the scores: 1/sqrt(head_dim) unless given. Finite and >= 0; 0 becomes the least number whose product
// with a masked score is still -inf and not NaN.
float check_scale(const char* op, std::optional<double> scale, int head_dim);

}  // namespace flash_cuda::ops
