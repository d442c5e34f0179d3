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

// One instruction's accesses to global memory in the shadow, line by line.
class GlobalAccess {
 public:
  GlobalAccess(Wave& w, const MemOp& op, const Role& role)
      : w_(w), op_(op), worker_(*w.wg->worker), shared_(w.wg->launch->workers > 1) {
    const Inst* inst = op.inst;
    bool scalar = inst->mem.space == Space::Scalar;
    u8 component = kComponents * w.id + (scalar || op.mixedLds ? kLgkm : kDone);
    bool writeBack = role.write && role.level < Role::kDevice && w.object->gpu->manyDies;
    record_ = {0, w.wg->linear, op.stamp, op.issued, component, scalar, writeBack, role, inst};
  }

  void touch(u64 line, u64 mask, int lane) {
    u64 number = line / GlobalShadow::kPageLines, at = line % GlobalShadow::kPageLines;
    auto& [known, page] = worker_.pages[number % worker_.pages.size()];
    if (known != number + 1) {
      page = &worker_.launch->shadow.page(number);
      known = number + 1;
    }
    Held held(*page, shared_);
    bool write = record_.role.write;
    if (write && !page->writers) {
      page->writers = std::make_unique<LineWriters[]>(GlobalShadow::kPageLines);
    }
    LineReaders& readers = page->readers[at];
    if (page->writers) {
      for (const AccessRecord& r : page->writers[at].last) check(r, line, mask, lane, true);
    }
    if (write) {
      for (const AccessRecord& r : readers.last) check(r, line, mask, lane, false);
      put<4>(page->writers[at].last, mask);
    } else {
      put<3>(readers.last, mask);
    }
  }

 private:
  void check(const AccessRecord& r, u64 line, u64 mask, int lane, bool earlierWrites) {
    if (!(r.mask & mask)) return;
    const Role& role = record_.role;
    bool fresh = role.write || role.level >= Role::kDevice;
    if (ordered(w_, op_, r, fresh)) return;
    if (synchronise(w_, role, r.role, r.workgroup == w_.wg->linear)) return;
    u64 address = line * 64 + __builtin_ctzll(r.mask & mask);
    report(w_, *op_.inst, "global-race", address, lane,
           describe(w_, role.write ? "writes global memory" : "reads global memory", r.workgroup,
                    r.component / kComponents, r.inst, earlierWrites, hintFor(role, r.role)));
  }

  template <int kCount>
  void put(AccessRecord* slots, u64 mask) {
    auto mine = [&](const AccessRecord& r) {
      return r.mask == 0 ||
             (r.workgroup == record_.workgroup && r.component == record_.component &&
              r.stamp == record_.stamp && r.issued == record_.issued &&
              r.role.level == record_.role.level && r.role.flag == record_.role.flag);
    };
    int at = 0;
    while (at < kCount - 1 && !mine(slots[at])) ++at;
    if (slots[at].mask && mine(slots[at])) mask |= slots[at].mask;
    for (; at > 0; --at) slots[at] = slots[at - 1];
    slots[0] = record_;
    slots[0].mask = mask;
  }

  Wave& w_;
  const MemOp& op_;
  Worker& worker_;
  bool shared_;  // other workers may hold a page
  AccessRecord record_;
};

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

namespace {

// One LDS instruction in the shadow.
class LdsAccess {
 public:
  LdsAccess(Wave& w, const MemOp& op, bool write)
      : w_(w), wg_(*w.wg), cells_(w.wg->shadow->cells.data()), role_(roleOf(w, op)) {
    role_.write = write;
    inst_ = op.inst;
    bool toLds = inst_->mem.access == Access::LoadToLds;
    component_ = kComponents * w.id + (toLds ? kDone : kLgkm);
    record_ = {op.stamp, static_cast<u32>(inst_ - w.object->code.data()), component_, 0, role_};
    const Clock& own = op.known->own;
    for (int n = 0; n < kClocks; ++n) known_[n] = std::max(own.at[n], wg_.clockBase - 1);
    for (u32 n = 0; n < kComponents; ++n) known_[kComponents * w.id + n] = ~0u;
  }

  // Bytes [begin, end) of LDS; `lane` asks for them.
  void touch(u32 begin, u32 end, int lane) {
    constexpr u32 kBytes = 4 * LdsShadow::kShared;
    u32 word = begin / 4;
    while (word * 4 < end) {
      LdsCell& first = cells_[word / LdsShadow::kShared * LdsShadow::kShared];
      bool whole = word * 4 >= begin && word * 4 + kBytes <= end && word % LdsShadow::kShared == 0;
      if (first.state >> 1 != wg_.clockBase) renew(&first, whole);
      if (whole && !(first.state & 1)) {
        meet(first, word, LdsShadow::kShared, 15, lane);
        word += LdsShadow::kShared;
        continue;
      }
      if (!(first.state & 1)) split(&first);
      u32 lo = word * 4 < begin ? begin - word * 4 : 0;
      u32 hi = std::min(4u, end - word * 4);
      meet(cells_[word], word, 1, (15 >> (4 - hi)) & (15 << lo), lane);
      ++word;
    }
  }

 private:
  // What an earlier workgroup left is no record.
  void renew(LdsCell* first, bool whole) {
    std::fill_n(first, whole ? 1 : LdsShadow::kShared, LdsCell{});
    first->state = wg_.clockBase << 1 | !whole;
  }

  // From now on each dword has records of its own.
  void split(LdsCell* first) {
    for (u32 n = 1; n < LdsShadow::kShared; ++n) first[n] = first[0];
    first->state |= 1;
  }

  // The access meets what a cell, which stands for `words` of them, has of others.
  void meet(LdsCell& cell, u32 word, u32 words, u8 mask, int lane) {
    auto meets = [&](const LdsRecord& r) {
      return (r.mask & mask) && r.stamp > known_[r.component];
    };
    bool any = false;
    for (const LdsRecord& r : cell.writers) any |= meets(r);
    if (role_.write) {
      for (const LdsRecord& r : cell.readers) any |= meets(r);
    }
    if (any) [[unlikely]] {
      for (u32 n = 0; n < words; ++n) {
        for (const LdsRecord& r : cell.writers) {
          if (meets(r)) complain(r, word + n, lane, true);
        }
        for (const LdsRecord& r : cell.readers) {
          if (role_.write && meets(r)) complain(r, word + n, lane, false);
        }
      }
    }
    role_.write ? put<2>(cell.writers, mask) : put<3>(cell.readers, mask);
  }

  // Keeps the newest records, one a wave, so that one wave cannot push out the others.
  template <int kCount>
  void put(LdsRecord* slots, u8 mask) {
    auto mine = [&](const LdsRecord& r) {
      return r.component == component_ && r.mask == mask && r.role.level == role_.level;
    };
    int at = 0;
    while (at < kCount - 1 && !mine(slots[at])) ++at;
    for (; at > 0; --at) slots[at] = slots[at - 1];
    slots[0] = record_;
    slots[0].mask = mask;
  }

  void complain(const LdsRecord& r, u32 word, int lane, bool earlierWrites) {
    if (synchronise(w_, role_, r.role, true)) return;
    report(w_, *inst_, "lds-race", word * 4, lane,
           describe(w_, role_.write ? "writes LDS" : "reads LDS", wg_.linear,
                    r.component / kComponents, &w_.object->code[r.inst], earlierWrites,
                    role_.level == r.role.level ? "" : hintFor(role_, r.role)));
  }

  Wave& w_;
  Workgroup& wg_;
  LdsCell* cells_;
  Role role_;
  const Inst* inst_;
  u8 component_;
  LdsRecord record_;
  // Up to which stamp a record of each component is known, or the wave's.
  alignas(64) u32 known_[kClocks];
};

}  // namespace

void raceLds(Wave& w, MemOp& op, u64 lanes, u32 bytes, u32 offset, bool write) {
  LdsAccess access(w, op, write);
  u32 limit = w.wg->ldsBytes;
  u32 begin = static_cast<u32>(op.addr[0]) + offset;
  bool inARow = lanes == ~0ull && begin <= limit && kLanes * bytes <= limit - begin;
  for (u32 lane = 0; lane < kLanes && inARow; ++lane) {
    inARow = static_cast<u32>(op.addr[lane]) + offset == begin + lane * bytes;
  }
  if (inARow && bytes < 16 && begin % 16 == 0) {
    for (u32 n = 0; n < kLanes * bytes; n += 16) {
      access.touch(begin + n, begin + n + 16, n / bytes);
    }
    return;
  }
  for (u64 m = lanes; m; m &= m - 1) {
    int lane = __builtin_ctzll(m);
    u32 address = static_cast<u32>(op.addr[lane]) + offset;
    if (bytes <= limit && address <= limit - bytes) access.touch(address, address + bytes, lane);
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
  GlobalAccess access(w, op, role);
  if (op.inARow && lanes == ~0ull) {
    u64 begin = op.addr[0], end = begin + kLanes * bytes;
    for (u64 at = begin; at < end;) {
      u64 stop = std::min(end, (at / 64 + 1) * 64);
      u64 part = stop - at == 64 ? ~0ull : ((1ull << (stop - at)) - 1) << at % 64;
      access.touch(at / 64, part, (at - begin) / bytes);
      at = stop;
    }
    return;
  }
  forLines(op, lanes, size, [&](u64 line, u64 mask, int lane) { access.touch(line, mask, lane); });
}

void raceScalar(Wave& w, MemOp& op) {
  const Launch& launch = *w.wg->launch;
  u64 arguments = reinterpret_cast<u64>(launch.kernarg.data());
  if (!op.scalarDwords || op.scalarAddress - arguments < launch.kernarg.size()) return;
  op.addr[0] = op.scalarAddress;
  GlobalAccess access(w, op, Role{});
  forLines(
      op, 1, [&](int) { return 4 * op.scalarDwords; },
      [&](u64 line, u64 mask, int) { access.touch(line, mask, 0); });
}

}  // namespace sim
