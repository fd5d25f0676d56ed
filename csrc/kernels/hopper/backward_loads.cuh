// What the backward keeps in shared memory, the warp that loads it, and those that look at the keys.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/nonfinite.cuh"
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

// Whether a tile is to be computed the slow way (backward_again.cuh): its dK and dV, or dQ as well, as K holds a NaN or
// an infinity.
enum class Again : unsigned { kNot, kGradients, kAll };

// What K, V and the queries that come belong to.
struct BackwardNote {
  WorkTile work;          // a negative block: there is no more
  unsigned steps_before;  // blocks of queries that the thread block has walked over for other tiles
  unsigned loads_before;  // tiles of its that had any
  Again again;            // nothing is loaded for those that are
};

// Tiles that are to be computed once more, when no other is under way. A tile is listed at most twice.
struct BackwardAgainList {
  struct Entry {
    WorkTile work;
    Again again;
  };
  static constexpr unsigned kSize = 16;
  static constexpr unsigned kFull = kSize - 2 * 3;  // three tiles are drawn and not yet over
  unsigned count;
  Entry entries[kSize];
};

// As for a WorkTile.
__device__ __forceinline__ BackwardNote uniform(const BackwardNote& note) {
  return {uniform(note.work), __reduce_max_sync(0xffffffffu, note.steps_before),
          __reduce_max_sync(0xffffffffu, note.loads_before),
          Again{__reduce_max_sync(0xffffffffu, unsigned(note.again))}};
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
  unsigned char k[Tile::kKeyStages][Key::kBytes];
  unsigned char v[Tile::kValueStages][Key::kBytes];
  Stages q;
  Stages dout;
  unsigned char ds[Tile::kScoreBlocks][Score::kBytes];  // dS^T
  [[no_unique_address]] BackwardExchange<Tile> exchange;
  alignas(16) Rows lse2;  // lse * log2(e)
  alignas(16) Rows delta;
  BackwardNote note[Tile::kKeyStages];
  uint32_t bad_keys[Tile::kKeyStages];  // not 0: K holds a NaN or an infinity; a byte for each warp that looks
  BackwardAgainList again;
  BackwardTurnBarriers turns;
  tile::RingBarriers<Tile::kKeyStages> key_barriers;  // K, note, and V unless
  tile::RingBarriers<1> value_barriers;               // Tile::kValuesApart
  uint64_t checked_barriers[Tile::kKeyStages];        // bad_keys
  tile::RingBarriers<Tile::kStages> query_barriers;   // Q, dO, lse2, D
  uint64_t score_barriers[Tile::kScoreBlocks];        // dS^T is there; that a block is free follows from other barriers
  uint64_t again_barrier;
  uint32_t again_parity;
};

// One warp: all loads, in the order in which the consumers wait for them. Rows past the end come as Q = dO = 0 and
// lse = D = 0: P = 1, dP = 0, and nothing is added anywhere.
template <class Tile>
class BackwardProducer {
  using Shared = BackwardShared<Tile>;
  using Key = typename Shared::Key;
  using Query = typename Shared::Query;
  using Keys = tile::RingCursor<Tile::kKeyStages>;

 public:
  // Arrivals that fill a stage of queries: the thread that announces the copies, and each lane's part of lse and of D.
  static constexpr int kArrivals = 1 + 32 + 32;

  __device__ static void run(const BackwardParams& p, const BackwardMaps& maps, Shared& shared, const TileOrder& order,
                             WorkQueue* const queue) {
    const int lane = threadIdx.x % 32;
    TileDraw draw(order, queue);
    unsigned notes = 0, steps = 0, loads = 0;  // counted rather than cursors kept: there are few registers
    for (;;) {
      const bool list_first = is_full(shared.again);
      const WorkTile work = draw_for_warp(draw, !list_first);
      const bool ends = work.block < 0;
      if (ends) notes = have_done_again(shared, notes);
      if (list_first) continue;
      const Walk<Tile> walk(p, work);
      const bool has_steps = !ends && !walk.is_end(walk.begin());
      const Keys keys(shared.key_barriers, notes++);
      keys.wait_empty();
      if (lane == 0) {
        shared.note[keys.stage()] = {work, steps, loads, Again::kNot};
        keys.expect(has_steps ? (Tile::kValuesApart ? 1 : 2) * Key::kBytes : 0);
        if (has_steps) {
          load_keys(maps.k, shared.k[keys.stage()], keys.full(), work);
          if constexpr (!Tile::kValuesApart) load_keys(maps.v, shared.v[keys.stage()], keys.full(), work);
        }
      }
      if (ends) return;
      if (!has_steps) continue;
      for (QueryStep at = walk.begin(); !walk.is_end(at); at = walk.next(at)) {
        load(p, maps, shared, work, at, steps++);
        if (Tile::kValuesApart && at == walk.begin()) load_values(maps, shared, work, loads);
      }
      ++loads;
    }
  }

 private:
  // While consumers may add to it.
  __device__ static bool is_full(const BackwardAgainList& list) {
    const unsigned count = *static_cast<const volatile unsigned*>(&list.count);
    return __any_sync(0xffffffffu, count > BackwardAgainList::kFull);
  }
  // One by one, with all shared memory to themselves.
  __device__ static unsigned have_done_again(Shared& shared, unsigned notes) {
    for (;; ++notes) {
      const Keys keys(shared.key_barriers, notes);
      keys.wait_all_empty();
      const unsigned left = __reduce_max_sync(0xffffffffu, shared.again.count);
      if (left == 0) return notes;
      __syncwarp();  // all lanes have read the count
      if (threadIdx.x % 32 == 0) {
        const BackwardAgainList::Entry& entry = shared.again.entries[left - 1];
        BackwardNote& note = shared.note[keys.stage()];
        note.work = entry.work;
        note.again = entry.again;
        shared.again.count = left - 1;
        keys.expect(0);
      }
    }
  }

  __device__ static void load_keys(const CUtensorMap& map, const void* to, const uint32_t barrier,
                                   const WorkTile& work) {
    load_tile<Key>(to, &map, barrier, work.block * Tile::kBlockN, work.head, work.batch);
  }

  __device__ static void load(const BackwardParams& p, const BackwardMaps& maps, Shared& shared, const WorkTile& work,
                              const QueryStep& at, const unsigned step) {
    const tile::RingCursor<Tile::kStages> ring(shared.query_barriers, step);
    const int lane = threadIdx.x % 32;
    const int row = at.block * Tile::kBlockM;
    const int64_t first = p.shape.row_index(work.batch, at.head, row);
    const int stage = ring.stage();
    float lse[Tile::kBlockM / 32];
#pragma unroll
    for (int i = 0; i < Tile::kBlockM / 32; ++i) {
      lse[i] = row + 32 * i + lane < p.shape.seqlen_q ? p.lse[first + 32 * i + lane] : 0.f;
    }
    ring.wait_empty();
    if (lane == 0) {
      ring.expect(2 * Query::kBytes);
      load_tile<Query>(shared.q[stage], &maps.q, ring.full(), row, at.head, work.batch);
      load_tile<Query>(shared.dout[stage], &maps.dout, ring.full(), row, at.head, work.batch);
    }
#pragma unroll
    for (int i = lane; i < Tile::kBlockM; i += 32) {
      ptx::cp_async_ca_4(ptx::shared_address(&shared.delta[stage][i]), p.row_delta + first + i,
                         row + i < p.shape.seqlen_q);
    }
    ptx::cp_async_arrive(ring.full());
#pragma unroll
    for (int i = 0; i < Tile::kBlockM / 32; ++i) shared.lse2[stage][32 * i + lane] = lse[i] * kLog2e;
    ptx::mbarrier_arrive(ring.full());
  }

  // Where V is apart: behind the first queries, since it has to wait longer.
  __device__ static void load_values(const BackwardMaps& maps, Shared& shared, const WorkTile& work,
                                     const unsigned loads_before) {
    const tile::RingCursor<1> values(shared.value_barriers, loads_before);
    values.wait_empty();
    if (threadIdx.x % 32 == 0) {
      values.expect(Key::kBytes);
      load_keys(maps.v, shared.v[0], values.full(), work);
    }
  }
};

// Whether K holds a NaN or an infinity, where that matters, before the consumers add the first dQ. By up to four warps,
// of which this is number `part`.
template <class Element, class Tile>
__device__ __forceinline__ void check_keys(const BackwardParams& p, BackwardShared<Tile>& shared, const int part,
                                           const int parts) {
  for (unsigned number = 0;; ++number) {
    const tile::RingCursor<Tile::kKeyStages> keys(shared.key_barriers, number);
    keys.wait_full();
    const auto& note = shared.note[keys.stage()];
    const WorkTile work = uniform(note.work);
    const Walk<Tile> walk(p, work);
    bool found = false;
    if (work.block >= 0 && note.again == Again::kNot && !walk.is_end(walk.begin()) && !walk.all_seen(p, work)) {
      found = has_nonfinite<Element>(ptx::shared_address(shared.k[keys.stage()]), BackwardShared<Tile>::Key::kBytes,
                                     part * 32 + threadIdx.x % 32, parts * 32);
      found = __any_sync(0xffffffffu, found);
    }
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<unsigned char*>(&shared.bad_keys[keys.stage()])[part] = found;
      ptx::mbarrier_arrive(ptx::shared_address(&shared.checked_barriers[keys.stage()]));
    }
    ptx::mbarrier_arrive(keys.empty());
    if (work.block < 0) return;
  }
}

}  // namespace flash_cuda::hopper
