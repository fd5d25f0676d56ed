// FlashAttention-2 backward (Dao 2023, Algorithm 2) for Hopper: TMA, wgmma, warp specialisation (FlashAttention-3, Shah
// et al. 2024, appendix B.1).
//
//   for each block of 128 keys K_j, values V_j (one thread block each)   grid: one dimension, TileOrder by KV head
//     a producer warp streams Q_i, dO_i, lse_i, D_i through rings in shared memory (backward_loads.cuh)
//     each of two consumer warpgroups owns 64 keys: dK, dV in registers
//       for each query head of the group, each block of queries i in the band
//         S^T = K_j Q_i^T;  dP^T = V_j dO_i^T
//         P^T = exp(S^T - lse);  dS^T = P^T * (dP^T - D)
//         dV += P^T dO_i;  dK += dS^T Q_i         P^T, dS^T from registers
//         dQ_i += dS K_j                          dS^T of both through shared memory, dQ_i by float32 reductions
//     dK, dV are computed once more where that is needed (backward_again.cuh)
//
// D before it and dQ in the element type after it: v2/backward_rows.cuh.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "attention/backward_scores.cuh"
#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/hopper/backward_again.cuh"
#include "kernels/hopper/backward_loads.cuh"
#include "kernels/hopper/config.h"
#include "kernels/v2/dq_accumulator.cuh"
#include "kernels/v2/restore_dv.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "tile/warp_gemm.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace flash_cuda::hopper {

// A warpgroup and its 64 keys. Rows of S^T, dK, dV are keys, so that P^T and dS^T are operands as they lie in
// registers.
template <class Element, class Tile>
class BackwardConsumer {
  using Shared = BackwardShared<Tile>;
  using Key = typename Shared::Key;
  using Query = typename Shared::Query;
  using Score = typename Shared::Score;
  static constexpr int kHeadDim = Tile::kHeadDim;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kQueryTiles = kBlockM / 8;
  static constexpr int kDqTiles = 64 / 8;

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams& p, Shared& shared, const WorkTile& work,
                                              const int warpgroup)
      : p_(p),
        shared_(shared),
        work_(work),
        warpgroup_(warpgroup),
        first_key_(work.block * kBlockN + 64 * warpgroup),
        base_(ptx::shared_address(&shared)),
        queries_(shared.query_barriers) {}

  __device__ __forceinline__ void run(const BackwardMaps& maps) {
    const Walk<Tile> walk(p_, work_);
    tile::clear<1, kHeadDim / 8>(dk_);
    tile::clear<1, kHeadDim / 8>(dv_);
    QueryStep at = walk.begin();
    if (!walk.is_end(at)) {
      tile::RingCursor<1>(shared_.key_barriers).wait_full();
      // Known to be the same for the whole warp, or each of its descriptors would be a thread's own.
      keys_of_dq_ = __shfl_sync(0xffffffffu, keys_of_dq(walk.all_seen(p_, work_)), 0);
      int step = 0;
      do {
        compute(at, step);
        at = walk.next(at);
        step ^= 1;
      } while (!walk.is_end(at));
      BackwardAgain<Element, Tile>(p_, maps, shared_, work_, warpgroup_).run_if_needed(dk_, dv_);
    }
    store(p_.dk, p_.dk_strides, dk_, p_.scale);
    store(p_.dv, p_.dv_strides, dv_, 1.f);
    if (shared_.again) v2::restore_dv<Element, Tile>(p_, work_);
  }

 private:
  // A block of queries of one head.
  __device__ __forceinline__ void compute(const QueryStep& at, const int step) {
    const int row_begin = at.block * kBlockM;
    const uint32_t q_tile = base_ + offsetof(Shared, q) + queries_.stage() * Query::kBytes;
    const uint32_t dout_tile = base_ + offsetof(Shared, dout) + queries_.stage() * Query::kBytes;
    const uint32_t ds_tile = base_ + offsetof(Shared, ds) + step * Score::kBytes;
    const uint32_t own_rows = 64 * warpgroup_ * Key::kRowBytes;
    tile::Accumulator<1, kQueryTiles> s, dp;
    queries_.wait_full();
    ptx::wgmma_fence();
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(s[0], base_ + offsetof(Shared, k) + own_rows, q_tile);
    ptx::wgmma_commit_group();
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(dp[0], base_ + offsetof(Shared, v) + own_rows, dout_tile);
    ptx::wgmma_commit_group();

    ptx::wgmma_wait_group<1>();
    ptx::wgmma_hold(s[0]);
    exponentiate<1, kQueryTiles>(s, shared_.lse[queries_.stage()], p_.scale * kLog2e);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dp[0]);
    differentiate_softmax<1, kQueryTiles>(s, dp, shared_.delta[queries_.stage()]);
    const bool partial = !p_.band.covers(row_begin, min_of(row_begin + kBlockM, p_.shape.seqlen_q), first_key_,
                                         first_key_ + 64, p_.shape.seqlen_k);
    if (partial) {
      mask_transposed<1, kQueryTiles>(s, dp, p_.band, first_key_ + warp_row(), row_begin, p_.shape.seqlen_k);
    }
    uint32_t probabilities[1][kBlockM / 16][4], ds[1][kBlockM / 16][4];
    tile::pack_operand<Element, 1, kQueryTiles>(probabilities, s);
    tile::pack_operand<Element, 1, kQueryTiles>(ds, dp);
    store_ds(ds_tile, ds[0]);
    ptx::fence_proxy_async();

    ptx::wgmma_fence();
    tile::multiply_registers<Element>(dv_[0], probabilities[0], dout_tile, true);
    ptx::wgmma_commit_group();
    tile::multiply_registers<Element>(dk_[0], ds[0], q_tile, true);
    ptx::wgmma_commit_group();
    // Both parts of dS^T are there; and of the other buffer, which is next, all products are done.
    sync();
    tile::Accumulator<1, kDqTiles> dq;
    tile::multiply_columns_by_columns<Element, kBlockN, kBlockM, 64>(
        dq[0], ds_tile + (Tile::kSplitsRows ? warpgroup_ * Score::kPanelBytes : 0), keys_of_dq_);
    ptx::wgmma_commit_group();
    const v2::DqAccumulator<Tile> accumulator(p_, work_.batch, at.head, at.block);
    float* const sum = accumulator.element((Tile::kSplitsRows ? 4 * warpgroup_ : 0) + warp_row() / 16,
                                           Tile::kSplitsRows ? 0 : kDqTiles * warpgroup_, 0);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dq[0]);
    ptx::wgmma_hold(dk_[0]);
    ptx::wgmma_hold(dv_[0]);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(queries_.empty());
    queries_.advance();
    if (p_.turns != nullptr) {
      accumulator.wait_turn(p_, work_.block, [] { sync(); });
      add(sum, dq);
      accumulator.pass_turn(p_, [] { sync(); });
    } else if (p_.dq != nullptr) {
      add(sum, dq);
    }
  }

  // This warpgroup's part of K as an operand of dQ. dS = 0 does not stop 0 * NaN: where a row does not see all keys, a
  // copy without NaNs and infinities if there are any. Rows that see one have a NaN in dS.
  __device__ __forceinline__ uint32_t keys_of_dq(const bool all_seen) const {
    const uint32_t keys = base_ + offsetof(Shared, k) + (Tile::kSplitsRows ? 0 : warpgroup_ * Key::kPanelBytes);
    if (all_seen) return keys;
    bool found = false;
    for (int i = threadIdx.x % 128 * 16; i < Key::kPanelBytes; i += 128 * 16) {
      found |= has_nonfinite<Element>(ptx::ld_shared_v4(keys + i));
    }
    if (!ptx::bar_red_or(2 + warpgroup_, 128, found)) return keys;
    const uint32_t finite = ptx::shared_address(shared_.finite[warpgroup_]);
    copy_finite<Element>(finite, keys, Key::kPanelBytes, threadIdx.x % 128, 128);
    ptx::fence_proxy_async();
    ptx::bar_sync(2 + warpgroup_, 128);
    return finite;
  }

  __device__ __forceinline__ static void add(float* const sum, const tile::Accumulator<1, kDqTiles>& dq) {
#pragma unroll
    for (int n = 0; n < kDqTiles; ++n) ptx::red_add_v4_f32(sum + 128 * n, dq[0][n]);
  }

  // dS^T of a warp's 16 keys, a row of queries each.
  __device__ __forceinline__ void store_ds(const uint32_t ds_tile, const uint32_t (&ds)[kBlockM / 16][4]) const {
    const int lane = threadIdx.x % 32;
    // Steps of 16 queries are XORed to the address, as the swizzle does it: the tile is aligned to its period.
    const uint32_t first = ds_tile + Score::offset(64 * warpgroup_ + warp_row() + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      ptx::stmatrix_x4((first ^ k % 4 * 32) + k / 4 * Score::kPanelBytes, ds[k]);
    }
  }

  // As store_output(): a quad writes 32 bytes of a row with each store.
  __device__ __forceinline__ void store(void* const tensor, const Strides& strides,
                                        const tile::Accumulator<1, kHeadDim / 8>& acc, const float scale) const {
    if (tensor == nullptr) return;
    const int lane = threadIdx.x % 32;
    const int odd = lane % 2;
    const int column = odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_key_ + warp_row() + half * 8 + lane / 4;
      auto* const out = static_cast<Element*>(tensor) + work_.batch * strides.batch + work_.head * strides.head +
                        row * strides.row + column;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 2) {
        const float (&left)[4] = acc[0][n];
        const float (&right)[4] = acc[0][n + 1];
        const uint32_t a = ptx::cvt_rn_x2_f32<Element>(left[2 * half] * scale, left[2 * half + 1] * scale);
        const uint32_t b = ptx::cvt_rn_x2_f32<Element>(right[2 * half] * scale, right[2 * half + 1] * scale);
        const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
        ptx::st_global_v2_b32(out + 8 * n, make_uint2(odd ? theirs : a, odd ? b : theirs),
                              row < p_.shape.seqlen_k && 8 * n + column < p_.shape.head_dim);
      }
    }
  }

  __device__ __forceinline__ static int warp_row() { return threadIdx.x % 128 / 32 * 16; }
  __device__ __forceinline__ static void sync() { ptx::bar_sync(1, Tile::kConsumerThreads); }

  const BackwardParams& p_;
  Shared& shared_;
  const WorkTile& work_;
  int warpgroup_;
  int first_key_;
  uint32_t base_;        // of shared_: all tiles lie at fixed distances from it
  uint32_t keys_of_dq_;  // keys_of_dq()
  tile::RingCursor<Tile::kStages> queries_;
  tile::Accumulator<1, kHeadDim / 8> dk_, dv_;
};

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ TileOrder order,
                    const __grid_constant__ BackwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = BackwardShared<Tile>;
  extern __shared__ unsigned char shared_bytes[];
  auto& shared =
      *reinterpret_cast<Shared*>(shared_bytes + (-ptx::shared_address(shared_bytes) & (kSharedAlignment - 1)));

  if (threadIdx.x == 0) {
    shared.key_barriers.init(1);  // never go back
    shared.query_barriers.init(Tile::kWarps, BackwardProducer<Tile>::kArrivals);
    ptx::mbarrier_init(ptx::shared_address(&shared.again_barrier), 1);
    shared.again = false;
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&maps.q);
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
    ptx::prefetch_tensormap(&maps.dout);
  }
  __syncthreads();

  const WorkTile work = order.tile(ptx::ctaid_x());
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same for the whole warp
  if (warp >= Tile::kWarps) {
    ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
    if (warp == Tile::kWarps) BackwardProducer<Tile>::run(p, maps, shared, work);
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    BackwardConsumer<Element, Tile>(p, shared, work, warp / 4).run(maps);
  }
#endif
}

}  // namespace flash_cuda::hopper
