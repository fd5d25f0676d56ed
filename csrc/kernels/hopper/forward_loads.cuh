// What the forward keeps in shared memory, and the thread that loads it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/tile_draw.cuh"
#include "kernels/hopper/rows.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "tile/panel.h"
#include "tile/ring.cuh"

namespace flash_cuda::hopper {

// Tensor maps (head_dim, row, head, batch) with boxes of a panel: 64 rows of Q, BlockN rows of K and V.
struct ForwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
};

// The swizzle of the widest panels repeats every 1024 bytes; dynamic shared memory may start anywhere.
inline constexpr int kSharedAlignment = 1024;

template <class Tile>
struct ForwardShared {
  using Query = tile::Panels<64, Tile::kHeadDim>;
  using Key = tile::Panels<Tile::kBlockN, Tile::kHeadDim>;
  unsigned char q[Tile::kQueryStages][Tile::kWarpgroups][Query::kBytes];
  unsigned char k[Tile::kStages][Key::kBytes];
  unsigned char v[Tile::kStages][Key::kBytes];
  tile::RingBarriers<Tile::kQueryStages> q_barriers;
  tile::RingBarriers<Tile::kStages> k_barriers;
  tile::RingBarriers<Tile::kStages> v_barriers;
};

// What the producer tells about a tile along with its Q: its rows, and the blocks of keys that some of them sees.
struct TileNote {
  RowTile rows;
  BlockRange keys;
};

template <class Tile>
__device__ __forceinline__ BlockRange key_blocks(const ForwardParams& p, const int row_begin) {
  return p.band.key_blocks(row_begin, min_of(row_begin + Tile::kBlockM, p.shape.seqlen_q), p.shape.seqlen_k,
                           Tile::kBlockN);
}

// One thread: all loads, in the order in which the consumers wait for them.
template <class Tile>
class Producer {
  using Query = typename ForwardShared<Tile>::Query;
  using Key = typename ForwardShared<Tile>::Key;

 public:
  __device__ Producer(const ForwardMaps& maps, ForwardShared<Tile>& shared, TileNote* notes)
      : maps_(maps),
        shared_(shared),
        notes_(notes),
        q_(shared.q_barriers),
        k_(shared.k_barriers),
        v_(shared.v_barriers) {}

  __device__ void run(const ForwardParams& p, const TileOrder& order, WorkQueue* queue) {
    TileDraw draw(order, queue);
    WorkTile work;
    int block_before = -1, head_before = 0, batch_before = 0;  // whose V is still to come
    const auto load_values = [&] {
      if (block_before >= 0) load(v_, shared_.v, &maps_.v, block_before, head_before, batch_before);
    };
    for (bool more = draw.next(work); more;) {
      const RowTile at{work.block * Tile::kBlockM, work.head, work.batch};
      const BlockRange keys = key_blocks<Tile>(p, at.row_begin);
      if (keys.end <= keys.begin) more = draw.next(work);  // store_unseen() writes it
      for (int block = keys.end - 1; block >= keys.begin; --block) {
        const bool first = block == keys.end - 1;
        const int head = at.head / p.shape.group();
        load(k_, shared_.k, &maps_.k, block, head, at.batch);
        if (first && Tile::kQueryStages > 1) load_queries({at, keys});
        load_values();
        if (first && Tile::kQueryStages == 1) load_queries({at, keys});  // waits for the last use of Q, and V must not
        block_before = block, head_before = head, batch_before = at.batch;
        if (first) more = draw.next(work);  // early: what it takes to find a tile would delay its first loads
      }
    }
    load_values();
    announce({{-1, 0, 0}, {0, 0}}, 0);
  }

 private:
  __device__ void announce(const TileNote& note, const int bytes) {
    q_.wait_empty();
    notes_[q_.stage()] = note;
    q_.expect(bytes);
  }

  __device__ void load_queries(const TileNote& note) {
    const RowTile& at = note.rows;
    announce(note, Tile::kWarpgroups * Query::kBytes);
#pragma unroll
    for (int i = 0; i < Tile::kWarpgroups * Query::kCount; ++i) {
      const int warpgroup = i / Query::kCount, panel = i % Query::kCount;
      ptx::cp_async_bulk_tensor_4d(ptx::shared_address(shared_.q[q_.stage()][warpgroup]) + panel * Query::kPanelBytes,
                                   &maps_.q, q_.full(), panel * Query::kColumns, at.row_begin + 64 * warpgroup, at.head,
                                   at.batch);
    }
    q_.advance();
  }

  __device__ void load(tile::RingCursor<Tile::kStages>& ring, unsigned char (&stages)[Tile::kStages][Key::kBytes],
                       const CUtensorMap* map, const int block, const int head, const int batch) {
    ring.wait_empty();
    ring.expect(Key::kBytes);
#pragma unroll
    for (int panel = 0; panel < Key::kCount; ++panel) {
      ptx::cp_async_bulk_tensor_4d(ptx::shared_address(stages[ring.stage()]) + panel * Key::kPanelBytes, map,
                                   ring.full(), panel * Key::kColumns, block * Tile::kBlockN, head, batch);
    }
    ring.advance();
  }

  const ForwardMaps& maps_;
  ForwardShared<Tile>& shared_;
  TileNote* notes_;
  tile::RingCursor<Tile::kQueryStages> q_;
  tile::RingCursor<Tile::kStages> k_, v_;
};

}  // namespace flash_cuda::hopper
