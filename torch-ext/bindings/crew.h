// Threads that stay together from the first launch of a program to its last. A pool that is called
// for each launch wakes its threads and awaits their sleep, 3 us each time; a decode step has
// hundreds of launches of 1 to 100 us.
//
//   leader    runs the launches in turn. Where one divides its work, it publishes the pieces, takes
//             some, and waits until all are done.
//   follower  looks at one word, takes pieces while there are any, until the program is over.
//
// A follower that comes late, or never, is not missed: pieces belong to nobody before they are
// taken. So the pool may give fewer threads than were asked for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../../common/core/context.h"
#include "../../common/core/math.h"

namespace rocm_kernels {

class Crew {
 public:
  explicit Crew(int64_t threads)
      : threads_(std::min(threads, kMostPieces)),
        spins_(threads <= std::thread::hardware_concurrency() ? kSpins : 0) {}

  // Calls `launches` with a context whose parallel_for gives the followers work.
  template <typename Launches>
  void lead(const Launches& launches) {
    struct Leading {  // until the launches end, or throw
      explicit Leading(Crew* crew) : crew(crew), before(leads()) { leads() = crew; }
      ~Leading() {
        leads() = before;
        crew->over_.store(true, std::memory_order_release);
      }
      Crew *crew, *before;
    } const leading(this);
    Context context;
    context.parallel_for = [](int64_t count, int64_t grain, Body body, void* state) {
      leads()->divide(count, grain, body, state);
    };
    launches(context);
  }

  void follow() {
    for (int64_t turn = 0; !over_.load(std::memory_order_acquire); ++turn) {
      if (take_pieces()) {
        turn = 0;
      } else {
        pause(turn);
      }
    }
  }

 private:
  using Body = void (*)(int64_t begin, int64_t end, void* state);
  static constexpr int64_t kMostPieces = 0xffff;
  static constexpr int64_t kSpins = 2000;  // some 50 us: beyond, another process may want the core

  static Crew*& leads() {
    thread_local Crew* crew = nullptr;
    return crew;
  }

  void divide(int64_t count, int64_t grain, Body body, void* state) {
    if (count <= 0) return;
    const int64_t pieces = std::min(threads_, ceil_div(count, std::max<int64_t>(grain, 1)));
    if (pieces == 1) return body(0, count, state);
    count_ = count;
    piece_ = ceil_div(count, pieces);
    body_ = body;
    state_ = state;
    unfinished_.store(pieces, std::memory_order_relaxed);
    divided_ += 1;
    open_.store(divided_ << 16 | static_cast<uint64_t>(pieces), std::memory_order_release);
    take_pieces();
    for (int64_t turn = 0; unfinished_.load(std::memory_order_acquire) != 0; ++turn) pause(turn);
  }

  // Whether there was one. What it reads of a call stays until the piece is done.
  bool take_pieces() {
    bool took = false;
    uint64_t open = open_.load(std::memory_order_acquire);
    while ((open & kMostPieces) != 0) {
      if (!open_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
        continue;
      }
      const int64_t begin = (static_cast<int64_t>(open & kMostPieces) - 1) * piece_;
      const int64_t end = std::min(count_, begin + piece_);
      if (begin < end) body_(begin, end, state_);
      unfinished_.fetch_sub(1, std::memory_order_release);
      took = true;
      open = open_.load(std::memory_order_acquire);
    }
    return took;
  }

  void pause(int64_t turn) const {
    if (turn >= spins_) return std::this_thread::yield();
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const int64_t threads_, spins_;
  alignas(64) std::atomic<uint64_t> open_{0};  // the call's number, and 16 bits of pieces to take
  alignas(64) std::atomic<int64_t> unfinished_{0};
  std::atomic<bool> over_{false};
  // Of the call that is under way.
  alignas(64) int64_t count_ = 0;
  int64_t piece_ = 0;
  Body body_ = nullptr;
  void* state_ = nullptr;
  uint64_t divided_ = 0;
};

}  // namespace rocm_kernels
