#include "ops/checks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace flash_cuda::ops {
namespace {

using torch::headeronly::ScalarType;

std::string dtype_text(const ScalarType type) {
  constexpr std::pair<ScalarType, const char*> kPythonNames[] = {
      {ScalarType::Half, "float16"},   {ScalarType::BFloat16, "bfloat16"}, {ScalarType::Float, "float32"},
      {ScalarType::Double, "float64"}, {ScalarType::Int, "int32"},         {ScalarType::Long, "int64"},
      {ScalarType::Bool, "bool"},
  };
  for (const auto& [known, name] : kPythonNames)
    if (type == known) return name;
  return torch::headeronly::toString(type);
}

std::string device_text(const Tensor& t) {
  return t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : t.is_cpu() ? "cpu" : "another device";
}

void check_dtype(const char* op, const char* argument, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  if (type == ScalarType::Half || type == ScalarType::BFloat16) return;
  const bool autocasts = std::string_view(op) != "flash_cuda.bwd";
  fail(op, argument, "float16 or bfloat16",
       dtype_text(type) + "; cast the inputs" +
           (autocasts ? " or call under torch.autocast(\"cuda\", dtype=torch.bfloat16)" : ""));
}

void check_dim4(const char* op, const char* argument, const Tensor& t) {
  if (t.dim() != 4) fail(op, argument, "4 dimensions (batch, seqlen, heads, head_dim)", "shape " + shape_text(t));
}

bool same_sizes(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t i = 0; i < a.dim(); ++i)
    if (a.size(i) != b.size(i)) return false;
  return true;
}

void check_same_device(const char* op, const char* argument, const Tensor& t, const Tensor& q) {
  if (t.is_cuda() == q.is_cuda() && t.get_device_index() == q.get_device_index()) return;
  fail(op, argument, "device " + device_text(q) + " like q", device_text(t));
}

void check_kind(const char* op, const char* argument, const Tensor& t, const char* like_name, const Tensor& like) {
  if (t.scalar_type() != like.scalar_type()) {
    fail(op, argument, dtype_text(like.scalar_type()) + " like " + like_name, dtype_text(t.scalar_type()));
  }
  check_same_device(op, argument, t, like);
}

}  // namespace

void fail(const char* op, const char* argument, const std::string& expected, const std::string& got) {
  throw std::runtime_error(std::string(op) + ": " + argument + ": expected " + expected + ", got " + got);
}

std::string shape_text(const Tensor& t) {
  std::string text = "(";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + (t.dim() == 1 ? ",)" : ")");
}

Shape check_qkv(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  check_dim4(op, "q", q);
  check_dim4(op, "k", k);
  check_dim4(op, "v", v);
  check_dtype(op, "q", q);
  const int64_t batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2), head_dim = q.size(3);
  const int64_t seqlen_k = k.size(1), heads_kv = k.size(2);
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    fail(op, "q", "head_dim from 1 to 256", std::to_string(head_dim));
  }
  if (heads < 1) fail(op, "q", "at least 1 head", std::to_string(heads));
  if (k.size(0) != batch || k.size(3) != head_dim) {
    fail(op, "k", "shape (" + std::to_string(batch) + ", seqlen_k, heads_kv, " + std::to_string(head_dim) + ")",
         shape_text(k));
  }
  if (heads_kv < 1 || heads % heads_kv != 0) {
    fail(op, "k", "a number of heads that divides q's " + std::to_string(heads), std::to_string(heads_kv));
  }
  check_kind(op, "k", k, "q", q);
  check_like(op, "v", v, "k", k);
  if (seqlen_q >= kMaxSeqlen) fail(op, "q", "seqlen below 2^29", std::to_string(seqlen_q));
  if (seqlen_k >= kMaxSeqlen) fail(op, "k", "seqlen below 2^29", std::to_string(seqlen_k));
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (heads > kMost || batch > kMost || batch * heads > kMost) {
    fail(op, "q", "batch * heads below 2^31", std::to_string(batch) + " * " + std::to_string(heads));
  }
  return {int(batch), int(seqlen_q), int(seqlen_k), int(heads), int(heads_kv), int(head_dim)};
}

void check_like(const char* op, const char* argument, const Tensor& t, const char* like_name, const Tensor& like) {
  check_kind(op, argument, t, like_name, like);
  if (!same_sizes(t, like)) fail(op, argument, "shape " + shape_text(like) + " like " + like_name, shape_text(t));
}

void check_rows(const char* op, const char* argument, const Tensor& t, const Tensor& q) {
  if (t.scalar_type() != ScalarType::Float) fail(op, argument, "float32", dtype_text(t.scalar_type()));
  check_same_device(op, argument, t, q);
  if (t.dim() != 3 || t.size(0) != q.size(0) || t.size(1) != q.size(2) || t.size(2) != q.size(1)) {
    fail(op, argument,
         "shape (" + std::to_string(q.size(0)) + ", " + std::to_string(q.size(2)) + ", " + std::to_string(q.size(1)) +
             ")",
         shape_text(t));
  }
}

Band check_window(const char* op, const Shape& shape, const int64_t left, const int64_t right) {
  if (left < -1) fail(op, "window_left", "a width >= 0, or -1 for no limit", std::to_string(left));
  if (right < -1) fail(op, "window_right", "a width >= 0, or -1 for no limit", std::to_string(right));
  const int64_t most = kMaxSeqlen * 2;
  return Band::from_window(shape.seqlen_q, shape.seqlen_k, int(left < most ? left : most),
                           int(right < most ? right : most));
}

float check_scale(const char* op, const std::optional<double> scale, const int head_dim) {
  if (!scale.has_value()) return 1.f / std::sqrt(float(head_dim));
  if (!std::isfinite(float(*scale)) || *scale < 0) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", *scale);
    fail(op, "scale", "a finite number >= 0", text);
  }
  return std::max(float(*scale), std::numeric_limits<float>::min());
}

}  // namespace flash_cuda::ops
