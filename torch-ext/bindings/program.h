// Launches on the CPU that are kept, to run again as one call: what a graph is on a GPU. While a
// thread records, the ops that it calls check their arguments as always and put what they would run
// at the end of a program. The memory that they were given must stay where it is.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "../../common/core/context.h"

namespace rocm_kernels {

class Program {
 public:
  // Runs on a context's threads; throws what its op would.
  using Launch = std::function<void(const Context&)>;

  // The program that this thread records into; nullptr: its ops run.
  static Program*& recorded() {
    thread_local Program* program = nullptr;
    return program;
  }

  void add(Launch launch) { launches_.push_back(std::move(launch)); }
  int64_t size() const { return static_cast<int64_t>(launches_.size()); }

  void run(int64_t begin, int64_t end, const Context& context) const {
    for (int64_t i = begin; i < end; ++i) launches_[i](context);
  }

 private:
  std::vector<Launch> launches_;
};

}  // namespace rocm_kernels
