// What the backward keeps in shared memory, and the warp that loads it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/scheduler.h"
#include "kernels/hopper/config.h"
#include "kernels/hopper/load_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "tile/panel.h"
#include "tile/ring.cuh"

namespace flash_cuda::hopper {

// Tensor maps (head_dim, row, head, batch) with boxes of a panel: BlockM rows of Q and dO, BlockN rows of K and V.
struct BackwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
};

// The queries that a block of keys walks over: the group's heads, and of each the blocks in the band.
template <class Tile>
class Walk {
 public:
  __device__ __forceinline__ Walk(const BackwardParams& p, const WorkTile& work)
      : blocks_(p.band.query_blocks(work.block * Tile::kBlockN,
                                    min_of((work.block + 1) * Tile::kBlockN, p.shape.seqlen_k), p.shape.seqlen_q,
                                    Tile::kBlockM)),
        first_head_(work.head * p.shape.group()),
        end_head_(first_head_ + p.shape.group()) {}

  __device__ __forceinline__ const BlockRange& blocks() const { return blocks_; }
  __device__ __forceinline__ QueryStep begin() const {
    return {blocks_.end > blocks_.begin ? first_head_ : end_head_, blocks_.begin};
  }
  // Every one of the queries sees every one of the keys, of which there are as many as the tile has rows.
  __device__ __forceinline__ bool all_seen(const BackwardParams& p, const WorkTile& work) const {
    return p.band.covers(blocks_.begin * Tile::kBlockM, min_of(blocks_.end * Tile::kBlockM, p.shape.seqlen_q),
                         work.block * Tile::kBlockN, (work.block + 1) * Tile::kBlockN, p.shape.seqlen_k);
  }
  __device__ __forceinline__ bool is_end(const QueryStep& at) const { return at.head >= end_head_; }
  __device__ __forceinline__ QueryStep next(const QueryStep& at) const { return at.next(blocks_); }

 private:
  BlockRange blocks_;
  int first_head_, end_head_;
};

// P^T in float32 from the warpgroup that computes it to the one that needs it, thread by thread; where they split keys,
// both have their own.
template <class Tile, bool = Tile::kSplitsKeys>
struct BackwardExchange {};
template <class Tile>
struct BackwardExchange<Tile, false> {
  float4 p[Tile::kBlockM / 8][128];
  tile::RingBarriers<1> barriers;
};

template <class Tile>
struct BackwardShared {
  using Key = tile::Panels<Tile::kBlockN, Tile::kHeadDim>;
  using Query = tile::Panels<Tile::kBlockM, Tile::kHeadDim>;
  using Score = tile::Panels<Tile::kBlockN, Tile::kBlockM>;
  using Rows = float[Tile::kStages][Tile::kBlockM];
  using Stages = unsigned char[Tile::kStages][Query::kBytes];
  unsigned char k[Key::kBytes];
  unsigned char v[Key::kBytes];
  Stages q;
  Stages dout;
  unsigned char ds[Tile::kScoreBlocks][Score::kBytes];  // dS^T
  [[no_unique_address]] BackwardExchange<Tile> exchange;
  alignas(16) Rows lse;
  alignas(16) Rows delta;
  tile::RingBarriers<1> key_barriers;
  tile::RingBarriers<Tile::kStages> query_barriers;  // Q, dO, lse, D
  uint64_t score_barriers[Tile::kScoreBlocks];       // dS^T is there; that a block is free follows from other barriers
  uint64_t again_barrier;
  // Here for want of registers:
  bool bad_keys;  // K holds a NaN or an infinity, and not all queries see all keys
  bool again;     // dK and dV come from the slow way
};

// One warp: all loads, in the order in which the consumers wait for them. Rows past the end come as Q = dO = 0 and
// lse = D = 0: P = 1, dP = 0, and nothing is added anywhere.
template <class Tile>
class BackwardProducer {
  using Shared = BackwardShared<Tile>;
  using Key = typename Shared::Key;
  using Query = typename Shared::Query;

 public:
  // Arrivals that fill a stage of queries: the thread that announces the copies, and each lane's part of lse and D.
  static constexpr int kArrivals = 1 + 32;

  __device__ static void run(const BackwardParams& p, const BackwardMaps& maps, Shared& shared, const WorkTile& work) {
    const int lane = threadIdx.x % 32;
    const Walk<Tile> walk(p, work);
    QueryStep at = walk.begin();
    if (walk.is_end(at)) return;
    if (lane == 0) {
      const tile::RingCursor<1> keys(shared.key_barriers);
      keys.expect(2 * Key::kBytes);
      load_tile<Key>(shared.k, &maps.k, keys.full(), work.block * Tile::kBlockN, work.head, work.batch);
      load_tile<Key>(shared.v, &maps.v, keys.full(), work.block * Tile::kBlockN, work.head, work.batch);
    }
    tile::RingCursor<Tile::kStages> ring(shared.query_barriers);
    do {
      const int row = at.block * Tile::kBlockM;
      const int64_t first = p.shape.row_index(work.batch, at.head, row);
      const int stage = ring.stage();
      ring.wait_empty();
      if (lane == 0) {
        ring.expect(2 * Query::kBytes);
        load_tile<Query>(shared.q[stage], &maps.q, ring.full(), row, at.head, work.batch);
        load_tile<Query>(shared.dout[stage], &maps.dout, ring.full(), row, at.head, work.batch);
      }
#pragma unroll
      for (int i = lane; i < Tile::kBlockM; i += 32) {
        const bool exists = row + i < p.shape.seqlen_q;
        ptx::cp_async_ca_4(ptx::shared_address(&shared.lse[stage][i]), p.lse + first + i, exists);
        ptx::cp_async_ca_4(ptx::shared_address(&shared.delta[stage][i]), p.row_delta + first + i, exists);
      }
      ptx::cp_async_arrive(ring.full());
      ring.advance();
      at = walk.next(at);
    } while (!walk.is_end(at));
  }
};

}  // namespace flash_cuda::hopper
