// An exchange between processes of one machine, through memory that they share.
//
//   epoch e:  copy own data to own buffer [e % 2]  ->  ready = e  ->  wait for ready >= e of all
//             ->  read the buffers [e % 2] of all
//
// Two buffers in turn need no barrier at the end: whoever writes its buffer in epoch e + 2 has seen
// ready >= e + 1 of all others, each of which had read the buffers of epoch e before.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "../../../common/core/context.h"
#include "../memory.h"

namespace rocm_kernels {
namespace cpu {

class Exchange {
 public:
  Exchange(void* memory, int64_t data_bytes, int rank, int ranks)
      : own_(static_cast<PeerHeader*>(memory)),
        data_bytes_(data_bytes),
        rank_(rank),
        ranks_(ranks) {}

  // Null, or why nothing can be exchanged. `call`: the same on all ranks.
  Status begin(int64_t bytes, uint64_t call) {
    if (own_->magic != kPeerMagic || own_->rank != static_cast<uint32_t>(rank_) ||
        own_->ranks != static_cast<uint32_t>(ranks_) || own_->data_bytes != data_bytes_) {
      return "memory must be that of this rank's Communicator";
    }
    if (bytes * 2 > data_bytes_) {
      return "the tensor has more bytes than the Communicator was made for: give it more max_bytes";
    }
    if (__atomic_load_n(&own_->failed, __ATOMIC_RELAXED) != 0) {
      return "an earlier call of this Communicator failed: make a new one on every rank";
    }
    epoch_ = own_->ready + 1;
    call_ = call;
    own_->calls[epoch_ % 2] = call;
    return nullptr;
  }

  char* buffer() const { return buffer_of(own_); }
  const char* buffer(int rank) const { return buffer_of(header(rank)); }

  // Shows the others what was written to buffer(), and waits for what they show. Null, or who is
  // missing; then this rank's memory is of no more use, which the others learn too.
  Status finish(double timeout) {
    __atomic_store_n(&own_->ready, epoch_, __ATOMIC_RELEASE);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (const Status error = wait_for(rank, timeout)) {
        __atomic_store_n(&own_->failed, uint64_t{1}, __ATOMIC_RELAXED);
        return error;
      }
    }
    return nullptr;
  }

 private:
  PeerHeader* header(int rank) const { return reinterpret_cast<PeerHeader*>(own_->peers[rank]); }

  char* buffer_of(PeerHeader* header) const {
    return reinterpret_cast<char*>(header) + kPeerHeaderBytes +
           static_cast<int64_t>(epoch_ % 2) * (data_bytes_ / 2);
  }

  Status wait_for(int rank, double timeout) const {
    static constexpr const char* kMissing[kMostRanks] = {
        "rank 0 did not come in time: has its process ended?",
        "rank 1 did not come in time: has its process ended?",
        "rank 2 did not come in time: has its process ended?",
        "rank 3 did not come in time: has its process ended?",
        "rank 4 did not come in time: has its process ended?",
        "rank 5 did not come in time: has its process ended?",
        "rank 6 did not come in time: has its process ended?",
        "rank 7 did not come in time: has its process ended?",
    };
    // At first without a system call, then by giving the core away, at last by sleeping: there may
    // be more ranks than cores, and a rank may be late by seconds.
    constexpr int kSpins = 2000, kYields = 20000;
    PeerHeader* const other = header(rank);
    std::chrono::steady_clock::time_point begin;
    for (int64_t tries = 0;; ++tries) {
      if (__atomic_load_n(&other->ready, __ATOMIC_ACQUIRE) >= epoch_) break;
      if (__atomic_load_n(&other->failed, __ATOMIC_RELAXED) != 0) {
        return "another rank gave up: its error says why";
      }
      if (tries < kSpins) continue;
      if (tries == kSpins) begin = std::chrono::steady_clock::now();
      if (tries < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
      if (waited.count() > timeout) return kMissing[rank];
    }
    // Its word of this epoch still: it writes this one again two epochs on, which nobody begins
    // before this rank is in the one between.
    if (other->calls[epoch_ % 2] != call_) {
      return "every rank must call the same op with the same number of elements and dtype";
    }
    return nullptr;
  }

  PeerHeader* own_;
  int64_t data_bytes_;
  int rank_, ranks_;
  uint64_t epoch_ = 0, call_ = 0;
};

}  // namespace cpu
}  // namespace rocm_kernels
