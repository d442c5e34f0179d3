// The happens-before checker: which accesses meet, and whether something orders them (sync.cpp).
//
// Two accesses to one byte race when one writes, they are of different waves, the later one's wave
// does not know the earlier one, and they are not both synchronisation: within a workgroup atomics
// and accesses with scope bits, between workgroups atomics and accesses with device scope. Two
// plain stores of the same value do not, nor does a look at a word that the wave then asks again.
#include "race.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <thread>

namespace sim {
namespace {

Reach reachOf(const Wave& w, const AccessRecord& r) {
  if (r.who == w.wg->who) return Reach::Workgroup;
  const World& world = *w.wg->launch->world;
  if (!world.several()) return Reach::Device;
  u32 other = world.partOf(r.who), own = w.wg->launch->part;
  return world.parts[other].device == world.parts[own].device ? Reach::Device : Reach::System;
}

// Does `x` tell that the launch of the recorded access had ended?
bool tellsOfItsEnd(const Wave& w, const Knowledge* x, const AccessRecord& r) {
  const World& world = *w.wg->launch->world;
  if (!world.several() || !x || !x->foreign) return false;
  u32 part = world.partOf(r.who);
  // All of a launch's workgroups tell the same: one of each is enough.
  for (auto it = x->foreign->begin(); it != x->foreign->end();) {
    u32 other = world.partOf(it->first);
    if (world.precedes(part, other)) return true;
    it = x->foreign->lower_bound(world.parts[other].first + world.parts[other].workgroups);
  }
  return false;
}

// Does `x` tell the recorded access of another workgroup?
bool tells(const Wave& w, const Knowledge* x, const AccessRecord& r, Reach reach) {
  if (!x || !x->foreign) return false;
  auto it = x->foreign->find(r.who);
  if (it != x->foreign->end()) {
    const Clock& k = it->second;
    bool across = reach == Reach::System;
    u32 written =
        across ? (k.carried ? (*k.carried)[r.wave] : 0) : k.at[r.wave * kComponents + kWritten];
    if (!r.scalar && written >= r.issued) return true;
    if (!(across ? r.carry : r.writeBack) && k.at[r.wave * kComponents + kReached] >= r.stamp) {
      return true;
    }
  }
  return tellsOfItsEnd(w, x, r);
}

// Is the recorded access ordered before this one? `fresh`: it also sees what flags gave and no
// buffer_inv has made visible to ordinary loads.
bool ordered(const Wave& w, const MemOp& op, const AccessRecord& r, Reach reach, bool fresh) {
  if (reach == Reach::Workgroup) {
    if (r.wave == w.id) return true;
    bool scalar = r.scalar || op.inst->mem.space == Space::Scalar;  // not through the L1
    return op.known->own.at[r.wave * kComponents + kReached] >= (scalar ? r.stamp : r.issued);
  }
  const World& world = *w.wg->launch->world;
  if (world.several() && world.precedes(world.partOf(r.who), w.wg->launch->part)) return true;
  return tells(w, op.known.get(), r, reach) || (fresh && tells(w, op.fresh.get(), r, reach));
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
    bool stays = role.write && w.object->gpu->manyDies;  // in the die's L2
    record_ = {0,
               w.wg->who,
               op.stamp,
               op.issued,
               static_cast<u8>(w.id),
               scalar,
               stays && role.level < Role::kDevice,
               stays && !role.system(),
               false,
               role,
               inst};
  }

  void touch(u64 line, u64 mask, int lane) {
    u64 number = line / GlobalShadow::kPageLines, at = line % GlobalShadow::kPageLines;
    auto& [known, page] = worker_.pages[number % worker_.pages.size()];
    if (known != number + 1) {
      page = &worker_.launch->world->shadow.page(number);
      known = number + 1;
    }
    // Room that nothing clears: hardly any line has such meetings.
    alignas(Meeting) std::byte room[7 * sizeof(Meeting)];
    Meeting* met = reinterpret_cast<Meeting*>(room);
    u32 count = 0;
    {
      Held held(*page, shared_);
      bool write = record_.role.write;
      if (write && !page->writers) {
        page->writers = std::make_unique<LineWriters[]>(GlobalShadow::kPageLines);
      }
      LineReaders& readers = page->readers[at];
      if (page->writers) {
        u64 open = mask;
        for (const AccessRecord& r : page->writers[at].last) {
          u64 both = r.mask & open;
          if (!both) continue;
          if (isRace(r)) {
            new (met + count++) Meeting{r, both, true, false, hasRead(readers, both)};
          } else if (r.same) {
            open &= ~both;  // what was there before and unordered was the same
          }
        }
      }
      if (write) {
        for (const AccessRecord& r : readers.last) {
          if (!(r.mask & mask) || !isRace(r)) continue;
          bool own = page->writers && wroteItself(*page, at, r, mask);
          new (met + count++) Meeting{r, r.mask & mask, false, own, false};
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
    if (count) record_.same = false;
  }

 private:
  struct Meeting {
    AccessRecord with;
    u64 mask = 0;
    bool writes = false;  // it wrote
    bool own = false;     // it read what its own wave had written
    bool cached = false;  // this launch has read it before
  };

  static bool isPlain(const Role& r) { return r.write && !r.atomic(); }

  bool isRace(const AccessRecord& r) const {
    const Role& role = record_.role;
    Reach reach = reachOf(w_, r);
    bool fresh =
        role.write || (reach == Reach::System ? role.system() : role.level >= Role::kDevice);
    return !synchronise(w_, role, r.role, reach, false) && !ordered(w_, op_, r, reach, fresh);
  }

  bool hasRead(const LineReaders& readers, u64 mask) const {
    const World& world = *worker_.launch->world;
    return std::any_of(std::begin(readers.last), std::end(readers.last), [&](const auto& r) {
      return (r.mask & mask) && world.partOf(r.who) == worker_.launch->part;
    });
  }

  static bool wroteItself(const GlobalShadow::Page& page, u64 at, const AccessRecord& r, u64 mask) {
    u64 open = r.mask & mask;
    for (const AccessRecord& x : page.writers[at].last) {
      bool own = x.who == r.who && x.wave == r.wave;
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
    u32 first = launch.world->parts[launch.part].first, own = met.with.who - first;
    u32 other = own % kXcds % launch.workers;
    if (!met.writes || other == worker_.index || own >= launch.workgroups) return false;
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
    const World& world = *worker_.launch->world;
    bool sameCode = world.parts[world.partOf(r.who)].kernel == worker_.launch->kernel;
    if (sameCode && !role.write && looksOnly(w_, *op_.inst, role, *r.inst)) return;
    if (sameCode && !r.role.write && looksOnly(w_, *r.inst, r.role, *op_.inst)) return;
    if (isPlain(role) && (!met.writes || isPlain(r.role)) && keepsSoon(met, line)) {
      if (met.writes || met.own) return;
      level = Level::Suspicious;
    }
    Reach reach = reachOf(w_, r);
    std::string hint = hintFor(role, r.role, reach);
    if (reach == Reach::System && hint.empty()) hint = acrossDevices(r);
    if (reach == Reach::System && !role.write && !met.cached &&
        tellsOfItsEnd(w_, op_.fresh.get(), r)) {
      level = Level::Suspicious;
      hint =
          "; a flag told that its launch had ended, but no acquire at system scope (buffer_inv sc0 "
          "sc1) followed: right as long as this launch has not read the line before";
    }
    if (reach == Reach::Workgroup && halfSynchronised(role, r.role)) {
      level = Level::Suspicious;
      hint = "; the load has scope bits, the store has none: only the hardware keeps them in order";
    }
    if (r.writeBack && met.writes && reach != Reach::Workgroup) hint += outrun(r);
    u64 address = line * 64 + __builtin_ctzll(met.mask);
    report(w_, *op_.inst, "global-race", address, lane,
           describe(w_, role.write ? "writes global memory" : "reads global memory", r.who, r.wave,
                    r.inst, met.writes, hint),
           level);
  }

  // A flag of another device ordered the two, as it would within one.
  std::string acrossDevices(const AccessRecord& r) const {
    auto told = [&](Reach reach) {
      return tells(w_, op_.known.get(), r, reach) || tells(w_, op_.fresh.get(), r, reach);
    };
    if (told(Reach::System)) {
      return "; a flag orders them, but this device may read an older copy: acquire at system "
             "scope "
             "(buffer_inv sc0 sc1)";
    }
    AccessRecord complete = r;
    complete.writeBack = false;
    if (r.role.write && tells(w_, op_.fresh.get(), complete, Reach::Device)) {
      return "; a flag orders them, but what was written may lie in the other device's L2: release "
             "at "
             "system scope (buffer_wbl2 sc0 sc1, and its wait)";
    }
    return "";
  }

  // Did the writer's release go out before its write-back was complete?
  std::string outrun(const AccessRecord& r) const {
    World& world = *worker_.launch->world;
    const Inst* writeBack = nullptr;
    {
      std::lock_guard guard(world.outrunLock);
      for (const auto& [who, inst] : world.outrun) {
        if (who.first == r.who) writeBack = inst;
      }
    }
    if (!writeBack) return "";
    return "; that workgroup's release did not wait for its write-back '" + writeBack->text +
           "' (" + w_.object->source(writeBack->address) +
           "): s_waitcnt vmcnt(0) belongs between it and the store of the flag, and clang 22.1 "
           "leaves it out of a correct release";
  }

  template <int kCount>
  void put(AccessRecord* slots, u64 mask) {
    auto mine = [&](const AccessRecord& r) {
      return r.mask == 0 ||
             (r.who == record_.who && r.wave == record_.wave && r.scalar == record_.scalar &&
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
// first that does. Says whether two of them meet.
template <class F>
bool forLines(const MemOp& op, u64 lanes, F f) {
  struct Touched {
    u64 line, mask;
    int lane;
  };
  constexpr u32 kSlots = 256;  // a lane touches two lines at most
  Touched touched[2 * kLanes];
  u8 slots[kSlots] = {};  // index + 1 by a hash of the line
  u32 count = 0;
  u64 twice = 0;
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
      twice |= last->mask & part;
      last->mask |= part;
      a = end;
    }
  }
  for (u32 n = 0; n < count; ++n) f(touched[n].line, touched[n].mask, touched[n].lane);
  return twice;
}

}  // namespace

GlobalShadow::Page& GlobalShadow::page(u64 number) {
  u32 stripe = number % kStripes;
  std::lock_guard guard(locks_[stripe]);
  std::unique_ptr<Page>& slot = pages_[stripe][number];
  if (!slot) slot = std::make_unique<Page>();
  return *slot;
}

bool raceGlobal(Wave& w, MemOp& op, u64 lanes, bool write) {
  const Hostcalls* host = w.wg->launch->hostcalls.get();
  bool toHost = host && lanes && op.addr[__builtin_ctzll(lanes)] - host->address() < host->bytes();
  if (toHost) return true;
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
    return false;
  }
  return forLines(op, lanes, [&](u64 line, u64 mask, int lane) { access.touch(line, mask, lane); });
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
  GlobalShadow::Page& page =
      w.wg->launch->world->shadow.page(address / 64 / GlobalShadow::kPageLines);
  Held held(page, w.wg->launch->workers > 1);
  for (const AccessRecord& r : page.readers[address / 64 % GlobalShadow::kPageLines].last) {
    bool own = r.who == w.wg->who && r.wave == w.id;
    if (own && (r.mask >> address % 64 & 1)) return r.inst;
  }
  return nullptr;
}

}  // namespace sim
