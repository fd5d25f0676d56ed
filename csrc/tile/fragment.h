// Which lane of a warp holds which element of the m16n8k16 operands, and which row each lane names to ldmatrix.
// Host and device; tests/test_host.py checks the maps against brute force.
#pragma once

namespace flash_cuda::tile {

struct RowColumn {
  int row;
  int column;
};

// Element e (0..3) of a 16 x 8 accumulator.
constexpr RowColumn accumulator_element(int lane, int e) { return {lane / 4 + 8 * (e / 2), 2 * (lane % 4) + e % 2}; }

// Row and chunk (0 or 1) that a lane names when ldmatrix_x4 reads a 16 x 16 block ...
struct LaneRow {
  int row;
  int chunk;
};

// ... as an A operand stored [m][k], or (with .trans) as two B operands stored [k][n],
constexpr LaneRow lane_row_a(int lane) { return {lane % 16, lane / 16}; }

// ... as two B operands stored [n][k], or (with .trans) as an A operand stored [k][m].
constexpr LaneRow lane_row_b(int lane) { return {lane % 8 + lane / 16 * 8, lane / 8 % 2}; }

}  // namespace flash_cuda::tile
