// What the launchers of the v2 and the hopper backward share: the workspace, and the row kernels before and after the
// main one.
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

// Bytes of one KV head that its blocks of keys read and update again and again: Q, dO and dQ's sum.
template <class Element>
int64_t query_bytes(const Shape& s) {
  return int64_t{s.seqlen_q} * s.head_dim * s.group() * (2 * sizeof(Element) + sizeof(float));
}

// Head by head, or where `mixes_heads` in the order that `mixed` makes of so many blocks a head. Under a causal mask
// the first keys have the most queries: block 0 is the longest, and goes first. The deterministic sum needs larger
// block numbers first, whatever their length (v2::DqAccumulator).
template <class Mixed>
TileOrder key_order(const BackwardParams& params, const int block_n, const bool mixes_heads, const Mixed& mixed) {
  const Shape& s = params.shape;
  const int blocks = blocks_of(s.seqlen_k, block_n);
  TileOrder order = mixes_heads ? mixed(blocks) : TileOrder::even(blocks, s.heads_kv, s.batch);
  if (params.turns != nullptr) order.ascending = false;
  return order;
}

// Prepare (D, clear), launch_main(), finish (dQ in the element type), in stream order.
template <class Element, class Tile, class LaunchMain>
cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream, const LaunchMain& launch_main) {
  const Shape& s = params.shape;
  const TileOrder row_order = TileOrder::even(blocks_of(s.seqlen_q, Tile::kBlockM), s.heads_q, s.batch);
  cudaError_t error =
      launch_grid<v2::backward_prepare_kernel<Element, Tile>>(v2::kRowThreads, 0, params, row_order, stream);
  if (error == cudaSuccess) error = launch_main();
  if (error != cudaSuccess || params.dq == nullptr) return error;
  return launch_grid<v2::backward_finish_kernel<Element, Tile>>(v2::kFinishThreads<Tile>, 0, params, row_order, stream);
}

}  // namespace flash_cuda
