// FlashAttention-2 backward (Dao 2023, Algorithm 2) for Hopper: TMA, wgmma, warp specialisation (FlashAttention-3, Shah
// et al. 2024, appendix B.1).
//
//   for each block of keys K_j, values V_j             drawn by persistent thread blocks, TileOrder by KV head
//     a producer warp streams Q_i, dO_i, lse_i, D_i through a ring in shared memory (backward_loads.cuh)
//     two consumer warpgroups of 64 keys each hold dK, dV in registers; for each query head of the group, each block of
//     queries i in the band:
//       S^T = K_j Q_i^T;  dP^T = V_j dO_i^T
//       P^T = exp(S^T - lse);  dS^T = P^T * (dP^T - D)
//       dQ_i-1 += dS_i-1 K_j                      dS^T of both through shared memory, dQ by float32 reductions
//       dV += P^T dO_i;  dK += dS^T Q_i           P^T, dS^T from registers
//     dK, dV are computed once more where that is needed (backward_again.cuh)
//
// dQ comes a step late, so that a warpgroup does not wait for the other's half of dS: they drift apart, and one's
// products run beside the other's exponentials. Above 64 keys' worth of registers: backward_wide.cuh. D before it and
// dQ in the element type after it: v2/backward_rows.cuh.
#pragma once

#include "kernels/hopper/backward_again.cuh"
#include "kernels/hopper/backward_consumer.cuh"
#include "kernels/hopper/backward_wide.cuh"
#include "kernels/hopper/config.h"
#include "kernels/v2/restore_dv.cuh"

namespace flash_cuda::hopper {

// A warpgroup and its 64 keys. Rows of S^T, dK, dV are keys, so that P^T and dS^T are operands as they lie in
// registers.
template <class Element, class Tile, bool Sums>
class KeyConsumer : BackwardConsumer<Element, Tile> {
  using Base = BackwardConsumer<Element, Tile>;
  using Base::first_key_;
  using Base::maps_;
  using Base::p_;
  using Base::queries_;
  using Base::shared_;
  using Base::warpgroup_;
  using Base::work_;
  using typename Base::Gradient;
  using typename Base::Key;
  using typename Base::Operand;
  using typename Base::Rows;
  using typename Base::Scores;
  using typename Base::Shared;
  static constexpr int kHeadDim = Tile::kHeadDim;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kDqColumns = Tile::kDqColumns;
  // At d 64 the exponentials take as long as half of the products: the second warpgroup begins half a step late.
  static constexpr bool kStaggers = Tile::kSplitsRows;
  static constexpr int kStaggerBarrier = 4;
  // Under a causal mask half of a tile's keys see nothing of its first 64 queries.
  static constexpr bool kPasses = Tile::kBlockM == 64;
  // dS^T goes to shared memory before the products of dV and dK are issued, or beside them.
  static constexpr bool kPutsFirst = Tile::kSplitsRows;

 public:
  __device__ __forceinline__ KeyConsumer(const BackwardParams& p, const BackwardMaps& maps, Shared& shared,
                                         const BackwardNote& note, const int warpgroup)
      : Base(p, maps, shared, note, warpgroup) {}

  __device__ __forceinline__ void run() {
    const Walk<Tile> walk(p_, work_);
    tile::clear<1, kHeadDim / 8>(dk_);
    tile::clear<1, kHeadDim / 8>(dv_);
    QueryStep at = walk.begin();
    if (!walk.is_end(at)) {
      if (this->keys_are_bad(walk)) {
        this->skip(walk);
      } else {
        if (kStaggers && warpgroup_ == 1) ptx::bar_sync(kStaggerBarrier, Tile::kConsumerThreads);
        if (is_unseen(at)) {
          pass<true>(0);
        } else {
          compute<true>(at, 0);
        }
        int before = this->sum_of(at);
        for (at = walk.next(at); !walk.is_end(at); at = walk.next(at)) {
          if (is_unseen(at)) {
            pass<false>(before);
          } else {
            compute<false>(at, before);
          }
          before = this->sum_of(at);
        }
        this->wait_last_ds();
        this->template finish_dq<kDqColumns, Sums>(before);
      }
      BackwardAgain<Element, Tile>(p_, maps_, shared_, work_, warpgroup_).run_if_needed(dk_, dv_);
    }
    this->give_keys_back();
    this->store(p_.dk, p_.dk_strides, dk_, p_.scale);
    this->store(p_.dv, p_.dv_strides, dv_, 1.f);
    if (shared_.again && !walk.all_seen(p_, work_)) v2::restore_dv<Element, Tile>(p_, work_);
  }

 private:
  // A block of queries of one head; dQ of the one before.
  template <bool First>
  __device__ __forceinline__ void compute(const QueryStep& at, const int before) {
    const uint32_t q_tile = this->q_tile(), dout_tile = this->dout_tile();
    const uint32_t own_rows = this->first_row() * Key::kRowBytes;
    Scores s, dp;
    Rows lse, delta;
    queries_.wait_full();
    ptx::wgmma_fence();
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(s[0], this->tile_at(offsetof(Shared, k) + own_rows),
                                                            q_tile);
    ptx::wgmma_commit_group();
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(dp[0], this->tile_at(offsetof(Shared, v) + own_rows),
                                                            dout_tile);
    ptx::wgmma_commit_group();

    this->load_rows(lse, offsetof(Shared, lse));
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_hold(s[0]);
    this->exponentiate(s, lse);
    this->load_rows(delta, offsetof(Shared, delta));
    ptx::wgmma_hold(s[0]);  // the compiler would move the wait up, before the exponentials
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dp[0]);
    this->differentiate(s, dp, delta);
    if (this->is_partial(at)) this->mask(at, s, dp);
    Operand probabilities, ds;
    tile::pack_operand<Element, 1, Tile::kBlockM / 8>(probabilities, s);
    tile::pack_operand<Element, 1, Tile::kBlockM / 8>(ds, dp);

    // Both warpgroups' dS^T of the step before is there, and so the step before that is over for both: of the three
    // blocks, the one that is written next is free.
    if constexpr (!First) this->wait_last_ds();
    if constexpr (kPutsFirst) this->put_ds(ds);
    tile::Accumulator<1, kDqColumns / 8> dq;
    if constexpr (First || !Sums) {
      ptx::wgmma_hold(dk_[0]);
      ptx::wgmma_hold(dv_[0]);
    } else {
      ptx::wgmma_fence();
      this->template multiply_dq<kDqColumns>(dq);
    }
    ptx::wgmma_fence();
    tile::multiply_registers<Element>(dv_[0], probabilities[0], this->dout_tile(), true);
    tile::multiply_registers<Element>(dk_[0], ds[0], this->q_tile(), true);
    ptx::wgmma_commit_group();
    if constexpr (!kPutsFirst) this->put_ds(ds);
    if (First && kStaggers && warpgroup_ == 0) ptx::bar_arrive(kStaggerBarrier, Tile::kConsumerThreads);
    if constexpr (Sums) this->advance_ds();
    if constexpr (Sums && !First) {
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_hold(dq[0]);
      this->template add_dq<kDqColumns>(before, dq);
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dk_[0]);
    ptx::wgmma_hold(dv_[0]);
    this->give_queries_back();
    if constexpr (!Sums) {
      if constexpr (!First) this->template finish_dq<kDqColumns, Sums>(before);
      this->advance_ds();
    }
  }

  // No query of the block sees a key of this warpgroup's.
  __device__ __forceinline__ bool is_unseen(const QueryStep& at) const {
    if constexpr (!kPasses) return false;
    const int row = at.block * Tile::kBlockM;
    return row + Tile::kBlockM <= first_key_ - p_.band.upper || row >= first_key_ + 64 - p_.band.lower;
  }

  // A block of queries that does not see this warpgroup's keys, but the other's: dS^T = 0, and dQ of the one before.
  template <bool First>
  __device__ __forceinline__ void pass(const int before) {
    queries_.wait_full();
    if constexpr (!First) this->wait_last_ds();
    this->put_ds(Operand{});
    if constexpr (!First) this->template finish_dq<kDqColumns, Sums>(before);
    this->advance_ds();
    this->give_queries_back();
  }

  Gradient dk_, dv_;
};

// Sums: dQ is asked for, added in whatever order.
template <class Element, class Tile, bool Sums>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ TileOrder order,
                    const __grid_constant__ BackwardMaps maps, WorkQueue* const queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = BackwardShared<Tile>;
  extern __shared__ unsigned char shared_bytes[];
  auto& shared =
      *reinterpret_cast<Shared*>(shared_bytes + (-ptx::shared_address(shared_bytes) & (kSharedAlignment - 1)));

  if (threadIdx.x == 0) {
    shared.key_barriers.init(Tile::kConsumerThreads);
    shared.query_barriers.init(Tile::kConsumerThreads, BackwardProducer<Tile>::kArrivals);
    for (uint64_t& barrier : shared.score_barriers) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), Tile::kSplitsKeys ? Tile::kWarps : Tile::kWarps / 2);
    }
    if constexpr (!Tile::kSplitsKeys) shared.exchange.barriers.init(128, 128);
    if constexpr (!Sums) BackwardTurns<Tile>::init(shared);
    ptx::mbarrier_init(ptx::shared_address(&shared.again_barrier), 1);
    shared.again_parity = 0;
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&maps.q);
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
    ptx::prefetch_tensormap(&maps.dout);
  }
  __syncthreads();

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same for the whole warp
  if (warp >= Tile::kWarps) {
    ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
    if (warp == Tile::kWarps) BackwardProducer<Tile>::run(p, maps, shared, order, queue);
    if (!Sums && p.turns != nullptr) {
      const WorkTile work = order.tile(ptx::ctaid_x());
      if (threadIdx.x == Tile::kConsumerThreads + 32) BackwardTurns<Tile>::await(p, shared, work);
      if (threadIdx.x == Tile::kConsumerThreads + 64) BackwardTurns<Tile>::pass(p, shared, work);
    }
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    for (tile::RingCursor<1> keys(shared.key_barriers);; keys.advance()) {
      keys.wait_full();
      const BackwardNote note = uniform(shared.note);
      if (note.work.block < 0) break;
      if constexpr (Tile::kSplitsKeys) {
        KeyConsumer<Element, Tile, Sums>(p, maps, shared, note, warp / 4).run();
      } else if (warp < 4) {
        WideConsumer<Element, Tile, Sums, true>(p, maps, shared, note).run();
      } else {
        WideConsumer<Element, Tile, Sums, false>(p, maps, shared, note).run();
      }
    }
  }
#endif
}

}  // namespace flash_cuda::hopper
