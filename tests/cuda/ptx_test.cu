// The single instructions of csrc/ptx on a GPU: conversions, reductions, memory order, small
// copies.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace {

using namespace flash_cuda;
using check::DeviceArray;

// cp_async_ca_4 of values[i] where i < valid; out: one word per thread and one beyond, which
// nothing writes.
__global__ void load_words(const float* values, const int valid, uint32_t* out) {
  __shared__ uint32_t words[129];
  for (int i = threadIdx.x; i < 129; i += 128) words[i] = check::kUntouched;
  __syncthreads();
  ptx::cp_async_ca_4(ptx::shared_address(words + threadIdx.x), values + threadIdx.x, int(threadIdx.x) < valid);
  ptx::cp_async_commit_group();
  ptx::cp_async_commit_group();  // an empty group counts
  ptx::cp_async_wait_group<1>();
  __syncthreads();
  for (int i = threadIdx.x; i < 129; i += 128) out[i] = words[i];
}

void test_cp_async_ca_4(const int valid) {
  const std::string name = "cp_async_ca_4: " + std::to_string(valid) + " of 128 valid";
  std::vector<float> values(valid > 0 ? valid : 1);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 1.5f + float(i);
  const DeviceArray<float> source(values);
  const DeviceArray<uint32_t> out(129, 0u);
  load_words<<<1, 128>>>(source.get(), valid, out.get());
  check::finish(name);
  std::vector<uint32_t> expected(129, 0u);
  for (int i = 0; i < valid; ++i) expected[i] = std::bit_cast<uint32_t>(values[i]);
  expected[128] = check::kUntouched;
  check::equal(name, out.read(), expected);
}

template <class Element>
__global__ void convert(const float* values, uint32_t* packed) {
  const int i = threadIdx.x;
  packed[i] = ptx::cvt_rn_x2_f32<Element>(values[i], values[(i + 1) % blockDim.x]);
}

struct Rounded {
  float value;
  uint16_t bits;
};

// Each value stands once in the lower and once in the upper half.
template <class Element>
void test_cvt(const std::vector<Rounded>& cases) {
  const std::string name = std::string("cvt_rn_x2_f32 ") + check::kElementName<Element>;
  const int count = int(cases.size());
  std::vector<float> values;
  std::vector<uint32_t> expected;
  for (int i = 0; i < count; ++i) {
    values.push_back(cases[i].value);
    expected.push_back(cases[i].bits | uint32_t{cases[(i + 1) % count].bits} << 16);
  }
  const DeviceArray<float> source(values);
  const DeviceArray<uint32_t> packed(count, 0u);
  convert<Element><<<1, count>>>(source.get(), packed.get());
  check::finish(name);
  check::equal(name, packed.read(), expected);
}

void test_conversions() {
  const float infinity = std::numeric_limits<float>::infinity();
  // Ties go to the even neighbour; subnormals are kept.
  test_cvt<__half>({{1.f, 0x3C00},
                    {-2.f, 0xC000},
                    {1 + 0x1p-11f, 0x3C00},
                    {1 + 0x3p-11f, 0x3C02},
                    {1 + 0x1.2p-11f, 0x3C01},
                    {65504.f, 0x7BFF},
                    {65519.f, 0x7BFF},
                    {65520.f, 0x7C00},
                    {-0.f, 0x8000},
                    {0x1p-24f, 0x0001},
                    {0x1p-25f, 0x0000},
                    {0x3p-25f, 0x0002},
                    {-infinity, 0xFC00}});
  test_cvt<__nv_bfloat16>({{1.f, 0x3F80},
                           {-2.f, 0xC000},
                           {1 + 0x1p-8f, 0x3F80},
                           {1 + 0x3p-8f, 0x3F82},
                           {1 + 0x1.2p-8f, 0x3F81},
                           {3.4e38f, 0x7F80},
                           {-0.f, 0x8000},
                           {0x1p-133f, 0x0001},
                           {0x1p-134f, 0x0000},
                           {-infinity, 0xFF80}});
}

__global__ void exponentiate(const float* values, float* out) {
  out[threadIdx.x] = ptx::ex2_approx_ftz(values[threadIdx.x]);
}

void test_ex2() {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {-infinity, infinity, 0.f, 1.f, -1.f, -150.f};
  for (int i = 0; i < 122; ++i) values.push_back(-30.f + 0.37f * i);
  const DeviceArray<float> source(values);
  const DeviceArray<float> out(values.size(), -1.f);
  exponentiate<<<1, int(values.size())>>>(source.get(), out.get());
  check::finish("ex2_approx_ftz");
  const std::vector<float> actual = out.read();
  check::report("ex2_approx_ftz: limits", actual[0] == 0.f && actual[1] == infinity && actual[5] == 0.f);
  double worst = 0;
  for (size_t i = 2; i < values.size(); ++i) {
    if (i == 5) continue;
    const double exact = std::exp2(double(values[i]));
    worst = std::max(worst, std::abs(actual[i] - exact) / exact);
  }
  // PTX ISA: at most 2^-22 relative; a rounding of the result is allowed beside it.
  check::report("ex2_approx_ftz: accuracy", worst < 0x1p-22 + 0x1p-24, std::to_string(worst * 0x1p22) + " * 2^-22");
}

// sums: 4 per thread of a block, all blocks to the same place. Element e of thread t: the sum over
// blocks b of t + e + b.
__global__ void add_scalars(float* sums) {
  for (int e = 0; e < 4; ++e) ptx::red_add_f32(sums + threadIdx.x * 4 + e, float(threadIdx.x + e + blockIdx.x));
}

// Below sm_90, where there is no such instruction, as scalars.
__global__ void add_vectors(float* sums) {
#if __CUDA_ARCH__ >= 900
  float value[4];
  for (int e = 0; e < 4; ++e) value[e] = float(threadIdx.x + e + blockIdx.x);
  ptx::red_add_v4_f32(sums + threadIdx.x * 4, value);
#else
  for (int e = 0; e < 4; ++e) ptx::red_add_f32(sums + threadIdx.x * 4 + e, float(threadIdx.x + e + blockIdx.x));
#endif
}

void test_red_add(const std::string& name, void (*kernel)(float*)) {
  constexpr int kBlocks = 300;
  constexpr int kThreads = 64;
  const DeviceArray<float> sums(4 * kThreads + 4, 1.f);
  kernel<<<kBlocks, kThreads>>>(sums.get());
  check::finish(name);
  std::vector<float> expected(4 * kThreads + 4, 1.f);
  for (int i = 0; i < 4 * kThreads; ++i) expected[i] += kBlocks * (i / 4 + i % 4) + kBlocks * (kBlocks - 1) / 2;
  check::equal(name, sums.read(), expected);
}

// Blocks take turns, the last one first, and each reads what the one before has written. The wait
// is bounded so that a fault fails the check and does not hang the device.
__global__ void take_turns(int* turn, unsigned* value) {
  const int mine = int(gridDim.x) - 1 - int(blockIdx.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 1 << 20 && ptx::ld_acquire(turn) != mine; ++i) __nanosleep(64);
  }
  __syncthreads();
  value[threadIdx.x] = value[threadIdx.x] * 3 + blockIdx.x;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ptx::red_release_add(turn, 1);
}

void test_turns() {
  constexpr int kBlocks = 16;  // fewer than the multiprocessors of any card: all run at once
  const DeviceArray<int> turn(1, 0);
  const DeviceArray<unsigned> value(128, 7u);
  take_turns<<<kBlocks, 128>>>(turn.get(), value.get());
  check::finish("ld_acquire, red_release_add");
  unsigned expected = 7;
  for (unsigned block = kBlocks; block-- > 0;) expected = expected * 3 + block;
  check::equal("ld_acquire, red_release_add: turns", value.read(), std::vector<unsigned>(128, expected));
}

void run() {
  for (const int valid : {128, 77, 1, 0}) test_cp_async_ca_4(valid);
  test_conversions();
  test_ex2();
  test_red_add("red_add_f32", add_scalars);
  test_red_add("red_add_v4_f32", add_vectors);
  test_turns();
}

}  // namespace

int main() { return check::run_all(run); }
