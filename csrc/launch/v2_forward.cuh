// Launcher of kernels/v2/forward.cuh: picks the tile, the order of tiles, the grid.
#pragma once

#include "kernels/v2/forward.cuh"
#include "launch/grid.cuh"
#include "launch/head_dim.h"
#include "launch/launch.h"

namespace flash_cuda {

template <class Element, class Tile>
cudaError_t launch_forward_tile(const ForwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  const TileOrder order = query_order(params, Tile::kBlockM, limits);
  return launch_grid<v2::forward_kernel<Element, Tile>>(Tile::kThreads, int(sizeof(v2::ForwardShared<Tile>)), params,
                                                        order, stream);
}

template <class Element>
cudaError_t launch_v2_forward(const ForwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return visit_head_dim(params.shape.head_dim, [&](auto head_dim) {
    return v2::ForwardTiles<head_dim>::template visit_fitting<v2::ForwardShared>(limits.shared_memory, [&](auto tile) {
      return launch_forward_tile<Element, decltype(tile)>(params, limits, stream);
    });
  });
}

}  // namespace flash_cuda
