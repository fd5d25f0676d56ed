// The slow way for tiles with a row whose first result is not to be used: P left the range of float32
// (InterleavedSoftmax), or a NaN or an infinity came out where a row does not see all keys of a block, so that it may
// stem from a value that the row must not see: P = 0 does not stop 0 * NaN.
//
// The same arithmetic in the same order, so that rows without such trouble get the same bits, but one load, product and
// softmax after the other; and such values are taken out of V, and added to the rows that do see them at the end.
// Nothing is remembered on the way: the marks of this thread block are looked up in lse after its last tile.
#pragma once

#include <climits>
#include <cstdint>

#include "attention/interleaved_softmax.cuh"
#include "attention/mask.cuh"
#include "attention/nonfinite.cuh"
#include "kernels/hopper/forward_loads.cuh"
#include "kernels/hopper/output.cuh"
#include "ptx/barrier.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace flash_cuda::hopper {

template <class Element, class Tile>
class Recompute {
  using Query = typename ForwardShared<Tile>::Query;
  using Key = typename ForwardShared<Tile>::Key;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kThreads = Tile::kConsumerThreads;

 public:
  __device__ __forceinline__ Recompute(const ForwardParams& p, const ForwardMaps& maps, ForwardShared<Tile>& shared)
      : p_(p), maps_(maps), shared_(shared) {}

  // All consumers, each warp with whether it has left a mark.
  __device__ __forceinline__ void run(const bool marked) {
    if (marked && threadIdx.x % 32 == 0) shared_.marked = 1;
    sync();
    if (shared_.marked == 0) return;
    const int tiles = row_tiles<Tile>(p_);
    for (int first = 0; first < tiles; first += kThreads) {
      if (threadIdx.x == 0) shared_.found = INT_MAX;
      sync();
      const int index = first + int(threadIdx.x);
      if (index < tiles && has_mark(row_tile<Tile>(p_, index))) atomicMin(&shared_.found, index);
      sync();
      const int found = shared_.found;
      sync();
      if (found == INT_MAX) continue;
      compute(row_tile<Tile>(p_, found));
      first = found + 1 - kThreads;
    }
  }

 private:
  __device__ __forceinline__ static void sync() { ptx::bar_sync(1, kThreads); }

  __device__ __forceinline__ bool has_mark(const RowTile& tile) const {
    const int last = min_of(tile.row_begin + Tile::kBlockM, p_.shape.seqlen_q);
    bool found = false;
    for (int row = tile.row_begin; row < last; row += 16) {
      found |= __float_as_uint(*lse_row(p_, tile, row)) == __float_as_uint(recompute_mark());
    }
    return found;
  }

  // One thread: a block of K and V, the first one with Q.
  __device__ __forceinline__ void load(const RowTile& tile, const int block, const bool first) const {
    const uint32_t barrier = ptx::shared_address(&shared_.recompute_barrier);
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * Key::kBytes + (first ? Tile::kWarpgroups * Query::kBytes : 0));
    const int kv_head = tile.head / maps_.group;
    for (int panel = 0; panel < Key::kCount; ++panel) {
      load_panel<Key>(shared_.k[0], panel, &maps_.k, barrier, block * kBlockN, kv_head, tile.batch);
      load_panel<Key>(shared_.v[0], panel, &maps_.v, barrier, block * kBlockN, kv_head, tile.batch);
    }
    for (int i = 0; first && i < Tile::kWarpgroups * Query::kCount; ++i) {
      const int warpgroup = i / Query::kCount;
      load_panel<Query>(shared_.q[warpgroup], i % Query::kCount, &maps_.q, barrier, tile.row_begin + 64 * warpgroup,
                        tile.head, tile.batch);
    }
  }

  // Some row of the tile does not see all of the block.
  __device__ __forceinline__ bool is_partial(const RowTile& tile, const int block) const {
    return !p_.band.covers(tile.row_begin, min_of(tile.row_begin + Tile::kBlockM, p_.shape.seqlen_q), block * kBlockN,
                           min_of((block + 1) * kBlockN, p_.shape.seqlen_k), p_.shape.seqlen_k);
  }

  __device__ __forceinline__ void take_nonfinite_out() const {
    const uint32_t v = ptx::shared_address(shared_.v[0]);
#pragma unroll 1
    for (int i = threadIdx.x; i < Key::kBytes / 16; i += kThreads) {
      ptx::st_shared_v4(v + 16 * i, without_nonfinite<Element>(ptx::ld_shared_v4(v + 16 * i)));
    }
    ptx::fence_proxy_async();
    sync();
  }

  __device__ __forceinline__ void compute(const RowTile& tile) {
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int warp_row = threadIdx.x % 128 / 32 * 16;
    const RowTile mine{tile.row_begin + 64 * warpgroup, tile.head, tile.batch};
    const BlockRange keys = key_blocks<Tile>(p_, tile.row_begin);
    tile::Accumulator<1, kBlockN / 8> s;
    tile::Accumulator<1, Tile::kHeadDim / 8> o;
    InterleavedSoftmax softmax(p_.scale * kLog2e);
    softmax.clear();
    tile::clear<1, Tile::kHeadDim / 8>(o);
#pragma unroll 1
    for (int block = keys.end - 1; block >= keys.begin; --block) {
      if (threadIdx.x == 0) load(tile, block, block == keys.end - 1);
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared_.recompute_barrier), parity_);
      parity_ ^= 1;

      ptx::wgmma_fence();
      tile::multiply_rows_by_rows<Element, Tile::kHeadDim>(s[0], ptx::shared_address(shared_.q[warpgroup]),
                                                           ptx::shared_address(shared_.k[0]));
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_hold(s[0]);
      mask_sides<64>(s[0], p_.band, mine.row_begin, warp_row, block * kBlockN, p_.shape.seqlen_k);
      softmax.begin(s);
      tile::scale_half(o, 0, softmax.make_room(s));
      softmax.first_grew(s);
      softmax.second_grew(s);
      softmax.exponentials(s, 0);
      const float first = softmax.follow_first();
      tile::scale_half(o, 0, first);
      tile::scale_half(o, 1, softmax.follow_second());
      softmax.exponents(s, 1);
      softmax.exponentials(s, 1);
      softmax.add_block();
      uint32_t probabilities[1][kBlockN / 16][4];
      tile::pack_operand_scaled<Element>(probabilities[0], s, first);

      if (is_partial(tile, block)) take_nonfinite_out();
      ptx::wgmma_hold(o[0]);
      ptx::wgmma_fence();
      tile::multiply_registers<Element>(o[0], probabilities[0], ptx::shared_address(shared_.v[0]), true);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_hold(o[0]);
      sync();  // K and V are read, the next ones may come
    }
    store_output<Element>(p_, mine, o, softmax, Mark::kNothing);

    __syncwarp();
    const auto* v = static_cast<const Element*>(p_.v) + tile.batch * p_.v_strides.batch +
                    int64_t{tile.head / maps_.group} * p_.v_strides.head;
    const int row = mine.row_begin + warp_row;
#pragma unroll 1
    for (int block = keys.begin; block < keys.end; ++block) {
      if (!is_partial(tile, block)) continue;
      restore_nonfinite(output_row<Element>(p_, tile, 0), p_.out_strides.row, v, p_.v_strides.row, p_.band, row,
                        min_of(row + 16, p_.shape.seqlen_q), block * kBlockN,
                        min_of((block + 1) * kBlockN, p_.shape.seqlen_k), p_.shape.head_dim);
    }
  }

  const ForwardParams& p_;
  const ForwardMaps& maps_;
  ForwardShared<Tile>& shared_;
  uint32_t parity_ = 0;
};

}  // namespace flash_cuda::hopper
