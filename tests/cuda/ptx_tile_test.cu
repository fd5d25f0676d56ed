// csrc/tile and the ldmatrix, mma and cp.async of csrc/ptx on a GPU, against plain loops on the
// host. Operand layouts are written here as in the PTX ISA ("Matrix fragments for mma.m16n8k16"),
// not taken from tile/fragment.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "ptx/memory.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"
#include "tile/warp_gemm.cuh"

namespace {

using namespace flash_cuda;
using check::DeviceArray;

std::string dims(const std::vector<int>& values) {
  std::string text;
  for (const int v : values) text += std::to_string(v) + "x";
  text.pop_back();
  return text;
}

// By all threads of a block, element by element. `values`: [Rows][Columns], row-major.
template <int Rows, int Columns>
__device__ void fill(tile::SharedTile<Rows, Columns>& shared, const uint16_t* values) {
  for (int i = threadIdx.x; i < Rows * Columns; i += blockDim.x) {
    const int row = i / Columns;
    const int column = i % Columns;
    *reinterpret_cast<uint16_t*>(shared.bytes + tile::Swizzle<Columns>::offset(row, column / 8) + column % 8 * 2) =
        values[i];
  }
  __syncthreads();
}

template <int Rows, int Columns>
__device__ void dump(const tile::SharedTile<Rows, Columns>& shared, uint16_t* values) {
  __syncthreads();
  for (int i = threadIdx.x; i < Rows * Columns; i += blockDim.x) {
    const int row = i / Columns;
    const int column = i % Columns;
    values[i] = ptx::ld_shared_u16(ptx::shared_address(&shared) + tile::Swizzle<Columns>::offset(row, column / 8) +
                                   column % 8 * 2);
  }
}

// --- ldmatrix through LaneView ---

enum Operand { kAFromRows, kBFromColumns, kBFromRows, kAFromColumns };

constexpr int kViewRows = 48;
constexpr int kViewFirstRow = 16;  // of the view; its blocks are the two below
constexpr int kViewBlocks = 2;

// registers: [block][pair][lane][4]
template <int Columns>
__global__ void load_operands(const uint16_t* values, const Operand operand, uint32_t* registers) {
  __shared__ tile::SharedTile<kViewRows, Columns> shared;
  fill(shared, values);
  const int lane = threadIdx.x;
  const bool from_a = operand == kAFromRows || operand == kBFromColumns;
  const tile::LaneView<Columns> view(ptx::shared_address(&shared), kViewFirstRow,
                                     from_a ? tile::lane_row_a(lane) : tile::lane_row_b(lane));
#pragma unroll
  for (int block = 0; block < kViewBlocks; ++block)
#pragma unroll
    for (int pair = 0; pair < Columns / 16; ++pair) {
      uint32_t r[4];
      if (operand == kAFromRows || operand == kBFromRows) {
        view.load(r, block, pair);
      } else {
        view.load_transposed(r, block, pair);
      }
      for (int i = 0; i < 4; ++i) registers[((block * (Columns / 16) + pair) * 32 + lane) * 4 + i] = r[i];
    }
}

template <int Columns>
void test_lane_view() {
  // Every element names itself.
  std::vector<uint16_t> values(kViewRows * Columns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = uint16_t(i);
  const DeviceArray<uint16_t> source(values);
  const char* names[] = {"A stored [m][k]", "B stored [k][n], transposed", "B stored [n][k]",
                         "A stored [k][m], transposed"};
  for (const Operand operand : {kAFromRows, kBFromColumns, kBFromRows, kAFromColumns}) {
    const std::string name = std::string("ldmatrix: ") + names[operand] + ", columns " + std::to_string(Columns);
    const size_t count = size_t{kViewBlocks} * (Columns / 16) * 32 * 4;
    const DeviceArray<uint32_t> registers(count, 0u);
    load_operands<Columns><<<1, 32>>>(source.get(), operand, registers.get());
    check::finish(name);
    std::vector<uint32_t> expected(count);
    for (size_t index = 0; index < count; ++index) {
      const int i = index % 4;
      const int lane = index / 4 % 32;
      const int pair = index / 128 % (Columns / 16);
      const int block = index / 128 / (Columns / 16);
      uint32_t halves[2];
      for (int half = 0; half < 2; ++half) {
        const bool a = operand == kAFromRows || operand == kAFromColumns;
        // A: registers a0a1 (m, k), a2a3 (m + 8, k), a4a5 (m, k + 8), a6a7 (m + 8, k + 8). B: b0b1
        // (k), b2b3 (k + 8), then the same of the next 8 columns.
        const int outer = lane / 4 + 8 * (a ? i % 2 : i / 2);  // m of A, n of B
        const int k = 2 * (lane % 4) + half + 8 * (a ? i / 2 : i % 2);
        const bool k_along_rows = operand == kBFromColumns || operand == kAFromColumns;
        const int row = kViewFirstRow + 16 * block + (k_along_rows ? k : outer);
        const int column = 16 * pair + (k_along_rows ? outer : k);
        halves[half] = values[row * Columns + column];
      }
      expected[index] = halves[0] | halves[1] << 16;
    }
    check::equal(name, registers.read(), expected);
  }
}

// --- warp_gemm ---

template <class Element>
uint16_t bits_of(const float value) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half_as_ushort(__float2half_rn(value));
  } else {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
}

// Integers of -2 .. 2: exact in 16 bits, and so are their sums in float32.
std::vector<float> small_integers(const int count, uint32_t seed) {
  std::vector<float> values(count);
  for (float& v : values) {
    seed = seed * 1664525u + 1013904223u;
    v = float(int(seed >> 16) % 5 - 2);
  }
  return values;
}

// [rows][columns] as 16-bit elements, in rows of `width` (the rest zero); transposed on the way if
// asked.
template <class Element>
std::vector<uint16_t> operand_bits(const std::vector<float>& x, const int rows, const int columns, const bool transpose,
                                   const int width) {
  std::vector<uint16_t> bits((transpose ? columns : rows) * width, 0);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) {
      bits[transpose ? c * width + r : r * width + c] = bits_of<Element>(x[r * columns + c]);
    }
  return bits;
}

// c [rows][columns] = a [rows][inner] b [inner][columns]
std::vector<float> multiply(const std::vector<float>& a, const std::vector<float>& b, const int rows, const int columns,
                            const int inner) {
  std::vector<float> c(rows * columns, 0.f);
  for (int m = 0; m < rows; ++m)
    for (int k = 0; k < inner; ++k)
      for (int n = 0; n < columns; ++n) c[m * columns + n] += a[m * inner + k] * b[k * columns + n];
  return c;
}

// A tile is at least 32 columns wide.
constexpr int padded(const int columns) { return (columns + 31) / 32 * 32; }

template <int M, int N>
__device__ void store(const tile::Accumulator<M / 16, N / 8>& acc, float* c) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int m = 0; m < M / 16; ++m)
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 16 * m + lane / 4 + 8 * (e / 2);
        c[row * N + 8 * n + lane % 4 * 2 + e % 2] = acc[m][n][e];
      }
}

// c [M][N] = a b twice over. a: [M][K], or [K][M] if AColumns; b: [N][K], or [K][N] if BRows. One
// element follows c: the calls of the side work that came in their turn.
template <class Element, int M, int N, int K, int Ahead, bool AColumns, bool BRows>
__global__ void multiply_on_device(const uint16_t* a, const uint16_t* b, float* c) {
  constexpr int kAWidth = padded(AColumns ? M : K);
  constexpr int kBWidth = padded(BRows ? N : K);
  __shared__ tile::SharedTile<AColumns ? K : M, kAWidth> a_tile;
  __shared__ tile::SharedTile<BRows ? K : N, kBWidth> b_tile;
  fill(a_tile, a);
  fill(b_tile, b);
  const int lane = threadIdx.x;
  const tile::LaneView<kAWidth> a_view(ptx::shared_address(&a_tile), 0,
                                       AColumns ? tile::lane_row_b(lane) : tile::lane_row_a(lane));
  const tile::LaneView<kBWidth> b_view(ptx::shared_address(&b_tile), 0,
                                       BRows ? tile::lane_row_a(lane) : tile::lane_row_b(lane));
  tile::Accumulator<M / 16, N / 8> acc;
  tile::clear<M / 16, N / 8>(acc);
  int calls = 0;
  for (int repeat = 0; repeat < 2; ++repeat) {  // the second adds to the first
    tile::warp_gemm<Element, K / 16, Ahead, M / 16, N / 8>(
        acc,
        [&](uint32_t (&r)[4], int m, int k) {
          if constexpr (AColumns) {
            a_view.load_transposed(r, k, m);
          } else {
            a_view.load(r, m, k);
          }
        },
        [&](uint32_t (&r)[4], int pair, int k) {
          if constexpr (BRows) {
            b_view.load_transposed(r, k, pair);
          } else {
            b_view.load(r, pair, k);
          }
        },
        [&](int i) { calls += i == calls % (K / 16 * (N / 16)); });
  }
  store<M, N>(acc, c);
  if (lane == 0) c[M * N] = float(calls);
}

template <class Element, int M, int N, int K, int Ahead, bool AColumns, bool BRows>
void test_warp_gemm() {
  const std::string name = std::string("warp_gemm ") + check::kElementName<Element> + " " + dims({M, N, K}) + ", " +
                           std::to_string(Ahead) + " ahead" + (AColumns ? ", A [k][m]" : ", A [m][k]") +
                           (BRows ? ", B [k][n]" : ", B [n][k]");
  const std::vector<float> a = small_integers(M * K, 1);
  const std::vector<float> b = small_integers(K * N, 2);
  const DeviceArray<uint16_t> a_bits(operand_bits<Element>(a, M, K, AColumns, padded(AColumns ? M : K)));
  const DeviceArray<uint16_t> b_bits(operand_bits<Element>(b, K, N, !BRows, padded(BRows ? N : K)));
  const DeviceArray<float> c(M * N + 1, std::nanf(""));
  multiply_on_device<Element, M, N, K, Ahead, AColumns, BRows><<<1, 32>>>(a_bits.get(), b_bits.get(), c.get());
  check::finish(name);
  std::vector<float> expected = multiply(a, b, M, N, K);
  for (float& x : expected) x *= 2;
  expected.push_back(2 * (K / 16) * (N / 16));
  check::equal(name, c.read(), expected);
}

// d [M][D] = (a b) v with a [M][K], b [N][K] and v [N][D]; a b stays in registers, as P does in the
// forward kernel.
template <class Element, int M, int N, int K, int D>
__global__ void multiply_twice(const uint16_t* a, const uint16_t* b, const uint16_t* v, float* d) {
  __shared__ tile::SharedTile<M, K> a_tile;
  __shared__ tile::SharedTile<N, K> b_tile;
  __shared__ tile::SharedTile<N, D> v_tile;
  fill(a_tile, a);
  fill(b_tile, b);
  fill(v_tile, v);
  const int lane = threadIdx.x;
  const tile::LaneView<K> a_view(ptx::shared_address(&a_tile), 0, tile::lane_row_a(lane));
  const tile::LaneView<K> b_view(ptx::shared_address(&b_tile), 0, tile::lane_row_b(lane));
  const tile::LaneView<D> v_view(ptx::shared_address(&v_tile), 0, tile::lane_row_a(lane));
  tile::Accumulator<M / 16, N / 8> s;
  tile::clear<M / 16, N / 8>(s);
  tile::warp_gemm<Element, K / 16, 1, M / 16, N / 8>(
      s, [&](uint32_t (&r)[4], int m, int k) { a_view.load(r, m, k); },
      [&](uint32_t (&r)[4], int pair, int k) { b_view.load(r, pair, k); });
  uint32_t packed[M / 16][N / 16][4];
  tile::pack_operand<Element, M / 16, N / 8>(packed, s);
  tile::Accumulator<M / 16, D / 8> o;
  tile::clear<M / 16, D / 8>(o);
  tile::warp_gemm<Element, N / 16, 2, M / 16, D / 8>(
      o,
      [&](uint32_t (&r)[4], int m, int k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = packed[m][k][i];
      },
      [&](uint32_t (&r)[4], int pair, int k) { v_view.load_transposed(r, k, pair); });
  store<M, D>(o, d);
}

template <class Element, int M, int N, int K, int D>
void test_pack_operand() {
  static_assert(4 * K <= 256);  // every sum of a b is exact in bf16
  const std::string name = std::string("pack_operand ") + check::kElementName<Element> + " " + dims({M, N, K, D});
  const std::vector<float> a = small_integers(M * K, 3);
  const std::vector<float> b = small_integers(K * N, 4);
  const std::vector<float> v = small_integers(N * D, 5);
  const DeviceArray<uint16_t> a_bits(operand_bits<Element>(a, M, K, false, K));
  const DeviceArray<uint16_t> b_bits(operand_bits<Element>(b, K, N, true, K));
  const DeviceArray<uint16_t> v_bits(operand_bits<Element>(v, N, D, false, D));
  const DeviceArray<float> d(M * D, std::nanf(""));
  multiply_twice<Element, M, N, K, D><<<1, 32>>>(a_bits.get(), b_bits.get(), v_bits.get(), d.get());
  check::finish(name);
  check::equal(name, d.read(), multiply(multiply(a, b, M, N, K), v, M, D, N));
}

// --- TileCopy and store_rows ---

template <int Rows, int Columns>
struct GuardedTile {
  tile::SharedTile<Rows, Columns> before;
  tile::SharedTile<Rows, Columns> middle;
  tile::SharedTile<Rows, Columns> after;
};

// out: [3 * Rows][Columns], the tile between two that the copy must leave alone.
template <int Rows, int Columns, int Threads>
__global__ void load_tile(const uint16_t* source, const int row_stride, const int valid_rows, const int columns,
                          uint16_t* out) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<GuardedTile<Rows, Columns>*>(shared_bytes);
  constexpr uint32_t kPair = check::kUntouched * 0x10001u;
  for (int i = threadIdx.x; i < int(sizeof(shared)) / 16; i += Threads) {
    ptx::st_shared_v4(ptx::shared_address(&shared) + i * 16, uint4{kPair, kPair, kPair, kPair});
  }
  __syncthreads();
  const tile::TileCopy<Rows, Columns, Threads> copy(threadIdx.x, row_stride, columns);
  copy.load_async(ptx::shared_address(&shared.middle), source + copy.offset(), valid_rows);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  dump(shared.before, out);
  dump(shared.middle, out + Rows * Columns);
  dump(shared.after, out + 2 * Rows * Columns);
}

template <int Rows, int Columns, int Threads>
void test_tile_copy(const int valid_rows, const int columns) {
  const std::string name = "TileCopy::load_async " + dims({Rows, Columns}) + " by " + std::to_string(Threads) +
                           " threads: " + std::to_string(valid_rows) + " rows, " + std::to_string(columns) + " columns";
  // The allocation ends with the last valid row: compute-sanitizer sees a read of what must not be
  // read.
  const int row_stride = columns + 24;
  const int present = valid_rows < Rows ? valid_rows : Rows;
  std::vector<uint16_t> values(present > 0 ? (present - 1) * row_stride + columns : 8);
  for (size_t i = 0; i < values.size(); ++i) values[i] = uint16_t(1 + i % 65521);
  const DeviceArray<uint16_t> source(values);
  const DeviceArray<uint16_t> out(3 * Rows * Columns, 0);
  constexpr int kBytes = sizeof(GuardedTile<Rows, Columns>);
  check::cuda(
      cudaFuncSetAttribute(load_tile<Rows, Columns, Threads>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      name);
  load_tile<Rows, Columns, Threads><<<1, Threads, kBytes>>>(source.get(), row_stride, valid_rows, columns, out.get());
  check::finish(name);
  std::vector<uint16_t> expected(3 * Rows * Columns, check::kUntouched);
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) {
      expected[(Rows + r) * Columns + c] = r < valid_rows && c < columns ? values[r * row_stride + c] : 0;
    }
  check::equal(name, out.read(), expected);
}

template <int Rows, int Columns, int Threads>
void test_tile_copies() {
  test_tile_copy<Rows, Columns, Threads>(Rows, Columns);
  test_tile_copy<Rows, Columns, Threads>(Rows + 9, Columns - 8);
  test_tile_copy<Rows, Columns, Threads>(Rows - 7, Columns - 24);
  test_tile_copy<Rows, Columns, Threads>(1, 8);
  test_tile_copy<Rows, Columns, Threads>(0, Columns);
}

// Each warp writes RowBlocks * 16 rows. values: [16 * RowBlocks * warps][Columns]
template <int Columns, int RowBlocks, int Warps>
__global__ void store_tile(const uint16_t* values, uint16_t* out, const int64_t row_stride, const int valid_rows,
                           const int columns) {
  __shared__ tile::SharedTile<16 * RowBlocks * Warps, Columns> shared;
  fill(shared, values);
  tile::store_rows<Columns, 16 * RowBlocks>(ptx::shared_address(&shared), out, row_stride,
                                       int(threadIdx.x) / 32 * 16 * RowBlocks, valid_rows, columns);
}

template <int Columns, int RowBlocks, int Warps>
void test_store_rows(const int valid_rows, const int columns) {
  constexpr int kRows = 16 * RowBlocks * Warps;
  const std::string name = "store_rows " + dims({kRows, Columns}) + " by " + std::to_string(Warps) +
                           " warps: " + std::to_string(valid_rows) + " rows, " + std::to_string(columns) + " columns";
  std::vector<uint16_t> values(kRows * Columns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = uint16_t(1 + i);
  const int row_stride = Columns + 16;
  std::vector<uint16_t> expected((kRows + 1) * row_stride, check::kUntouched);
  const DeviceArray<uint16_t> source(values);
  const DeviceArray<uint16_t> out(expected);
  store_tile<Columns, RowBlocks, Warps><<<1, 32 * Warps>>>(source.get(), out.get(), row_stride, valid_rows, columns);
  check::finish(name);
  for (int r = 0; r < valid_rows && r < kRows; ++r)
    for (int c = 0; c < columns; ++c) expected[r * row_stride + c] = values[r * Columns + c];
  check::equal(name, out.read(), expected);
}

template <class Element>
void test_products() {
  test_warp_gemm<Element, 16, 16, 16, 1, false, false>();
  test_warp_gemm<Element, 16, 16, 32, 3, false, false>();
  test_warp_gemm<Element, 16, 64, 96, 2, false, false>();
  test_warp_gemm<Element, 32, 64, 128, 1, false, false>();
  test_warp_gemm<Element, 64, 32, 64, 1, false, false>();
  test_warp_gemm<Element, 32, 16, 192, 2, false, false>();
  test_warp_gemm<Element, 16, 128, 64, 4, false, true>();
  test_warp_gemm<Element, 32, 96, 16, 1, false, true>();
  test_warp_gemm<Element, 16, 64, 128, 1, true, true>();
  test_warp_gemm<Element, 64, 32, 48, 2, true, true>();
  test_warp_gemm<Element, 32, 32, 64, 1, true, false>();
  test_pack_operand<Element, 16, 64, 64, 64>();
  test_pack_operand<Element, 32, 32, 32, 96>();
}

void run() {
  test_lane_view<32>();
  test_lane_view<64>();
  test_lane_view<96>();
  test_lane_view<128>();
  test_lane_view<192>();
  test_lane_view<256>();
  test_products<__half>();
  test_products<__nv_bfloat16>();
  test_tile_copies<128, 32, 128>();
  test_tile_copies<32, 32, 256>();  // more threads than chunks
  test_tile_copies<128, 64, 256>();
  test_tile_copies<64, 96, 128>();
  test_tile_copies<64, 128, 128>();
  test_tile_copies<64, 192, 256>();
  test_tile_copies<32, 256, 128>();
  test_store_rows<32, 2, 4>(128, 32);
  test_store_rows<64, 2, 4>(101, 40);
  test_store_rows<96, 1, 4>(64, 88);
  test_store_rows<128, 1, 8>(1, 128);
  test_store_rows<192, 1, 4>(47, 136);
  test_store_rows<256, 1, 4>(200, 248);
}

}  // namespace

int main() { return check::run_all(run); }
