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

}  // namespace flash_cuda::ptx
