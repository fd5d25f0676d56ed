// The slow way for blocks of keys whose dK or dV came out with a NaN or an infinity although some query does not see
// some of them: P = 0 does not stop 0 * NaN, so that it may stem from a query or dO that must not reach the key.
//
// The same products in the same order, so that keys without such trouble get the same bits, but one after the other; Q
// and dO lose such values between the scores and the products with dS^T and P^T. Keys that see such a query have a NaN
// in dS^T; those of dO are added to the dV of the keys that see them at the end. dQ is left as it is.
#pragma once

#include <cstdint>

#include "attention/backward_scores.cuh"
#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/hopper/backward_loads.cuh"
#include "ptx/barrier.cuh"
#include "tile/warp_gemm.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace flash_cuda::hopper {

// By all consumers.
template <class Element, class Tile>
class BackwardAgain {
  using Shared = BackwardShared<Tile>;
  using Query = typename Shared::Query;
  using Gradient = tile::Accumulator<1, Tile::kHeadDim / 8>;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kQueryTiles = kBlockM / 8;
  static constexpr int kThreads = Tile::kConsumerThreads;

 public:
  __device__ __forceinline__ BackwardAgain(const BackwardParams& p, const BackwardMaps& maps, Shared& shared,
                                           const WorkTile& work, const int warpgroup)
      : p_(p), maps_(maps), shared_(shared), work_(work), warpgroup_(warpgroup) {}

  // Says in shared memory if they have been: then v2::restore_dv() must follow the store of dV.
  __device__ __forceinline__ void run_if_needed(Gradient& dk, Gradient& dv) {
    const Walk<Tile> walk(p_, work_);
    if (walk.all_seen(p_, work_)) return;
    const bool bad = has_nonfinite<1, Tile::kHeadDim / 8>(dk) || has_nonfinite<1, Tile::kHeadDim / 8>(dv);
    if (!ptx::bar_red_or(1, kThreads, bad)) return;
    if (threadIdx.x == 0) shared_.again = true;
    tile::clear<1, Tile::kHeadDim / 8>(dk);
    tile::clear<1, Tile::kHeadDim / 8>(dv);
#pragma unroll 1
    for (QueryStep at = walk.begin(); !walk.is_end(at); at = walk.next(at)) compute(at, dk, dv);
    sync();
  }

 private:
  __device__ __forceinline__ static void sync() { ptx::bar_sync(1, kThreads); }

  // Some query of the block does not see some key of the thread block's.
  __device__ __forceinline__ bool is_partial(const QueryStep& at) const {
    return !p_.band.covers(at.block * kBlockM, min_of((at.block + 1) * kBlockM, p_.shape.seqlen_q),
                           work_.block * kBlockN, (work_.block + 1) * kBlockN, p_.shape.seqlen_k);
  }

  __device__ __forceinline__ void load(const QueryStep& at) const {
    const int row = at.block * kBlockM;
    if (threadIdx.x == 0) {
      const uint32_t barrier = ptx::shared_address(&shared_.again_barrier);
      ptx::mbarrier_arrive_expect_tx(barrier, 2 * Query::kBytes);
      load_tile<Query>(shared_.q[0], &maps_.q, barrier, row, at.head, work_.batch);
      load_tile<Query>(shared_.dout[0], &maps_.dout, barrier, row, at.head, work_.batch);
    }
    const int64_t first = p_.shape.row_index(work_.batch, at.head, row);
    for (int i = threadIdx.x; i < kBlockM; i += kThreads) {
      shared_.lse[0][i] = row + i < p_.shape.seqlen_q ? p_.lse[first + i] : 0.f;
      shared_.delta[0][i] = row + i < p_.shape.seqlen_q ? p_.row_delta[first + i] : 0.f;
    }
  }

  __device__ __forceinline__ void take_nonfinite_out() const {
    sync();  // the scores no longer need them
    for (const uint32_t tile : {ptx::shared_address(shared_.q[0]), ptx::shared_address(shared_.dout[0])}) {
      copy_finite<Element>(tile, tile, Query::kBytes, threadIdx.x, kThreads);
    }
    ptx::fence_proxy_async();
    sync();
  }

  __device__ __forceinline__ void compute(const QueryStep& at, Gradient& dk, Gradient& dv) {
    constexpr int kHeadDim = Tile::kHeadDim;
    const int first_key = work_.block * kBlockN + 64 * warpgroup_;
    sync();  // the block before is done with
    load(at);
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared_.again_barrier), parity_);
    parity_ ^= 1;
    sync();
    const uint32_t q_tile = ptx::shared_address(shared_.q[0]), dout_tile = ptx::shared_address(shared_.dout[0]);
    const uint32_t own_rows = 64 * warpgroup_ * Shared::Key::kRowBytes;
    tile::Accumulator<1, kQueryTiles> s, dp;
    ptx::wgmma_fence();
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(s[0], ptx::shared_address(shared_.k) + own_rows, q_tile);
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(dp[0], ptx::shared_address(shared_.v) + own_rows,
                                                            dout_tile);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(s[0]);
    ptx::wgmma_hold(dp[0]);
    exponentiate<1, kQueryTiles>(s, shared_.lse[0], p_.scale * kLog2e);
    differentiate_softmax<1, kQueryTiles>(s, dp, shared_.delta[0]);
    mask_transposed<1, kQueryTiles>(s, dp, p_.band, first_key + threadIdx.x % 128 / 32 * 16, at.block * kBlockM,
                                    p_.shape.seqlen_k);
    uint32_t probabilities[1][kBlockM / 16][4], ds[1][kBlockM / 16][4];
    tile::pack_operand<Element, 1, kQueryTiles>(probabilities, s);
    tile::pack_operand<Element, 1, kQueryTiles>(ds, dp);
    if (is_partial(at)) take_nonfinite_out();
    ptx::wgmma_hold(dk[0]);
    ptx::wgmma_hold(dv[0]);
    ptx::wgmma_fence();
    tile::multiply_registers<Element>(dv[0], probabilities[0], dout_tile, true);
    tile::multiply_registers<Element>(dk[0], ds[0], q_tile, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dk[0]);
    ptx::wgmma_hold(dv[0]);
  }

  const BackwardParams& p_;
  const BackwardMaps& maps_;
  Shared& shared_;
  const WorkTile& work_;
  int warpgroup_;
  uint32_t parity_ = 0;
};

}  // namespace flash_cuda::hopper
