// Counters from which the thread blocks of a persistent kernel draw their tiles.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/tile_draw.cuh"

namespace flash_cuda {

// A counter of this stream, or null where none is safe: while a graph is being captured (its copies may run at the same
// time as each other and as the stream), or when more streams than counters have been seen. The counter is 0 whenever
// no kernel uses it; kernels of one stream follow each other, and the last thread block of each puts the 0 back.
WorkQueue* work_queue(cudaStream_t stream);

}  // namespace flash_cuda
