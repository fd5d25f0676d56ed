// Launcher of kernels/hopper/backward.cuh.
#pragma once

#include <algorithm>

#include "kernels/hopper/backward.cuh"
#include "launch/backward.cuh"
#include "launch/grid.cuh"
#include "launch/head_dim.h"
#include "launch/launch.h"
#include "launch/tensor_map.cuh"
#include "launch/work_queue.h"

namespace flash_cuda {

template <class Visitor>
auto visit_hopper_backward_tile(const Shape& shape, Visitor&& visit) {
  return visit_head_dim<hopper::kLeastBackwardHeadDim>(
      shape.head_dim, [&](auto head_dim) { return visit(typename hopper::BackwardTiles<head_dim>::type{}); });
}

inline BackwardWorkspace hopper_workspace_of_tile(const Shape& shape) {
  return visit_hopper_backward_tile(shape, [&](auto tile) { return backward_workspace<decltype(tile)>(shape); });
}

// The blocks of keys of as many heads as fit the L2 cache, then the next heads'. In deterministic mode also where all
// are of one length: all heads' last blocks come first, and the next ones do not wait for neighbours that start with
// them.
template <class Element>
TileOrder hopper_key_order(const BackwardParams& params, const int block_n, const int64_t l2_bytes) {
  const Shape& s = params.shape;
  const bool mixes_heads = params.band.is_uneven(s.seqlen_k) || params.turns != nullptr;
  return key_order(params, block_n, mixes_heads, [&](const int blocks) {
    return TileOrder::by_section(blocks, s.heads_kv, s.batch, true, query_bytes<Element>(s), l2_bytes);
  });
}

template <class Element, class Tile, hopper::DqSum Sum>
cudaError_t launch_hopper_backward_main(const BackwardParams& params, const TileOrder& order,
                                        const DeviceLimits& limits, cudaStream_t stream) {
  using Shared = hopper::BackwardShared<Tile>;
  constexpr auto kKernel = hopper::backward_kernel<Element, Tile, Sum>;
  constexpr int kSharedBytes = int(sizeof(Shared));
  static_assert(kSharedBytes <= 227 * 1024);
  const Shape& s = params.shape;
  if (order.tiles() == 0) return cudaSuccess;
  if (order.tiles() > INT32_MAX) return cudaErrorInvalidConfiguration;

  hopper::BackwardMaps maps;
  const bool no_queries = s.seqlen_q == 0;  // nothing is loaded then, but a map must point somewhere
  const auto map_queries = [&](CUtensorMap& map, const void* data, const Strides& strides) {
    return make_tensor_map<Element>(map, no_queries ? params.k : data, strides, s.batch, std::max(s.seqlen_q, 1),
                                    s.heads_q, s.head_dim, Tile::kBlockM, Shared::Query::kColumns);
  };
  const auto map_keys = [&](CUtensorMap& map, const void* data, const Strides& strides) {
    return make_tensor_map<Element>(map, data, strides, s.batch, s.seqlen_k, s.heads_kv, s.head_dim, Tile::kBlockN,
                                    Shared::Key::kColumns);
  };
  cudaError_t error = map_queries(maps.q, params.q, params.q_strides);
  if (error == cudaSuccess) error = map_queries(maps.dout, params.dout, params.dout_strides);
  if (error == cudaSuccess) error = map_keys(maps.k, params.k, params.k_strides);
  if (error == cudaSuccess) error = map_keys(maps.v, params.v, params.v_strides);
  maps.scale_log2 = params.scale * kLog2e;
  if (error == cudaSuccess) error = allow_shared_memory<kKernel>(kSharedBytes);
  if (error != cudaSuccess) return error;
  // Where blocks of keys wait for each other's turns, each has a thread block of its own: one of a smaller grid that is
  // waited for might never start.
  const auto grid = unsigned(Sum == hopper::DqSum::kInOrder ? order.tiles()
                                                            : std::min<int64_t>(order.tiles(), limits.multiprocessors));
  WorkQueue* const queue = order.tiles() > grid ? work_queue(stream) : nullptr;
  kKernel<<<grid, Tile::kThreads, kSharedBytes, stream>>>(params, order, maps, queue);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch_hopper_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return visit_hopper_backward_tile(params.shape, [&](auto tile) {
    using Tile = decltype(tile);
    return launch_backward<Element, Tile>(params, stream, [&] {
      const TileOrder order = hopper_key_order<Element>(params, Tile::kBlockN, limits.l2_bytes);
      const auto launch = [&](auto sum) {
        return launch_hopper_backward_main<Element, Tile, sum>(params, order, limits, stream);
      };
      using hopper::DqSum;
      if (params.dq == nullptr) return launch(std::integral_constant<DqSum, DqSum::kNone>{});
      if (params.turns == nullptr) return launch(std::integral_constant<DqSum, DqSum::kAsItComes>{});
      return launch(std::integral_constant<DqSum, DqSum::kInOrder>{});
    });
  });
}

}  // namespace flash_cuda
