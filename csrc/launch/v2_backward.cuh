// Launcher of kernels/v2/backward.cuh.
#pragma once

#include "kernels/v2/backward.cuh"
#include "launch/backward.cuh"
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
  return visit_backward_tile(shape, limits, [&](auto tile) { return backward_workspace<decltype(tile)>(shape); });
}

// Keys of a head in one phase of the order of tiles; each phase reads Q and dO and updates dQ's sum.
inline constexpr int kLeastPhaseKeys = 256;

template <class Element>
TileOrder v2_key_order(const BackwardParams& params, const int block_n, const int64_t l2_bytes) {
  const Shape& s = params.shape;
  return key_order(params, block_n, params.band.is_uneven(s.seqlen_k), [&](const int blocks) {
    return TileOrder::longest_first(blocks, s.heads_kv, s.batch, true, blocks_of(kLeastPhaseKeys, block_n),
                                    query_bytes<Element>(s), l2_bytes);
  });
}

template <class Element>
cudaError_t launch_v2_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return visit_backward_tile(params.shape, limits, [&](auto tile) {
    using Tile = decltype(tile);
    return launch_backward<Element, Tile>(params, stream, [&] {
      return launch_grid<v2::backward_kernel<Element, Tile>>(
          Tile::kThreads, int(sizeof(v2::BackwardShared<Tile>)), params,
          v2_key_order<Element>(params, Tile::kBlockN, limits.l2_bytes), stream);
    });
  });
}

}  // namespace flash_cuda
