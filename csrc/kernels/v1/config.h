// Tiles of the v1 backward. The paper's B_r and B_c leave no room for P and dS, which a tensor-core kernel needs in
// shared memory too; these are v2's tiles, so that the two backwards differ in their algorithm alone.
#pragma once

#include "kernels/v2/config.h"

namespace flash_cuda::v1 {

template <int HeadDim>
using BackwardTiles = v2::BackwardTiles<HeadDim>;

}  // namespace flash_cuda::v1
