#include <atomic>

#include "launch/hopper_forward.cuh"

template cudaError_t flash_cuda::launch_hopper_forward<__nv_bfloat16>(const ForwardParams&, const DeviceLimits&,
                                                                      cudaStream_t);

namespace flash_cuda {

namespace {

// A kernel's notes are static shared memory. Compiled for anything but sm_90a its body is empty and has none.
bool ask() {
  using Tile = hopper::ForwardTiles<64>::Short;
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, hopper::forward_kernel<__nv_bfloat16, Tile>);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && attributes.sharedSizeBytes != 0;
}

}  // namespace

bool has_hopper_code() {
  constexpr int kDevices = 64;
  static std::atomic<signed char> known[kDevices];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device >= kDevices) return ask();
  if (known[device] == 0) known[device] = ask() ? 1 : -1;
  return known[device] > 0;
}

}  // namespace flash_cuda
