// Launcher of kernels/v2/forward.cuh: picks the tile, the order of tiles, the grid.
#pragma once

#include "kernels/v2/forward.cuh"
#include "launch/grid.cuh"
#include "launch/head_dim.h"
#include "launch/launch.h"

namespace flash_cuda {

// Rows of a head in one phase of the order of tiles: enough arithmetic for the bytes of K and V that a phase reads
// anew.
inline constexpr int kLeastPhaseRows = 128;

template <class Element, class Tile>
cudaError_t launch_forward_tile(const ForwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  const Shape& s = params.shape;
  const int blocks = blocks_of(s.seqlen_q, Tile::kBlockM);
  const int64_t key_bytes = int64_t{2} * s.seqlen_k * s.head_dim * sizeof(Element) / s.group();
  const TileOrder order =
      params.band.is_uneven(s.seqlen_k)
          ? TileOrder::longest_first(blocks, s.heads_q, s.batch, false, blocks_of(kLeastPhaseRows, Tile::kBlockM),
                                     key_bytes, limits.l2_bytes)
          : TileOrder::even(blocks, s.heads_q, s.batch);
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
