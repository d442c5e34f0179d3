// The happens-before checker: which accesses meet, and whether something orders them (sync.cpp).
//
// Two accesses to one byte race when one writes, they are of different waves, the later one's wave
// does not know the earlier one, and they are not both synchronisation: within a workgroup atomics
// and accesses with scope bits, between workgroups atomics and accesses with device scope.
#include <algorithm>
#include <thread>

#include "memory.h"

namespace sim {
namespace {

std::string describe(const Wave& w, const char* what, u32 workgroup, u32 wave, const Inst* inst,
                     bool earlierWrites, const char* hint) {
  return std::string(what) + ": wave " + std::to_string(wave) +
         (workgroup == w.wg->linear ? "" : " of workgroup " + std::to_string(workgroup)) +
         (earlierWrites ? " wrote it" : " read it") + " in '" + inst->text + "' (" +
         w.object->source(inst->address) + ") with nothing ordering the two" + hint;
}

// Do both accesses mean to meet? Then they are synchronisation and no race.
bool synchronise(const Wave& w, const Role& a, const Role& b, bool sameGroup) {
  if (sameGroup || !w.object->gpu->manyDies) {
    // Flags of gfx90a, and flags in LDS, have no scope bits: one word and a polling reader tell.
    auto flagged = [](const Role& x, const Role& y) {
      return (x.poll || (!x.write && x.level)) && (y.flag || y.level || y.poll);
    };
    if (flagged(a, b) || flagged(b, a)) return true;
  }
  u8 needed = sameGroup ? Role::kWorkgroup : Role::kDevice;
  return a.level >= needed && b.level >= needed;
}

// Why two accesses that look like synchronisation are not.
const char* hintFor(const Role& a, const Role& b) {
  auto narrow = [](const Role& x) {
    return x.level < Role::kDevice && (x.poll || x.level || x.flag);
  };
  auto wide = [](const Role& x) { return x.level >= Role::kDevice || x.poll; };
  if ((narrow(a) && wide(b)) || (narrow(b) && wide(a))) {
    return "; as a flag between workgroups it needs device scope (sc1) on both sides";
  }
  bool atomic = a.level == Role::kAtomic || b.level == Role::kAtomic;
  return atomic ? "; one of them is atomic, the other is not" : "";
}

// Is the recorded access ordered before this one? `fresh`: it also sees what flags gave and no
// buffer_inv has made visible to ordinary loads.
bool ordered(const Wave& w, const MemOp& op, const AccessRecord& r, bool fresh) {
  u32 wave = r.component / kComponents * kComponents;
  if (r.workgroup == w.wg->linear) {
    if (static_cast<int>(wave / kComponents) == w.id) return true;
    const Clock& k = op.known->own;
    bool scalar = r.scalar || op.inst->mem.space == Space::Scalar;  // not through the L1
    return scalar ? k.at[r.component] >= r.stamp : k.at[wave + kIssued] >= r.issued;
  }
  auto in = [&](const Knowledge* x) {
    if (!x || !x->foreign) return false;
    auto it = x->foreign->find(r.workgroup);
    if (it == x->foreign->end()) return false;
    const Clock& k = it->second;
    return (!r.scalar && k.at[wave + kWritten] >= r.issued) ||
           (!r.writeBack && k.at[r.component] >= r.stamp);
  };
  return in(op.known.get()) || (fresh && in(op.fresh.get()));
}

// A page of the shadow, for this worker alone.
class Held {
 public:
  Held(GlobalShadow::Page& page, bool shared) : busy_(shared ? &page.busy : nullptr) {
    while (busy_ && busy_->test_and_set(std::memory_order_acquire)) {
      while (busy_->test(std::memory_order_relaxed)) std::this_thread::yield();
    }
  }
  ~Held() {
    if (busy_) busy_->clear(std::memory_order_release);
  }
  Held(const Held&) = delete;

 private:
  std::atomic_flag* busy_;
};

void raceLine(Wave& w, MemOp& op, const Role& role, u64 line, u64 mask, int lane) {
  Launch& launch = *w.wg->launch;
  const Inst* inst = op.inst;
  bool write = role.write, fresh = write || role.level >= Role::kDevice;
  u64 number = line / GlobalShadow::kPageLines;
  auto& [known, page] = w.wg->worker->pages[number % 256];
  if (known != number + 1) {
    page = &launch.shadow.page(number);
    known = number + 1;
  }
  Held held(*page, launch.workers > 1);
  u64 at = line % GlobalShadow::kPageLines;
  if (write && !page->writers) {
    page->writers = std::make_unique<LineWriters[]>(GlobalShadow::kPageLines);
  }
  LineReaders& readers = page->readers[at];
  LineWriters* writers = page->writers ? &page->writers[at] : nullptr;
  bool scalar = inst->mem.space == Space::Scalar;
  u8 component = kComponents * w.id + (scalar || op.mixedLds ? kLgkm : kDone);
  u32 wg = w.wg->linear;
  auto check = [&](const AccessRecord& r, bool earlierWrites) {
    if (!(r.mask & mask)) return;
    if (ordered(w, op, r, fresh) || synchronise(w, role, r.role, r.workgroup == wg)) return;
    u64 address = line * 64 + __builtin_ctzll(r.mask & mask);
    report(w, *inst, "global-race", address, lane,
           describe(w, write ? "writes global memory" : "reads global memory", r.workgroup,
                    r.component / kComponents, r.inst, earlierWrites, hintFor(role, r.role)));
  };
  if (writers) {
    for (const AccessRecord& r : writers->last) check(r, true);
  }
  if (write) {
    for (const AccessRecord& r : readers.last) check(r, false);
  }
  bool writeBack = write && role.level < Role::kDevice && w.object->gpu->manyDies;
  AccessRecord record{mask, wg, op.stamp, op.issued, component, scalar, writeBack, role, inst};
  auto put = [&](AccessRecord* slots, int count) {
    int at = 0;
    auto mine = [&](const AccessRecord& r) {
      return r.mask == 0 ||
             (r.workgroup == wg && r.component == component && r.stamp == op.stamp &&
              r.issued == op.issued && r.role.level == role.level && r.role.flag == role.flag);
    };
    while (at < count - 1 && !mine(slots[at])) ++at;
    if (slots[at].mask && mine(slots[at])) record.mask |= slots[at].mask;
    for (; at > 0; --at) slots[at] = slots[at - 1];
    slots[0] = record;
  };
  write ? put(writers->last, 4) : put(readers.last, 3);
}

// Calls f(line, bytes of it, lane) once for each line that the lanes' ranges touch; `lane` is the
// first that does.
template <class Size, class F>
void forLines(const MemOp& op, u64 lanes, Size size, F f) {
  struct Touched {
    u64 line, mask;
    int lane;
  };
  constexpr u32 kSlots = 256;  // a lane touches two lines at most
  Touched touched[2 * kLanes];
  u8 slots[kSlots] = {};  // index + 1 by a hash of the line
  u32 count = 0;
  Touched* last = nullptr;
  for (; lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctzll(lanes);
    u64 a = op.addr[lane], stop = a + size(lane);
    while (a < stop) {
      u64 line = a / 64, end = std::min(stop, (line + 1) * 64);
      u64 part = (end - a == 64 ? ~0ull : (1ull << (end - a)) - 1) << (a % 64);
      if (!last || last->line != line) {
        u32 slot = (line ^ line >> 8) % kSlots;
        while (slots[slot] && touched[slots[slot] - 1].line != line) slot = (slot + 1) % kSlots;
        if (!slots[slot]) {
          touched[count] = {line, 0, lane};
          slots[slot] = ++count;
        }
        last = &touched[slots[slot] - 1];
      }
      last->mask |= part;
      a = end;
    }
  }
  for (u32 n = 0; n < count; ++n) f(touched[n].line, touched[n].mask, touched[n].lane);
}

}  // namespace

GlobalShadow::Page& GlobalShadow::page(u64 number) {
  u32 stripe = number % kStripes;
  std::lock_guard guard(locks_[stripe]);
  std::unique_ptr<Page>& slot = pages_[stripe][number];
  if (!slot) slot = std::make_unique<Page>();
  return *slot;
}

void raceLds(Wave& w, MemOp& op, u64 lanes, u32 bytes, u32 offset, bool write) {
  Workgroup& wg = *w.wg;
  const Inst* inst = op.inst;
  Role role = roleOf(w, op);
  role.write = write;
  u8 component = kComponents * w.id + (inst->mem.access == Access::LoadToLds ? kDone : kLgkm);
  u32 index = inst - w.object->code.data();
  // Up to which stamp a record of each component is of an earlier workgroup, known, or the wave's.
  alignas(64) u32 known[kClocks];
  for (int n = 0; n < kClocks; ++n) known[n] = std::max(op.known->own.at[n], wg.clockBase - 1);
  for (u32 n = 0; n < kComponents; ++n) known[kComponents * w.id + n] = ~0u;
  // Keeps the newest records, one a wave, so that one wave cannot push out the others.
  auto put = [&](LdsRecord* slots, int count, u8 mask) {
    auto mine = [&](const LdsRecord& r) {
      bool same = r.mask == mask && r.role.level == role.level;
      return r.component == component && (same || r.stamp < wg.clockBase);
    };
    int at = 0;
    while (at < count - 1 && !mine(slots[at])) ++at;
    for (; at > 0; --at) slots[at] = slots[at - 1];
    slots[0] = {op.stamp, index, component, mask, role};
  };
  for (u64 m = lanes; m; m &= m - 1) {
    int lane = __builtin_ctzll(m);
    u32 address = static_cast<u32>(op.addr[lane]) + offset, end = address + bytes;
    if (end > wg.ldsBytes) continue;
    for (u32 word = address / 4; word * 4 < end; ++word) {
      u32 lo = word * 4 < address ? address - word * 4 : 0;
      u32 hi = std::min(4u, end - word * 4);
      u8 mask = (15 >> (4 - hi)) & (15 << lo);
      LdsCell& cell = wg.shadow->cells[word];
      auto meets = [&](const LdsRecord& r) {
        return (r.mask & mask) && r.stamp > known[r.component];
      };
      auto check = [&](const LdsRecord& r, bool earlierWrites) {
        if (!meets(r) || synchronise(w, role, r.role, true)) return;
        report(w, *inst, "lds-race", word * 4, lane,
               describe(w, write ? "writes LDS" : "reads LDS", wg.linear, r.component / kComponents,
                        &w.object->code[r.inst], earlierWrites,
                        role.level == r.role.level ? "" : hintFor(role, r.role)));
      };
      bool any = false;
      for (const LdsRecord& r : cell.writers) any |= meets(r);
      for (const LdsRecord& r : cell.readers) any |= write && meets(r);
      if (any) [[unlikely]] {
        for (const LdsRecord& r : cell.writers) check(r, true);
        for (const LdsRecord& r : cell.readers) {
          if (write) check(r, false);
        }
      }
      write ? put(cell.writers, 2, mask) : put(cell.readers, 3, mask);
    }
  }
}

void raceGlobal(Wave& w, MemOp& op, u64 lanes, bool write) {
  const Hostcalls* host = w.wg->launch->hostcalls.get();
  if (host && lanes && op.addr[__builtin_ctzll(lanes)] - host->address() < host->bytes()) return;
  Role role = roleOf(w, op);
  role.write = write;
  u32 bytes = op.inst->mem.bytes;
  bool buffer = op.inst->mem.space == Space::Buffer;
  auto size = [&](int l) -> u32 {
    if (!buffer) return bytes;
    return bytes >= 4 ? op.validDwords[l] * 4u : op.validDwords[l] ? bytes : 0;
  };
  forLines(op, lanes, size,
           [&](u64 line, u64 mask, int lane) { raceLine(w, op, role, line, mask, lane); });
}

void raceScalar(Wave& w, MemOp& op) {
  const Launch& launch = *w.wg->launch;
  u64 arguments = reinterpret_cast<u64>(launch.kernarg.data());
  if (!op.scalarDwords || op.scalarAddress - arguments < launch.kernarg.size()) return;
  op.addr[0] = op.scalarAddress;
  forLines(
      op, 1, [&](int) { return 4 * op.scalarDwords; },
      [&](u64 line, u64 mask, int) { raceLine(w, op, Role{}, line, mask, 0); });
}

}  // namespace sim
