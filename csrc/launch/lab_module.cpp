// The extension flash_cuda._lab: the kernels of v1 and of the lab as a capsule for flash_cuda._C, and what Python asks
// of them. It is loaded by the first call that names one of them.

#include <Python.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch/head_dim.h"
#include "launch/lab.h"

namespace flash_cuda {
namespace {

// Rows of a strip of the choice's kernel.
int strip_rows(const LabChoice& choice, const int head_dim) {
  const TilePlan plan = tile_plan(choice.budget_kb * 1024, head_dim);
  return choice.split_k ? plan.strip_rows : plan.block.rows;
}

LabWorkspace forward_workspace(const LabChoice& choice, const Shape& shape) {
  if (!choice.kv_outer) return {0, 0};
  const int head_dim = lab_head_dim(shape.head_dim);
  const int strip = strip_rows(choice, head_dim);
  const int64_t rows = int64_t{shape.batch} * shape.heads_q * blocks_of(shape.seqlen_q, strip) * strip;
  return {rows * head_dim, rows * 2};
}

template <class Element>
cudaError_t forward(const LabChoice& choice, const int head_dim, const KvOuterForwardParams& params,
                    const DeviceLimits& limits, const cudaStream_t stream, LabKernelFacts* facts) {
  return visit_lab_head_dim(head_dim, [&](auto width) {
    const auto launch = choice.kv_outer ? launch_kv_outer<Element, width> : launch_q_outer<Element, width>;
    return launch(choice, params, limits, stream, facts);
  });
}

cudaError_t forward_of(const LabChoice& choice, const bool is_half, const KvOuterForwardParams& params,
                       const DeviceLimits& limits, const cudaStream_t stream) {
  return (is_half ? forward<__half> : forward<__nv_bfloat16>)(choice, params.shape.head_dim, params, limits, stream,
                                                              nullptr);
}

cudaError_t facts_of(const LabChoice& choice, const bool is_half, const int head_dim, LabKernelFacts* facts) {
  return (is_half ? forward<__half> : forward<__nv_bfloat16>)(choice, head_dim, {}, {}, nullptr, facts);
}

cudaError_t backward_of(const bool is_half, const BackwardParams& params, const DeviceLimits& limits,
                        const cudaStream_t stream) {
  return (is_half ? launch_v1_backward<__half> : launch_v1_backward<__nv_bfloat16>)(params, limits, stream);
}

constexpr LabKernels kKernels{forward_workspace, forward_of, facts_of, v1_backward_workspace, backward_of};

// kernel_facts(kernel, head_dim, is_half) -> (registers, shared_bytes, threads, blocks_per_multiprocessor) on the
// current device; `kernel` with its budget.
PyObject* kernel_facts(PyObject*, PyObject* arguments) {
  const char* name = nullptr;
  int head_dim = 0;
  int is_half = 0;
  if (!PyArg_ParseTuple(arguments, "sip", &name, &head_dim, &is_half)) return nullptr;
  const auto choice = parse_lab_name(name);
  if (!choice.has_value() || !is_budget(choice->budget_kb) || head_dim < 1 || head_dim > kMostLabHeadDim) {
    PyErr_Format(PyExc_ValueError, "kernel_facts: no kernel \"%s\" for head_dim %d", name, head_dim);
    return nullptr;
  }
  LabKernelFacts facts{};
  const cudaError_t error = facts_of(*choice, is_half != 0, head_dim, &facts);
  if (error != cudaSuccess) {
    PyErr_Format(PyExc_RuntimeError, "kernel_facts: CUDA error: %s", cudaGetErrorString(error));
    return nullptr;
  }
  return Py_BuildValue("(iiii)", facts.registers, facts.shared_bytes, facts.threads, facts.blocks_per_multiprocessor);
}

}  // namespace
}  // namespace flash_cuda

PyMODINIT_FUNC PyInit__lab() {
  static PyMethodDef methods[] = {{"kernel_facts", flash_cuda::kernel_facts, METH_VARARGS, nullptr}, {}};
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_lab", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyObject* kernels =
      PyCapsule_New(const_cast<flash_cuda::LabKernels*>(&flash_cuda::kKernels), flash_cuda::kLabCapsule, nullptr);
  if (kernels == nullptr || PyModule_AddObject(module, "kernels", kernels) != 0) {
    Py_XDECREF(kernels);
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
