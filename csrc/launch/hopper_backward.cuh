// Launcher of kernels/hopper/backward.cuh: prepare (D, clear), main kernel, finish (dQ in the element type), in stream
// order.
#pragma once

#include <algorithm>

#include "kernels/hopper/backward.cuh"
#include "kernels/v2/backward_rows.cuh"
#include "launch/grid.cuh"
#include "launch/launch.h"
#include "launch/tensor_map.cuh"

namespace flash_cuda {

template <class Visitor>
auto visit_hopper_backward_tile(const Shape& shape, Visitor&& visit) {
  if (shape.head_dim <= 64) return visit(hopper::BackwardTiles<64>::Tile{});
  return visit(hopper::BackwardTiles<hopper::kMostBackwardHeadDim>::Tile{});
}

inline BackwardWorkspace hopper_workspace_of_tile(const Shape& shape) {
  return visit_hopper_backward_tile(shape, [&](auto tile) {
    using Sum = v2::DqAccumulator<decltype(tile)>;
    return BackwardWorkspace{Sum::elements(shape), int64_t{shape.batch} * shape.heads_q * Sum::blocks(shape.seqlen_q)};
  });
}

// Blocks of keys of a head in one phase of the order of tiles.
inline constexpr int kLeastPhaseBlocks = 2;

template <class Element, class Tile>
cudaError_t launch_hopper_backward_tile(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  using Shared = hopper::BackwardShared<Tile>;
  constexpr auto kKernel = hopper::backward_kernel<Element, Tile>;
  constexpr int kSharedBytes = int(sizeof(Shared)) + hopper::kSharedAlignment;
  const Shape& s = params.shape;
  const TileOrder row_order = TileOrder::even(blocks_of(s.seqlen_q, Tile::kBlockM), s.heads_q, s.batch);
  cudaError_t error =
      launch_grid<v2::backward_prepare_kernel<Element, Tile>>(v2::kRowThreads, 0, params, row_order, stream);
  if (error != cudaSuccess) return error;

  // As for v2: longest first, and in deterministic mode larger block numbers first.
  const int blocks = blocks_of(s.seqlen_k, Tile::kBlockN);
  const int64_t query_bytes = int64_t{s.seqlen_q} * s.head_dim * s.group() * (2 * sizeof(Element) + sizeof(float));
  TileOrder order =
      params.band.is_uneven(s.seqlen_k)
          ? TileOrder::longest_first(blocks, s.heads_kv, s.batch, true, kLeastPhaseBlocks, query_bytes, limits.l2_bytes)
          : TileOrder::even(blocks, s.heads_kv, s.batch);
  if (params.turns != nullptr) order.ascending = false;
  if (order.tiles() > INT32_MAX) return cudaErrorInvalidConfiguration;

  if (order.tiles() > 0) {
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
    error = map_queries(maps.q, params.q, params.q_strides);
    if (error == cudaSuccess) error = map_queries(maps.dout, params.dout, params.dout_strides);
    if (error == cudaSuccess) error = map_keys(maps.k, params.k, params.k_strides);
    if (error == cudaSuccess) error = map_keys(maps.v, params.v, params.v_strides);
    if (error == cudaSuccess) error = allow_shared_memory<kKernel>(kSharedBytes);
    if (error != cudaSuccess) return error;
    kKernel<<<unsigned(order.tiles()), Tile::kThreads, kSharedBytes, stream>>>(params, order, maps);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess || params.dq == nullptr) return error;
  return launch_grid<v2::backward_finish_kernel<Element, Tile>>(Tile::kBlockM * 2, 0, params, row_order, stream);
}

template <class Element>
cudaError_t launch_hopper_backward(const BackwardParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return visit_hopper_backward_tile(params.shape, [&](auto tile) {
    return launch_hopper_backward_tile<Element, decltype(tile)>(params, limits, stream);
  });
}

}  // namespace flash_cuda
