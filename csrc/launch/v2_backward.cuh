// Launcher of the v2 backward: prepare (D, clear), main kernel, finish (dQ in the element type), in stream order.
#pragma once

#include "kernels/v2/backward.cuh"
#include "kernels/v2/backward_rows.cuh"
#include "launch/grid.cuh"
#include "launch/head_dim.h"
#include "launch/launch.h"

namespace flash_cuda {

// Calls visit(Tile{}) with the tile that this head dim gets on this device.
template <class Visitor>
auto visit_backward_tile(const Shape& shape, const DeviceLimits& limits, Visitor&& visit) {
  return visit_head_dim(shape.head_dim, [&](auto head_dim) {
    return v2::BackwardTiles<head_dim>::template visit_fitting<v2::BackwardShared>(limits.shared_memory, visit);
  });
}

inline BackwardWorkspace workspace_of_tile(const Shape& shape, const DeviceLimits& limits) {
  return visit_backward_tile(shape, limits, [&](auto tile) {
    using Accumulator = v2::DqAccumulator<decltype(tile)>;
    return BackwardWorkspace{Accumulator::elements(shape),
                             int64_t{shape.batch} * shape.heads_q * Accumulator::blocks(shape.seqlen_q)};
  });
}

// Keys of a head in one phase of the order of tiles; a phase reads Q and dO and updates dQ's sum, more than the forward
// reads.
inline constexpr int kLeastPhaseKeys = 256;

template <class Element, class Tile>
cudaError_t launch_backward_tile(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  const Shape& s = params.shape;
  const TileOrder row_order = TileOrder::even(blocks_of(s.seqlen_q, Tile::kBlockM), s.heads_q, s.batch);
  cudaError_t error =
      launch_grid<v2::backward_prepare_kernel<Element, Tile>>(v2::kRowThreads, 0, params, row_order, stream);
  if (error != cudaSuccess) return error;

  // Under a causal mask the first keys have the most queries: block 0 is the longest. The deterministic sum needs
  // larger block numbers first, whatever their length (DqAccumulator::wait_turn).
  const int blocks = blocks_of(s.seqlen_k, Tile::kBlockN);
  const int64_t query_bytes = int64_t{s.seqlen_q} * s.head_dim * s.group() * (2 * sizeof(Element) + sizeof(float));
  TileOrder key_order =
      params.band.is_uneven(s.seqlen_k)
          ? TileOrder::longest_first(blocks, s.heads_kv, s.batch, true, blocks_of(kLeastPhaseKeys, Tile::kBlockN),
                                     query_bytes, limits.l2_bytes)
          : TileOrder::even(blocks, s.heads_kv, s.batch);
  if (params.turns != nullptr) key_order.ascending = false;
  error = launch_grid<v2::backward_kernel<Element, Tile>>(Tile::kThreads, int(sizeof(v2::BackwardShared<Tile>)), params,
                                                          key_order, stream);
  if (error != cudaSuccess || params.dq == nullptr) return error;
  return launch_grid<v2::backward_finish_kernel<Element, Tile>>(Tile::kBlockM * 2, 0, params, row_order, stream);
}

template <class Element>
cudaError_t launch_v2_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return visit_backward_tile(params.shape, limits, [&](auto tile) {
    return launch_backward_tile<Element, decltype(tile)>(params, limits, stream);
  });
}

}  // namespace flash_cuda
