// The memory that a rank shares with the others of its group: a header, then room for data.
//
// torch-ext/rocm_kernels/comm/memory.py makes it and writes the first fields of the header; an op
// gets its address. Epochs count the exchanges of a group from 1 on, never come again,
// and are kept here and not by a caller, so that a captured graph may be replayed.
#pragma once

#include <cstdint>

namespace rocm_kernels {

constexpr int kMostRanks = 8;
constexpr int kMostPeerBlocks = 512;                 // of a GPU's kernel
constexpr uint64_t kPeerMagic = 0x3152454550534B52;  // "RKSPEER1"
constexpr int64_t kPeerHeaderBytes = 4096;

struct PeerHeader {
  // Written once, before any op.
  uint64_t magic;
  uint32_t rank;
  uint32_t ranks;
  int64_t data_bytes;          // behind the header
  uint64_t peers[kMostRanks];  // the ranks' headers, own included, where this process has them
  uint64_t report;             // a GPU's: where the host looks for 1 + the rank that did not come

  // The CPU's: each on a cache line of its own, since one rank writes it and all others read it.
  alignas(64) uint64_t ready;     // the last epoch whose data lie here
  alignas(64) uint64_t calls[2];  // what this rank called in an even and in an odd epoch

  alignas(64) uint64_t failed;  // not 0: this rank gave up, and the group with it
  // A GPU's: finished exchanges. Each block of a kernel has one to read and counts up its share of
  // all, so that between kernels they are equal and no block waits for the others to count.
  uint32_t epochs[kMostPeerBlocks];
};
static_assert(sizeof(PeerHeader) <= kPeerHeaderBytes);

// What a GPU's kernel knows of the group; built by a launcher.
struct Group {
  PeerHeader* own;
  int64_t half_bytes;
  uint64_t patience;  // ticks
  int32_t rank;
  int32_t ranks;
};

}  // namespace rocm_kernels
