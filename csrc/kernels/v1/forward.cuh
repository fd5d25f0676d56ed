// FlashAttention v1 forward (Dao et al. 2022, Algorithm 1) on mma.sync, for sm_80 and later.
//
//   for each block of keys K_j, values V_j                     one thread block for each (batch, head), which does it
//   all
//     for each strip of queries Q_i in the band
//       load O_i, l_i, m_i                                     from global memory, float32
//       S = Q_i K_j^T;  m~ = rowmax S;  P~ = exp(S - m~);  l~ = rowsum P~
//       m = max(m_i, m~);  l = e^(m_i - m) l_i + e^(m~ - m) l~
//       O_i = (l_i e^(m_i - m) O_i + e^(m~ - m) P~ V_j) / l    normalised in every step ("eager")
//       store O_i, l, m                                        the last time O_i and lse_i as results
//
// The step itself is `Warps`: v1's warps divide the keys (SplitK), and the lab puts SplitQ there. `Normalisation` is
// v1's Eager or the lab's Deferred. Block sizes are those of the paper (attention/tile_plan.h).
//
// K_j and V_j stay in shared memory while strips of queries stream past, through a ring of as many strips as a block of
// B_r rows has.
#pragma once

#include <cstdint>

#include "attention/nonfinite.cuh"
#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/lab/row_state.cuh"
#include "kernels/lab/team.cuh"
#include "ptx/registers.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"

namespace flash_cuda::v1 {

template <class Tile, class Warps>
struct ForwardShared {
  static constexpr int kSlots = Tile::kRows / Warps::kStripRows / Warps::kTeams;
  tile::SharedTile<Tile::kColumns, Tile::kHeadDim> k;
  tile::SharedTile<Tile::kColumns, Tile::kHeadDim> v;
  tile::SharedTile<Warps::kStripRows, Tile::kHeadDim> q[Warps::kTeams][kSlots];
  unsigned char exchange[Warps::kTeams][Warps::kSharedBytes];
};

// The head of this thread block. Where its rows start is computed where it is needed, and not kept in registers.
template <class Element, class Tile, class Warps>
struct ForwardHead {
  const KvOuterForwardParams& p;
  WorkTile work;

  static constexpr int kStripRows = Warps::kStripRows;

  __device__ const Element* q() const { return rows(static_cast<const Element*>(p.q), p.q_strides, work.head); }
  __device__ const Element* k() const {
    return rows(static_cast<const Element*>(p.k), p.k_strides, work.head / p.shape.group());
  }
  __device__ const Element* v() const {
    return rows(static_cast<const Element*>(p.v), p.v_strides, work.head / p.shape.group());
  }
  __device__ Element* out() const { return rows(static_cast<Element*>(p.out), p.out_strides, work.head); }
  __device__ float* lse() const { return p.lse + index() * p.shape.seqlen_q; }
  __device__ int strips() const { return (p.shape.seqlen_q + kStripRows - 1) / kStripRows; }
  __device__ float* row_sums(const int strip) const {
    return p.row_sums + (index() * strips() + strip) * (kStripRows * Tile::kHeadDim);
  }
  __device__ float* row_stats(const int strip) const {
    return p.row_stats + (index() * strips() + strip) * (kStripRows * 2);
  }
  __device__ int row_end(const int strip) const { return min_of((strip + 1) * kStripRows, p.shape.seqlen_q); }
  // Blocks of keys that a strip sees something of.
  __device__ BlockRange key_blocks(const int strip) const {
    return p.band.key_blocks(strip * kStripRows, row_end(strip), p.shape.seqlen_k, Tile::kColumns);
  }
  __device__ bool covers(const int strip, const int key) const {
    return p.band.covers(strip * kStripRows, row_end(strip), key, key + Tile::kColumns, p.shape.seqlen_k);
  }

 private:
  __device__ int64_t index() const { return int64_t{work.batch} * p.shape.heads_q + work.head; }
  template <class T>
  __device__ T* rows(T* tensor, const Strides& s, const int head) const {
    return tensor + work.batch * s.batch + head * s.head;
  }
};

// Rows that see no key at all are in no step: O = 0, lse = -inf.
template <class Head>
__device__ void clear_unseen(const Head& head) {
  const auto& p = head.p;
  for (int strip = 0; strip < head.strips(); ++strip) {
    const BlockRange blocks = head.key_blocks(strip);
    if (blocks.begin < blocks.end) continue;
    for (int row = strip * Head::kStripRows; row < head.row_end(strip); ++row) {
      for (int c = threadIdx.x * tile::kChunkElements; c < p.shape.head_dim; c += blockDim.x * tile::kChunkElements) {
        *reinterpret_cast<uint4*>(head.out() + row * p.out_strides.row + c) = uint4{0, 0, 0, 0};
      }
      if (threadIdx.x == 0) head.lse()[row] = -INFINITY;
    }
  }
}

// The NaNs and infinities of values that were left out of the products, to the rows that see them.
template <class Element, class Tile, class Warps>
__device__ void restore_output(const ForwardHead<Element, Tile, Warps>& head) {
  const auto& p = head.p;
  __syncthreads();  // the rows were written by other warps
  for (int strip = threadIdx.x / 32; strip < head.strips(); strip += Warps::kThreads / 32) {
    const BlockRange blocks = head.key_blocks(strip);
    for (int block = blocks.begin; block < blocks.end; ++block) {
      const int key = block * Tile::kColumns;
      if (head.covers(strip, key)) continue;
      restore_nonfinite(head.out(), p.out_strides.row, head.v(), p.v_strides.row, p.band, strip * head.kStripRows,
                        head.row_end(strip), key, min_of(key + Tile::kColumns, p.shape.seqlen_k), p.shape.head_dim);
    }
  }
}

// Which strips of a block of keys to do: all, or in two passes those that see it whole and those that see a part of it.
enum class Strips { kAll, kWhole, kPart };

// The strips of a block of keys, dealt out to the teams in turn. K_j and V_j have been requested.
template <Strips Which, class Normalisation, class Element, class Tile, class Warps>
__device__ __forceinline__ void attend_strips(const ForwardHead<Element, Tile, Warps>& head,
                                              ForwardShared<Tile, Warps>& shared, const int block,
                                              const BlockRange strips) {
  constexpr int kSlots = ForwardShared<Tile, Warps>::kSlots;
  constexpr int kRows = Warps::kStripRows;
  const KvOuterForwardParams& p = head.p;
  const lab::Team<Warps> team;
  const tile::TileCopy<kRows, Tile::kHeadDim, team.kThreads> copy(team.thread, p.q_strides.row, p.shape.head_dim);
  const Element* q = head.q() + copy.offset();
  const auto request = [&](const int strip, const int slot) {
    const int row = strip * kRows;
    if (strip < strips.end) {
      copy.load_async(ptx::shared_address(&shared.q[team.index][slot]), q + row * p.q_strides.row,
                      p.shape.seqlen_q - row);
    }
    ptx::cp_async_commit_group();
  };
  const float scale_log2 = p.scale * kLog2e;
  Warps warps(team, ptx::shared_address(&shared.exchange[team.index]), scale_log2);

#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) request(strips.begin + team.index + slot * Warps::kTeams, slot);
  ptx::cp_async_wait_group<kSlots - 1>();
  __syncthreads();  // K_j and V_j are there
  int slot = 0;
  for (int strip = strips.begin + team.index; strip < strips.end; strip += Warps::kTeams) {
    const int row = strip * kRows;
    const BlockRange blocks = head.key_blocks(strip);
    const auto request_next = [&] {
      request(strip + kSlots * Warps::kTeams, slot);
      slot = slot + 1 == kSlots ? 0 : slot + 1;
    };
    ptx::cp_async_wait_group<kSlots - 1>();
    team.sync();  // Q_i is there
    if (Which != Strips::kAll && head.covers(strip, block * Tile::kColumns) != (Which == Strips::kWhole)) {
      team.sync();
      request_next();
      continue;
    }
    typename Warps::State state;
    const auto load_state = [&] {
      if (block == blocks.begin) {
        state.clear();
      } else {
        state.load(head.row_sums(strip), head.row_stats(strip), team.warp);
      }
    };
    const auto step = [&](auto&& values_needed, auto&& queries_read) {
      warps.step(
          state, ptx::shared_address(&shared.k), ptx::shared_address(&shared.v), p.band, row, block * Tile::kColumns,
          p.shape.seqlen_k, [] {}, values_needed, queries_read);
    };
    warps.take_queries(ptx::shared_address(&shared.q[team.index][slot]));
    if constexpr (Warps::kTakesQueries) {
      load_state();
      team.sync();  // no warp reads Q_i any more
      request_next();
      step([] {}, [] {});
    } else {
      // The state is added to after P V: it is on its way during that product, and not in registers beside the scores.
      step(load_state, request_next);
    }
    if (block + 1 < blocks.end) {
      state.store(head.row_sums(strip), head.row_stats(strip), team.warp);
    } else {
      state.template store_output<Normalisation>(head.out() + row * p.out_strides.row, p.out_strides.row,
                                                 head.lse() + row, p.shape.head_dim, p.shape.seqlen_q - row, scale_log2,
                                                 warps.staging(), team.warp);
    }
  }
  ptx::cp_async_wait_group<0>();
}

// The strips that see something of a block of keys.
template <class Tile, class Head>
__device__ __forceinline__ BlockRange strips_of(const Head& head, const int block) {
  const int key = block * Tile::kColumns;
  return head.p.band.query_blocks(key, min_of(key + Tile::kColumns, head.p.shape.seqlen_k), head.p.shape.seqlen_q,
                                  Head::kStripRows);
}

// Starts the copies of K_j and V_j.
template <class Element, class Tile, class Warps>
__device__ __forceinline__ void request_block(const ForwardHead<Element, Tile, Warps>& head,
                                              ForwardShared<Tile, Warps>& shared, const int block) {
  const auto& p = head.p;
  const int key = block * Tile::kColumns;
  const auto request = [&](auto& shared_tile, const Element* rows, const int64_t stride) {
    const tile::TileCopy<Tile::kColumns, Tile::kHeadDim, Warps::kThreads> copy(threadIdx.x, stride, p.shape.head_dim);
    copy.load_async(ptx::shared_address(&shared_tile), rows + copy.offset() + key * stride, p.shape.seqlen_k - key);
  };
  __syncthreads();  // K_{j-1} and V_{j-1} are no longer read
  request(shared.k, head.k(), p.k_strides.row);
  request(shared.v, head.v(), p.v_strides.row);
  ptx::cp_async_commit_group();
}

// Whether V_j holds a NaN or an infinity and some row sees the block only in part: P = 0 does not stop 0 * NaN.
template <class Element, class Tile, class Warps>
__device__ __forceinline__ bool needs_care(const ForwardHead<Element, Tile, Warps>& head,
                                           const ForwardShared<Tile, Warps>& shared, const int block,
                                           const BlockRange strips) {
  const int key = block * Tile::kColumns;
  if (head.p.band.covers(strips.begin * head.kStripRows, head.row_end(strips.end - 1), key, key + Tile::kColumns,
                         head.p.shape.seqlen_k)) {
    return false;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  return has_nonfinite<Element, Tile::kColumns, Tile::kHeadDim, Warps::kThreads>(ptx::shared_address(&shared.v));
}

// The blocks of keys from `first_block` on, with care: strips that see a block only in part do without the NaNs and
// infinities of V, and get those that they see at the end. Not inlined: rare, and not to cost the other way registers.
template <class Normalisation, class Element, class Tile, class Warps>
__device__ __noinline__ void attend_with_care(const KvOuterForwardParams& p, const TileOrder& order,
                                              ForwardShared<Tile, Warps>& shared, const int first_block) {
  const ForwardHead<Element, Tile, Warps> head{p, order.tile(ptx::ctaid_x())};
  for (int block = first_block; block * Tile::kColumns < p.shape.seqlen_k; ++block) {
    const BlockRange strips = strips_of<Tile>(head, block);
    if (strips.end <= strips.begin) continue;
    request_block(head, shared, block);
    attend_strips<Strips::kWhole, Normalisation>(head, shared, block, strips);
    zero_nonfinite<Element, Tile::kColumns, Tile::kHeadDim, Warps::kThreads>(ptx::shared_address(&shared.v));
    attend_strips<Strips::kPart, Normalisation>(head, shared, block, strips);
  }
  restore_output(head);
}

// Bounded for two thread blocks on a multiprocessor: a third would leave each too few registers.
template <class Element, class Tile, class Warps, class Normalisation>
__global__ void __launch_bounds__(Warps::kThreads, min_of(Warps::kMinBlocks, 2))
    forward_kernel(const __grid_constant__ KvOuterForwardParams p, const __grid_constant__ TileOrder order) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<Tile, Warps>*>(shared_bytes);
  using Head = ForwardHead<Element, Tile, Warps>;
  clear_unseen(Head{p, order.tile(ptx::ctaid_x())});
  for (int block = 0; block * Tile::kColumns < p.shape.seqlen_k; ++block) {
    const Head head{p, order.tile(ptx::ctaid_x())};  // anew for each block, not kept in registers meanwhile
    const BlockRange strips = strips_of<Tile>(head, block);
    if (strips.end <= strips.begin) continue;
    request_block(head, shared, block);
    if (needs_care(head, shared, block, strips)) {
      attend_with_care<Normalisation, Element>(p, order, shared, block);
      return;
    }
    attend_strips<Strips::kAll, Normalisation>(head, shared, block, strips);
  }
}

}  // namespace flash_cuda::v1
