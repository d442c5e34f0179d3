// Order within a workgroup: its waves share a compute unit, whose L1 serves their global accesses
// as they were issued. So an access that meets one in flight waits for it; all others stay late.
#include <algorithm>

#include "memory.h"

namespace sim {
namespace {

bool writes(const MemOp& op) {
  Access a = op.inst->mem.access;
  return a == Access::Store || a == Access::Atomic;
}

bool isGlobal(const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  return m.access != Access::None && m.bytes && m.space != Space::Lds &&
         m.space != Space::Scratch && m.space != Space::Scalar;
}

bool meet(const MemOp& a, const MemOp& b) {
  if (a.high <= b.low || b.high <= a.low) return false;
  u64 bytesA = a.inst->mem.bytes, bytesB = b.inst->mem.bytes;
  for (u64 m = a.mask; m; m &= m - 1) {
    u64 at = a.addr[__builtin_ctzll(m)];
    u64 hit = 0;
    for (int l = 0; l < kLanes; ++l) {
      bool near = at < b.addr[l] + bytesB && b.addr[l] < at + bytesA;
      hit |= static_cast<u64>(near) << l;
    }
    if (hit & b.mask) return true;
  }
  return false;
}

// Performs what a queue holds up to the last operation that `op` meets.
void settle(Wave& other, std::deque<MemOp*>& queue, const MemOp& op, bool write) {
  size_t last = 0;
  for (size_t n = 0; n < queue.size(); ++n) {
    const MemOp& o = *queue[n];
    if (!o.performed && o.high && (write || writes(o)) && meet(op, o)) last = n + 1;
  }
  for (size_t n = 0; n < last; ++n) perform(other, *queue[n]);
}

}  // namespace

void orderInWorkgroup(Wave& w, MemOp& op) {
  op.low = op.high = 0;
  if (!isGlobal(op) || !op.mask) return;
  u64 low = ~0ull, high = 0;
  for (int l = 0; l < kLanes; ++l) {
    bool on = op.mask >> l & 1;
    low = std::min(low, on ? op.addr[l] : ~u64{0});
    high = std::max(high, on ? op.addr[l] : u64{0});
  }
  op.low = low;
  op.high = high + op.inst->mem.bytes;
  bool write = writes(op);
  for (Wave& other : w.wg->waves) {
    if (!(write ? other.unordered : other.unorderedWrites)) continue;
    // A wave's own queue keeps its order; its flat accesses are in the other one.
    if (&other != &w || op.mixedLds) settle(other, other.vm, op, write);
    if (&other != &w || !op.mixedLds) settle(other, other.lgkm, op, write);
  }
  ++w.unordered;
  w.unorderedWrites += write;
}

void writeBackWorkgroup(const Wave& w, const MemOp& fence) {
  for (Wave& other : w.wg->waves) {
    for (std::deque<MemOp*>* queue : {&other.vm, &other.lgkm}) {
      for (MemOp* op : *queue) {
        if (op->born > fence.born) break;
        if (op->inst->mem.space != Space::Scalar) perform(other, *op);  // those pass the L1 by
      }
    }
  }
}

void tookEffect(Wave& w, const MemOp& op) {
  if (!op.high) return;
  --w.unordered;
  w.unorderedWrites -= writes(op);
}

}  // namespace sim
