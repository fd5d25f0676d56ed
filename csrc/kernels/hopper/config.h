// Tile sizes of the Hopper kernels: a line for each head dim that launch/head_dim.h names for them. docs/tuning.md
// holds the measurements behind them.
#pragma once

#include <type_traits>

namespace flash_cuda::hopper {

// The swizzle of the widest panels repeats every 1024 bytes; dynamic shared memory may start anywhere.
inline constexpr int kSharedAlignment = 1024;

// Forward: Warpgroups x 64 queries by BlockN keys, Stages blocks each of K and V in shared memory at a time. One thread
// block fills a multiprocessor: its warpgroups, and one more for the warp that loads. Of those of a single warpgroup,
// which come with that warp alone, two share a multiprocessor where their shared memory allows it.
template <int HeadDim, int Warpgroups, int BlockN, int Stages>
struct ForwardTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kWarpgroups = Warpgroups;
  static constexpr int kBlockM = 64 * Warpgroups;
  static constexpr int kBlockN = BlockN;
  static constexpr int kStages = Stages;
  static constexpr int kConsumerThreads = 128 * Warpgroups;
  static constexpr int kThreads = kConsumerThreads + (Warpgroups > 1 ? 128 : 32);
  static constexpr int kTileBytes = (kBlockM + 2 * Stages * BlockN) * HeadDim * 2;
  static constexpr int kResident = Warpgroups == 1 && kTileBytes <= 110 * 1024 ? 2 : 1;
  // All threads are launched with an equal share of the 64 K registers; then most of the producer's go to the
  // consumers. S, P and O of a consumer thread come first; what they leave makes the producer's life easier. A single
  // warpgroup has enough from the start.
  static constexpr bool kTradesRegisters = Warpgroups > 1;
  static constexpr int kFragments = BlockN / 2 + BlockN / 4 + HeadDim / 2;
  static constexpr int kConsumerRegisters = Warpgroups == 2    ? 232
                                            : Warpgroups == 4  ? 112
                                            : kFragments > 120 ? 160
                                                               : 152;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kLaunchRegisters + Warpgroups * (kLaunchRegisters - kConsumerRegisters);
  static_assert(Warpgroups >= 1 && Warpgroups <= 4 && BlockN % 16 == 0 && HeadDim % 32 == 0 && Stages >= 2);
};

// The tile in place of `Tile` for calls of few queries, which leave it most multiprocessors idle. Blocks of the same
// keys in the same order: a row has the same bits from either, whatever else the call holds.
template <class Tile>
using SmallTile = ForwardTile<Tile::kHeadDim, 1, Tile::kBlockN, 2>;

// The tiles of a head dim: for rows that see few keys one that wastes little at the edges, and from kLongFrom keys a
// row on one that is faster inside, where there is such a one. HeadDim, Warpgroups, BlockN, Stages
template <class Tile, int LongFrom = 0, class LongTile = Tile>
struct TileChoice {
  using Short = Tile;
  using Long = LongTile;
  static constexpr int kLongFrom = LongFrom;
};

template <int HeadDim>
struct ForwardTiles;
template <>
struct ForwardTiles<64> : TileChoice<ForwardTile<64, 4, 64, 3>, 2048, ForwardTile<64, 3, 128, 3>> {};
template <>
struct ForwardTiles<96> : TileChoice<ForwardTile<96, 3, 96, 3>> {};
template <>
struct ForwardTiles<128> : TileChoice<ForwardTile<128, 2, 128, 2>> {};
template <>
struct ForwardTiles<192> : TileChoice<ForwardTile<192, 2, 96, 2>> {};
template <>
struct ForwardTiles<256> : TileChoice<ForwardTile<256, 2, 64, 2>> {};

// Backward: a tile is BlockN keys, and walks over blocks of BlockM queries, two of them in shared memory at a
// time. Two warpgroups compute; a third loads, and gives its registers to them.
template <int HeadDim, int BlockM, int BlockN>
struct BackwardTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kBlockM = BlockM;
  static constexpr int kBlockN = BlockN;
  static constexpr int kStages = 2;
  static constexpr int kWarps = 8;  // of the two
  static constexpr int kConsumerThreads = 32 * kWarps;
  static constexpr int kThreads = kConsumerThreads + 128;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  // How the warpgroups share the work: 64 keys each (backward.cuh), or dV to one and dK to the other
  // (backward_wide.cuh).
  static constexpr bool kSplitsKeys = BlockN == 128;
  // And a block of dQ: 64 of its rows each; or its columns, this many for the first.
  static constexpr bool kSplitsRows = BlockM == 128;
  static constexpr int kDqColumns = kSplitsRows ? HeadDim : HeadDim <= 128 ? 64 : 128;
  // Blocks of K and V in shared memory: those of the next tile are loaded beside this one's last steps. Where there is
  // room for one V only, it comes when this one's is done with.
  static constexpr int kKeyStages = kSplitsKeys ? 2 : 1;
  static constexpr int kValueStages = kSplitsRows ? 2 : 1;
  static constexpr bool kValuesApart = kValueStages != kKeyStages;
  // Blocks of dS^T in shared memory: of this step, of the last, and where a warpgroup may run a step ahead one more.
  static constexpr int kScoreBlocks = kSplitsKeys ? 3 : 2;
  static_assert(kSplitsRows ? HeadDim == 64 && BlockN == 128 : BlockM == 64);
};

// What becomes of dQ: it is not asked for; blocks of keys add to it as they come; or in a fixed order.
enum class DqSum { kNone, kAsItComes, kInOrder };

// The narrowest tile's; smaller head dims run in it.
inline constexpr int kLeastBackwardHeadDim = 64;

template <int HeadDim>
struct BackwardTiles;
template <>
struct BackwardTiles<64> : std::type_identity<BackwardTile<64, 128, 128>> {};
template <>
struct BackwardTiles<96> : std::type_identity<BackwardTile<96, 64, 64>> {};
template <>
struct BackwardTiles<128> : std::type_identity<BackwardTile<128, 64, 128>> {};
template <>
struct BackwardTiles<192> : std::type_identity<BackwardTile<192, 64, 64>> {};
template <>
struct BackwardTiles<256> : std::type_identity<BackwardTile<256, 64, 64>> {};

}  // namespace flash_cuda::hopper
