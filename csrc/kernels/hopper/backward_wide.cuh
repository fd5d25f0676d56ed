// The consumers of backward.cuh where the registers of two warpgroups hold dK and dV of 64 keys only (and head dim 96,
// whose columns two warpgroups of 64 keys could not share):
//
//   the first warpgroup                                   the second
//     S^T = K Q^T; P^T = exp(S^T - lse)                     dP^T = V dO^T
//                          P^T, float32, through shared memory
//                                                           dS^T = P^T * (dP^T - D)
//     dQ_i-1 += dS_i-1 K, its first columns                 dQ_i-1, the others
//     dV += P^T dO                                          dK += dS^T Q
//
// Against halves of the queries for each this reads K and V half as often from shared memory, and P^T and dS^T are
// still operands as they lie in registers. The first runs up to a step ahead.
#pragma once

#include "kernels/hopper/backward_again.cuh"
#include "kernels/hopper/backward_consumer.cuh"
#include "kernels/hopper/config.h"
#include "kernels/v2/restore_dv.cuh"

namespace flash_cuda::hopper {

template <class Element, class Tile, DqSum Sum, bool OwnsDv>
class WideConsumer : BackwardConsumer<Element, Tile, Sum> {
  using Base = BackwardConsumer<Element, Tile, Sum>;
  using Base::maps_;
  using Base::p_;
  using Base::queries_;
  using Base::shared_;
  using Base::work_;
  using typename Base::Gradient;
  using typename Base::Operand;
  using typename Base::Rows;
  using typename Base::Scores;
  using typename Base::Shared;
  static constexpr int kHeadDim = Tile::kHeadDim;
  static constexpr int kQueryTiles = Tile::kBlockM / 8;
  static constexpr int kDqColumns = OwnsDv ? Tile::kDqColumns : kHeadDim - Tile::kDqColumns;

 public:
  __device__ __forceinline__ WideConsumer(const BackwardParams& p, const BackwardMaps& maps, Shared& shared,
                                          const unsigned tile_number, const BackwardNote& note)
      : Base(p, maps, shared, tile_number, note, OwnsDv ? 0 : 1),
        exchange_(shared.exchange.barriers, note.steps_before) {}

  __device__ __forceinline__ void run(const BackwardNote& note) {
    const Walk<Tile> walk(p_, work_);
    tile::clear<1, kHeadDim / 8>(gradient_);
    QueryStep at = walk.begin();
    if (note.again != Again::kNot) {
      BackwardAgain<Element, Tile, Sum, !OwnsDv, OwnsDv>(p_, maps_, shared_, work_, OwnsDv ? 0 : 1)
          .run(note.again == Again::kAll, gradient_, gradient_);
    } else if (!walk.is_end(at)) {
      compute<true>(at, 0);
      int before = this->sum_of(at);
      at = walk.next(at);
      if (this->keys_are_bad(walk)) {
        for (QueryStep skipped = at; !walk.is_end(skipped); skipped = walk.next(skipped)) pass_exchange();
        this->skip(walk, at);
      } else {
        for (; !walk.is_end(at); at = walk.next(at)) {
          compute<false>(at, before);
          before = this->sum_of(at);
        }
        this->wait_last_ds();
        this->template finish_dq<kDqColumns>(before);
      }
      this->list_if_bad(walk, [&] { return has_nonfinite<1, kHeadDim / 8>(gradient_); });
    }
    this->give_keys_back();
    this->store(OwnsDv ? p_.dv : p_.dk, OwnsDv ? p_.dv_strides : p_.dk_strides, gradient_, OwnsDv ? 1.f : p_.scale);
    if (OwnsDv && note.again != Again::kNot) v2::restore_dv<Element, Tile>(p_, work_);
  }

 private:
  // A block of queries of one head; dQ of the one before.
  template <bool First>
  __device__ __forceinline__ void compute(const QueryStep& at, const int before) {
    const uint32_t q_tile = this->q_tile(), dout_tile = this->dout_tile();
    Scores s;  // S^T or dP^T
    Rows rows;
    queries_.wait_full();
    ptx::wgmma_fence();
    tile::multiply_rows_by_rows<Element, kHeadDim>(s[0], OwnsDv ? this->key_tile() : this->value_tile(),
                                                   OwnsDv ? q_tile : dout_tile);
    ptx::wgmma_commit_group();
    this->load_rows(rows, OwnsDv ? offsetof(Shared, lse2) : offsetof(Shared, delta));
    if constexpr (OwnsDv) {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_hold(s[0]);
      this->exponentiate(s, rows);
      if (this->is_partial(at)) this->mask(at, s);
      give(s);
    } else {
      Scores p;
      take(p);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_hold(s[0]);
      this->differentiate(p, s, rows);
      if (this->is_partial(at)) this->mask(at, s);
    }
    exchange_.advance();
    Operand operand;
    tile::pack_operand<Element, 1, kQueryTiles>(operand, s);

    if constexpr (!First) this->wait_for_others();
    tile::Accumulator<1, kDqColumns / 8> dq;
    if constexpr (First || !Base::kSums) {
      ptx::wgmma_hold(gradient_[0]);
    } else {
      ptx::wgmma_fence();
      this->template multiply_dq<kDqColumns>(dq);
    }
    ptx::wgmma_fence();
    tile::multiply_registers<Element>(gradient_[0], operand[0], OwnsDv ? dout_tile : q_tile, true);
    ptx::wgmma_commit_group();
    // Into the block whose dQ the other has finished: it has given P^T of this step since.
    if constexpr (!OwnsDv) {
      this->put_ds(operand);
    }
    this->advance_ds();
    if constexpr (Base::kSums && !First) {
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_hold(dq[0]);
      this->template add_dq<kDqColumns>(before, dq);
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(gradient_[0]);
    this->give_queries_back();
  }

  // As each step does, with nothing exchanged.
  __device__ __forceinline__ void pass_exchange() {
    if constexpr (OwnsDv) {
      exchange_.wait_empty();
      ptx::mbarrier_arrive(exchange_.full());
    } else {
      exchange_.wait_full();
      ptx::mbarrier_arrive(exchange_.empty());
    }
    exchange_.advance();
  }

  // P^T from a thread to its twin in the other warpgroup, which holds the same elements.
  __device__ __forceinline__ uint32_t slot(const int n) const {
    return ptx::shared_address(&shared_.exchange.p[n][threadIdx.x % 128]);
  }
  __device__ __forceinline__ void give(const Scores& p) const {
    exchange_.wait_empty();
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) ptx::st_shared_v4_f32(slot(n), p[0][n]);
    ptx::mbarrier_arrive(exchange_.full());
  }
  __device__ __forceinline__ void take(Scores& p) const {
    exchange_.wait_full();
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) ptx::ld_shared_v4_f32(p[0][n], slot(n));
    ptx::mbarrier_arrive(exchange_.empty());
  }

  tile::RingCursor<1> exchange_;
  Gradient gradient_;
};

}  // namespace flash_cuda::hopper
