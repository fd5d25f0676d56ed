// What the backward keeps in shared memory, and the warp that loads it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/scheduler.h"
#include "attention/tile_draw.cuh"
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
  float scale_log2;  // scale * log2(e), here so that instructions take it as it is, without a register
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

// What K, V and the queries that come belong to.
struct BackwardNote {
  WorkTile work;          // a negative block: there is no more
  unsigned steps_before;  // blocks of queries that the thread block has walked over for other tiles
};

// The same in every lane, and known to be so: the compiler keeps the results of reductions in uniform registers.
__device__ __forceinline__ WorkTile uniform(const WorkTile& work) {
  return {__reduce_max_sync(0xffffffffu, work.block), __reduce_max_sync(0xffffffffu, work.head),
          __reduce_max_sync(0xffffffffu, work.batch)};
}
__device__ __forceinline__ BackwardNote uniform(const BackwardNote& note) {
  return {uniform(note.work), __reduce_max_sync(0xffffffffu, note.steps_before)};
}

// Deterministic mode (backward_turns.cuh): full says that it is the block of keys' turn to add to dQ, added that it
// has, empty that the turn has been passed on.
inline constexpr int kTurnStages = 2;
struct BackwardTurnBarriers {
  tile::RingBarriers<kTurnStages> barriers;
  uint64_t added[kTurnStages];
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
  BackwardNote note;
  BackwardTurnBarriers turns;
  tile::RingBarriers<1> key_barriers;                // K, V, note
  tile::RingBarriers<Tile::kStages> query_barriers;  // Q, dO, lse, D
  uint64_t score_barriers[Tile::kScoreBlocks];       // dS^T is there; that a block is free follows from other barriers
  uint64_t again_barrier;
  uint32_t again_parity;
  // Here for want of registers; of tiles where not all queries see all keys:
  bool bad_keys;  // K holds a NaN or an infinity
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

  __device__ static void run(const BackwardParams& p, const BackwardMaps& maps, Shared& shared, const TileOrder& order,
                             WorkQueue* const queue) {
    const int lane = threadIdx.x % 32;
    TileDraw draw(order, queue);
    tile::RingCursor<1> keys(shared.key_barriers);
    tile::RingCursor<Tile::kStages> ring(shared.query_barriers);
    unsigned steps = 0;
    for (WorkTile work = draw_tile(draw);; work = draw_tile(draw)) {
      const bool ends = work.block < 0;
      const Walk<Tile> walk(p, work);
      // Late, but with the slow way the queries' stages are in use until K and V are done with.
      keys.wait_empty();
      if (lane == 0) {
        shared.note = {work, steps};
        const bool loads = !ends && !walk.is_end(walk.begin());
        keys.expect(loads ? 2 * Key::kBytes : 0);
        if (loads) {
          load_tile<Key>(shared.k, &maps.k, keys.full(), work.block * Tile::kBlockN, work.head, work.batch);
          load_tile<Key>(shared.v, &maps.v, keys.full(), work.block * Tile::kBlockN, work.head, work.batch);
        }
      }
      keys.advance();
      if (ends) return;
      for (QueryStep at = walk.begin(); !walk.is_end(at); at = walk.next(at)) {
        load(p, maps, shared, work, at, ring);
        ++steps;
      }
    }
  }

 private:
  // The same for all lanes.
  __device__ static WorkTile draw_tile(TileDraw& draw) {
    WorkTile work{-1, 0, 0};
    if (threadIdx.x % 32 == 0 && !draw.next(work)) work.block = -1;
    return uniform(work);
  }

  __device__ static void load(const BackwardParams& p, const BackwardMaps& maps, Shared& shared, const WorkTile& work,
                              const QueryStep& at, tile::RingCursor<Tile::kStages>& ring) {
    const int lane = threadIdx.x % 32;
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
  }
};

}  // namespace flash_cuda::hopper
