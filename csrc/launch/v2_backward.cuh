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

template <class Element>
cudaError_t launch_v2_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return visit_backward_tile(params.shape, limits, [&](auto tile) {
    using Tile = decltype(tile);
    return launch_backward<Element, Tile>(params, limits, stream, [&](const TileOrder& order) {
      return launch_grid<v2::backward_kernel<Element, Tile>>(Tile::kThreads, int(sizeof(v2::BackwardShared<Tile>)),
                                                             params, order, stream);
    });
  });
}

}  // namespace flash_cuda
