// Launches of the same kernels by several threads on two devices, with any sizes of dynamic shared
// memory: each must be let through, and the runtime must not be asked before each of them.
//
// Prints "launches N, failed M, told K times".
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <random>
#include <vector>

#include "common/gpu/launch.h"

using namespace rocm_kernels;

static void kernel_a(int) {}
static void kernel_b(int) {}
static void kernel_c(int) {}
static void (*const kKernels[])(int) = {kernel_a, kernel_b, kernel_c};

// More kernels than any table has places for; never called.
static void (*kernel_at(uintptr_t address))(int) {
  return reinterpret_cast<void (*)(int)>(address);
}

static bool launch(void (*kernel)(int), int bytes) {
  Launch launch;
  launch.grid = dim3(1);
  launch.block = 32;
  launch.shared_bytes = bytes;
  return launch_kernel(kernel, launch, 1) == nullptr;
}

int main() {
  constexpr int kThreads = 8, kEach = 20000, kMany = 10000;
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&failed, number] {
      std::mt19937 chance(static_cast<unsigned>(number));
      for (int i = 0; i < kEach; ++i) {
        stand_in::device = static_cast<int>(chance() % 2);
        const int most = stand_in::kOptinBytes[stand_in::device] - stand_in::kStaticBytes;
        const int bytes = chance() % 4 == 0 ? most : 1 + static_cast<int>(chance() % most);
        failed += !launch(kKernels[chance() % 3], bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const int told = stand_in::times_set;
  stand_in::device = 0;
  for (int i = 0; i < kMany; ++i) failed += !launch(kernel_at(4096 + 16 * i), 200 << 10);
  // What no block can have is refused, and leaves the others as they are.
  failed += launch(kernel_a, stand_in::kOptinBytes[0]);
  failed += !launch(kernel_a, 200 << 10);
  std::printf("launches %d, failed %d, told %d times\n", kThreads * kEach + kMany, failed.load(),
              told);
}
