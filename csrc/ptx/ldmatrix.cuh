// Warp-wide loads of 8x8 matrices of 16-bit elements from shared memory (PTX ISA, "ldmatrix").
// Lane l passes the address of row l % 8 of matrix l / 8; every row is 16 contiguous bytes.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The way back (sm_90 and later): four 8 x 8 matrices, the rows of the i-th at the addresses of lanes 8 i to 8 i + 7.
__device__ __forceinline__ void stmatrix_x4(const uint32_t row, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
#endif

}  // namespace flash_cuda::ptx
