// What orders what: vector clocks, releases and acquires.
//
// The rules are the hardware's, as LLVM's memory model for these targets uses them (without
// threadgroup split mode):
//   - Waves of a workgroup share a compute unit and its L1, which serves global accesses in the
//   order
//     of their issue. Between them nothing waits for VMCNT; s_barrier or a flag orders what was
//     issued.
//   - LDS operations of a wave keep their order; s_barrier needs them complete (LGKMCNT). A load to
//     LDS has written it when VMCNT says so.
//   - For other workgroups a load, an atomic or a store with sc1 must be complete (VMCNT). A store
//     without sc1 stays in this die's L2 until `buffer_wbl2 sc1`, itself complete, has written it
//     back. Where all workgroups share one L2 there is nothing to write back.
//   - What a flag of another workgroup gives is seen by loads with sc1, by atomics and stores;
//   other
//     loads see it after `buffer_inv sc1`, executed by any wave of the workgroup that is ordered
//     before them: it empties the caches of the whole compute unit.
//   - For other devices a write needs sc0 and sc1, or `buffer_wbl2 sc0 sc1`; a flag too, on both
//   sides; ordinary loads see what it gave after `buffer_inv sc0 sc1`. The end of a launch is
//   before what comes behind it in its stream, for all of the device.
//   - Release: atomics; stores with sc0 or sc1; a store to one word (it may be a flag without
//   them).
//     Acquire: atomics that return, loads with sc0 or sc1, polling loads (decode_polling.cpp).
#include <algorithm>
#include <functional>

#include "memory.h"

namespace sim {
namespace {

u64 newNumber() {
  static std::atomic<u64> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Says whether `other` has what `mine` has not.
bool beyond(const std::shared_ptr<const Carried>& mine,
            const std::shared_ptr<const Carried>& other) {
  return other && other != mine &&
         (!mine || !std::equal(mine->begin(), mine->end(), other->begin(), std::greater_equal<>()));
}

void lift(Clock& clock, const Clock& other) {
  for (int n = 0; n < kClocks; ++n) clock.at[n] = std::max(clock.at[n], other.at[n]);
  if (!beyond(clock.carried, other.carried)) return;
  auto both = std::make_shared<Carried>(*other.carried);
  for (int n = 0; n < kMaxWaves && clock.carried; ++n) {
    (*both)[n] = std::max((*both)[n], (*clock.carried)[n]);
  }
  clock.carried = both;
}

KnowledgePtr join(const KnowledgePtr& a, const KnowledgePtr& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  bool bigger = false;
  for (int n = 0; n < kClocks; ++n) bigger |= b->own.at[n] > a->own.at[n];
  bigger = bigger || beyond(a->own.carried, b->own.carried);
  bool foreign = b->foreign && b->foreign != a->foreign;
  if (!bigger && !foreign) return a;
  auto r = std::make_shared<Knowledge>(*a);
  r->number = newNumber();
  lift(r->own, b->own);
  if (foreign && !a->foreign) {
    r->foreign = b->foreign;
  } else if (foreign) {
    auto merged = std::make_shared<Foreign>(*a->foreign);
    for (const auto& [wg, clock] : *b->foreign) {
      Clock& c = (*merged)[wg];
      lift(c, clock);
    }
    r->foreign = merged;
  }
  return r;
}

// The wave's knowledge as other workgroups take it: all of it is about others.
KnowledgePtr seenFromOutside(const Wave& w, const KnowledgePtr& k) {
  auto r = std::make_shared<Knowledge>();
  r->number = newNumber();
  KnowledgePtr all = join(k, w.acquired);
  auto foreign =
      all->foreign ? std::make_shared<Foreign>(*all->foreign) : std::make_shared<Foreign>();
  Clock& c = (*foreign)[w.wg->who];
  lift(c, k->own);
  r->foreign = foreign;
  return r;
}

void ownClocks(const Wave& w, Clock& clock) { clock.at[kComponents * w.id + kReached] = w.clock; }

// What the wave knows plus its own accesses.
KnowledgePtr snapshot(const Wave& w) {
  auto r = std::make_shared<Knowledge>(*w.known);
  ownClocks(w, r->own);
  return r;
}

// Moves the clocks on; operations in flight get the new stamp, so a release says nothing about
// them. A flag in LDS covers earlier LDS instructions even in flight.
void advance(Wave& w, bool coversLds) {
  ++w.clock;
  for (MemOp* op : w.vm) op->stamp = w.clock;
  for (MemOp* op : w.lgkm) {
    if (!coversLds || op->inst->mem.space != Space::Lds) op->stamp = w.clock;
  }
}

// The one word that a store touches: only such a store can be a flag without saying so.
bool singleWord(const MemOp& op) {
  if (op.inst->mem.bytes > 8 || !op.mask || op.inst->mem.pair) return false;
  int first = __builtin_ctzll(op.mask);
  for (u64 m = op.mask; m; m &= m - 1) {
    if (op.addr[__builtin_ctzll(m)] / 4 != op.addr[first] / 4) return false;
  }
  return true;
}

bool isFence(const MemOp& op) { return op.inst->mem.access == Access::None; }

// Memory that others see: scratch is a lane's own, scalar loads have their own cache.
bool isShared(const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  return m.bytes && m.space != Space::Scratch && m.space != Space::Scalar;
}

bool releases(const Wave& w, const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  bool lds = m.space == Space::Lds;
  if (!isShared(op) || m.access == Access::Load || m.access == Access::LoadToLds) return false;
  bool inLds = w.wg->launch->kernel->acquiresLds, inGlobal = takenElsewhere(w);
  if (m.space == Space::Flat ? !inLds && !inGlobal : !(lds ? inLds : inGlobal)) {
    return false;  // nobody would look
  }
  return m.access == Access::Atomic || op.inst->sc0 || op.inst->sc1 || lds || singleWord(op);
}

bool acquires(const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  if (!isShared(op)) return false;
  if (m.access == Access::Atomic) return m.returns;
  return m.access == Access::Load && (m.spin || op.inst->sc0 || op.inst->sc1);
}

bool hasTaken(const Wave& w, u64 number) { return w.taken[number % std::size(w.taken)] == number; }

// What a flag of another workgroup gave; loads see it after a buffer_inv.
void take(Wave& w, const KnowledgePtr& given) {
  if (hasTaken(w, given->number)) return;
  w.taken[given->number % std::size(w.taken)] = given->number;
  // Knowledge about the own workgroup comes back through other groups' flags too.
  auto it = given->foreign->find(w.wg->who);
  if (it != given->foreign->end()) {
    auto own = std::make_shared<Knowledge>();
    own->own = it->second;
    w.known = join(w.known, own);
  }
  w.acquired = join(w.acquired, given);
}

// buffer_inv and its kin of gfx90a, which have no scope.
bool reachesOtherGroups(const Wave& w, const Inst& fence) {
  return fence.sc1 || !w.object->gpu->manyDies;
}

// Of one device, the caches of others hold its flags' data still.
bool reachesDevices(const Wave& w, const Inst& fence) {
  return (fence.sc0 && fence.sc1) || !w.object->gpu->manyDies;
}

// What is known of workgroups of the wave's own device.
KnowledgePtr ofThisDevice(const Wave& w, const KnowledgePtr& k) {
  if (!k || !k->foreign) return k;
  const World& world = *w.wg->launch->world;
  u32 device = world.parts[w.wg->launch->part].device;
  auto r = std::make_shared<Knowledge>(*k);
  auto foreign = std::make_shared<Foreign>(*k->foreign);
  std::erase_if(*foreign, [&](const auto& entry) {
    return world.parts[world.partOf(entry.first)].device != device;
  });
  r->foreign = foreign;
  return r;
}

}  // namespace

bool takenElsewhere(const Wave& w) {
  return w.wg->launch->kernel->acquiresGlobal || w.wg->launch->world->several();
}

u64 ldsLanes(const MemOp& op) {
  Space space = op.inst->mem.space;
  if (space == Space::Lds) return op.mask;
  if (space != Space::Flat || !op.mixedLds) return 0;
  u64 r = 0;
  for (u64 m = op.mask; m; m &= m - 1) {
    int l = __builtin_ctzll(m);
    if (op.addr[l] >> 32 == kSharedBase >> 32) r |= 1ull << l;
  }
  return r;
}

u64 globalLanes(const MemOp& op) {
  Space space = op.inst->mem.space;
  if (space == Space::Lds || space == Space::Scratch || space == Space::Scalar) return 0;
  if (space != Space::Flat) return op.mask;
  u64 r = 0;
  for (u64 m = op.mask; m; m &= m - 1) {
    int l = __builtin_ctzll(m);
    u64 high = op.addr[l] >> 32;
    if (high != kSharedBase >> 32 && high != kPrivateBase >> 32) r |= 1ull << l;
  }
  return r;
}

Role roleOf(const Wave& w, const MemOp& op) {
  const Inst& i = *op.inst;
  Role r;
  r.write = i.mem.access == Access::Store || i.mem.access == Access::Atomic;
  r.poll = i.mem.spin;
  if (i.mem.access == Access::Atomic) {
    r.level = i.sc1 ? Role::kSystemAtomic : Role::kAtomic;
  } else if (i.mem.access != Access::LoadToLds) {
    r.level = !i.sc1  ? (i.sc0 ? Role::kWorkgroup : Role::kPlain)
              : i.sc0 ? Role::kSystem
                      : Role::kDevice;
  }
  r.flag = r.write && r.level == Role::kPlain &&
           (i.mem.space == Space::Lds ? !i.mem.pair : singleWord(op));
  return r;
}

void initKnowledge(Workgroup& wg) {
  wg.clockBase = wg.worker->clockBase;
  auto k = std::make_shared<Knowledge>();
  World& world = *wg.launch->world;
  if (world.several()) {
    World::Part& part = world.parts[wg.launch->part];
    if (!part.known) {
      part.known = std::make_shared<Knowledge>();
      for (u32 n = 0; n < part.before.size(); ++n) {
        if (part.before[n]) part.known = join(part.known, world.parts[n].given);
      }
    }
    *k = *part.known;
  }
  for (u32& c : k->own.at) c = wg.clockBase - 1;
  for (Wave& w : wg.waves) {
    w.known = k;
    w.clock = wg.clockBase;
  }
}

// What a launch knew at its end, those that follow in its stream know from their beginning.
void endKnowledge(const Workgroup& wg) {
  World& world = *wg.launch->world;
  if (!world.several()) return;
  KnowledgePtr& given = world.parts[wg.launch->part].given;
  for (const Wave& w : wg.waves) {
    for (const KnowledgePtr& k : {w.known, w.acquired}) {
      if (!k || !k->foreign) continue;
      auto others = std::make_shared<Knowledge>();
      others->foreign = k->foreign;
      given = join(given, others);
    }
  }
}

void workgroupBarrier(Workgroup& wg) {
  if (!wg.launch->options.race) return;
  auto all = std::make_shared<Knowledge>(*wg.waves[0].known);
  KnowledgePtr known, acquired;
  for (Wave& w : wg.waves) {
    lift(all->own, w.known->own);
    if (w.known->foreign != all->foreign) known = join(known, w.known);
    acquired = join(acquired, w.acquired);
  }
  for (Wave& w : wg.waves) ownClocks(w, all->own);
  KnowledgePtr joined = join(KnowledgePtr(all), known);
  for (Wave& w : wg.waves) {
    w.known = joined;
    w.acquired = acquired;
    advance(w, false);
  }
}

void issueSync(Wave& w, MemOp& op) {
  const Inst& i = *op.inst;
  op.known = w.known;
  op.fresh = w.acquired;
  op.stamp = op.issued = w.clock;
  if (isFence(op)) {
    if (!reachesOtherGroups(w, i)) return;
    if (i.name == "buffer_wbl2") {
      op.publish = snapshot(w);  // counts when it has completed
      advance(w, true);
    } else if (w.wg->launch->world->several() && !reachesDevices(w, i)) {
      w.known = join(w.known, ofThisDevice(w, w.acquired));
    } else if (w.invalidated != w.acquired) {
      w.known = join(w.known, w.acquired);
      w.invalidated = w.acquired;
    }
    return;
  }
  if (!releases(w, op)) return;
  op.publish = snapshot(w);
  if (i.mem.space != Space::Lds && takenElsewhere(w)) {
    for (const MemOp* other : w.vm) {
      if (other->inst->name != "buffer_wbl2") continue;
      World& world = *w.wg->launch->world;
      std::lock_guard guard(world.outrunLock);
      world.outrun[{w.wg->who, w.id}] = other->inst;
    }
    op.publishForeign = seenFromOutside(w, op.publish);
  }
  advance(w, i.mem.space == Space::Lds);
}

void FlagTable::release(u64 line, u16 words, const Wave& w, const MemOp& op) {
  u32 stripe = line % kStripes, who = w.wg->who;
  std::lock_guard guard(locks_[stripe]);
  std::vector<FlagWords>& entries = lines_[stripe][line];
  bool atomic = op.inst->mem.access == Access::Atomic;
  std::vector<FlagWords> joined;
  for (FlagWords& e : entries) {
    u16 both = e.words & words;
    if (!both) continue;
    e.words &= ~both;
    if (!atomic) continue;
    // What earlier releases gave stays with an atomic's new value.
    FlagWords next{both, who, op.publish, join(e.foreign, op.publishForeign)};
    if (e.who == who) next.local = join(e.local, op.publish);
    next.number = next.foreign->number;
    joined.push_back(std::move(next));
    words &= ~both;
  }
  std::erase_if(entries, [](const FlagWords& e) { return !e.words; });
  for (FlagWords& e : joined) entries.push_back(std::move(e));
  const KnowledgePtr& given = op.publishForeign;
  if (words) entries.push_back({words, who, op.publish, given, given->number});
}

void FlagTable::acquire(u64 line, u16 words, const Wave& w, MemOp& op) {
  u32 stripe = line % kStripes;
  std::lock_guard guard(locks_[stripe]);
  auto it = lines_[stripe].find(line);
  if (it == lines_[stripe].end()) return;
  for (const FlagWords& e : it->second) {
    if (!(e.words & words)) continue;
    if (e.who == w.wg->who) op.acquired = join(op.acquired, e.local);
    // A wave that polls meets the same again and again.
    if (!hasTaken(w, e.number)) op.given.push_back(e.foreign);
  }
}

void performSync(Wave& w, MemOp& op) {
  bool out = op.publish != nullptr, in = acquires(op);
  if (!out && !in) return;
  const MemSpec& m = op.inst->mem;
  bool atomic = m.access == Access::Atomic;
  u32 dwords = std::max(1, m.bytes / 4);
  auto lds = [&](u32 offset) {
    for (u64 lanes = ldsLanes(op); lanes; lanes &= lanes - 1) {
      u32 word = static_cast<u32>(op.addr[__builtin_ctzll(lanes)] + offset) / 4;
      for (u32 d = 0; d < dwords; ++d, ++word) {
        if (out) {
          KnowledgePtr& slot = w.wg->ldsSync[word];
          if (in) op.acquired = join(op.acquired, slot);
          slot = atomic ? join(slot, op.publish) : op.publish;
        } else if (auto it = w.wg->ldsSync.find(word); it != w.wg->ldsSync.end()) {
          op.acquired = join(op.acquired, it->second);
        }
      }
    }
  };
  u32 scale = m.pair ? m.pairStride : 1;
  bool plainLds = m.space == Space::Lds;
  if (plainLds || op.mixedLds) lds(plainLds ? op.inst->offset * scale : 0);
  if (m.pair) lds(op.inst->offset1 * scale);
  if (plainLds) return;
  FlagTable& flags = w.wg->launch->world->flags;
  u64 line = ~0ull;
  u16 words = 0;
  auto flush = [&] {
    if (!words) return;
    if (in) flags.acquire(line, words, w, op);
    if (op.publishForeign) flags.release(line, words, w, op);
    words = 0;
  };
  for (u64 lanes = globalLanes(op); lanes; lanes &= lanes - 1) {
    u64 word = op.addr[__builtin_ctzll(lanes)] / 4;
    for (u32 d = 0; d < dwords; ++d, ++word) {
      if (word / 16 != line) flush();
      line = word / 16;
      words |= 1 << word % 16;
    }
  }
  flush();
}

void completeSync(Wave& w, MemOp& op) {
  if (isFence(op)) {
    if (!op.publish) return;
    auto k = std::make_shared<Knowledge>(*w.known);
    Carried issued;
    for (int n = 0; n < kMaxWaves; ++n) {
      issued[n] = op.publish->own.at[n * kComponents + kReached];
      u32& written = k->own.at[n * kComponents + kWritten];
      written = std::max(written, issued[n]);
    }
    if (w.wg->launch->world->several() && reachesDevices(w, *op.inst)) {
      Clock carried = k->own;
      carried.carried = std::make_shared<Carried>(issued);
      lift(k->own, carried);
    }
    w.known = k;
    return;
  }
  if (op.acquired) w.known = join(w.known, op.acquired);
  for (const KnowledgePtr& given : op.given) take(w, given);
  op.given.clear();
}

void gridArrive(Wave& w, GridBarrier& barrier) {
  if (!w.wg->launch->options.race) return;
  barrier.gathered = join(barrier.gathered, seenFromOutside(w, snapshot(w)));
  advance(w, false);
}

void gridLeave(Wave& w, const GridBarrier& barrier) {
  if (!w.wg->launch->options.race || !barrier.given) return;
  take(w, barrier.given);
  // ROCm's grid sync invalidates before the barrier and not after it, which has to do.
  w.known = join(w.known, w.acquired);
}

}  // namespace sim
