// What the host tells the kernels: plain structs, passed by value.
#pragma once

#include <cstdint>

#include "attention/band.h"

namespace flash_cuda {

// Elements from one batch entry, row (token) and head to the next; the head dimension itself is contiguous. Every
// stride of a dimension longer than 1 is a multiple of 8 elements and the base pointer is 16-byte aligned (csrc/ops
// copies otherwise).
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t head;
};

inline constexpr int kElementBytes = 2;  // float16 and bfloat16

struct Shape {
  int batch;
  int seqlen_q;
  int seqlen_k;
  int heads_q;
  int heads_kv;  // divides heads_q
  int head_dim;  // a multiple of 8, at most 256

  constexpr int group() const { return heads_q / heads_kv; }

  // Where a query's lse and D lie.
  constexpr int64_t row_index(int batch_entry, int head, int row) const {
    return (int64_t{batch_entry} * heads_q + head) * seqlen_q + row;
  }
};

struct ForwardParams {
  Shape shape;
  Band band;
  float scale;
  const void* q;  // (batch, seqlen_q, heads_q, head_dim)
  const void* k;  // (batch, seqlen_k, heads_kv, head_dim)
  const void* v;  // like k
  void* out;      // like q
  float* lse;     // (batch, heads_q, seqlen_q), contiguous, natural logarithm
  Strides q_strides, k_strides, v_strides, out_strides;
};

// Where KV-outer kernels keep the state of every row between their steps, in strips of rows
// (kernels/lab/row_state.cuh).
struct KvOuterForwardParams : ForwardParams {
  float* row_sums;   // O, the head dim of the tile
  float* row_stats;  // m and l
};

struct BackwardParams {
  Shape shape;
  Band band;
  float scale;
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const void* dout;
  const float* lse;
  const float* dlse;  // like lse, or null
  void* dq;           // each of the three may be null: not asked for
  void* dk;
  void* dv;
  Strides q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides;
  // Workspace; launch.h has the sizes.
  float* row_delta;  // D = rowsum(dO * O) - dlse, shaped like lse
  float* dq_accumulator;
  int* turns;  // deterministic mode: how many KV blocks have added to each block of dQ; null otherwise
};

}  // namespace flash_cuda
