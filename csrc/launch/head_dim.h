// The head dims that kernels exist for; others run in the next one up, their missing columns read as zeros.
#pragma once

#include <type_traits>

#include "attention/tile_plan.h"

namespace flash_cuda {

// Calls visit(std::integral_constant<int, D>) with the smallest D, Least or more, that holds head_dim (at most 256).
template <int Least = 32, class Visitor>
auto visit_head_dim(const int head_dim, Visitor&& visit) {
  if constexpr (Least <= 32) {
    if (head_dim <= 32) return visit(std::integral_constant<int, 32>{});
  }
  if (head_dim <= 64) return visit(std::integral_constant<int, 64>{});
  if (head_dim <= 96) return visit(std::integral_constant<int, 96>{});
  if (head_dim <= 128) return visit(std::integral_constant<int, 128>{});
  if (head_dim <= 192) return visit(std::integral_constant<int, 192>{});
  return visit(std::integral_constant<int, 256>{});
}

// As visit_head_dim, for v1 and the lab (head_dim at most kMostLabHeadDim).
template <class Visitor>
auto visit_lab_head_dim(const int head_dim, Visitor&& visit) {
  if (lab_head_dim(head_dim) == 64) return visit(std::integral_constant<int, 64>{});
  return visit(std::integral_constant<int, kMostLabHeadDim>{});
}

}  // namespace flash_cuda
