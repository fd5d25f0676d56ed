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
template <class Element, class Tile, DqSum Sum>
class KeyConsumer : BackwardConsumer<Element, Tile, Sum> {
  using Base = BackwardConsumer<Element, Tile, Sum>;
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
  // At d 64 the exponentials take as long as half of the products: the second warpgroup begins half a step late, once,
  // and so it stays.
  static constexpr bool kStaggers = Tile::kSplitsRows;
  static constexpr int kStaggerBarrier = 4;
  // Under a causal mask half of a tile's keys see nothing of the first 64 queries. Only of the first head of a group:
  // the compiler does not keep the registers of two kinds of steps in the loop apart.
  static constexpr bool kPasses = Tile::kBlockM == 64;
  // dP^T is issued together with S^T, or when S^T is there.
  static constexpr bool kIssuesTogether = Tile::kSplitsRows && Base::kSums;
  // dS^T goes to shared memory before the products of dV and dK are issued, or beside them.
  static constexpr bool kPutsFirst = Tile::kSplitsRows;

 public:
  __device__ __forceinline__ KeyConsumer(const BackwardParams& p, const BackwardMaps& maps, Shared& shared,
                                         const unsigned tile_number, const BackwardNote& note, const int warpgroup)
      : Base(p, maps, shared, tile_number, note, warpgroup) {}

  __device__ __forceinline__ void run(const BackwardNote& note) {
    const Walk<Tile> walk(p_, work_);
    tile::clear<1, kHeadDim / 8>(dk_);
    tile::clear<1, kHeadDim / 8>(dv_);
    QueryStep at = walk.begin();
    bool has_dq = false;
    int before = 0;
    if (note.again != Again::kNot) {
      BackwardAgain<Element, Tile, Sum>(p_, maps_, shared_, work_, warpgroup_).run(note.again == Again::kAll, dk_, dv_);
    } else if (!walk.is_end(at)) {
      if constexpr (Tile::kValuesApart) this->wait_values(note);
      if (staggers() && warpgroup_ == 1) ptx::bar_sync(kStaggerBarrier, Tile::kConsumerThreads);
      const bool is_only = walk.is_end(walk.next(at));
      if (is_unseen(at)) {
        pass(is_only);
      } else {
        compute<true>(at, 0, is_only);
      }
      before = this->sum_of(at);
      at = walk.next(at);
      has_dq = !this->keys_are_bad(walk);
      if (has_dq) {
        for (; !walk.is_end(at); at = walk.next(at)) {
          compute<false>(at, before, walk.is_end(walk.next(at)));
          before = this->sum_of(at);
        }
      } else {
        if constexpr (Tile::kValuesApart) this->give_values_back_if(!is_only);
        this->skip(walk, at);
      }
      this->list_if_bad(walk,
                        [&] { return has_nonfinite<1, kHeadDim / 8>(dk_) || has_nonfinite<1, kHeadDim / 8>(dv_); });
    }
    // While the other warpgroup may still be at its last step.
    this->store(p_.dk, p_.dk_strides, dk_, p_.scale);
    this->store(p_.dv, p_.dv_strides, dv_, 1.f);
    // Read again rather than kept in a register.
    if (shared_.note[this->key_stage()].again != Again::kNot) v2::restore_dv<Element, Tile>(p_, work_);
    if (has_dq) {
      this->wait_last_ds();
      this->template finish_dq<kDqColumns>(before);
    }
    this->give_keys_back();
  }

 private:
  // A block of queries of one head; dQ of the one before. Last: of the tile.
  template <bool First>
  __device__ __forceinline__ void compute(const QueryStep& at, const int before, const bool is_last) {
    const uint32_t q_tile = this->q_tile(), dout_tile = this->dout_tile();
    const uint32_t own_rows = this->first_row() * Key::kRowBytes;
    Scores s, dp;
    Rows lse2, delta;
    queries_.wait_full();
    this->load_rows(lse2, offsetof(Shared, lse2));
    ptx::wgmma_fence();
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(s[0], this->key_tile(own_rows), q_tile);
    ptx::wgmma_commit_group();
    const auto multiply_dp = [&] {
      tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(dp[0], this->value_tile(own_rows), dout_tile);
      ptx::wgmma_commit_group();
    };
    if constexpr (kIssuesTogether) multiply_dp();
    ptx::wgmma_wait_group<kIssuesTogether ? 1 : 0>();
    ptx::wgmma_hold(s[0]);
    if constexpr (!kIssuesTogether) {
      ptx::wgmma_fence();
      multiply_dp();
    }
    this->exponentiate(s, lse2);
    this->load_rows(delta, offsetof(Shared, delta));
    ptx::wgmma_hold(s[0]);
    // Here, or the compiler would move the wait for dP^T up, before the exponentials.
    if constexpr (!First && kIssuesTogether) this->wait_for_others();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dp[0]);
    if constexpr (Tile::kValuesApart) this->give_values_back_if(is_last);
    this->differentiate(s, dp, delta);
    if (this->is_partial(at)) this->mask(at, s, dp);
    Operand probabilities, ds;
    tile::pack_operand<Element, 1, Tile::kBlockM / 8>(probabilities, s);
    tile::pack_operand<Element, 1, Tile::kBlockM / 8>(ds, dp);

    if constexpr (!First && !kIssuesTogether) this->wait_for_others();
    if constexpr (kPutsFirst) this->put_ds(ds);
    tile::Accumulator<1, kDqColumns / 8> dq;
    if constexpr (First || !Base::kSums) {
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
    if (First && staggers() && warpgroup_ == 0) ptx::bar_arrive(kStaggerBarrier, Tile::kConsumerThreads);
    this->advance_ds();
    if constexpr (Base::kSums && !First) {
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_hold(dq[0]);
      this->template add_dq<kDqColumns>(before, dq);
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dk_[0]);
    ptx::wgmma_hold(dv_[0]);
    this->give_queries_back();
  }

  __device__ __forceinline__ bool staggers() const { return kStaggers && this->tile_number_ == 0; }

  // No query of the block sees a key of this warpgroup's.
  __device__ __forceinline__ bool is_unseen(const QueryStep& at) const {
    if constexpr (!kPasses) return false;
    const int row = at.block * Tile::kBlockM;
    return row + Tile::kBlockM <= first_key_ - p_.band.upper || row >= first_key_ + 64 - p_.band.lower;
  }

  // The first block of queries, which does not see this warpgroup's keys, but the other's: dS^T = 0.
  __device__ __forceinline__ void pass(const bool is_last) {
    queries_.wait_full();
    if constexpr (Tile::kValuesApart) this->give_values_back_if(is_last);
    this->put_ds(Operand{});
    this->advance_ds();
    this->give_queries_back();
  }

  Gradient dk_, dv_;
};

template <class Element, class Tile, DqSum Sum>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ TileOrder order,
                    const __grid_constant__ BackwardMaps maps, WorkQueue* const queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = BackwardShared<Tile>;
  constexpr int kChecks = Sum == DqSum::kInOrder ? 1 : 3;  // warps that look at the keys
  extern __shared__ __align__(kSharedAlignment) unsigned char backward_shared[];
  auto& shared = *reinterpret_cast<Shared*>(backward_shared);

  if (threadIdx.x == 0) {
    shared.key_barriers.init(Tile::kConsumerThreads + 32 * kChecks);
    shared.value_barriers.init(Tile::kConsumerThreads);
    for (uint64_t& barrier : shared.checked_barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), kChecks);
    for (uint32_t& bad : shared.bad_keys) bad = 0;
    shared.again.count = 0;
    shared.query_barriers.init(Tile::kConsumerThreads, BackwardProducer<Tile>::kArrivals);
    for (uint64_t& barrier : shared.score_barriers) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), Tile::kSplitsKeys ? Tile::kWarps : Tile::kWarps / 2);
    }
    if constexpr (!Tile::kSplitsKeys) shared.exchange.barriers.init(128, 128);
    if constexpr (Sum == DqSum::kInOrder) BackwardTurns<Tile>::init(shared);
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
    if (warp > Tile::kWarps && warp <= Tile::kWarps + kChecks) {
      check_keys<Element, Tile>(p, shared, warp - Tile::kWarps - 1, kChecks);
    }
    if constexpr (Sum == DqSum::kInOrder) {
      const WorkTile work = order.tile(ptx::ctaid_x());
      if (threadIdx.x == Tile::kConsumerThreads + 2 * 32) BackwardTurns<Tile>::await(p, shared, work);
      if (threadIdx.x == Tile::kConsumerThreads + 3 * 32) BackwardTurns<Tile>::pass(p, shared, work);
    }
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    for (unsigned number = 0;; ++number) {
      const tile::RingCursor<Tile::kKeyStages> keys(shared.key_barriers, number);
      keys.wait_full();
      const BackwardNote note = uniform(shared.note[keys.stage()]);
      if (note.work.block < 0) break;
      if constexpr (Tile::kSplitsKeys) {
        KeyConsumer<Element, Tile, Sum>(p, maps, shared, number, note, warp / 4).run(note);
      } else if (warp < 4) {
        WideConsumer<Element, Tile, Sum, true>(p, maps, shared, number, note).run(note);
      } else {
        WideConsumer<Element, Tile, Sum, false>(p, maps, shared, number, note).run(note);
      }
    }
  }
#endif
}

}  // namespace flash_cuda::hopper
