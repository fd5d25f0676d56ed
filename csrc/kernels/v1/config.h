// Tiles of the v1 backward. The paper's B_r and B_c leave no room for P and dS, which a tensor-core kernel needs in
// shared memory too; these are v2's tiles, so that the two backwards differ in their algorithm alone.
#pragma once

#include "kernels/v2/config.h"

namespace flash_cuda::v1 {

// HeadDim, BlockM, BlockN, Warps, WarpsN, WarpsM, Stages, MinBlocks
template <int HeadDim>
struct BackwardTiles;
template <>
struct BackwardTiles<64> : v2::TileList<v2::BackwardTile<64, 32, 128, 4, 4, 2, 2, 2>> {};
template <>
struct BackwardTiles<128>
    : v2::TileList<v2::BackwardTile<128, 64, 128, 8, 4, 2, 2, 1>, v2::BackwardTile<128, 64, 64, 8, 4, 4, 1, 1>> {};

}  // namespace flash_cuda::v1
