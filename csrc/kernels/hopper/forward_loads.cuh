// What the forward keeps in shared memory, and the warp that loads it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/tile_draw.cuh"
#include "kernels/hopper/config.h"
#include "kernels/hopper/load_tile.cuh"
#include "kernels/hopper/rows.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "tile/panel.h"
#include "tile/ring.cuh"

namespace flash_cuda::hopper {

// Tensor maps (head_dim, row, head, batch) with boxes of a panel: 64 rows of Q, BlockN rows of K and V.
struct ForwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  int group;  // heads_q / heads_kv, divided on the host
};

// What the producer tells about a tile along with its Q.
struct TileNote {
  // Of a warpgroup's 64 rows: the blocks of keys that some of them see, from the right (at least one, be it to find
  // that no row sees a key of it), and how many of the tile come before and after these.
  struct alignas(16) Part {
    int last, first;
    int before, after;
  };
  Part parts[4];
  RowTile rows;
  bool all_seen[4];  // all of a warpgroup's rows see all of the tile's keys
};

template <class Tile>
struct ForwardShared {
  using Query = tile::Panels<64, Tile::kHeadDim>;
  using Key = tile::Panels<Tile::kBlockN, Tile::kHeadDim>;
  unsigned char q[Tile::kWarpgroups][Query::kBytes];
  unsigned char k[Tile::kStages][Key::kBytes];
  unsigned char v[Tile::kStages][Key::kBytes];
  tile::RingBarriers<1> q_barriers;
  tile::RingBarriers<2> note_barriers;  // of which `full` is not used: a note comes with Q
  tile::RingBarriers<Tile::kStages> k_barriers;
  tile::RingBarriers<Tile::kStages> v_barriers;
  uint64_t recompute_barrier;
  int marked;  // some warp has rows to be computed anew
  int found;   // the next tile with such rows
};

// One warp: all loads, in the order in which the consumers wait for them. All lanes know where it stands, so that its
// arithmetic is the warp's and not a thread's; one of them acts.
template <class Tile>
class Producer {
  using Query = typename ForwardShared<Tile>::Query;
  using Key = typename ForwardShared<Tile>::Key;

 public:
  __device__ Producer(const ForwardMaps& maps, ForwardShared<Tile>& shared, TileNote (&notes)[2])
      : maps_(maps),
        shared_(shared),
        notes_(notes),
        q_(shared.q_barriers),
        k_(shared.k_barriers),
        v_(shared.v_barriers),
        note_read_(shared.note_barriers) {}

  __device__ void run(const ForwardParams& p, const TileOrder& order, WorkQueue* queue) {
    TileDraw draw(order, queue);
    for (WorkTile next = draw_for_warp(draw); next.block >= 0;) {
      const WorkTile work = next;
      const RowTile at{work.block * Tile::kBlockM, work.head, work.batch};
      const int kv_head = at.head / maps_.group;
      const BlockRange keys = key_blocks<Tile>(p, at.row_begin);
      if (keys.end <= keys.begin) {  // store_unseen() writes it
        next = draw_for_warp(draw);
        continue;
      }
      int block = keys.end - 1;
      load(k_, shared_.k, &maps_.k, block, kv_head, at.batch);
      announce(p, at, keys);
      load_queries(at);
      // The next tile is drawn before the last blocks: the time it takes would delay the next tile's first loads,
      // but who draws late draws what is left.
      if (block < keys.begin + 2) next = draw_for_warp(draw);
      while (--block >= keys.begin) {
        load(k_, shared_.k, &maps_.k, block, kv_head, at.batch);
        load(v_, shared_.v, &maps_.v, block + 1, kv_head, at.batch);
        if (block == keys.begin + 1) next = draw_for_warp(draw);
      }
      load(v_, shared_.v, &maps_.v, keys.begin, kv_head, at.batch);
    }
    announce(p, {-1, 0, 0}, {0, 0});
    q_.wait_empty();
    if (ptx::elect_one()) q_.expect(0);
  }

 private:
  // The note of the next tile, beside the last steps of the one before.
  __device__ void announce(const ForwardParams& p, const RowTile& at, const BlockRange& keys) {
    note_read_.wait_empty();
    TileNote& note = notes_[note_read_.stage()];
    note_read_.advance();
#pragma unroll 1
    for (int i = 0; i < Tile::kWarpgroups; ++i) {
      const int row = at.row_begin + 64 * i;
      const int row_end = min_of(row + 64, p.shape.seqlen_q);
      const BlockRange own = p.band.key_blocks(row, row_end, p.shape.seqlen_k, Tile::kBlockN);
      const bool exists = row < row_end && own.begin < own.end;
      const int first = exists ? own.begin : keys.begin;
      const int last = exists ? own.end - 1 : keys.begin;
      const bool all_seen = p.band.covers(row, row_end, keys.begin * Tile::kBlockN,
                                          min_of(keys.end * Tile::kBlockN, p.shape.seqlen_k), p.shape.seqlen_k);
      if (ptx::elect_one()) {
        note.parts[i] = {last, first, keys.end - 1 - last, first - keys.begin};
        note.all_seen[i] = all_seen;
      }
    }
    if (ptx::elect_one()) note.rows = at;
  }

  __device__ void load_queries(const RowTile& at) {
    q_.wait_empty();
    if (ptx::elect_one()) {
      q_.expect(Tile::kWarpgroups * Query::kBytes);
#pragma unroll
      for (int i = 0; i < Tile::kWarpgroups * Query::kCount; ++i) {
        const int warpgroup = i / Query::kCount;
        load_panel<Query>(shared_.q[warpgroup], i % Query::kCount, &maps_.q, q_.full(), at.row_begin + 64 * warpgroup,
                          at.head, at.batch);
      }
    }
    q_.advance();
  }

  __device__ void load(tile::RingCursor<Tile::kStages>& ring, unsigned char (&stages)[Tile::kStages][Key::kBytes],
                       const CUtensorMap* map, const int block, const int head, const int batch) {
    ring.wait_empty();
    if (ptx::elect_one()) {
      ring.expect(Key::kBytes);
      load_tile<Key>(stages[ring.stage()], map, ring.full(), block * Tile::kBlockN, head, batch);
    }
    ring.advance();
  }

  const ForwardMaps& maps_;
  ForwardShared<Tile>& shared_;
  TileNote (&notes_)[2];
  tile::RingCursor<1> q_;
  tile::RingCursor<2> note_read_;
  tile::RingCursor<Tile::kStages> k_, v_;
};

}  // namespace flash_cuda::hopper
