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

STABLE_TORCH_LIBRARY(flash_cuda, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, *, float? scale=None, int window_left=-1, int window_right=-1, "
      "str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
  m.def(
      "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None, *, "
      "float? scale=None, int window_left=-1, int window_right=-1, bool deterministic=False, bool need_dq=True, "
      "bool need_dk=True, bool need_dv=True, str kernel_name=\"auto\") -> (Tensor dq, Tensor dk, Tensor dv)");
}

// The module itself is empty: importing it runs the registrations of this library.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
