// The happens-before checker: which accesses meet, and whether something orders them (sync.cpp).
//
// Two accesses to one byte race when one writes, they are of different waves, the later one's wave
// does not know the earlier one, and they are not both synchronisation: within a workgroup atomics
// and accesses with scope bits, between workgroups atomics and accesses with device scope. Two
// plain stores of the same value do not, nor does a look at a word that the wave then asks again.
#include <algorithm>
#include <thread>

#include "memory.h"

namespace sim {
namespace {

std::string describe(const Wave& w, const char* what, u32 workgroup, u32 wave, const Inst* inst,
                     bool earlierWrites, const std::string& hint) {
  return std::string(what) + ": wave " + std::to_string(wave) +
         (workgroup == w.wg->linear ? "" : " of workgroup " + std::to_string(workgroup)) +
         (earlierWrites ? " wrote it" : " read it") + " in '" + inst->text + "' (" +
         w.object->source(inst->address) + ") with nothing ordering the two" + hint;
}

// Do both accesses mean to meet? Then they are synchronisation and no race.
bool synchronise(const Wave& w, const Role& a, const Role& b, bool sameGroup, bool lds) {
  if (sameGroup || !w.object->gpu->manyDies) {
    // Stores to flags of gfx90a, and flags in LDS, have no scope bits: one word and a polling
    // reader tell, in memory also a load that has them. One of LDS through a volatile pointer reads
    // data.
    bool scoped = !lds && !w.object->gpu->manyDies;
    auto flagged = [&](const Role& x, const Role& y) {
      return (x.poll || (scoped && !x.write && x.level)) && (y.flag || y.level || y.poll);
    };
    if (flagged(a, b) || flagged(b, a)) return true;
  }
  u8 needed = sameGroup ? Role::kWorkgroup : Role::kDevice;
  return a.level >= needed && b.level >= needed;
}

// A word that waves of a workgroup share, read with scope bits and stored without: the hardware
// keeps them in order, the languages do not allow it.
bool halfSynchronised(const Role& a, const Role& b) {
  auto half = [](const Role& x, const Role& y) { return !x.write && x.level && y.flag; };
  return half(a, b) || half(b, a);
}

// Does the load only look, because what writes asks the word again? Then whatever it saw will do: a
// compare-and-swap has the value to compare, an atomic or a store runs only because of it. A store
// of what was made of the value does not ask again.
bool looksOnly(const Wave& w, const Inst& load, const Role& role, const Inst& write) {
  if (role.level == Role::kAtomic || load.mem.access != Access::Load) return false;
  Dependence d = w.wg->launch->dependences.of(*w.object, load, write);
  if (write.mem.access != Access::Atomic) return d.control && !d.data;
  bool compares = write.name.find("cmpswap") != std::string::npos ||
                  write.name.find("cmpst") != std::string::npos;
  return d.control || (d.data && compares);
}

// A byte of a store's data, `at` bytes into what a lane stores.
u8 dataByte(const MemOp& op, int lane, u32 at, u32 row) {
  u32 x = op.data[row + at / 4][lane];
  if (op.inst->mem.bytes < 4 && op.inst->mem.d16hi) x >>= 16;
  return x >> (8 * (at % 4));
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

// Bytes of a lane's access: buffers end where their resource says.
u32 sizeOf(const MemOp& op, int lane) {
  u32 bytes = op.inst->mem.bytes;
  if (op.inst->mem.space == Space::Scalar) return 4 * op.scalarDwords;
  if (op.inst->mem.space != Space::Buffer) return bytes;
  return bytes >= 4 ? op.validDwords[lane] * 4u : op.validDwords[lane] ? bytes : 0;
}

// One instruction's accesses to global memory in the shadow, line by line.
class GlobalAccess {
 public:
  GlobalAccess(Wave& w, const MemOp& op, u64 lanes, const Role& role)
      : w_(w), op_(op), lanes_(lanes), worker_(*w.wg->worker), shared_(w.wg->launch->workers > 1) {
    const Inst* inst = op.inst;
    bool scalar = inst->mem.space == Space::Scalar;
    u8 component = kComponents * w.id + (scalar || op.mixedLds ? kLgkm : kDone);
    bool writeBack = role.write && role.level < Role::kDevice && w.object->gpu->manyDies;
    record_ = {0,      w.wg->linear, op.stamp, op.issued, component,
               scalar, writeBack,    false,    role,      inst};
  }

  void touch(u64 line, u64 mask, int lane) {
    u64 number = line / GlobalShadow::kPageLines, at = line % GlobalShadow::kPageLines;
    auto& [known, page] = worker_.pages[number % worker_.pages.size()];
    if (known != number + 1) {
      page = &worker_.launch->shadow.page(number);
      known = number + 1;
    }
    Meeting met[7];
    u32 count = 0;
    {
      Held held(*page, shared_);
      bool write = record_.role.write;
      if (write && !page->writers) {
        page->writers = std::make_unique<LineWriters[]>(GlobalShadow::kPageLines);
      }
      LineReaders& readers = page->readers[at];
      record_.same = false;
      if (page->writers) {
        u64 open = mask;
        for (const AccessRecord& r : page->writers[at].last) {
          u64 both = r.mask & open;
          if (!both) continue;
          if (isRace(r)) {
            met[count++] = {r, both, true, false};
          } else if (r.same) {
            open &= ~both;  // what was there before and unordered was the same
          }
        }
      }
      if (write) {
        for (const AccessRecord& r : readers.last) {
          if (!(r.mask & mask) || !isRace(r)) continue;
          met[count++] = {r, r.mask & mask, false,
                          page->writers && wroteItself(*page, at, r, mask)};
        }
        if (count && met[0].writes) record_.same = isPlain(record_.role) && keeps(line, mask);
        put<4>(page->writers[at].last, mask);
      } else {
        put<3>(readers.last, mask);
      }
    }
    for (u32 n = 0; n < count; ++n) [[unlikely]] {
      judge(met[n], line, lane);
    }
  }

 private:
  struct Meeting {
    AccessRecord with;
    u64 mask = 0;
    bool writes = false;  // it wrote
    bool own = false;     // it read what its own wave had written
  };

  static bool isPlain(const Role& r) { return r.write && r.level != Role::kAtomic; }

  bool isRace(const AccessRecord& r) const {
    const Role& role = record_.role;
    bool fresh = role.write || role.level >= Role::kDevice;
    return !ordered(w_, op_, r, fresh) &&
           !synchronise(w_, role, r.role, r.workgroup == w_.wg->linear, false);
  }

  static bool wroteItself(const GlobalShadow::Page& page, u64 at, const AccessRecord& r, u64 mask) {
    u64 open = r.mask & mask;
    for (const AccessRecord& x : page.writers[at].last) {
      bool own =
          x.workgroup == r.workgroup && x.component / kComponents == r.component / kComponents;
      if (own) open &= ~x.mask;
    }
    return !open;
  }

  // Does the store leave these bytes of the line as they are?
  bool keeps(u64 line, u64 mask) const {
    for (u64 m = lanes_; m; m &= m - 1) {
      int lane = __builtin_ctzll(m);
      u64 begin = op_.addr[lane], end = begin + sizeOf(op_, lane);
      u64 from = std::max(begin, line * 64), to = std::min(end, line * 64 + 64);
      if (from >= to) continue;
      if (!findBuffer(worker_, from, to - from)) return false;
      for (u64 a = from; a < to; ++a) {
        if (!(mask >> a % 64 & 1)) continue;
        if (*reinterpret_cast<const u8*>(a) != dataByte(op_, lane, a - begin, 0)) return false;
      }
    }
    return true;
  }

  // Another worker has said what it stores, and may not have stored it yet.
  bool keepsSoon(const Meeting& met, u64 line) const {
    if (keeps(line, met.mask)) return true;
    Launch& launch = *worker_.launch;
    u32 other = met.with.workgroup % kXcds % launch.workers;
    if (!met.writes || other == worker_.index) return false;
    u64 now = launch.storing[other].load(std::memory_order_acquire);
    for (int n = 0; n < 1000 && (now & 1) && launch.storing[other] == now; ++n) {
      std::this_thread::yield();
    }
    return keeps(line, met.mask);
  }

  void judge(const Meeting& met, u64 line, int lane) {
    const AccessRecord& r = met.with;
    const Role& role = record_.role;
    Level level = Level::Error;
    if (!role.write && looksOnly(w_, *op_.inst, role, *r.inst)) return;
    if (!r.role.write && looksOnly(w_, *r.inst, r.role, *op_.inst)) return;
    if (isPlain(role) && (!met.writes || isPlain(r.role)) && keepsSoon(met, line)) {
      if (met.writes || met.own) return;
      level = Level::Suspicious;
    }
    std::string hint = hintFor(role, r.role);
    if (r.workgroup == w_.wg->linear && halfSynchronised(role, r.role)) {
      level = Level::Suspicious;
      hint = "; the load has scope bits, the store has none: only the hardware keeps them in order";
    }
    if (r.writeBack && met.writes && r.workgroup != w_.wg->linear) hint += outrun(r);
    u64 address = line * 64 + __builtin_ctzll(met.mask);
    report(w_, *op_.inst, "global-race", address, lane,
           describe(w_, role.write ? "writes global memory" : "reads global memory", r.workgroup,
                    r.component / kComponents, r.inst, met.writes, hint),
           level);
  }

  // Did the writer's release go out before its write-back was complete?
  std::string outrun(const AccessRecord& r) const {
    Launch& launch = *worker_.launch;
    const Inst* writeBack = nullptr;
    {
      std::lock_guard guard(launch.findingsLock);
      for (const auto& [who, inst] : launch.outrun) {
        if (who.first == r.workgroup) writeBack = inst;
      }
    }
    if (!writeBack) return "";
    return "; that workgroup's release did not wait for its write-back '" + writeBack->text +
           "' (" + w_.object->source(writeBack->address) +
           "): s_waitcnt vmcnt(0) belongs between it and the store of the flag";
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
  u64 lanes_;
  Worker& worker_;
  bool shared_;  // other workers may hold a page
  AccessRecord record_;
};

// Calls f(line, bytes of it, lane) once for each line that the lanes' ranges touch; `lane` is the
// first that does.
template <class F>
void forLines(const MemOp& op, u64 lanes, F f) {
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
    u64 a = op.addr[lane], stop = a + sizeOf(op, lane);
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
  LdsAccess(Wave& w, const MemOp& op, bool write, u32 bytes, u32 offset, u32 row)
      : w_(w),
        wg_(*w.wg),
        op_(op),
        cells_(w.wg->shadow->cells.data()),
        role_(roleOf(w, op)),
        bytes_(bytes),
        offset_(offset),
        row_(row) {
    role_.write = write;
    inst_ = op.inst;
    bool toLds = inst_->mem.access == Access::LoadToLds;
    component_ = kComponents * w.id + (toLds ? kDone : kLgkm);
    record_ = {op.stamp, static_cast<u32>(inst_ - w.object->code.data()), component_, 0, role_,
               false};
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
    record_.same = false;
    if (any) [[unlikely]] {
      judge(cell, word, words, mask, lane);
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

  void judge(const LdsCell& cell, u32 word, u32 words, u8 mask, int lane) {
    auto meets = [&](const LdsRecord& r, u8 bytes) {
      return (r.mask & bytes) && r.stamp > known_[r.component];
    };
    bool plain = role_.write && role_.level != Role::kAtomic;
    bool kept = plain && keeps(word, words, mask, lane);
    u8 open = mask;
    for (const LdsRecord& r : cell.writers) {
      if (!meets(r, open)) {
        if (r.same) open &= ~r.mask;  // what was there before and unordered was the same
      } else if (kept && r.role.level != Role::kAtomic) {
        record_.same = true;
      } else {
        complain(r, word, words, lane, true, Level::Error);
      }
    }
    for (const LdsRecord& r : cell.readers) {
      if (!role_.write || !meets(r, mask)) continue;
      if (kept && wroteItself(cell, r, mask)) continue;
      complain(r, word, words, lane, false, kept ? Level::Suspicious : Level::Error);
    }
  }

  static bool wroteItself(const LdsCell& cell, const LdsRecord& reader, u8 mask) {
    u8 open = reader.mask & mask;
    for (const LdsRecord& r : cell.writers) {
      if (r.component / kComponents == reader.component / kComponents) open &= ~r.mask;
    }
    return !open;
  }

  // Does the store leave these bytes as they are?
  bool keeps(u32 word, u32 words, u8 mask, int lane) const {
    u32 first = static_cast<u32>(op_.addr[0]) + offset_;
    for (u32 at = 4 * word; at < 4 * (word + words); ++at) {
      if (!(mask >> at % 4 & 1)) continue;
      int its = inARow ? (at - first) / bytes_ : lane;
      u32 begin = static_cast<u32>(op_.addr[its]) + offset_;
      if (wg_.lds[at] != dataByte(op_, its, at - begin, row_)) return false;
    }
    return true;
  }

  void complain(const LdsRecord& r, u32 word, u32 words, int lane, bool earlierWrites,
                Level level) {
    if (synchronise(w_, role_, r.role, true, true)) return;
    const Inst& other = w_.object->code[r.inst];
    const Inst &load = role_.write ? other : *inst_, &write = role_.write ? *inst_ : other;
    const Role& reads = role_.write ? r.role : role_;
    if (!reads.write) {
      if (looksOnly(w_, load, reads, write)) return;
      // The compiler makes a load of atomicAdd(&x, 0); LDS has no bits that say so.
      bool atomic = write.mem.access == Access::Atomic;
      if (atomic && w_.object->inlinedFrom(load.address, "atomic")) return;
    }
    for (u32 n = 0; n < words; ++n) {
      report(w_, *inst_, "lds-race", (word + n) * 4, lane,
             describe(w_, role_.write ? "writes LDS" : "reads LDS", wg_.linear,
                      r.component / kComponents, &other, earlierWrites,
                      role_.level == r.role.level ? "" : hintFor(role_, r.role)),
             level);
    }
  }

 public:
  bool inARow = false;  // lane after lane, so that a cell may be several lanes'

 private:
  Wave& w_;
  Workgroup& wg_;
  const MemOp& op_;
  LdsCell* cells_;
  Role role_;
  const Inst* inst_;
  u32 bytes_, offset_, row_;
  u8 component_;
  LdsRecord record_;
  // Up to which stamp a record of each component is known, or the wave's.
  alignas(64) u32 known_[kClocks];
};

}  // namespace

void raceLds(Wave& w, MemOp& op, u64 lanes, u32 bytes, u32 offset, u32 row, bool write) {
  LdsAccess access(w, op, write, bytes, offset, row);
  u32 limit = w.wg->ldsBytes;
  u32 begin = static_cast<u32>(op.addr[0]) + offset;
  bool inARow = lanes == ~0ull && begin <= limit && kLanes * bytes <= limit - begin;
  for (u32 lane = 0; lane < kLanes && inARow; ++lane) {
    inARow = static_cast<u32>(op.addr[lane]) + offset == begin + lane * bytes;
  }
  if (inARow && bytes < 16 && begin % 16 == 0) {
    access.inARow = true;
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
  GlobalAccess access(w, op, lanes, role);
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
  forLines(op, lanes, [&](u64 line, u64 mask, int lane) { access.touch(line, mask, lane); });
}

void raceScalar(Wave& w, MemOp& op) {
  const Launch& launch = *w.wg->launch;
  u64 arguments = reinterpret_cast<u64>(launch.kernarg.data());
  if (!op.scalarDwords || op.scalarAddress - arguments < launch.kernarg.size()) return;
  op.addr[0] = op.scalarAddress;
  GlobalAccess access(w, op, 1, Role{});
  forLines(op, 1, [&](u64 line, u64 mask, int) { access.touch(line, mask, 0); });
}

const Inst* ownReader(const Wave& w, u64 address) {
  GlobalShadow::Page& page = w.wg->launch->shadow.page(address / 64 / GlobalShadow::kPageLines);
  Held held(page, w.wg->launch->workers > 1);
  for (const AccessRecord& r : page.readers[address / 64 % GlobalShadow::kPageLines].last) {
    bool own = r.workgroup == w.wg->linear && static_cast<int>(r.component / kComponents) == w.id;
    if (own && (r.mask >> address % 64 & 1)) return r.inst;
  }
  return nullptr;
}

const Inst* ownLdsReader(const Wave& w, u32 address) {
  if (address >= w.wg->ldsBytes) return nullptr;
  const std::vector<LdsCell>& cells = w.wg->shadow->cells;
  u32 word = address / 4, first = word / LdsShadow::kShared * LdsShadow::kShared;
  if (cells[first].state >> 1 != w.wg->clockBase) return nullptr;
  for (const LdsRecord& r : cells[cells[first].state & 1 ? word : first].readers) {
    bool own = static_cast<int>(r.component / kComponents) == w.id;
    if (own && (r.mask >> address % 4 & 1)) return &w.object->code[r.inst];
  }
  return nullptr;
}

}  // namespace sim
