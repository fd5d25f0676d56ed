// The tile of a lab kernel: block sizes from the plan, at compile time.
#pragma once

#include "attention/tile_plan.h"

namespace flash_cuda::lab {

template <int HeadDim, int BudgetKb>
struct LabTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kBudgetKb = BudgetKb;
  static constexpr TilePlan kPlan = tile_plan(BudgetKb * 1024, HeadDim);
  static constexpr int kRows = kPlan.block.rows;
  static constexpr int kColumns = kPlan.block.columns;
};

}  // namespace flash_cuda::lab
