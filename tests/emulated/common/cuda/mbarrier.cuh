// Barriers with the phases, parities and bytes of mbarrier, and a thread of the host for each of a
// block.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>

struct EmulatedBarriers {
  struct Barrier {
    int expected = 0, pending = 0, bytes = 0;  // to come
    uint32_t phases = 0;                       // complete
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint32_t, Barrier> all;

  void init(uint32_t address, int arrivals) { all[address] = {arrivals, arrivals, 0, 0}; }
  void change(uint32_t address, int arrivals, int bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    Barrier& barrier = all.at(address);
    barrier.pending -= arrivals, barrier.bytes += bytes;
    if (barrier.pending == 0 && barrier.bytes == 0) {
      barrier.pending = barrier.expected;
      ++barrier.phases;
      changed.notify_all();
    }
  }
};
inline EmulatedBarriers emulated_barriers;

namespace rocm_kernels {
namespace cuda {

constexpr int kMbarrierBytes = 8;

struct PipelineState {
  int stage;
  int parity;

  void advance(int num_stages) {
    if (++stage == num_stages) stage = 0, parity ^= 1;
  }
};

// As the hardware's: of two phases it tells no more than which parity is under way.
inline void mbarrier_wait(uint32_t address, uint32_t parity) {
  EmulatedBarriers& barriers = emulated_barriers;
  std::unique_lock<std::mutex> lock(barriers.mutex);
  const EmulatedBarriers::Barrier& barrier = barriers.all.at(address);
  barriers.changed.wait(lock, [&] { return (barrier.phases & 1) != parity; });
}
inline bool mbarrier_is_over(uint32_t address, uint32_t parity) {
  std::this_thread::yield();
  std::lock_guard<std::mutex> lock(emulated_barriers.mutex);
  return (emulated_barriers.all.at(address).phases & 1) != parity;
}
inline void mbarrier_arrive(uint32_t address) { emulated_barriers.change(address, 1, 0); }
inline void mbarrier_arrive_expect(uint32_t address, int bytes) {
  emulated_barriers.change(address, 1, bytes);
}
inline void fence_async_proxy() {}

}  // namespace cuda
}  // namespace rocm_kernels
