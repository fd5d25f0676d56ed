// Launchers of the lab's forward kernels: from a choice at run time to its types.
#pragma once

#include "kernels/lab/normalisation.cuh"
#include "kernels/lab/q_outer.cuh"
#include "kernels/lab/split_k.cuh"
#include "kernels/lab/split_q.cuh"
#include "kernels/lab/tile.h"
#include "kernels/v1/forward.cuh"
#include "launch/grid.cuh"
#include "launch/lab.h"

namespace flash_cuda {

template <class T>
struct TypeOf {
  using type = T;
};

// visit(TypeOf<Tile>, TypeOf<Warps>, TypeOf<Normalisation>) with what the choice names.
template <class Element, int HeadDim, class Visitor>
cudaError_t visit_lab_types(const LabChoice& choice, Visitor&& visit) {
  const auto with_normalisation = [&](auto tile, auto normalisation) {
    using Tile = typename decltype(tile)::type;
    using Normalisation = typename decltype(normalisation)::type;
    return choice.split_k ? visit(tile, TypeOf<lab::SplitK<Element, Tile, Normalisation>>{}, normalisation)
                          : visit(tile, TypeOf<lab::SplitQ<Element, Tile, Normalisation>>{}, normalisation);
  };
  const auto with_tile = [&](auto tile) {
    return choice.eager ? with_normalisation(tile, TypeOf<lab::Eager>{})
                        : with_normalisation(tile, TypeOf<lab::Deferred>{});
  };
  switch (choice.budget_kb) {
    case 48:
      return with_tile(TypeOf<lab::LabTile<HeadDim, 48>>{});
    case 99:
      return with_tile(TypeOf<lab::LabTile<HeadDim, 99>>{});
    case 163:
      return with_tile(TypeOf<lab::LabTile<HeadDim, 163>>{});
    case 227:
      return with_tile(TypeOf<lab::LabTile<HeadDim, 227>>{});
    default:
      return cudaErrorInvalidValue;
  }
}

template <auto Kernel>
cudaError_t read_facts(const int threads, const int shared_bytes, LabKernelFacts* facts) {
  cudaFuncAttributes attributes{};
  cudaError_t error = allow_shared_memory<Kernel>(shared_bytes);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, Kernel);
  if (error != cudaSuccess) return error;
  *facts = {attributes.numRegs, shared_bytes, threads, 0};
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&facts->blocks_per_multiprocessor, Kernel, threads,
                                                       shared_bytes);
}

template <class Element, int HeadDim>
cudaError_t launch_kv_outer(const LabChoice& choice, const KvOuterForwardParams& params, const DeviceLimits&,
                            cudaStream_t stream, LabKernelFacts* facts) {
  return visit_lab_types<Element, HeadDim>(choice, [&](auto tile, auto warps, auto normalisation) {
    using Tile = typename decltype(tile)::type;
    using Warps = typename decltype(warps)::type;
    constexpr auto kKernel = v1::forward_kernel<Element, Tile, Warps, typename decltype(normalisation)::type>;
    constexpr int kBytes = int(sizeof(v1::ForwardShared<Tile, Warps>));
    static_assert(kBytes <= Tile::kBudgetKb * 1024);
    if (facts != nullptr) return read_facts<kKernel>(Warps::kThreads, kBytes, facts);
    const Shape& s = params.shape;
    const TileOrder order = TileOrder::even(s.seqlen_q > 0 ? 1 : 0, s.heads_q, s.batch);
    return launch_grid<kKernel>(Warps::kThreads, kBytes, params, order, stream);
  });
}

template <class Element, int HeadDim>
cudaError_t launch_q_outer(const LabChoice& choice, const KvOuterForwardParams& params, const DeviceLimits& limits,
                           cudaStream_t stream, LabKernelFacts* facts) {
  return visit_lab_types<Element, HeadDim>(choice, [&](auto tile, auto warps, auto normalisation) {
    using Tile = typename decltype(tile)::type;
    using Warps = typename decltype(warps)::type;
    constexpr auto kKernel = lab::q_outer_kernel<Element, Tile, Warps, typename decltype(normalisation)::type>;
    constexpr int kBytes = int(sizeof(lab::QOuterShared<Tile, Warps>));
    static_assert(kBytes <= Tile::kBudgetKb * 1024);
    if (facts != nullptr) return read_facts<kKernel>(Warps::kThreads, kBytes, facts);
    const TileOrder order = query_order(params, Tile::kRows, limits);
    return launch_grid<kKernel>(Warps::kThreads, kBytes, static_cast<const ForwardParams&>(params), order, stream);
  });
}

}  // namespace flash_cuda
