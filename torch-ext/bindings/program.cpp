#include "program.h"

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "../torch_binding.h"
#include "crew.h"
#include "launch.h"

using namespace rocm_kernels;

namespace {

struct Programs {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Program>> by_number;
  int64_t last = 0;
};

Programs& programs() {
  static Programs instance;
  return instance;
}

std::shared_ptr<Program> require_program(int64_t number) {
  const std::lock_guard<std::mutex> lock(programs().mutex);
  const auto found = programs().by_number.find(number);
  require(found != programs().by_number.end(), "program must be one that is there, got ", number);
  return found->second;
}

#if defined(CPU_KERNEL)
// On torch's threads, in one parallel region.
void run_together(const Program& program, int64_t begin, int64_t end) {
  const int64_t threads = torch::stable::get_num_threads();
  if (threads == 1 || begin == end) return program.run(begin, end, torch_threads());
  Crew crew(threads);
  std::exception_ptr error;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t) {
    if (first != 0) return crew.follow();
    try {
      crew.lead([&](const Context& context) { program.run(begin, end, context); });
    } catch (...) {
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}
#endif

}  // namespace

int64_t record_program(int64_t program, std::string what) {
  if (what == "new") {
    const std::lock_guard<std::mutex> lock(programs().mutex);
    programs().by_number[++programs().last] = std::make_shared<Program>();
    return programs().last;
  }
  const std::shared_ptr<Program> found = require_program(program);
  if (what == "on") {
    Program::recorded() = found.get();
  } else if (what == "off") {
    Program::recorded() = nullptr;
  } else {
    require(what == "free", "what must be new, on, off or free, got ", what);
    const std::lock_guard<std::mutex> lock(programs().mutex);
    programs().by_number.erase(program);
  }
  return found->size();
}

void run_program(int64_t program, int64_t begin, int64_t end) {
  const std::shared_ptr<Program> found = require_program(program);
  require(0 <= begin && begin <= end && end <= found->size(),
          "begin and end must lie in the program's ", found->size(), " launches, got ", begin,
          " and ", end);
#if defined(CPU_KERNEL)
  run_together(*found, begin, end);
#endif
}
