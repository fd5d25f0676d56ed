// Launchers that run on the CPU, for tests/test_bench_variants.py: out is the mean of the visible v, lse their number
// times the scale, and the gradients tell which pointers came.
#include <cuda_bf16.h>
#include "launch/launch.h"
namespace flash_cuda {
using T = __nv_bfloat16;
template <>
cudaError_t launch_hopper_forward<T>(const ForwardParams& p, const DeviceLimits& l, cudaStream_t stream) {
  if (l.multiprocessors != 3 || l.l2_bytes != 4 || l.shared_memory != 1 || l.compute_capability != 90)
    return cudaErrorInvalidValue;
  if (stream != reinterpret_cast<cudaStream_t>(5)) return cudaErrorInvalidResourceHandle;
  const Shape& s = p.shape;
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.heads_q; ++h)
      for (int i = 0; i < s.seqlen_q; ++i) {
        int seen = 0;
        for (int j = 0; j < s.seqlen_k; ++j) seen += p.band.visible(i, j);
        p.lse[s.row_index(b, h, i)] = seen * p.scale;
        for (int d = 0; d < s.head_dim; ++d) {
          float sum = 0;
          for (int j = 0; j < s.seqlen_k; ++j)
            if (p.band.visible(i, j))
              sum += __bfloat162float(static_cast<const T*>(
                  p.v)[b * p.v_strides.batch + j * p.v_strides.row + h / s.group() * p.v_strides.head + d]);
          static_cast<T*>(p.out)[b * p.out_strides.batch + i * p.out_strides.row + h * p.out_strides.head + d] =
              __float2bfloat16(seen ? sum / seen : 0.f);
        }
      }
  return cudaSuccess;
}
BackwardWorkspace hopper_backward_workspace(const Shape& s) { return {int64_t{s.seqlen_q} * s.head_dim, 0}; }
template <>
cudaError_t launch_hopper_backward<T>(const BackwardParams& p, const DeviceLimits&, cudaStream_t) {
  const Shape& s = p.shape;
  const int64_t rows = int64_t{s.batch} * s.seqlen_q * s.heads_q, keys = int64_t{s.batch} * s.seqlen_k * s.heads_kv;
  if (p.turns != nullptr || p.dlse != nullptr) return cudaErrorInvalidValue;
  for (int64_t i = 0; i < s.seqlen_q * s.head_dim; ++i) p.dq_accumulator[i] = 7;
  for (int64_t i = 0; i < rows; ++i) p.row_delta[i] = p.lse[i];
  for (int64_t i = 0; i < rows * s.head_dim; ++i)
    static_cast<T*>(p.dq)[i] = __float2bfloat16(__bfloat162float(static_cast<const T*>(p.dout)[i]) +
                                                __bfloat162float(static_cast<const T*>(p.out)[i]));
  for (int64_t i = 0; i < keys * s.head_dim; ++i) {
    static_cast<T*>(p.dk)[i] = static_cast<const T*>(p.k)[i];
    static_cast<T*>(p.dv)[i] = static_cast<const T*>(p.v)[i];
  }
  return p.q == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}
}  // namespace flash_cuda
