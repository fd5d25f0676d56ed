// Which block of which head a thread block works on: a one-dimensional grid, so that no count of heads or batches meets
// a limit.
#pragma once

#include <cstdint>

#include "attention/band.h"

namespace flash_cuda {

struct WorkTile {
  int block;  // of queries (forward) or keys (backward)
  int head;
  int batch;
};

// Where a backward's loop over the query heads of a group and their blocks stands.
struct QueryStep {
  int head;
  int block;

  constexpr bool operator==(const QueryStep&) const = default;

  constexpr QueryStep next(const BlockRange blocks) const {
    return block + 1 < blocks.end ? QueryStep{head, block + 1} : QueryStep{head + 1, blocks.begin};
  }
};

// Under a causal mask the last query block has the most keys (and the first key block the most queries). Work should go
// out longest first, so that the final wave is short; but heads should also stay together while their keys and values
// are in the L2 cache. Both: phases of `blocks_per_phase` blocks, from long to short; inside a phase sections of
// `heads_per_section` heads; inside a section all heads' longest block, then all heads' next one, ... One phase of
// one-head sections is plain head-by-head order. `ascending` says that block 0 is the longest.
struct TileOrder {
  int blocks;  // per head
  int heads;   // per batch entry
  int batches;
  int blocks_per_phase;
  int heads_per_section;
  bool ascending;
  unsigned sweep = 0;  // tiles from a longest to a shortest one, for after(); 0: all tiles are one sweep

  constexpr int64_t tiles() const { return int64_t{blocks} * heads * batches; }

  constexpr WorkTile tile(unsigned index) const {
    const unsigned flat_heads = unsigned(heads) * batches;
    const unsigned phase = index / (flat_heads * blocks_per_phase);
    index -= phase * flat_heads * blocks_per_phase;
    const unsigned first_step = phase * blocks_per_phase;
    const unsigned steps = least(blocks_per_phase, blocks - first_step);
    const unsigned section = index / (heads_per_section * steps);
    index -= section * heads_per_section * steps;
    const unsigned first_head = section * heads_per_section;
    const unsigned width = least(heads_per_section, flat_heads - first_head);
    const int step = first_step + index / width;
    const unsigned flat_head = first_head + index % width;
    return {ascending ? step : blocks - 1 - step, int(flat_head % heads), int(flat_head / heads)};
  }

  // For a grid of `stride` thread blocks that take more than one tile each: the tile after the one at `index`. The
  // order turns round at the end of each round, so that the longest of one round meets the shortest of the next. Each
  // sweep begins anew, the other way round: a round across the end of one would give some blocks its shortest tiles and
  // others the longest of the next, time after time.
  constexpr unsigned after(const unsigned index, const unsigned stride) const {
    const unsigned all = unsigned(tiles());
    // At least a tile for each block, so that all blocks begin in the first sweep and only the last one is short.
    const unsigned length = sweep == 0 ? all : sweep < stride ? (stride + sweep - 1) / sweep * sweep : sweep;
    const unsigned end = least(index / length * length + length, all);
    const unsigned place = index % length, column = place % stride;
    const unsigned next = index + 2 * (stride - column) - 1;
    if (next < end || end == all) return next;
    return end + (place / stride % 2 == 0 ? stride - 1 - column : column);
  }

  // For persistent thread blocks, which draw their tiles: all blocks of a section of heads, longest first, then the
  // next section. No phases: the short blocks at the end of one section and the long ones of the next overlap.
  static constexpr TileOrder by_section(int blocks, int heads, int batches, bool ascending, int64_t bytes_per_head,
                                        int64_t l2_bytes) {
    const int64_t total = int64_t{heads} * batches;
    const int64_t most = section_for(bytes_per_head, l2_bytes * 4 / 3, total);
    const int64_t sections = total > 0 ? (total + most - 1) / most : 1;
    const int width = int(total > 0 ? (total + sections - 1) / sections : 1);
    return {blocks, heads, batches, blocks > 0 ? blocks : 1, width, ascending, unsigned(blocks) * width};
  }

  static constexpr TileOrder even(int blocks, int heads, int batches) {
    return {blocks, heads, batches, blocks > 0 ? blocks : 1, 1, true};
  }

  // For blocks of unequal length. A head's blocks read `bytes_per_head` of keys and values (or queries) again and
  // again; a phase has at least `least_per_phase` blocks, since each phase reads them from memory once more.
  static constexpr TileOrder longest_first(int blocks, int heads, int batches, bool ascending, int least_per_phase,
                                           int64_t bytes_per_head, int64_t l2_bytes) {
    const unsigned wanted = most((blocks + kPhases - 1) / kPhases, least_per_phase);
    return {blocks,
            heads,
            batches,
            int(most(least(wanted, blocks), 1)),
            section_for(bytes_per_head, l2_bytes, int64_t{heads} * batches),
            ascending};
  }

  // Heads whose `bytes_per_head` stay in an L2 cache of `l2_bytes` with room for the rest of the traffic.
  static constexpr int section_for(int64_t bytes_per_head, int64_t l2_bytes, int64_t total_heads) {
    const int64_t fit = l2_bytes / 2 / (bytes_per_head > 0 ? bytes_per_head : 1);
    const int64_t most = fit < total_heads ? fit : total_heads;
    return int(most > 1 ? most : 1);
  }

 private:
  // Each phase reads its heads' keys once more; 8 leave the last wave a few per cent of the work (docs/tuning.md).
  static constexpr int kPhases = 8;

  static constexpr unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }
  static constexpr unsigned most(unsigned a, unsigned b) { return a > b ? a : b; }
};

}  // namespace flash_cuda
