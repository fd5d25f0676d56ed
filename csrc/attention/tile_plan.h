// Block sizes of FlashAttention v1 from the shared memory of a thread block (Dao et al. 2022, Algorithm 1, line 1), and
// what a tensor-core kernel can make of them. The v1 kernels and the lab take their tiles from here. Host and device;
// tests/test_host.py checks it against the paper's formulas.
#pragma once

#include "attention/params.h"

namespace flash_cuda {

struct BlockSizes {
  int rows;     // B_r, of queries
  int columns;  // B_c, of keys
};

// M of the papers: elements, not bytes.
constexpr int sram_elements(int shared_bytes) { return shared_bytes / kElementBytes; }

// B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d): Q_i, K_j, V_j and O_i in a quarter of the memory each.
constexpr BlockSizes paper_block_sizes(int sram, int head_dim) {
  const int quarter = (sram + 4 * head_dim - 1) / (4 * head_dim);
  return {min_of(quarter, head_dim), quarter};
}

// The shared memory that a thread block may have where a kernel of this many KB can run: 48 (no opt-in), 99 (sm_86,
// sm_89, sm_120), 163 (A100), 227 (H100, H200, B200). Ascending.
inline constexpr int kBudgetsKb[] = {48, 99, 163, 227};

// Thread blocks that share a multiprocessor: as many as its 228 KB hold of this budget (1 KB of each is CUDA's own),
// but with the 168 registers a thread that the kernels need.
constexpr int resident_blocks(int budget_kb, int threads) { return min_of(228 / (budget_kb + 1), 384 / threads); }

// What a kernel makes of the paper's sizes.
//
// Split-K warps come in teams: the warps of a team divide the keys of a block among themselves and work on one strip of
// `strip_rows` queries at a time; what they add up passes through shared memory. Split-Q warps own 16 rows each.
struct TilePlan {
  BlockSizes paper;
  BlockSizes block;
  int split_k;     // warps of a team
  int teams;       // of split-K warps in a thread block
  int strip_rows;  // of split-K; a strip has 8 rows for each warp to add up, or 16
  int split_q;     // split-Q warps in a thread block

  // Columns of O that split-K warps add up at a time.
  static constexpr int kExchangedDims = 64;

  // Split-K: the partial sums that the warps of a team leave for each other (float32), and each row's m and l per warp.
  constexpr int exchange_bytes() const {
    return teams * ((split_k - 1) * strip_rows * kExchangedDims * 4 + split_k * strip_rows * 8);
  }
  // O_i on its way out. Split-K warps put it where they exchange sums.
  constexpr int output_bytes(int head_dim) const { return block.rows * head_dim * kElementBytes; }
  // Q_i, K_j, V_j.
  constexpr int tile_bytes(int head_dim) const { return (block.rows + 2 * block.columns) * head_dim * kElementBytes; }
  constexpr int split_k_bytes(int head_dim) const { return tile_bytes(head_dim) + exchange_bytes(); }
  constexpr int split_q_bytes(int head_dim) const { return tile_bytes(head_dim) + output_bytes(head_dim); }
};

// B_r and B_c rounded down to what mma.m16n8k16 takes of `split_k` warps either way: 16 rows or 16 keys a warp.
constexpr TilePlan rounded_plan(BlockSizes paper, int split_k, int teams) {
  const int unit = 16 * split_k;
  const BlockSizes block{paper.rows / unit * unit, paper.columns / unit * unit};
  return {paper, block, split_k, teams, block.rows >= 64 ? 32 : 16, block.rows / 16};
}

// The plan for head_dim 64 or 128 within `shared_bytes`: as many warps as fit beside the blocks. Two teams if there are
// rows for two strips each (one in use, one on its way), four warps a team if there is memory for their exchange.
constexpr TilePlan tile_plan(int shared_bytes, int head_dim) {
  const BlockSizes paper = paper_block_sizes(sram_elements(shared_bytes), head_dim);
  for (int teams = 2; teams >= 1; --teams) {
    const TilePlan plan = rounded_plan(paper, 4, teams);
    if (plan.block.rows >= 2 * teams * plan.strip_rows && plan.block.columns >= 64 &&
        plan.split_k_bytes(head_dim) <= shared_bytes) {
      return plan;
    }
  }
  return rounded_plan(paper, 2, 1);
}

// The head dims that the lab has kernels for; smaller ones run in the next one up, their missing columns read as zeros.
inline constexpr int kMostLabHeadDim = 128;
constexpr int lab_head_dim(int head_dim) { return head_dim <= 64 ? 64 : kMostLabHeadDim; }

// The budget that v1 is fastest with (docs/tuning.md), or the largest that a device with `shared_memory` bytes a block
// allows.
constexpr int default_budget_kb(int head_dim, int shared_memory) {
  const int wanted = lab_head_dim(head_dim) == 64 ? 163 : 227;
  int found = kBudgetsKb[0];
  for (const int kb : kBudgetsKb) {
    if (kb <= wanted && kb * 1024 <= shared_memory) found = kb;
  }
  return found;
}

}  // namespace flash_cuda
