// Launcher of kernels/v1/backward.cuh: a thread block for each head of K and V.
#pragma once

#include "kernels/v1/backward.cuh"
#include "launch/grid.cuh"
#include "launch/head_dim.h"
#include "launch/lab.h"

namespace flash_cuda {

template <class Visitor>
auto visit_v1_backward_tile(const int head_dim, const DeviceLimits& limits, Visitor&& visit) {
  return visit_lab_head_dim(head_dim, [&](auto width) {
    return v1::BackwardTiles<width>::template visit_fitting<v1::BackwardShared>(limits.shared_memory, visit);
  });
}

template <class Element>
cudaError_t launch_v1_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return visit_v1_backward_tile(params.shape.head_dim, limits, [&](auto tile) {
    using Tile = decltype(tile);
    const Shape& s = params.shape;
    return launch_grid<v1::backward_kernel<Element, Tile>>(Tile::kThreads, int(sizeof(v1::BackwardShared<Tile>)),
                                                           params, TileOrder::even(1, s.heads_kv, s.batch), stream);
  });
}

}  // namespace flash_cuda
