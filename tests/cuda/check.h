// What the device unit tests share: memory, kernel errors, and one printed line per check.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

// What memory holds before a kernel writes to it; never an expected value.
constexpr uint16_t kUntouched = 0xA5C3;

template <class Element>
constexpr const char* kElementName = std::is_same_v<Element, __half> ? "f16" : "bf16";

inline int passed = 0;
inline int failed = 0;

inline void report(const std::string& name, const bool good, const std::string& detail = "") {
  good ? ++passed : ++failed;
  std::printf("%s %s%s%s\n", good ? "ok  " : "FAIL", name.c_str(), good || detail.empty() ? "" : ": ",
              good ? "" : detail.c_str());
  std::fflush(stdout);
}

// A CUDA error is sticky: no later check would mean anything.
inline void cuda(const cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  report(what, false, cudaGetErrorString(error));
  std::printf("%d passed, %d failed\n", passed, failed);
  std::exit(1);
}

// After a launch.
inline void finish(const std::string& name) {
  cuda(cudaGetLastError(), name + ": launch");
  cuda(cudaDeviceSynchronize(), name + ": run");
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    cuda(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    cuda(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceArray(const size_t size, const T value) : DeviceArray(std::vector<T>(size, value)) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }

  std::vector<T> read() const {
    std::vector<T> values(size_);
    cuda(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

// Bit for bit; the detail names the first of the elements that differ.
template <class T>
void equal(const std::string& name, const std::vector<T>& actual, const std::vector<T>& expected) {
  size_t wrong = 0;
  size_t first = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (actual[i] == expected[i]) continue;
    if (wrong++ == 0) first = i;
  }
  std::string detail = "sizes differ";
  if (wrong > 0) {
    detail = std::to_string(wrong) + " of " + std::to_string(expected.size()) + " differ, first [" +
             std::to_string(first) + "]: expected " + std::to_string(expected[first]) + ", got " +
             std::to_string(actual[first]);
  }
  report(name, wrong == 0 && actual.size() == expected.size(), detail);
}

// Exit code of main: 77 tells ctest and pytest that there is no GPU.
template <class Run>
int run_all(Run&& run) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device\n");
    return 77;
  }
  run();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace check
