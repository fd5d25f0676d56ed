// Plain C entry points of a variant's Hopper kernels, which bench/variants.py links with its launchers and calls
// through ctypes. bfloat16; every tensor (batch, seqlen, heads, head_dim), contiguous, head_dim a multiple of 8.
#include <cuda_bf16.h>

#include <cstdint>

#include "launch/launch.h"

// As bench/variants.py has it, field by field.
struct Call {
  int32_t batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, window_left, window_right;
  int32_t shared_memory, compute_capability, multiprocessors;
  float scale;
  int64_t l2_bytes;
  const void *q, *k, *v;
  void* out;
  float* lse;
  const void* dout;
  void *dq, *dk, *dv;
  float *row_delta, *dq_accumulator;
  cudaStream_t stream;
};

namespace {

using namespace flash_cuda;

Shape shape(const Call& c) { return {c.batch, c.seqlen_q, c.seqlen_k, c.heads_q, c.heads_kv, c.head_dim}; }

Band band(const Call& c) { return Band::from_window(c.seqlen_q, c.seqlen_k, c.window_left, c.window_right); }

DeviceLimits limits(const Call& c) { return {c.shared_memory, c.l2_bytes, c.compute_capability, c.multiprocessors}; }

Strides strides(const Call& c, const int seqlen, const int heads) {
  const int64_t row = int64_t{heads} * c.head_dim;
  return {seqlen * row, row, c.head_dim};
}

}  // namespace

#define VARIANT_EXPORT extern "C" __attribute__((visibility("default")))

VARIANT_EXPORT int variant_forward(const Call* call) {
  const Call& c = *call;
  const Strides rows = strides(c, c.seqlen_q, c.heads_q), keys = strides(c, c.seqlen_k, c.heads_kv);
  const ForwardParams params{shape(c), band(c), c.scale, c.q, c.k, c.v, c.out, c.lse, rows, keys, keys, rows};
  return launch_hopper_forward<__nv_bfloat16>(params, limits(c), c.stream);
}

#ifdef VARIANT_BACKWARD

// Elements of dq_accumulator.
VARIANT_EXPORT int64_t variant_accumulator(const Call* call) {
  return hopper_backward_workspace(shape(*call)).dq_accumulator;
}

VARIANT_EXPORT int variant_backward(const Call* call) {
  const Call& c = *call;
  const Strides rows = strides(c, c.seqlen_q, c.heads_q), keys = strides(c, c.seqlen_k, c.heads_kv);
  const BackwardParams params{
      shape(c), band(c), c.scale, c.q,  c.k,  c.v,  c.out, c.dout, c.lse,       nullptr,          c.dq,   c.dk, c.dv,
      rows,     keys,    keys,    rows, rows, rows, keys,  keys,   c.row_delta, c.dq_accumulator, nullptr};
  return launch_hopper_backward<__nv_bfloat16>(params, limits(c), c.stream);
}

#endif
