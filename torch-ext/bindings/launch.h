// What a binding asks torch for, to run a launcher: the tensor's stream or torch's threads, and
// scratch memory.
//
// CPU_KERNEL is defined where tensors lie in the CPU's memory. Where ROCM_KERNEL is defined too,
// the launchers are AMD's, and the simulator runs their kernels on such tensors
// (tests/simulated.py).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#if !defined(CPU_KERNEL)
#include <torch/csrc/stable/accelerator.h>
#endif

#include <optional>
#include <utility>

#include "../../common/core/context.h"
#include "checks.h"
#include "program.h"

#if !defined(CPU_KERNEL)
// libtorch exports it on ROCm too, but its header declares it for USE_CUDA alone.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace rocm_kernels {

#if defined(CPU_KERNEL)
inline Context torch_threads() {
  Context context;
  context.parallel_for = [](int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*),
                            void* state) {
    torch::stable::parallel_for(
        0, count, grain, [body, state](int64_t begin, int64_t end) { body(begin, end, state); });
  };
  return context;
}

// Runs `launch` with torch's thread pool.
template <typename Launch>
auto with_context(const Tensor&, Launch&& launch) {
  return launch(torch_threads());
}

// Runs `launch` so, or puts it into the program that this thread records. It has copies of all that
// it needs, the tensors' memory excepted, and throws where it fails.
template <typename Launch>
void run_or_record(const Tensor& tensor, Launch launch) {
  if (Program* const program = Program::recorded()) return program->add(std::move(launch));
  with_context(tensor, launch);
}

// Runs `ask` with the device of that index as the current one; the CPU has index -1.
template <typename Ask>
Status on_device(int64_t, const Ask& ask) {
  return ask();
}
#else
// Runs `launch` on the tensor's device and that device's current stream.
template <typename Launch>
auto with_context(const Tensor& tensor, Launch&& launch) {
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  Context context;
  const int32_t error =
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &context.stream);
  require(error == 0, "torch has no current stream for device ", tensor.get_device_index());
  return launch(context);
}

template <typename Launch>
void run_or_record(const Tensor& tensor, Launch launch) {
  with_context(tensor, launch);
}

// Runs `ask` with the device of that index as the current one.
template <typename Ask>
Status on_device(int64_t device, const Ask& ask) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  return ask();
}
#endif

inline void check_status(Status status, const char* op) {
  if (status != nullptr) fail(op, ": ", status);
}

// Scratch for one call.
class Workspace {
 public:
  void* allocate(int64_t bytes, const Tensor& like) {
    if (bytes == 0) return nullptr;
#if defined(CPU_KERNEL) && !defined(ROCM_KERNEL)
    // An allocation through torch costs a fifth of a product of one row. The simulator must see it.
    if (bytes <= static_cast<int64_t>(sizeof(small_))) return small_;
#endif
    large_ = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
    return large_->data_ptr();
  }

 private:
#if defined(CPU_KERNEL) && !defined(ROCM_KERNEL)
  alignas(256) char small_[32 * 1024];
#endif
  std::optional<Tensor> large_;
};

}  // namespace rocm_kernels
