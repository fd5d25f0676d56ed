// What every launch does: raise the shared-memory limit where a kernel needs it, one-dimensional grid, report the
// error.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "attention/params.h"
#include "attention/scheduler.h"
#include "launch/launch.h"

namespace flash_cuda {

inline constexpr int kDefaultSharedMemory = 48 * 1024;  // what a kernel may use without asking

// Asked once for a kernel and device: the call costs as much host time as a launch.
template <auto Kernel>
cudaError_t allow_shared_memory(const int bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit for each device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (error != cudaSuccess || (allowed.load(std::memory_order_relaxed) & bit) != 0) return error;
  error = cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < 64) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Kernel takes (Params, TileOrder); a kernel always asks for the same shared_bytes.
template <auto Kernel, class Params>
cudaError_t launch_grid(const int threads, const int shared_bytes, const Params& params, const TileOrder& order,
                        cudaStream_t stream) {
  if (order.tiles() == 0) return cudaSuccess;
  if (order.tiles() > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared_bytes > kDefaultSharedMemory) {
    const cudaError_t error = allow_shared_memory<Kernel>(shared_bytes);
    if (error != cudaSuccess) return error;
  }
  Kernel<<<unsigned(order.tiles()), threads, shared_bytes, stream>>>(params, order);
  return cudaGetLastError();
}

// Rows of a head in one phase of the order of blocks: enough arithmetic for the bytes of K and V that a phase reads
// anew.
inline constexpr int kLeastPhaseRows = 128;

// Blocks of `block_rows` queries, for a forward kernel with a thread block each.
inline TileOrder query_order(const ForwardParams& params, const int block_rows, const DeviceLimits& limits) {
  const Shape& s = params.shape;
  const int blocks = blocks_of(s.seqlen_q, block_rows);
  if (!params.band.is_uneven(s.seqlen_k)) return TileOrder::even(blocks, s.heads_q, s.batch);
  const int64_t key_bytes = int64_t{2} * s.seqlen_k * s.head_dim * kElementBytes / s.group();
  return TileOrder::longest_first(blocks, s.heads_q, s.batch, false, blocks_of(kLeastPhaseRows, block_rows), key_bytes,
                                  limits.l2_bytes);
}

}  // namespace flash_cuda
