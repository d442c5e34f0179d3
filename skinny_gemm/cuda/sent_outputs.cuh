// Outputs of a product that go straight to the mailboxes of all ranks of a group, this one's too
// (blocks/peers/gpu/mailbox.h): the first half of all_reduce, one shot. Element [m, n] lies there
// where all_reduce of out would put it, so a rank whose product does not send is as good a partner.
//
// A block collects its rounded outputs in shared memory, then all its threads send vectors of 16
// bytes. It lets the next kernel, which receives and adds, begin when its last operands are on
// their way: that one is there when the first vectors come. No block waits for other ranks here.
//
// Why not one kernel: it would end when its stores to other GPUs are answered, a way there and
// back, and hold its shared memory until then. The kernel behind it does not wait for that end.
#pragma once

#include "../../blocks/peers/gpu/mailbox.h"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "config.h"
#include "epilogue.cuh"

namespace rocm_kernels {
namespace cuda::skinny {

class SentOutputs {
 public:
  static constexpr bool kSends = true, kGates = false;
  struct Args : GemmArgs {
    Group group;
  };
  struct Shared {
    char* mailboxes[kMostRanks];  // of this epoch's half; nullptr: the group is of no more use
  };

  // The block has outputs of columns [first_n, first_n + columns), as far as there are; whole
  // vectors. `collected`: shared memory of sent_bytes(), aligned to 16 bytes.
  __device__ __forceinline__ SentOutputs(const Args& args, Shared& shared, void* collected,
                                         int first_n, int columns)
      : args_(args),
        shared_(shared),
        collected_(static_cast<uint16_t*>(collected)),
        first_n_(first_n),
        columns_(columns),
        pitch_(sent_pitch(columns)) {}

  // Looks up where to send, then lets the next kernel begin, which counts the epoch. By one thread,
  // once the previous kernel is done and the last operands are on their way.
  __device__ __forceinline__ void begin_next() const {
    const PeerHeader& own = *args_.group.own;
    const int64_t half = int64_t{own.epochs[0] & 1} * args_.group.half_bytes;
    const bool failed = own.failed != 0;
    uint64_t headers[kMostRanks];  // all asked for before any is used
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) headers[r] = own.peers[r];
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) {
      shared_.mailboxes[r] =
          failed ? nullptr : reinterpret_cast<char*>(headers[r]) + kPeerHeaderBytes + half;
    }
    allow_next_kernel();
  }
  __device__ __forceinline__ void put(int m, int64_t n, float value) const {
    collected_[m * pitch_ + static_cast<int>(n) - first_n_] =
        static_cast<uint16_t>(round_pair(args_.out_dtype, value, 0.0f));
  }
  // n and the one behind it, both of which there are.
  __device__ __forceinline__ void put_pair(int m, int64_t n, float low, float high) const {
    uint16_t* const to = collected_ + m * pitch_ + static_cast<int>(n) - first_n_;
    *reinterpret_cast<uint32_t*>(to) = round_pair(args_.out_dtype, low, high);
  }
  // By all threads of the block.
  __device__ __forceinline__ void send() const {
    __syncthreads();
    if (shared_.mailboxes[0] == nullptr) return;
    constexpr int kCount = kVectorElements<bfloat16>;
    const int vectors = min(columns_, static_cast<int>(args_.n) - first_n_) / kCount;
    const int m_count = static_cast<int>(args_.m);
    for (int i = threadIdx.x; i < m_count * vectors; i += blockDim.x) {
      const int m = i / vectors, column = (i - m * vectors) * kCount;
      const uint4 bits = load_shared(shared_address(collected_ + m * pitch_ + column));
      const Vector vector = sendable(Vector{{bits.x, bits.y, bits.z, bits.w}});
      const int64_t row = int64_t{args_.group.rank} * m_count + m;
      const int64_t place = (row * args_.n + first_n_ + column) * int64_t{sizeof(bfloat16)};
      for (int step = 1; step <= args_.group.ranks; ++step) {  // the own mailbox last
        const int r = args_.group.rank + step;
        store_to_peer(shared_.mailboxes[r < args_.group.ranks ? r : r - args_.group.ranks] + place,
                      vector);
      }
    }
  }

 private:
  const Args& args_;
  Shared& shared_;
  uint16_t* const collected_;
  const int first_n_, columns_, pitch_;
};

}  // namespace cuda::skinny
}  // namespace rocm_kernels
