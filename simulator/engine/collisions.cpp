// Lanes of one instruction that store to the same bytes: which of them stays is for no one to say.
#include <algorithm>

#include "memory.h"

namespace sim {
namespace {

struct Collisions {
  int first = -1, second = -1;  // two lanes of them, such that differ if any do
  bool differ = false;
  bool regular =
      true;  // every place is met by as many lanes, a power of two: copies of one another
};

bool sameData(const MemOp& op, int a, int b, u32 row) {
  for (u32 r = 0; r < op.inst->mem.dwords; ++r) {
    if (op.data[row + r][a] != op.data[row + r][b]) return false;
  }
  return true;
}

// Most stores go upwards.
bool ascend(const MemOp& op, u64 lanes, u32 bytes) {
  if (lanes == ~0ull) {  // nearly all: without a branch for each lane
    u64 down = 0;
    for (int l = 0; l + 1 < kLanes; ++l) down |= op.addr[l] + bytes > op.addr[l + 1];
    return !down;
  }
  u64 free = 0;
  for (u64 m = lanes; m; m &= m - 1) {
    u64 at = op.addr[__builtin_ctzll(m)];
    if (at < free) return false;
    free = at + bytes;
  }
  return true;
}

Collisions collisions(const MemOp& op, u64 lanes, u32 row) {
  constexpr u32 kSlots = 256;
  u8 slots[kSlots] = {};  // lane + 1 of the first at an address, by its hash
  u8 met[kLanes] = {};
  Collisions c;
  for (u64 m = lanes; m; m &= m - 1) {
    int lane = __builtin_ctzll(m);
    u64 at = op.addr[lane];
    u32 slot = (at * 0x9e3779b97f4a7c15ull) >> 56;
    while (slots[slot] && op.addr[slots[slot] - 1] != at) slot = (slot + 1) % kSlots;
    if (!slots[slot]) {
      slots[slot] = lane + 1;
      met[lane] = 1;
      continue;
    }
    int other = slots[slot] - 1;
    ++met[other];
    bool differ = !sameData(op, other, lane, row);
    if (c.first < 0 || (differ && !c.differ)) c.first = other, c.second = lane;
    c.differ = c.differ || differ;
  }
  u8 count = 0;
  for (u8 n : met) {
    if (!n) continue;
    count = count ? count : n;
    c.regular = c.regular && n == count && (n & (n - 1)) == 0;
  }
  return c;
}

}  // namespace

void checkCollisions(Wave& w, const MemOp& op, u64 lanes, u32 offset, u32 row) {
  if (!(lanes & (lanes - 1)) || ascend(op, lanes, op.inst->mem.bytes)) return;
  Collisions c = collisions(op, lanes, row);
  if (c.first < 0) return;
  bool lds = op.inst->mem.space == Space::Lds || ldsLanes(op) & lanes;
  u64 address = op.addr[c.first] + offset;
  if (lds) address = static_cast<u32>(address);
  const Inst* load = lds ? ownLdsReader(w, address) : ownReader(w, address);
  bool changes = load && w.wg->launch->dependences.of(*w.object, *load, *op.inst).data;
  if (!changes && !c.differ) return;
  bool certain = changes && (c.differ || !c.regular);
  std::string who = "lanes " + std::to_string(c.first) + " and " + std::to_string(c.second) +
                    " of one wave store to the same " + (lds ? "bytes of LDS" : "bytes");
  report(w, *op.inst, "lane-collision", address, c.first,
         changes ? who + " what they made of '" + load->text + "' (" +
                       w.object->source(load->address) + "): all but one of their changes are lost"
                 : who + ", and not the same value: which of them stays is undefined",
         certain ? Level::Error : Level::Suspicious);
}

}  // namespace sim
