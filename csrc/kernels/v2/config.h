// Tile sizes of the v2 kernels: a line for each head dim that launch/head_dim.h names. docs/tuning.md holds the
// measurements behind them.
#pragma once

namespace flash_cuda::v2 {

// What a thread block may have on the smallest devices (sm_86, sm_89): every head dim has a tile within it.
inline constexpr int kSmallSharedMemory = 99 * 1024;

// What the forward's ring of keys and values does past the last block: skip, or request zeros all the same. Without the
// branch the compiler overlaps the arithmetic before and after it, for a few registers more.
enum class PastEnd { kSkip, kRequestZeros };

// Forward: BlockM queries by BlockN keys, Warps warps of 32 threads that split the queries. Slots tiles of K or V are
// in shared memory at a time. MinBlocks thread blocks share a multiprocessor (bounds the registers). KeysAhead,
// ValuesAhead: how many fragments are loaded before their product.
template <int HeadDim, int BlockM, int BlockN, int Warps, int Slots, int MinBlocks, bool QInRegisters, PastEnd Past,
          int KeysAhead = 1, int ValuesAhead = 1>
struct ForwardTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kBlockM = BlockM;
  static constexpr int kBlockN = BlockN;
  static constexpr int kWarps = Warps;
  static constexpr int kThreads = Warps * 32;
  static constexpr int kSlots = Slots;
  static constexpr int kMinBlocks = MinBlocks;
  static constexpr bool kQInRegisters = QInRegisters;
  static constexpr PastEnd kPastEnd = Past;
  static constexpr int kKeysAhead = KeysAhead;
  static constexpr int kValuesAhead = ValuesAhead;
  static_assert(BlockM % (16 * Warps) == 0 && BlockN % 16 == 0 && HeadDim % 32 == 0 && Slots >= 2 && Slots <= 4);
};

// The tiles of a head dim, from the one that is fastest where there is shared memory for it down to one for 99 KB.
template <class First, class... Rest>
struct TileList {
  // visit(Tile{}) with the first tile whose Shared<Tile> fits.
  template <template <class> class Shared, class Visitor>
  static auto visit_fitting(const int shared_memory, Visitor&& visit) {
    if constexpr (sizeof...(Rest) > 0) {
      if (int(sizeof(Shared<First>)) > shared_memory) {
        return TileList<Rest...>::template visit_fitting<Shared>(shared_memory, visit);
      }
    } else {
      static_assert(sizeof(Shared<First>) <= kSmallSharedMemory);
    }
    return visit(First{});
  }
};

// HeadDim, BlockM, BlockN, Warps, Slots, MinBlocks, QInRegisters, PastEnd, KeysAhead, ValuesAhead
template <int HeadDim>
struct ForwardTiles;
template <>
struct ForwardTiles<32> : TileList<ForwardTile<32, 128, 64, 4, 3, 3, true, PastEnd::kSkip>> {};
template <>
struct ForwardTiles<64> : TileList<ForwardTile<64, 128, 64, 4, 3, 2, true, PastEnd::kRequestZeros>> {};
template <>
struct ForwardTiles<96> : TileList<ForwardTile<96, 128, 64, 4, 3, 2, false, PastEnd::kRequestZeros>> {};
template <>
struct ForwardTiles<128> : TileList<ForwardTile<128, 128, 64, 4, 3, 2, false, PastEnd::kSkip>> {};
template <>
struct ForwardTiles<192> : TileList<ForwardTile<192, 64, 64, 4, 2, 2, false, PastEnd::kSkip, 2, 2>> {};
template <>
struct ForwardTiles<256> : TileList<ForwardTile<256, 64, 64, 4, 2, 2, false, PastEnd::kRequestZeros>> {};

// Backward: BlockN keys stay in shared memory, blocks of BlockM queries stream past. The warps form a grid for each
// product: WarpsN (along keys) x Warps / WarpsN (along queries) for S^T and dP^T; WarpsN x Warps / WarpsN (along the
// head dim) for dK and dV; WarpsM (along queries) x Warps / WarpsM (along the head dim) for dQ. Stages blocks of
// queries are in shared memory at a time.
template <int HeadDim, int BlockM, int BlockN, int Warps, int WarpsN, int WarpsM, int Stages, int MinBlocks,
          int Ahead = 1>
struct BackwardTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kBlockM = BlockM;
  static constexpr int kBlockN = BlockN;
  static constexpr int kWarps = Warps;
  static constexpr int kThreads = Warps * 32;
  static constexpr int kWarpsN = WarpsN;
  static constexpr int kWarpsM = WarpsM;
  static constexpr int kStages = Stages;
  static constexpr int kAhead = Ahead;
  static constexpr int kMinBlocks = MinBlocks;
  static_assert(BlockN % (16 * WarpsN) == 0 && BlockM % (16 * Warps / WarpsN) == 0);
  static_assert(HeadDim % (16 * Warps / WarpsN) == 0 && BlockM % (16 * WarpsM) == 0);
  static_assert(HeadDim % (16 * Warps / WarpsM) == 0 && Stages >= 1 && Stages <= 2);
};

// HeadDim, BlockM, BlockN, Warps, WarpsN, WarpsM, Stages, MinBlocks, Ahead
template <int HeadDim>
struct BackwardTiles;
template <>
struct BackwardTiles<32> : TileList<BackwardTile<32, 64, 128, 4, 2, 2, 2, 2>> {};
template <>
struct BackwardTiles<64> : TileList<BackwardTile<64, 32, 128, 4, 4, 2, 2, 2>> {};
template <>
struct BackwardTiles<96> : TileList<BackwardTile<96, 64, 64, 4, 2, 2, 2, 2>> {};
template <>
struct BackwardTiles<128>
    : TileList<BackwardTile<128, 64, 128, 8, 4, 2, 2, 1>, BackwardTile<128, 64, 64, 8, 4, 4, 1, 1>> {};
template <>
struct BackwardTiles<192>
    : TileList<BackwardTile<192, 64, 64, 8, 2, 2, 2, 1, 3>, BackwardTile<192, 32, 64, 8, 4, 2, 1, 1>> {};
template <>
struct BackwardTiles<256>
    : TileList<BackwardTile<256, 64, 64, 8, 2, 2, 2, 1, 3>, BackwardTile<256, 64, 64, 8, 2, 2, 1, 1>,
               BackwardTile<256, 32, 32, 4, 2, 2, 1, 1>> {};

}  // namespace flash_cuda::v2
