// What a launcher takes beside its tensors (a stream, a thread pool), and what it returns.
#pragma once

#include <cstdint>

namespace rocm_kernels {

// Runs body(begin, end, state) over disjoint chunks that cover [0, count), on the caller's thread
// pool. Chunks are at least `grain` long. The CPU launchers get torch's pool through it.
using ParallelFor = void (*)(int64_t count, int64_t grain,
                             void (*body)(int64_t begin, int64_t end, void* state), void* state);

struct Context {
  // GPU backends: the stream to launch on (hipStream_t or cudaStream_t), on the current device.
  void* stream = nullptr;
  // CPU backend: the pool.
  ParallelFor parallel_for = nullptr;
};

// Launchers return nullptr for success, else a static string that names what failed. They never
// throw, exit, synchronise or print: the binding turns the string into a Python exception.
using Status = const char*;

}  // namespace rocm_kernels
