// Late completion: operations in flight, the registers that they owe, and the waits that end them.
#include <algorithm>

#include "memory.h"

namespace sim {
namespace {

constexpr u32 kPoison = 0x7fd1deadu;  // a NaN, so that arithmetic on it shows

u32 resultRows(const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  u32 rows = m.pair ? 2 * m.dwords : m.dwords;
  return m.access == Access::Load || (m.access == Access::Atomic && m.returns) ? rows : 0;
}

void writeBack(Wave& w, MemOp& op) {
  const Inst& i = *op.inst;
  if (i.mem.space == Space::Scalar) {
    for (u32 n = 0; n < op.scalarDwords; ++n) w.s[i.dst.index + n] = op.scalar[n];
    return;
  }
  u32 rows = resultRows(op);
  for (u32 r = 0; r < rows; ++r) {
    u32* d = w.row(i.dst.index + r);
    const u32* value = op.data[r];
    if (i.mem.d16) {
      for (int l = 0; l < kLanes; ++l) {
        u32 merged = i.mem.d16hi ? (d[l] & 0xffff) | value[l] << 16
                                 : (d[l] & 0xffff0000u) | (value[l] & 0xffff);
        d[l] = (op.mask >> l & 1) ? merged : d[l];
      }
    } else if (op.mask == ~0ull) {
      std::memcpy(d, value, kLanes * 4);
    } else {
      for (int l = 0; l < kLanes; ++l) d[l] = (op.mask >> l & 1) ? value[l] : d[l];
    }
  }
}

// Marks the registers that an operation will write, or unmarks them.
void owe(Wave& w, const MemOp& op, int change) {
  const Inst& i = *op.inst;
  if (i.mem.access == Access::LoadToLds) w.dmaInFlight += change;
  bool scalar = i.mem.space == Space::Scalar && i.mem.access != Access::None;
  u32 rows = scalar ? op.scalarDwords : resultRows(op);
  u8* owed = scalar ? w.owedS : w.owedV;
  for (u32 reg = i.dst.index; reg < i.dst.index + rows; ++reg) {
    owed[reg] += change;
    w.owing.set(reg, scalar, owed[reg] > 0);
  }
  if (scalar || rows) w.owed += change;
}

void poison(Wave& w, const MemOp& op) {
  const Inst& i = *op.inst;
  if (i.mem.space == Space::Scalar) {
    for (u32 n = 0; n < op.scalarDwords; ++n) w.s[i.dst.index + n] = kPoison;
    return;
  }
  if (i.mem.d16) return;  // the other half must survive
  u32 rows = resultRows(op);
  for (u32 r = 0; r < rows; ++r) {
    u32* d = w.row(i.dst.index + r);
    if (op.mask == ~0ull) {
      std::fill_n(d, kLanes, kPoison);
    } else {
      for (int l = 0; l < kLanes; ++l) d[l] = (op.mask >> l & 1) ? kPoison : d[l];
    }
  }
}

void complete(Wave& w, MemOp* op, bool wasQueued) {
  perform(w, *op);
  if (op->inst->mem.access != Access::None) {
    writeBack(w, *op);
  } else if (op->inst->name == "buffer_wbl2") {
    writeBackWorkgroup(w, *op);
  }
  notePoll(w, *op);
  if (w.wg->launch->options.race) completeSync(w, *op);
  if (wasQueued) owe(w, *op, -1);
  op->known = op->fresh = nullptr;
  w.wg->worker->freeOps.push_back(op);
}

bool isScalar(const MemOp* op) {
  return op->inst->mem.space == Space::Scalar && op->inst->mem.access != Access::None;
}

}  // namespace

void issue(Wave& w, MemOp* op) {
  const Inst& i = *op->inst;
  Workgroup& wg = *w.wg;
  const Options& o = wg.launch->options;
  op->born = wg.executed;
  orderInWorkgroup(w, *op);
  if (o.race) issueSync(w, *op);
  if (!o.late) {
    complete(w, op, false);
    return;
  }
  owe(w, *op, 1);
  if (i.mem.access != Access::None) poison(w, *op);
  bool lgkm = i.mem.space == Space::Scalar || i.mem.space == Space::Lds || op->mixedLds;
  if (i.mem.access == Access::None) lgkm = false;
  std::deque<MemOp*>& queue = lgkm ? w.lgkm : w.vm;
  // The counters are 6 and 4 bits wide: the hardware stalls when they are full.
  if (!lgkm && w.vm.size() >= 63) waitVm(w, 62);
  if (lgkm && w.lgkm.size() >= 64) waitLgkm(w, 0);
  queue.push_back(op);
}

void waitVm(Wave& w, u32 left) {
  while (w.vm.size() > left) {
    MemOp* op = w.vm.front();
    w.vm.pop_front();
    complete(w, op, true);
  }
}

// Scalar loads return in any order, so a count above 0 promises nothing about them; of the LDS
// operations, which keep their order, at most the newest `left` can be outstanding.
void waitLgkm(Wave& w, u32 left) {
  if (left == 0) {
    while (!w.lgkm.empty()) {
      MemOp* op = w.lgkm.front();
      w.lgkm.pop_front();
      complete(w, op, true);
    }
    return;
  }
  u32 ordered =
      std::count_if(w.lgkm.begin(), w.lgkm.end(), [](const MemOp* op) { return !isScalar(op); });
  for (auto it = w.lgkm.begin(); it != w.lgkm.end() && ordered > left;) {
    if (isScalar(*it)) {
      ++it;
      continue;
    }
    MemOp* op = *it;
    it = w.lgkm.erase(it);
    complete(w, op, true);
    --ordered;
  }
}

void performAged(Workgroup& wg, u64 age) {
  for (Wave& w : wg.waves) {
    for (std::deque<MemOp*>* queue : {&w.vm, &w.lgkm}) {
      for (MemOp* op : *queue) {
        if (op->born + age > wg.executed) break;
        perform(w, *op);
      }
    }
  }
}

void checkPending(Wave& w, const Inst& i) {
  if (!w.owing.meets(i.touches)) return;
  auto find = [&](u32 reg, bool scalar) -> const MemOp* {
    for (const std::deque<MemOp*>* queue : {&w.vm, &w.lgkm}) {
      for (const MemOp* op : *queue) {
        if (op->inst->mem.access == Access::None || isScalar(op) != scalar) continue;
        u32 rows = scalar ? op->scalarDwords : resultRows(*op);
        u32 first = op->inst->dst.index;
        if (reg >= first && reg < first + rows) return op;
      }
    }
    return nullptr;
  };
  auto complain = [&](u32 reg, bool scalar, bool writes) {
    const MemOp* op = find(reg, scalar);
    if (!op) return;
    bool allLanes = i.cls == Class::Matrix || i.name.starts_with("v_readlane") ||
                    i.name.starts_with("v_writelane");
    if (!scalar && !allLanes && !(op->mask & w.exec())) return;
    // Operations under one in-order counter may reuse a result register.
    bool vm = !scalar && std::find(w.vm.begin(), w.vm.end(), op) != w.vm.end();
    if (writes && i.mem.access != Access::None && !scalar) {
      bool mine = i.mem.space != Space::Lds && i.mem.space != Space::Scalar;
      if (mine == vm) return;
    }
    int lane = scalar ? 0 : __builtin_ctzll(op->mask ? op->mask : 1);
    u64 address = scalar ? op->scalarAddress : op->addr[lane];
    std::string name = scalar ? "s" + std::to_string(reg)
                              : (reg >= kAccBase ? "a" + std::to_string(reg - kAccBase)
                                                 : "v" + std::to_string(reg));
    report(w, i, "missing-wait", address, lane,
           std::string(writes ? "overwrites " : "reads ") + name + " while '" + op->inst->text +
               "' (" + w.object->source(op->inst->address) + ", address " + hex(address) +
               ") has not written it yet: s_waitcnt " + (vm ? "vmcnt" : "lgkmcnt") + " is missing");
  };
  auto scan = [&](const std::vector<Inst::Range>& ranges, bool scalar, bool writes) {
    for (const Inst::Range& r : ranges) {
      for (u32 n = r.first; n < u32(r.first) + r.count; ++n) {
        if (scalar ? w.owedS[n & 127] : n < kTempBase && w.owedV[n]) complain(n, scalar, writes);
      }
    }
  };
  scan(i.readsV, false, false);
  scan(i.readsS, true, false);
  scan(i.writesV, false, true);
  scan(i.writesS, true, true);
}

void cacheFence(Wave& w, const Inst& i) {
  MemOp* op = w.wg->worker->takeOp();
  op->inst = &i;
  op->mask = 0;
  issue(w, op);
}

}  // namespace sim
