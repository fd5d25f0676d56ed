// The constexpr geometry that the kernels run on, called from pytest (tests/test_host.py) without a GPU.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "attention/band.h"
#include "attention/scheduler.h"
#include "attention/tile_plan.h"
#include "kernels/v1/config.h"
#include "kernels/v2/config.h"
#include "launch/head_dim.h"
#include "tile/fragment.h"
#include "tile/panel.h"
#include "tile/swizzle.h"

namespace {

using flash_cuda::Band;
using flash_cuda::TileOrder;

// Calls visit(integral_constant<int, C>) for a width that tiles have.
template <class Visitor>
auto visit_columns(const int columns, Visitor&& visit) {
  switch (columns) {
    case 32:
      return visit(std::integral_constant<int, 32>{});
    case 64:
      return visit(std::integral_constant<int, 64>{});
    case 96:
      return visit(std::integral_constant<int, 96>{});
    case 128:
      return visit(std::integral_constant<int, 128>{});
    case 192:
      return visit(std::integral_constant<int, 192>{});
    case 256:
      return visit(std::integral_constant<int, 256>{});
    default:
      throw std::invalid_argument("columns: expected 32, 64, 96, 128, 192 or 256");
  }
}

// Adds Panels<Rows, Columns> to a dict: byte offsets [row][chunk], steps of 16 columns, steps of 16 rows, descriptor.
template <int Rows, int Columns>
void add_panels(pybind11::dict& tiles) {
  using Tile = flash_cuda::tile::Panels<Rows, Columns>;
  std::vector<std::vector<int>> offsets(Rows);
  std::vector<int> column_steps, row_steps;
  for (int row = 0; row < Rows; ++row) {
    for (int chunk = 0; chunk < Columns / 8; ++chunk) offsets[row].push_back(Tile::offset(row, chunk));
  }
  for (int step = 0; step < Columns / 16; ++step) column_steps.push_back(Tile::column_step(step));
  for (int step = 0; step < Rows / 16; ++step) row_steps.push_back(Tile::row_step(step));
  const auto size = pybind11::make_tuple(Rows, Columns);
  tiles[size] = pybind11::make_tuple(offsets, column_steps, row_steps, Tile::kDescriptor);
}

std::pair<int, int> pair_of(const flash_cuda::BlockRange range) { return {range.begin, range.end}; }

// For TileList: every tile fits, so that the first one is visited.
template <class Tile>
struct NoMemory {};

// (BlockM, BlockN) of a head dim's first tile.
template <class TileList>
std::pair<int, int> first_tile() {
  return TileList::template visit_fitting<NoMemory>(
      1, [](auto tile) { return std::pair<int, int>(tile.kBlockM, tile.kBlockN); });
}

}  // namespace

PYBIND11_MODULE(flash_cuda_host, m) {
  m.def("band", [](int sq, int sk, int left, int right) {
    const Band b = Band::from_window(sq, sk, left, right);
    return std::pair(b.lower, b.upper);
  });
  m.def("visible", [](int lower, int upper, int row, int key) { return Band{lower, upper}.visible(row, key); });
  m.def("key_blocks", [](int lower, int upper, int row_begin, int row_end, int sk, int width) {
    return pair_of(Band{lower, upper}.key_blocks(row_begin, row_end, sk, width));
  });
  m.def("query_blocks", [](int lower, int upper, int key_begin, int key_end, int sq, int height) {
    return pair_of(Band{lower, upper}.query_blocks(key_begin, key_end, sq, height));
  });
  m.def("covers", [](int lower, int upper, int row_begin, int row_end, int key_begin, int key_end, int sk) {
    return Band{lower, upper}.covers(row_begin, row_end, key_begin, key_end, sk);
  });
  m.def("leaves_rows_unseen",
        [](int lower, int upper, int sq, int sk) { return Band{lower, upper}.leaves_rows_unseen(sq, sk); });
  m.def("swizzle_offset", [](int columns, int row, int chunk) {
    return visit_columns(columns, [&](auto c) { return flash_cuda::tile::Swizzle<c>::offset(row, chunk); });
  });
  m.def("swizzle_step_pairs", [](int columns, unsigned offset, int pair) {
    return visit_columns(columns, [&](auto c) { return flash_cuda::tile::Swizzle<c>::step_pairs(offset, pair); });
  });
  pybind11::dict panels;
  add_panels<64, 64>(panels);
  add_panels<64, 96>(panels);
  add_panels<64, 128>(panels);
  add_panels<64, 192>(panels);
  add_panels<64, 256>(panels);
  add_panels<96, 96>(panels);
  add_panels<96, 192>(panels);
  add_panels<128, 64>(panels);
  add_panels<128, 128>(panels);
  m.attr("panels") = panels;
  m.def("accumulator_element", [](int lane, int e) {
    const auto at = flash_cuda::tile::accumulator_element(lane, e);
    return std::pair(at.row, at.column);
  });
  m.def("lane_row_a", [](int lane) {
    const auto at = flash_cuda::tile::lane_row_a(lane);
    return std::pair(at.row, at.chunk);
  });
  m.def("lane_row_b", [](int lane) {
    const auto at = flash_cuda::tile::lane_row_b(lane);
    return std::pair(at.row, at.chunk);
  });
  m.def("tile_order",
        [](int blocks, int heads, int batches, int blocks_per_phase, int heads_per_section, bool ascending) {
          const TileOrder order{blocks, heads, batches, blocks_per_phase, heads_per_section, ascending};
          std::vector<std::tuple<int, int, int>> tiles;
          for (unsigned i = 0; i < order.tiles(); ++i) {
            const auto t = order.tile(i);
            tiles.emplace_back(t.block, t.head, t.batch);
          }
          return tiles;
        });
  m.def("section_for", &TileOrder::section_for);
  // The arguments of tile_order.
  m.def("by_section", [](int blocks, int heads, int batches, bool ascending, int64_t bytes_per_head, int64_t cache) {
    const auto o = TileOrder::by_section(blocks, heads, batches, ascending, bytes_per_head, cache);
    return std::tuple(o.blocks, o.heads, o.batches, o.blocks_per_phase, o.heads_per_section, o.ascending, o.sweep);
  });
  m.def("tile_after", [](unsigned tiles, unsigned sweep, unsigned index, unsigned stride) {
    return TileOrder{int(tiles), 1, 1, 1, 1, false, sweep}.after(index, stride);
  });
  m.def("paper_block_sizes", [](int sram, int head_dim) {
    const auto sizes = flash_cuda::paper_block_sizes(sram, head_dim);
    return std::pair(sizes.rows, sizes.columns);
  });
  m.attr("budgets_kb") = std::vector<int>(std::begin(flash_cuda::kBudgetsKb), std::end(flash_cuda::kBudgetsKb));
  m.def("v2_forward_tile", [](int head_dim) {
    return flash_cuda::visit_head_dim(head_dim, [](auto d) { return first_tile<flash_cuda::v2::ForwardTiles<d>>(); });
  });
  m.def("v2_backward_tile", [](int head_dim) {
    return flash_cuda::visit_head_dim(head_dim, [](auto d) { return first_tile<flash_cuda::v2::BackwardTiles<d>>(); });
  });
  m.def("v1_backward_tile", [](int head_dim) {
    return flash_cuda::visit_lab_head_dim(head_dim,
                                          [](auto d) { return first_tile<flash_cuda::v1::BackwardTiles<d>>(); });
  });
  // The head dim of the kernel that serves `head_dim`.
  m.def("kernel_head_dim",
        [](int head_dim) { return flash_cuda::visit_head_dim(head_dim, [](auto d) { return int(d); }); });
}
