// Every operator of flash_cuda, on one page. New features become optional arguments of these two.
//
// Shapes: q, out, dout, dq (batch, seqlen_q, heads_q, head_dim); k, v, dk, dv (batch, seqlen_k, heads_kv, head_dim);
// lse, dlse (batch, heads_q, seqlen_q), float32, natural logarithm. Windows are inclusive, -1 = open; causal is
// window_right = 0. dlse is positional: torch 2.11 and earlier refuse autograd for ops with keyword-only tensors. A
// gradient that is not needed comes back as an empty tensor of shape (0,).
//
// kernel_name and not kernel: Inductor has an argument of that name of its own.
//
// Kernels: csrc/ops/forward.cpp and backward.cpp on CUDA; flash_cuda/ops.py on the CPU, with the fakes;
// flash_cuda/autograd.py.

#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "attention/tile_plan.h"

STABLE_TORCH_LIBRARY(flash_cuda, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, *, float? scale=None, int window_left=-1, int window_right=-1, "
      "str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
  m.def(
      "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None, *, "
      "float? scale=None, int window_left=-1, int window_right=-1, bool deterministic=False, bool need_dq=True, "
      "bool need_dk=True, bool need_dv=True, str kernel_name=\"auto\") -> (Tensor dq, Tensor dk, Tensor dv)");
}

namespace {

// tile_plan(head_dim, kilobytes): the lab's block sizes. TilePlan in flash_cuda/tile_plan.py names the numbers.
PyObject* tile_plan(PyObject*, PyObject* arguments) {
  int head_dim, kilobytes;
  if (!PyArg_ParseTuple(arguments, "ii:tile_plan", &head_dim, &kilobytes)) return nullptr;
  if (head_dim < 1 || head_dim > flash_cuda::kMostLabHeadDim) {
    return PyErr_Format(PyExc_ValueError, "tile_plan: head_dim: expected 1 to 128, got %d", head_dim);
  }
  if (std::ranges::count(flash_cuda::kBudgetsKb, kilobytes) == 0) {
    return PyErr_Format(PyExc_ValueError, "tile_plan: kilobytes: expected 48, 99, 163 or 227, got %d", kilobytes);
  }
  const int width = flash_cuda::lab_head_dim(head_dim);
  const int bytes = kilobytes * 1024;
  const flash_cuda::BlockSizes paper = flash_cuda::paper_block_sizes(flash_cuda::sram_elements(bytes), head_dim);
  const flash_cuda::TilePlan plan = flash_cuda::tile_plan(bytes, width);
  const int split_k_threads = plan.teams * plan.split_k * 32;
  const int split_q_threads = plan.split_q * 32;
  return Py_BuildValue("(iiiiiiiiiiiiii)", width, paper.rows, paper.columns, plan.block.rows, plan.block.columns,
                       plan.split_k, plan.teams, plan.strip_rows, plan.split_q, plan.split_k_bytes(width),
                       plan.split_q_bytes(width), flash_cuda::resident_blocks(kilobytes, split_k_threads),
                       flash_cuda::resident_blocks(kilobytes, split_q_threads),
                       flash_cuda::default_budget_kb(head_dim, bytes));
}

}  // namespace

// Importing the module runs the registrations of this library.
PyMODINIT_FUNC PyInit__C() {
  static PyMethodDef methods[] = {
      {"tile_plan", tile_plan, METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
