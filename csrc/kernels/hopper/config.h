// Tile sizes of the Hopper kernels: a line for each head dim that launch/hopper_forward.cuh names. docs/tuning.md holds
// the measurements behind them.
#pragma once

namespace flash_cuda::hopper {

// Forward: Warpgroups x 64 queries by BlockN keys. Stages blocks each of K and V, QueryStages blocks of Q are in shared
// memory at a time. MinBlocks thread blocks share a multiprocessor.
template <int HeadDim, int Warpgroups, int BlockN, int Stages, int QueryStages, int MinBlocks = 1>
struct ForwardTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kWarpgroups = Warpgroups;
  static constexpr int kBlockM = 64 * Warpgroups;
  static constexpr int kBlockN = BlockN;
  static constexpr int kStages = Stages;
  static constexpr int kQueryStages = QueryStages;
  static constexpr int kMinBlocks = MinBlocks;
  // Two blocks on a multiprocessor leave no registers for a whole warpgroup that only loads: one warp does it, and the
  // registers stay as launched.
  static constexpr bool kMovesRegisters = MinBlocks == 1;
  static constexpr int kConsumerThreads = 128 * Warpgroups;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 32);
  static constexpr int kProducerRegisters = Warpgroups <= 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = Warpgroups <= 2 ? 232 : Warpgroups == 3 ? 160 : 112;
  static_assert(BlockN % 16 == 0 && HeadDim % 32 == 0 && QueryStages <= 2);
};

// The tiles of a head dim: for rows that see few keys one that wastes little at the edges, and from kLongFrom keys a
// row on one that is faster inside. HeadDim, Warpgroups, BlockN, Stages, QueryStages
template <int HeadDim>
struct ForwardTiles;
template <>
struct ForwardTiles<64> {
  using Short = ForwardTile<64, 4, 64, 3, 2>;
  using Long = ForwardTile<64, 3, 128, 3, 2>;
  static constexpr int kLongFrom = 2048;
};
template <>
struct ForwardTiles<96> {
  using Short = ForwardTile<96, 2, 128, 2, 2>;
  using Long = ForwardTile<96, 2, 176, 2, 2>;
  static constexpr int kLongFrom = 1024;
};
template <>
struct ForwardTiles<128> {
  using Short = ForwardTile<128, 2, 128, 2, 2>;
  using Long = ForwardTile<128, 2, 176, 2, 1>;
  static constexpr int kLongFrom = 4096;
};
template <>
struct ForwardTiles<192> {
  using Short = ForwardTile<192, 2, 112, 2, 1>;
  using Long = Short;
  static constexpr int kLongFrom = 0;
};
template <>
struct ForwardTiles<256> {
  using Short = ForwardTile<256, 2, 64, 2, 1>;
  using Long = Short;
  static constexpr int kLongFrom = 0;
};

}  // namespace flash_cuda::hopper
