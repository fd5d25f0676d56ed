// What the launchers of the v2 and the hopper backward share: the workspace, the order of blocks of keys, and the row
// kernels before and after the main one.
#pragma once

#include "kernels/v2/backward_rows.cuh"
#include "launch/grid.cuh"
#include "launch/launch.h"

namespace flash_cuda {

template <class Tile>
BackwardWorkspace backward_workspace(const Shape& shape) {
  using Accumulator = v2::DqAccumulator<Tile>;
  return {Accumulator::elements(shape), int64_t{shape.batch} * shape.heads_q * Accumulator::blocks(shape.seqlen_q)};
}

// Keys of a head in one phase of the order of tiles; a phase reads Q and dO and updates dQ's sum, more than the forward
// reads.
inline constexpr int kLeastPhaseKeys = 256;

// Prepare (D, clear), launch_main(order of the blocks of keys), finish (dQ in the element type), in stream order.
template <class Element, class Tile, class LaunchMain>
cudaError_t launch_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream,
                            const LaunchMain& launch_main) {
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
  error = launch_main(key_order);
  if (error != cudaSuccess || params.dq == nullptr) return error;
  return launch_grid<v2::backward_finish_kernel<Element, Tile>>(Tile::kBlockM * 2, 0, params, row_order, stream);
}

}  // namespace flash_cuda
