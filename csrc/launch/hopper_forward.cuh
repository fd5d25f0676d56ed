// Launcher of kernels/hopper/forward.cuh: tensor maps, the order of tiles, a grid as large as the GPU.
#pragma once

#include <algorithm>

#include "kernels/hopper/forward.cuh"
#include "launch/grid.cuh"
#include "launch/head_dim.h"
#include "launch/launch.h"
#include "launch/tensor_map.cuh"
#include "launch/work_queue.h"

namespace flash_cuda {

template <class Element, class Tile>
cudaError_t launch_hopper_forward_tile(const ForwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  using Shared = hopper::ForwardShared<Tile>;
  constexpr auto kKernel = hopper::forward_kernel<Element, Tile>;
  constexpr int kSharedBytes = int(sizeof(Shared)) + hopper::kSharedAlignment;
  const Shape& s = params.shape;
  const int blocks = blocks_of(s.seqlen_q, Tile::kBlockM);
  const bool uneven = params.band.is_uneven(s.seqlen_k);
  const int64_t key_bytes = int64_t{2} * s.seqlen_k * s.head_dim * kElementBytes / s.group();
  const TileOrder order = uneven ? TileOrder::by_section(blocks, s.heads_q, s.batch, false, key_bytes, limits.l2_bytes)
                                 : TileOrder::even(blocks, s.heads_q, s.batch);
  if (order.tiles() == 0) return cudaSuccess;
  if (order.tiles() > INT32_MAX) return cudaErrorInvalidConfiguration;

  hopper::ForwardMaps maps;
  maps.group = s.group();
  const bool no_keys = s.seqlen_k == 0;  // nothing is loaded then, but a map must point somewhere
  const auto map_keys = [&](CUtensorMap& map, const void* data, const Strides& strides) {
    return make_tensor_map<Element>(map, no_keys ? params.q : data, strides, s.batch, std::max(s.seqlen_k, 1),
                                    s.heads_kv, s.head_dim, Tile::kBlockN, Shared::Key::kColumns);
  };
  cudaError_t error = make_tensor_map<Element>(maps.q, params.q, params.q_strides, s.batch, s.seqlen_q, s.heads_q,
                                               s.head_dim, 64, Shared::Query::kColumns);
  if (error == cudaSuccess) error = map_keys(maps.k, params.k, params.k_strides);
  if (error == cudaSuccess) error = map_keys(maps.v, params.v, params.v_strides);
  if (error == cudaSuccess) error = allow_shared_memory<kKernel>(kSharedBytes);
  if (error != cudaSuccess) return error;
  const auto grid = unsigned(std::min<int64_t>(order.tiles(), limits.multiprocessors * Tile::kResident));
  WorkQueue* const queue = uneven && order.tiles() > grid ? work_queue(stream) : nullptr;
  kKernel<<<grid, Tile::kThreads, kSharedBytes, stream>>>(params, order, maps, queue);
  return cudaGetLastError();
}

// Keys that a row sees on average, roughly.
inline int64_t mean_keys(const ForwardParams& p) {
  const Shape& s = p.shape;
  const int width = min_of(p.band.upper - p.band.lower + 1, s.seqlen_k);
  const bool grows = p.band.is_uneven(s.seqlen_k) && width == s.seqlen_k;  // from about none to all, as causal rows do
  return grows ? width / 2 : width;
}

// With the small tile where the GPU holds all of those at the same time.
template <class Element, class Tile>
cudaError_t launch_hopper_forward_size(const ForwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  using Small = hopper::SmallTile<Tile>;
  const Shape& s = params.shape;
  const int64_t tiles = int64_t{blocks_of(s.seqlen_q, Small::kBlockM)} * s.heads_q * s.batch;
  if (tiles <= int64_t{limits.multiprocessors} * Small::kResident) {
    return launch_hopper_forward_tile<Element, Small>(params, limits, stream);
  }
  return launch_hopper_forward_tile<Element, Tile>(params, limits, stream);
}

template <class Element>
cudaError_t launch_hopper_forward(const ForwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return visit_head_dim<64>(params.shape.head_dim, [&](auto head_dim) {
    using Tiles = hopper::ForwardTiles<head_dim>;
    if (mean_keys(params) >= Tiles::kLongFrom) {
      return launch_hopper_forward_size<Element, typename Tiles::Long>(params, limits, stream);
    }
    return launch_hopper_forward_size<Element, typename Tiles::Short>(params, limits, stream);
  });
}

}  // namespace flash_cuda
