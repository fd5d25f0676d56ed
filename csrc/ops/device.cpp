#include "ops/device.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

namespace flash_cuda::ops {
namespace {

struct DeviceFacts {
  std::once_flag once;
  DeviceLimits limits{};
};

constexpr int kMaxDevices = 64;
std::array<DeviceFacts, kMaxDevices> facts;

int attribute(const char* op, const cudaDeviceAttr which, const int device) {
  int value = 0;
  check_cuda(op, cudaDeviceGetAttribute(&value, which, device));
  return value;
}

void lower(int& limit, const char* variable) {
  const char* text = std::getenv(variable);
  const int value = text == nullptr ? 0 : std::atoi(text);
  if (value > 0 && value < limit) limit = value;
}

}  // namespace

DeviceLimits device_limits(const char* op, const int device) {
  DeviceFacts& f = facts.at(device);
  std::call_once(f.once, [&] {
    f.limits = {attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                attribute(op, cudaDevAttrL2CacheSize, device),
                10 * attribute(op, cudaDevAttrComputeCapabilityMajor, device) +
                    attribute(op, cudaDevAttrComputeCapabilityMinor, device),
                attribute(op, cudaDevAttrMultiProcessorCount, device)};
  });
  if (f.limits.compute_capability < 80) {
    throw std::runtime_error(std::string(op) + ": expected a GPU of compute capability 8.0 or later, got " +
                             capability_text(f.limits));
  }
  DeviceLimits limits = f.limits;
  lower(limits.shared_memory, "FLASH_CUDA_SHARED_MEMORY_LIMIT");
  lower(limits.multiprocessors, "FLASH_CUDA_MULTIPROCESSOR_LIMIT");
  return limits;
}

std::string capability_text(const DeviceLimits& limits) {
  return std::to_string(limits.compute_capability / 10) + "." + std::to_string(limits.compute_capability % 10);
}

cudaStream_t current_stream(const int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("flash_cuda: PyTorch has no current stream for cuda:" + std::to_string(device));
  }
  return static_cast<cudaStream_t>(stream);
}

void check_cuda(const char* op, const cudaError_t error) {
  if (error == cudaSuccess) return;
  std::string text = std::string(op) + ": CUDA error: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    text += "; this build holds no kernel for this GPU, rebuild with TORCH_CUDA_ARCH_LIST set to its architecture";
  }
  if (error == cudaErrorInvalidConfiguration) {
    text += "; the call needs more thread blocks than a grid may have, split it along the batch";
  }
  throw std::runtime_error(text);
}

}  // namespace flash_cuda::ops
