// The float32 sum of dQ in global memory, one tile of BlockM x HeadDim per block of queries. Inside a tile the elements
// lie in the order of the accumulator registers, so that a warp's reduction touches whole lines; v2/backward_rows.cuh
// puts them back in rows. The Hopper backward's sum, too.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "ptx/memory.cuh"
#include "tile/warp_gemm.cuh"

namespace flash_cuda::v2 {

template <class Tile>
class DqAccumulator {
  static constexpr int kTileElements = Tile::kBlockM * Tile::kHeadDim;
  static constexpr int kDimTiles = Tile::kHeadDim / 8;

 public:
  __device__ DqAccumulator(const BackwardParams& p, const int batch, const int head, const int block)
      : block_(block),
        index_((int64_t{batch} * p.shape.heads_q + head) * blocks(p.shape.seqlen_q) + block),
        tile_(p.dq_accumulator + index_ * kTileElements) {}

  // By its number among all blocks of queries; only for adding.
  __device__ DqAccumulator(const BackwardParams& p, const int64_t index)
      : block_(0), index_(index), tile_(p.dq_accumulator + index_ * kTileElements) {}

  static constexpr int blocks(int seqlen_q) { return blocks_of(seqlen_q, Tile::kBlockM); }
  static constexpr int64_t elements(const Shape& s) {
    return int64_t{s.batch} * s.heads_q * blocks(s.seqlen_q) * kTileElements;
  }

  // Element e of this lane in the 16 x 8 fragment of rows 16 * row_tile .., columns 8 * dim_tile ... From sm_90 on a
  // lane's four elements are neighbours for the vector reduction; before, the lanes are, for four scalar ones.
  __device__ float* element(const int row_tile, const int dim_tile, const int e) const {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    const int within = lane * 4 + e;
#else
    const int within = e * 32 + lane;
#endif
    return tile_ + (row_tile * kDimTiles + dim_tile) * 128 + within;
  }

  template <int MTiles, int NTiles>
  __device__ __forceinline__ void add(const tile::Accumulator<MTiles, NTiles>& dq, const int first_row,
                                      const int first_dim) const {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
#if __CUDA_ARCH__ >= 900
        ptx::red_add_v4_f32(element(first_row / 16 + m, first_dim / 8 + n, 0), dq[m][n]);
#else
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          ptx::red_add_f32(element(first_row / 16 + m, first_dim / 8 + n, e), dq[m][n][e]);
        }
#endif
      }
  }

  __device__ void read(float (&dq)[4], const int row_tile, const int dim_tile) const {
#if __CUDA_ARCH__ >= 900
    *reinterpret_cast<float4*>(dq) = *reinterpret_cast<const float4*>(element(row_tile, dim_tile, 0));
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[e] = *element(row_tile, dim_tile, e);
#endif
  }

  __device__ void clear(const int thread, const int threads) const {
    for (int i = thread * 4; i < kTileElements; i += threads * 4) {
      *reinterpret_cast<float4*>(tile_ + i) = float4{0.f, 0.f, 0.f, 0.f};
    }
  }

  // Deterministic mode: KV blocks add to a tile in descending order. Under a causal mask each block then starts at its
  // diagonal, where it is first in line, and hardly waits. TileOrder gives larger block numbers to earlier thread
  // blocks, and thread blocks start in the order of their numbers, so whoever is waited for runs. (CUDA does not
  // promise that order; every device so far keeps it.)
  //
  // kv_block: this thread block's, read by thread 0. sync: a barrier of the threads that add.
  template <class Sync>
  __device__ void wait_turn(const BackwardParams& p, const int& kv_block, const Sync& sync) const {
    if (p.turns == nullptr) return;
    if (threadIdx.x == 0) wait_turns(p, rank(p, kv_block));
    sync();
  }
  // How many blocks of keys add before this one.
  __device__ int rank(const BackwardParams& p, const int kv_block) const {
    const int row_begin = block_ * Tile::kBlockM;
    const BlockRange contributors = p.band.key_blocks(row_begin, min_of(row_begin + Tile::kBlockM, p.shape.seqlen_q),
                                                      p.shape.seqlen_k, Tile::kBlockN);
    return contributors.end - 1 - kv_block;
  }
  // One thread: until at least `count` turns have been passed on.
  __device__ void wait_turns(const BackwardParams& p, const int count) const {
    while (ptx::ld_acquire(turn(p)) < count) __nanosleep(64);
  }

  __device__ void reset_turn(const BackwardParams& p) const { p.turns[index_] = 0; }

  template <class Sync>
  __device__ void pass_turn(const BackwardParams& p, const Sync& sync) const {
    if (p.turns == nullptr) return;
    __threadfence();
    sync();
    if (threadIdx.x == 0) ptx::red_release_add(turn(p), 1);
  }

  __device__ int* turn(const BackwardParams& p) const { return p.turns + index_; }

 private:
  int block_;
  int64_t index_;  // of the block of queries among all heads and batches
  float* tile_;
};

}  // namespace flash_cuda::v2
