// The happens-before checker.
//
// Every wave has a clock for the operations of each wait counter. An access is stamped with the
// clock of its counter when it is issued; a release (barrier, flag write, fence) publishes the
// clocks and moves them on, and operations that have not completed by then, and that the release
// does not cover, are stamped anew, so the release says nothing about them. Two accesses to one
// byte race when one writes, they are of different waves, and the later one's wave does not know
// the stamp of the earlier one.
//
// Who releases and acquires:
//   s_barrier                      everything completed, both ways, between a workgroup's waves
//   atomics on a word              release and acquire
//   a store to one word            release (it may be a flag; that costs little if it is not)
//   a polling load                 acquire (see decode_polling.cpp)
//   buffer_wbl2 / buffer_inv       what a global flag gives to, and takes from, other workgroups:
//                                  stores with sc1 are written through and need no write-back;
//                                  where all workgroups share one L2, no store does
// LDS operations of one wave stay in order, so a flag in LDS covers earlier LDS operations even
// without a wait; it covers global ones (and loads to LDS) only after their wait.
#include "memory.h"

namespace sim {
namespace {

KnowledgePtr join(const KnowledgePtr& a, const KnowledgePtr& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  bool bigger = false;
  for (int n = 0; n < kClocks; ++n) bigger |= b->own.at[n] > a->own.at[n];
  bool foreign = b->foreign && b->foreign != a->foreign;
  if (!bigger && !foreign) return a;
  auto r = std::make_shared<Knowledge>(*a);
  for (int n = 0; n < kClocks; ++n) r->own.at[n] = std::max(a->own.at[n], b->own.at[n]);
  if (foreign && !a->foreign) {
    r->foreign = b->foreign;
  } else if (foreign) {
    auto merged = std::make_shared<Foreign>(*a->foreign);
    for (const auto& [wg, clock] : *b->foreign) {
      Clock& c = (*merged)[wg];
      for (int n = 0; n < kClocks; ++n) c.at[n] = std::max(c.at[n], clock.at[n]);
    }
    r->foreign = merged;
  }
  return r;
}

// The same knowledge as another workgroup sees it.
KnowledgePtr seenFromOutside(const KnowledgePtr& k, u32 publisher) {
  if (!k) return nullptr;
  auto r = std::make_shared<Knowledge>();
  auto foreign = k->foreign ? std::make_shared<Foreign>(*k->foreign) : std::make_shared<Foreign>();
  Clock& c = (*foreign)[publisher];
  for (int n = 0; n < kClocks; ++n) c.at[n] = std::max(c.at[n], k->own.at[n]);
  r->foreign = foreign;
  return r;
}

// What the wave knows plus its own completed accesses.
KnowledgePtr snapshot(const Wave& w) {
  auto r = std::make_shared<Knowledge>(*w.known);
  for (int c = 0; c < 2; ++c) r->own.at[2 * w.id + c] = w.clock[c];
  return r;
}

// Moves the clocks on; operations in flight get the new stamp.
void advance(Wave& w, bool coversLds) {
  ++w.clock[0];
  ++w.clock[1];
  for (MemOp* op : w.vm) op->stamp = w.clock[0];
  if (coversLds) return;
  for (MemOp* op : w.lgkm) op->stamp = w.clock[1];
}

int counterOf(const MemOp& op) {
  Space s = op.inst->mem.space;
  return s == Space::Lds || s == Space::Scalar || op.mixedLds;
}

// The one word that a store touches, or 0 when lanes differ: only such a store can be a flag.
bool singleWord(const MemOp& op) {
  if (op.inst->mem.bytes > 8 || !op.mask || op.inst->mem.pair) return false;
  int first = __builtin_ctzll(op.mask);
  for (u64 m = op.mask; m; m &= m - 1) {
    if (op.addr[__builtin_ctzll(m)] / 4 != op.addr[first] / 4) return false;
  }
  return true;
}

bool isLds(const MemOp& op) { return op.inst->mem.space == Space::Lds; }

bool releases(const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  if (m.space == Space::Scratch || m.space == Space::Scalar) return false;
  return m.access == Access::Atomic || (m.access == Access::Store && singleWord(op));
}

bool acquires(const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  if (m.space == Space::Scratch || m.space == Space::Scalar || m.bytes == 0) return false;
  return m.access == Access::Atomic || (m.access == Access::Load && m.spin);
}

std::string describe(const Wave& w, const char* what, u32 workgroup, u32 wave, const Inst* inst,
                     bool earlierWrites) {
  return std::string(what) + ": wave " + std::to_string(wave) +
         (workgroup == w.wg->linear ? "" : " of workgroup " + std::to_string(workgroup)) +
         (earlierWrites ? " wrote it" : " read it") + " in '" + inst->text + "' (" +
         w.object->source(inst->address) + ") with nothing ordering the two";
}

bool knows(const Wave& w, const MemOp& op, u32 workgroup, u32 component, u32 stamp, bool fresh) {
  const Knowledge* k = op.known.get();
  if (workgroup == w.wg->linear) {
    return static_cast<int>(component / 2) == w.id || k->own.at[component] >= stamp;
  }
  auto in = [&](const Knowledge* x) {
    if (!x || !x->foreign) return false;
    auto it = x->foreign->find(workgroup);
    return it != x->foreign->end() && it->second.at[component] >= stamp;
  };
  return in(k) || (fresh && in(w.acquired.get()));
}

}  // namespace

void initKnowledge(Workgroup& wg) {
  wg.clockBase = wg.worker->clockBase;
  auto k = std::make_shared<Knowledge>();
  for (u32& c : k->own.at) c = wg.clockBase - 1;
  for (Wave& w : wg.waves) {
    w.known = k;
    w.clock[0] = w.clock[1] = wg.clockBase;
  }
}

void workgroupBarrier(Workgroup& wg) {
  if (!wg.launch->options.race) return;
  KnowledgePtr all;
  for (Wave& w : wg.waves) {
    all = join(all, snapshot(w));
    all = join(all, w.acquired);
  }
  for (Wave& w : wg.waves) {
    w.known = all;
    advance(w, false);
  }
}

void issueSync(Wave& w, MemOp& op) {
  const Inst& i = *op.inst;
  op.known = w.known;
  op.stamp = w.clock[counterOf(op)];
  if (i.mem.access == Access::None) {
    if (i.name == "buffer_wbl2") {
      w.released = snapshot(w);
      w.wg->dirtyStores = 0;
      advance(w, false);
    } else {
      w.known = join(w.known, w.acquired);
    }
    return;
  }
  bool global = !isLds(op) && i.mem.space != Space::Scratch && i.mem.space != Space::Scalar;
  bool store = i.mem.access == Access::Store;
  if (releases(op)) {
    op.publish = snapshot(w);
    if (global) {
      KnowledgePtr visible = w.wg->dirtyStores ? w.released : op.publish;
      op.publishForeign = seenFromOutside(visible, w.wg->linear);
    }
    advance(w, isLds(op));
  }
  if (global && store && !i.sc1 && w.object->gpu->manyDies) ++w.wg->dirtyStores;
}

void performSync(Wave& w, MemOp& op, bool lds, u32 offset) {
  bool out = op.publish != nullptr, in = acquires(op);
  if (!out && !in) return;
  Launch& launch = *w.wg->launch;
  bool atomic = op.inst->mem.access == Access::Atomic;
  u64 last = ~0ull;
  for (u64 m = op.mask; m; m &= m - 1) {
    u64 address = op.addr[__builtin_ctzll(m)] + offset;
    u64 word = (lds ? static_cast<u32>(address) : address) / 4;
    if (word == last) continue;
    last = word;
    if (lds) {
      KnowledgePtr& slot = w.wg->ldsSync[word];
      if (in) {
        op.acquired = join(op.acquired, slot);
        std::lock_guard guard(launch.syncLock);
        launch.ldsFlagWords.insert(word);
      }
      if (out) slot = atomic ? join(slot, op.publish) : op.publish;
      continue;
    }
    std::lock_guard guard(launch.syncLock);
    GlobalSync& slot = launch.sync[word];
    if (in) {
      if (slot.workgroup == w.wg->linear) op.acquired = join(op.acquired, slot.local);
      op.acquiredForeign = join(op.acquiredForeign, slot.foreign);
      launch.flagWords.insert(word);
    }
    if (out) {
      bool same = slot.workgroup == w.wg->linear;
      slot.local = atomic && same ? join(slot.local, op.publish) : op.publish;
      slot.foreign = atomic ? join(slot.foreign, op.publishForeign) : op.publishForeign;
      slot.workgroup = w.wg->linear;
    }
  }
}

void completeSync(Wave& w, MemOp& op) {
  if (op.acquired) w.known = join(w.known, op.acquired);
  if (op.acquiredForeign) w.acquired = join(w.acquired, op.acquiredForeign);
}

void raceLds(Wave& w, MemOp& op, u32 bytes, u32 offset, bool write) {
  if (acquires(op) && !write) return;
  Workgroup& wg = *w.wg;
  const Inst* inst = op.inst;
  bool atomic = inst->mem.access == Access::Atomic;
  u8 component = 2 * w.id + (inst->mem.access == Access::LoadToLds ? 0 : 1);
  for (u64 m = op.mask; m; m &= m - 1) {
    int lane = __builtin_ctzll(m);
    u32 address = static_cast<u32>(op.addr[lane]) + offset, end = address + bytes;
    if (end > wg.ldsBytes) continue;
    for (u32 word = address / 4; word * 4 < end; ++word) {
      u32 lo = word * 4 < address ? address - word * 4 : 0;
      u32 hi = std::min(4u, end - word * 4);
      u8 mask = (15 >> (4 - hi)) & (15 << lo);
      LdsCell& cell = wg.shadow->cells[word];
      auto check = [&](const LdsRecord& r, bool earlierWrites) {
        if (!(r.mask & mask) || r.stamp < wg.clockBase || (atomic && r.atomic)) return;
        if (!knows(w, op, wg.linear, r.component, r.stamp, false)) {
          report(w, *inst, "lds-race", word * 4, lane,
                 describe(w, write ? "writes LDS" : "reads LDS", wg.linear, r.component / 2, r.inst,
                          earlierWrites));
        }
      };
      for (const LdsRecord& r : cell.writers) check(r, true);
      if (write) {
        for (const LdsRecord& r : cell.readers) check(r, false);
      }
      // Keep the newest records, one a wave, so that one wave cannot push out the others.
      LdsRecord record{op.stamp, component, mask, atomic, inst};
      auto put = [&](LdsRecord* slots, int count) {
        int at = 0;
        while (at < count - 1 && !(slots[at].component == component &&
                                   (slots[at].mask == mask || slots[at].stamp < wg.clockBase))) {
          ++at;
        }
        for (; at > 0; --at) slots[at] = slots[at - 1];
        slots[0] = record;
      };
      write ? put(cell.writers, 2) : put(cell.readers, 3);
    }
  }
}

namespace {

void raceLine(Wave& w, MemOp& op, u64 line, u64 mask, int lane, bool write) {
  Launch& launch = *w.wg->launch;
  const Inst* inst = op.inst;
  bool atomic = inst->mem.access == Access::Atomic;
  bool fresh = atomic || write || inst->sc1;
  GlobalShadow::Page& page = launch.shadow.page(line / GlobalShadow::kPageLines);
  std::lock_guard guard(page.lock);
  LineShadow& shadow = page.lines[line % GlobalShadow::kPageLines];
  u16 component = 2 * w.id + counterOf(op);
  u32 wg = w.wg->linear;
  auto check = [&](const AccessRecord& r, bool earlierWrites) {
    if (!(r.mask & mask) || (atomic && r.atomic)) return;
    if (knows(w, op, r.workgroup, r.component, r.stamp, fresh)) return;
    u64 address = line * 64 + __builtin_ctzll(r.mask & mask);
    report(w, *inst, "global-race", address, lane,
           describe(w, write ? "writes global memory" : "reads global memory", r.workgroup,
                    r.component / 2, r.inst, earlierWrites));
  };
  for (const AccessRecord& r : shadow.writers) check(r, true);
  if (write) {
    for (const AccessRecord& r : shadow.readers) check(r, false);
  }
  AccessRecord record{mask, wg, op.stamp, component, atomic, inst};
  auto put = [&](AccessRecord* slots, int count) {
    int at = 0;
    auto mine = [&](const AccessRecord& r) {
      return r.mask == 0 || (r.workgroup == wg && r.component == component && r.stamp == op.stamp &&
                             r.atomic == atomic);
    };
    while (at < count - 1 && !mine(slots[at])) ++at;
    if (slots[at].mask && mine(slots[at])) record.mask |= slots[at].mask;
    for (; at > 0; --at) slots[at] = slots[at - 1];
    slots[0] = record;
  };
  write ? put(shadow.writers, 4) : put(shadow.readers, 3);
}

}  // namespace

GlobalShadow::Page& GlobalShadow::page(u64 number) {
  u32 stripe = number % kStripes;
  std::lock_guard guard(locks_[stripe]);
  std::unique_ptr<Page>& slot = pages_[stripe][number];
  if (!slot) slot = std::make_unique<Page>();
  return *slot;
}

void raceGlobal(Wave& w, MemOp& op, u32 bytes, bool write) {
  if (acquires(op) && !write) return;
  u64 line = ~0ull, mask = 0;
  int lane = 0;
  for (u64 m = op.mask; m; m &= m - 1) {
    int l = __builtin_ctzll(m);
    u64 address = op.addr[l];
    if (address >> 56) continue;  // LDS or scratch through a flat instruction
    u32 size = bytes;
    if (op.inst->mem.space == Space::Buffer) {
      size = bytes >= 4 ? op.validDwords[l] * 4u : op.validDwords[l] ? bytes : 0;
      if (!size) continue;
    }
    for (u64 a = address; a < address + size;) {
      u64 end = std::min(address + size, (a / 64 + 1) * 64);
      u64 part = (end - a == 64 ? ~0ull : (1ull << (end - a)) - 1) << (a % 64);
      if (a / 64 != line) {
        if (mask) raceLine(w, op, line, mask, lane, write);
        line = a / 64;
        mask = 0;
        lane = l;
      }
      mask |= part;
      a = end;
    }
  }
  if (mask) raceLine(w, op, line, mask, lane, write);
}

}  // namespace sim
