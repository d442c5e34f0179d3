// Vectors from rank to rank, each its own signal.
//
// A rank stores a vector into the memory of another: its mailbox there. An empty place holds
// kNothing in each word; a place whose words are all something else has been filled, whatever the
// order in which its words came. So no fence is waited for, and no flag sent after the data.
// The reader empties the place again.
//
// An exchange of epoch e takes the places of half e % 2 of the memory, as many as it needs, and
// empties each that was filled. A rank that fills a place in epoch e + 2 has left epoch e + 1, so
// the reader had begun it; and it began that with its kernel of epoch e done, so with the place
// empty. Thus two halves suffice, kernels of a rank following one another, whatever the sizes and
// the grids.
//
// A product may send its results itself, to its own mailbox too (sent_outputs.cuh); the kernel
// behind it then does the rest of the exchange.
#pragma once

#include "../../../common/gpu/dependent_launch.h"
#include "../../../common/gpu/peer.h"
#include "../memory.h"

namespace rocm_kernels {

// No number: what has it is sent as another NaN.
constexpr uint32_t kNothing = 0xFFFFFFFFu;
constexpr uint32_t kOtherNan = 0x7FFFFFFFu;  // of float32, and of both 16-bit halves a NaN too

ROCM_KERNELS_DEVICE Vector sendable(Vector v) {
#pragma unroll
  for (int w = 0; w < 4; ++w) v.word[w] = v.word[w] == kNothing ? kOtherNan : v.word[w];
  return v;
}

ROCM_KERNELS_DEVICE bool has_come(const Vector& v) {
  return (v.word[0] != kNothing) & (v.word[1] != kNothing) & (v.word[2] != kNothing) &
         (v.word[3] != kNothing);
}

// The group for a kernel that has no vectors of its own to send: it receives those of all ranks.
inline Group of_receivers(Group group) {
  group.rank = -1;
  return group;
}

// Rank number `i` of the others; of those that are not there rank 0. Each rank begins with the next
// one: if all sent to one first, its link would carry what those of the others could.
ROCM_KERNELS_DEVICE int other_rank(const Group& group, int i) {
  const int r = group.rank + 1 + i;
  return i >= group.ranks - 1 ? 0 : r < group.ranks ? r : r - group.ranks;
}

// A thread's view of one exchange.
template <int kRanks>
struct Mailboxes {
  Group group;
  char* peers[kRanks - 1];  // the data of the other ranks, of this epoch's half, by other_rank()
  uint32_t epoch;
  bool failed;

  // Once the previous exchange is done.
  ROCM_KERNELS_DEVICE explicit Mailboxes(const Group& g) : group(g) {
    epoch = load_older(&group.own->epochs[blockIdx.x]);
    const int64_t half = kPeerHeaderBytes + static_cast<int64_t>(epoch & 1) * group.half_bytes;
#pragma unroll
    for (int i = 0; i < kRanks - 1; ++i) {
      peers[i] = reinterpret_cast<char*>(group.own->peers[other_rank(group, i)]) + half;
    }
    // Last: the compiler lets no load pass it, so none waits until this one's answer is known. What
    // a kernel loads before it makes its Mailboxes is on its way at the same time, too.
    failed = load_number(&group.own->failed) != 0;
  }

  // By all threads of a block, once each has made its Mailboxes.
  ROCM_KERNELS_DEVICE void count_epoch() const {
    const unsigned entry = blockIdx.x + threadIdx.x * gridDim.x;
    if (entry < kMostPeerBlocks) group.own->epochs[entry] = epoch + 1;
  }

  ROCM_KERNELS_DEVICE bool is_other(int r) const { return (r < group.ranks) & (r != group.rank); }

  // To place `offset` of every other rank's mailbox.
  ROCM_KERNELS_DEVICE void send(int64_t offset, const Vector& v) const {
#pragma unroll
    for (int i = 0; i < kRanks - 1; ++i) {
      if (i < group.ranks - 1) store_to_peer(peers[i] + offset, v);
    }
  }

  // Waits for vectors of each other rank, v[i][r] at `offsets[i] + r * stride` of the own mailbox,
  // and empties the places; false: one did not come, and the group is of no more use. An offset of
  // kNoVector: that v[i] is not there.
  static constexpr int64_t kNoVector = -1;
  template <int kVectors>
  ROCM_KERNELS_DEVICE bool receive(const int64_t (&offsets)[kVectors], int64_t stride,
                                   Vector (&v)[kVectors][kRanks]) const {
    uint64_t begin = 0;
    for (unsigned tries = 0;; ++tries) {
      // No branch between these loads, or each waits for the one before. Ranks that are not there
      // have rank 0's place, vectors that are not there the first of all.
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const char* const from = peers_own() + (offsets[i] < 0 ? 0 : offsets[i]);
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          v[i][r] = load_from_peer(from + (r < group.ranks ? r : 0) * stride);
        }
      }
      int all = 1;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          all &= int{has_come(v[i][r])} | int{!is_other(r)} | int{offsets[i] < 0};
        }
      }
      if (all != 0) break;
      pause();
      if (tries == 0) begin = ticks();
      if (tries % 256 == 255 && ticks() - begin > group.patience) {
        uint64_t missing = 0;  // its number and 1
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
#pragma unroll
          for (int r = 0; r < kRanks; ++r) {
            const bool waited = is_other(r) && offsets[i] >= 0;
            if (waited && !has_come(v[i][r])) missing = 1 + static_cast<uint64_t>(r);
          }
        }
        if (claim_number(&group.own->failed, missing)) {
          store_to_host(reinterpret_cast<uint64_t*>(group.own->report), missing);
        }
        return false;
      }
    }
    Vector nothing;
#pragma unroll
    for (int w = 0; w < 4; ++w) nothing.word[w] = kNothing;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (offsets[i] < 0) continue;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (is_other(r)) store_to_peer(peers_own() + offsets[i] + r * stride, nothing);
      }
    }
    return true;
  }

 private:
  ROCM_KERNELS_DEVICE char* peers_own() const {
    return reinterpret_cast<char*>(group.own) + kPeerHeaderBytes +
           static_cast<int64_t>(epoch & 1) * group.half_bytes;
  }
};

// The vector of sums, `v` in the ranks' order, from 0 on.
template <typename T, int kRanks>
ROCM_KERNELS_DEVICE Vector sum_of_ranks(const Vector (&v)[kRanks], int ranks) {
  constexpr int kCount = kVectorElements<T>;
  float total[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) total[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (r >= ranks) break;
    float values[kCount];
    unpack<T>(v[r], values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] += values[i];
  }
  return pack<T>(total);
}

}  // namespace rocm_kernels
