// Tensor maps for the copy engine. The driver's encoder is looked up at run time, so that libcuda is not linked.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention/params.h"

namespace flash_cuda {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

inline EncodeTensorMap tensor_map_encoder() {
  static const EncodeTensorMap encoder = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? EncodeTensorMap(symbol) : nullptr;
  }();
  return encoder;
}

// A tensor (batch, rows, heads, head_dim) of 16-bit elements, in boxes of box_rows x box_columns of one head: a panel
// of tile::Panels, swizzled by its row bytes. Elements outside read as zero. Host arithmetic only.
template <class Element>
cudaError_t make_tensor_map(CUtensorMap& map, const void* data, const Strides& strides, const int batch, const int rows,
                            const int heads, const int head_dim, const int box_rows, const int box_columns) {
  const EncodeTensorMap encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr auto kType =
      std::is_same_v<Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // The encoder takes no size and no stride of 0; what a dimension of one entry has for a stride does not matter.
  const auto stride = [](const int64_t elements) { return std::max<cuuint64_t>(elements * kElementBytes, 16); };
  const cuuint64_t sizes[4] = {cuuint64_t(head_dim), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(batch)};
  const cuuint64_t byte_strides[3] = {stride(strides.row), stride(strides.head), stride(strides.batch)};
  const cuuint32_t box[4] = {cuuint32_t(box_columns), cuuint32_t(box_rows), 1, 1};
  const cuuint32_t every[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, kType, 4, const_cast<void*>(data), sizes, byte_strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flash_cuda
