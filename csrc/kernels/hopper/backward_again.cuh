// The slow way for blocks of keys where a NaN or an infinity would reach what must not see it: P = 0 and dS = 0 do not
// stop 0 * NaN. Taken where some query does not see some key, and dK or dV came out with one, which may stem from a
// query or dO that must not reach the key; or where K holds one, which must not reach the dQ of other rows.
//
// Such tiles are listed and come once more when no other is under way: so the warpgroups, which have no other reason
// to, need not wait for each other at the end of each tile.
//
// The same products in the same order, so that what has no such trouble gets the same bits, but one after the other; Q,
// dO and K lose such values between the scores and the products with dS^T, P^T and dS. Keys that see such a query have
// a NaN in dS^T, queries that see such a key in dS; those of dO are added to the dV of the keys that see them at the
// end.
#pragma once

#include <cstdint>

#include "kernels/hopper/backward_consumer.cuh"

namespace flash_cuda::hopper {

// By all consumers. OwnsDk, OwnsDv: which gradients this warpgroup has in registers.
template <class Element, class Tile, DqSum Sum, bool OwnsDk = true, bool OwnsDv = true>
class BackwardAgain : BackwardConsumer<Element, Tile, Sum> {
  using Base = BackwardConsumer<Element, Tile, Sum>;
  using Base::maps_;
  using Base::p_;
  using Base::shared_;
  using Base::work_;
  using typename Base::Gradient;
  using typename Base::Key;
  using typename Base::Operand;
  using typename Base::Query;
  using typename Base::Rows;
  using typename Base::Scores;
  using typename Base::Shared;
  static constexpr int kHeadDim = Tile::kHeadDim;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kThreads = Tile::kConsumerThreads;
  static constexpr int kDqColumns = OwnsDv ? Tile::kDqColumns : kHeadDim - Tile::kDqColumns;

 public:
  __device__ __forceinline__ BackwardAgain(const BackwardParams& p, const BackwardMaps& maps, Shared& shared,
                                           const WorkTile& work, const int warpgroup)
      : Base(p, maps, shared, 0, {work, 0, 0, Again::kNot}, warpgroup) {}

  // v2::restore_dv() must follow the store of dV.
  __device__ __forceinline__ void run(const bool sums, Gradient& dk, Gradient& dv) {
    const Walk<Tile> walk(p_, work_);
    if (Base::kSums && sums) {
#pragma unroll 1
      for (QueryStep at = walk.begin(); !walk.is_end(at); at = walk.next(at)) add_dq(at);
    }
    if constexpr (OwnsDk) tile::clear<1, kHeadDim / 8>(dk);
    if constexpr (OwnsDv) tile::clear<1, kHeadDim / 8>(dv);
#pragma unroll 1
    for (QueryStep at = walk.begin(); !walk.is_end(at); at = walk.next(at)) add_gradients(at, dk, dv);
    sync();
  }

 private:
  __device__ __forceinline__ static void sync() { ptx::bar_sync(1, kThreads); }

  // Some query of the block does not see some key of the thread block's.
  __device__ __forceinline__ bool hides_keys(const QueryStep& at) const {
    return !p_.band.covers(at.block * kBlockM, min_of((at.block + 1) * kBlockM, p_.shape.seqlen_q),
                           work_.block * kBlockN, (work_.block + 1) * kBlockN, p_.shape.seqlen_k);
  }

  __device__ __forceinline__ void load(const QueryStep& at) const {
    const int row = at.block * kBlockM;
    if (ptx::tid_x() == 0) {
      const uint32_t barrier = ptx::shared_address(&shared_.again_barrier);
      ptx::mbarrier_arrive_expect_tx(barrier, 2 * Query::kBytes + 2 * Key::kBytes);
      load_tile<Query>(shared_.q[0], &maps_.q, barrier, row, at.head, work_.batch);
      load_tile<Query>(shared_.dout[0], &maps_.dout, barrier, row, at.head, work_.batch);
      load_tile<Key>(shared_.k[0], &maps_.k, barrier, work_.block * kBlockN, work_.head, work_.batch);
      load_tile<Key>(shared_.v[0], &maps_.v, barrier, work_.block * kBlockN, work_.head, work_.batch);
    }
    const int64_t first = p_.shape.row_index(work_.batch, at.head, row);
    for (int i = ptx::tid_x(); i < kBlockM; i += kThreads) {
      shared_.lse2[0][i] = row + i < p_.shape.seqlen_q ? p_.lse[first + i] * kLog2e : 0.f;
      shared_.delta[0][i] = row + i < p_.shape.seqlen_q ? p_.row_delta[first + i] : 0.f;
    }
  }

  __device__ __forceinline__ static void take_nonfinite_out(unsigned char* const tile, const int bytes) {
    const uint32_t address = ptx::shared_address(tile);
    copy_finite<Element>(address, address, bytes, ptx::tid_x(), kThreads);
  }

  // P^T and dS^T of a block of queries, as operands.
  __device__ __forceinline__ void compute(const QueryStep& at, Operand& probabilities, Operand& ds) {
    sync();  // the block before is done with
    load(at);
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared_.again_barrier), shared_.again_parity);
    sync();
    if (ptx::tid_x() == 0) shared_.again_parity ^= 1;  // read again after the next barrier
    const uint32_t own_rows = this->first_row() * Key::kRowBytes;
    Scores s, dp;
    Rows rows;
    ptx::wgmma_fence();
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(s[0], this->key_tile(own_rows), this->q_tile());
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(s[0]);
    this->load_rows(rows, offsetof(Shared, lse2));
    this->exponentiate(s, rows);
    ptx::wgmma_fence();
    tile::multiply_rows_by_rows<Element, kHeadDim, kBlockN>(dp[0], this->value_tile(own_rows), this->dout_tile());
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dp[0]);
    this->load_rows(rows, offsetof(Shared, delta));
    this->differentiate(s, dp, rows);
    this->mask(at, s, dp);
    tile::pack_operand<Element, 1, kBlockM / 8>(probabilities, s);
    tile::pack_operand<Element, 1, kBlockM / 8>(ds, dp);
  }

  __device__ __forceinline__ void add_gradients(const QueryStep& at, Gradient& dk, Gradient& dv) {
    Operand probabilities, ds;
    compute(at, probabilities, ds);
    sync();  // the scores no longer need Q and dO
    if (hides_keys(at)) {
      take_nonfinite_out(shared_.q[0], Query::kBytes);
      take_nonfinite_out(shared_.dout[0], Query::kBytes);
    }
    ptx::fence_proxy_async();
    sync();
    if constexpr (OwnsDk) ptx::wgmma_hold(dk[0]);
    if constexpr (OwnsDv) ptx::wgmma_hold(dv[0]);
    ptx::wgmma_fence();
    if constexpr (OwnsDv) tile::multiply_registers<Element>(dv[0], probabilities[0], this->dout_tile(), true);
    if constexpr (OwnsDk) tile::multiply_registers<Element>(dk[0], ds[0], this->q_tile(), true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    if constexpr (OwnsDk) ptx::wgmma_hold(dk[0]);
    if constexpr (OwnsDv) ptx::wgmma_hold(dv[0]);
  }

  __device__ __forceinline__ void add_dq(const QueryStep& at) {
    Operand probabilities, ds;
    compute(at, probabilities, ds);
    if constexpr (OwnsDk) this->store_ds(ds);
    this->advance_ds();  // to the block behind the one that dS^T is in
    sync();              // the scores no longer need K
    take_nonfinite_out(shared_.k[0], Key::kBytes);
    ptx::fence_proxy_async();
    sync();
    tile::Accumulator<1, kDqColumns / 8> dq;
    ptx::wgmma_fence();
    this->template multiply_dq<kDqColumns>(dq);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_hold(dq[0]);
    this->wait_turn();
    Base::template add_dq<kDqColumns>(this->sum_of(at), dq);
  }
};

}  // namespace flash_cuda::hopper
