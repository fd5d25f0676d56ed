// Warpgroup matrix multiply-accumulate (PTX ISA, "wgmma.mma_async", sm_90a): 64 x N x 16, asynchronous.
//
// One warpgroup (four warps, the first at a multiple of four) issues it together. Its accumulator and its A registers
// belong to the tensor core from the instruction until wgmma_wait_group() says that it has finished.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_cuda::ptx {

// Before the first wgmma after registers that it uses were written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Pending` of this warpgroup's groups are under way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// No instruction, but the compiler moves neither uses nor the computation of these registers across it. Stands after
// the wait for an accumulator, and where arithmetic is to be done before a wait.
template <int Blocks>
__device__ __forceinline__ void wgmma_hold(float (&d)[Blocks][4]) {
#pragma unroll
  for (int i = 0; i < Blocks; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[i][e])::"memory");
}

// d (64 x N, float32) = or += A B. A and B in shared memory by descriptor (tile/panel_tile.cuh), or A in registers.
// TransposeA, TransposeB: 0 where the operand's rows in memory run along the contraction, 1 where they run across it.
template <class Element, int N, int TransposeA, int TransposeB>
struct Wgmma;

// The accumulator's registers in the text of an instruction and as its operands, for each count of 16 columns.
#define FLASH_CUDA_LIST_2 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_CUDA_LIST_4                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_CUDA_LIST_6 \
  FLASH_CUDA_LIST_4       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_CUDA_LIST_8 \
  FLASH_CUDA_LIST_6       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_CUDA_LIST_12                                                           \
  FLASH_CUDA_LIST_8                                                                  \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_CUDA_LIST_16                                                                       \
  FLASH_CUDA_LIST_12                                                                             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_CUDA_BLOCK(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FLASH_CUDA_BLOCKS(i) \
  FLASH_CUDA_BLOCK(i), FLASH_CUDA_BLOCK(i + 1), FLASH_CUDA_BLOCK(i + 2), FLASH_CUDA_BLOCK(i + 3)
#define FLASH_CUDA_ACCUMULATOR_2 FLASH_CUDA_BLOCKS(0)
#define FLASH_CUDA_ACCUMULATOR_4 FLASH_CUDA_BLOCKS(0), FLASH_CUDA_BLOCKS(4)
#define FLASH_CUDA_ACCUMULATOR_6 FLASH_CUDA_ACCUMULATOR_4, FLASH_CUDA_BLOCKS(8)
#define FLASH_CUDA_ACCUMULATOR_8 FLASH_CUDA_ACCUMULATOR_6, FLASH_CUDA_BLOCKS(12)
#define FLASH_CUDA_ACCUMULATOR_12 FLASH_CUDA_ACCUMULATOR_8, FLASH_CUDA_BLOCKS(16), FLASH_CUDA_BLOCKS(20)
#define FLASH_CUDA_ACCUMULATOR_16 FLASH_CUDA_ACCUMULATOR_12, FLASH_CUDA_BLOCKS(24), FLASH_CUDA_BLOCKS(28)

// o0 .. o6: numbers of the operands after the accumulator.
#define FLASH_CUDA_WGMMA(ELEMENT, NAME, N, SIXTEENTHS, o0, o1, o2, o3, o4, o5, o6)                                    \
  template <int TransposeA, int TransposeB>                                                                           \
  struct Wgmma<ELEMENT, N, TransposeA, TransposeB> {                                                                  \
    static __device__ __forceinline__ void shared_a(float (&d)[N / 8][4], const uint64_t a, const uint64_t b,         \
                                                    const int accumulate) {                                           \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #o2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME  \
                   "." NAME " {" FLASH_CUDA_LIST_##SIXTEENTHS "}, %" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 ";}"  \
                   : FLASH_CUDA_ACCUMULATOR_##SIXTEENTHS                                                              \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(TransposeA), "n"(TransposeB));                              \
    }                                                                                                                 \
    static __device__ __forceinline__ void register_a(float (&d)[N / 8][4], const uint32_t (&a)[4], const uint64_t b, \
                                                      const int accumulate) {                                         \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #o5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME  \
                   "." NAME " {" FLASH_CUDA_LIST_##SIXTEENTHS "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4    \
                                                              ", p, 1, 1, %" #o6 ";}"                                 \
                   : FLASH_CUDA_ACCUMULATOR_##SIXTEENTHS                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TransposeB));           \
    }                                                                                                                 \
  };
#define FLASH_CUDA_WGMMA_BOTH(...)             \
  FLASH_CUDA_WGMMA(__half, "f16", __VA_ARGS__) \
  FLASH_CUDA_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__)

FLASH_CUDA_WGMMA_BOTH(32, 2, 16, 17, 18, 19, 20, 21, 22)
FLASH_CUDA_WGMMA_BOTH(64, 4, 32, 33, 34, 35, 36, 37, 38)
FLASH_CUDA_WGMMA_BOTH(96, 6, 48, 49, 50, 51, 52, 53, 54)
FLASH_CUDA_WGMMA_BOTH(128, 8, 64, 65, 66, 67, 68, 69, 70)
FLASH_CUDA_WGMMA_BOTH(192, 12, 96, 97, 98, 99, 100, 101, 102)
FLASH_CUDA_WGMMA_BOTH(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef FLASH_CUDA_LIST_2
#undef FLASH_CUDA_LIST_4
#undef FLASH_CUDA_LIST_6
#undef FLASH_CUDA_LIST_8
#undef FLASH_CUDA_LIST_12
#undef FLASH_CUDA_LIST_16
#undef FLASH_CUDA_ACCUMULATOR_2
#undef FLASH_CUDA_ACCUMULATOR_4
#undef FLASH_CUDA_ACCUMULATOR_6
#undef FLASH_CUDA_ACCUMULATOR_8
#undef FLASH_CUDA_ACCUMULATOR_12
#undef FLASH_CUDA_ACCUMULATOR_16
#undef FLASH_CUDA_BLOCK
#undef FLASH_CUDA_BLOCKS
#undef FLASH_CUDA_WGMMA
#undef FLASH_CUDA_WGMMA_BOTH

}  // namespace flash_cuda::ptx
