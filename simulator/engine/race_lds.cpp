// The happens-before checker of LDS, by dword with a byte mask; its rules are in race.cpp.
#include <algorithm>

#include "race.h"

namespace sim {
namespace {

// One LDS instruction in the shadow.
template <bool kWrites>
class LdsAccess {
 public:
  LdsAccess(Wave& w, const MemOp& op, u32 bytes, u32 offset, u32 row)
      : w_(w),
        wg_(*w.wg),
        op_(op),
        shadow_(*w.wg->shadow),
        role_(roleOf(w, op)),
        bytes_(bytes),
        offset_(offset),
        row_(row) {
    role_.write = kWrites;
    inst_ = op.inst;
    bool toLds = inst_->mem.access == Access::LoadToLds;
    u32 inst = inst_ - w.object->code.data();
    record_ = {op.stamp, inst, static_cast<u8>(2 * w.id + toLds), 0, role_, false};
    const Clock& own = op.known->own;
    for (int n = 0; n < kMaxWaves; ++n) known_[n] = own.at[n * kComponents + kReached];
    known_[w.id] = ~0u;
    knownOfAll_ = *std::min_element(known_, known_ + wg_.waves.size());
  }

  // Bytes [begin, end) of LDS; `lane` asks for them.
  void touch(u32 begin, u32 end, int lane) {
    LdsCell& first = shadow_.firstOf(begin / 4);
    if (begin % kBytes == 0 && end - begin == kBytes && first.state == wg_.clockBase << 1) {
      meet(first, begin / 4, LdsShadow::kShared, 15, lane);
    } else {
      touchWords(begin, end, lane);
    }
  }

 private:
  static constexpr u32 kBytes = 4 * LdsShadow::kShared;

  [[gnu::noinline]] void touchWords(u32 begin, u32 end, int lane) {
    u32 word = begin / 4;
    while (word * 4 < end) {
      LdsCell& first = shadow_.firstOf(word);
      bool whole = word * 4 >= begin && word * 4 + kBytes <= end && word % LdsShadow::kShared == 0;
      if (first.state >> 1 != wg_.clockBase) renew(first, word, whole);
      if (whole && !(first.state & 1)) {
        meet(first, word, LdsShadow::kShared, 15, lane);
        word += LdsShadow::kShared;
        continue;
      }
      if (!(first.state & 1)) split(first, word);
      u32 lo = word * 4 < begin ? begin - word * 4 : 0;
      u32 hi = std::min(4u, end - word * 4);
      meet(shadow_.at(word), word, 1, (15 >> (4 - hi)) & (15 << lo), lane);
      ++word;
    }
  }

  // What an earlier workgroup left is no record.
  void renew(LdsCell& first, u32 word, bool whole) {
    first = LdsCell{};
    first.state = wg_.clockBase << 1 | !whole;
    if (!whole) std::fill_n(shadow_.othersOf(word), LdsShadow::kShared - 1, LdsCell{});
  }

  // From now on each dword has records of its own.
  void split(LdsCell& first, u32 word) {
    std::fill_n(shadow_.othersOf(word), LdsShadow::kShared - 1, first);
    first.state |= 1;
  }

  // The access meets what a cell, which stands for `words` of them, has of others.
  [[gnu::always_inline]] void meet(LdsCell& cell, u32 word, u32 words, u8 mask, int lane) {
    auto meets = [&](const LdsRecord& r) { return (r.mask & mask) && r.stamp > known_[r.by / 2]; };
    // Mostly a barrier lies behind all of them.
    u32 newest = std::max(cell.writers[0].stamp, cell.writers[1].stamp);
    if (kWrites) {
      for (const LdsRecord& r : cell.readers) newest = std::max(newest, r.stamp);
    }
    bool any = false;
    if (newest > knownOfAll_) {
      for (const LdsRecord& r : cell.writers) any |= meets(r);
      if (kWrites) {
        for (const LdsRecord& r : cell.readers) any |= meets(r);
      }
    }
    if (any) [[unlikely]] {
      judge(cell, word, words, mask, lane);
    }
    if (kWrites) meetsItself |= isMine(cell.writers[0]);
    kWrites ? put<2>(cell.writers, mask) : put<3>(cell.readers, mask);
    if (any) record_.same = false;  // seldom: a byte stored before the copy above holds that up
  }

  // Did another lane store to it, or the same instruction before?
  bool isMine(const LdsRecord& r) const {
    return r.by == record_.by && r.inst == record_.inst && r.stamp == record_.stamp;
  }

  // Keeps the newest records, one a wave, so that one wave cannot push out the others.
  template <int kCount>
  void put(LdsRecord* slots, u8 mask) {
    auto mine = [&](const LdsRecord& r) {
      return r.by == record_.by && r.mask == mask && r.role.level == role_.level;
    };
    int at = 0;
    while (at < kCount - 1 && !mine(slots[at])) ++at;
    for (; at > 0; --at) slots[at] = slots[at - 1];
    slots[0] = record_;
    slots[0].mask = mask;
  }

  [[gnu::noinline]] void judge(const LdsCell& cell, u32 word, u32 words, u8 mask, int lane) {
    auto meets = [&](const LdsRecord& r, u8 bytes) {
      return (r.mask & bytes) && r.stamp > known_[r.by / 2];
    };
    bool plain = kWrites && !role_.atomic();
    bool kept = plain && keeps(word, words, mask, lane);
    u8 open = mask;
    for (const LdsRecord& r : cell.writers) {
      if (!meets(r, open)) {
        if (r.same) open &= ~r.mask;  // what was there before and unordered was the same
      } else if (kept && !r.role.atomic()) {
        record_.same = true;
      } else {
        complain(r, word, words, lane, true, Level::Error);
      }
    }
    for (const LdsRecord& r : cell.readers) {
      if (!kWrites || !meets(r, mask)) continue;
      if (kept && wroteItself(cell, r, mask)) continue;
      complain(r, word, words, lane, false, kept ? Level::Suspicious : Level::Error);
    }
  }

  static bool wroteItself(const LdsCell& cell, const LdsRecord& reader, u8 mask) {
    u8 open = reader.mask & mask;
    for (const LdsRecord& r : cell.writers) {
      if (r.by / 2 == reader.by / 2) open &= ~r.mask;
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
    if (synchronise(w_, role_, r.role, Reach::Workgroup, true)) return;
    const Inst& other = w_.object->code[r.inst];
    const Inst &load = kWrites ? other : *inst_, &write = kWrites ? *inst_ : other;
    const Role& reads = kWrites ? r.role : role_;
    if (!reads.write) {
      if (looksOnly(w_, load, reads, write)) return;
      // The compiler makes a load of atomicAdd(&x, 0); LDS has no bits that say so.
      bool atomic = write.mem.access == Access::Atomic;
      if (atomic && w_.object->inlinedFrom(load.address, "atomic")) return;
    }
    for (u32 n = 0; n < words; ++n) {
      report(w_, *inst_, "lds-race", (word + n) * 4, lane,
             describe(w_, kWrites ? "writes LDS" : "reads LDS", wg_.who, r.by / 2, &other,
                      earlierWrites,
                      role_.level == r.role.level ? "" : hintFor(role_, r.role, Reach::Workgroup)),
             level);
    }
  }

 public:
  bool inARow = false;  // lane after lane, so that a cell may be several lanes'
  bool meetsItself = false;

 private:
  Wave& w_;
  Workgroup& wg_;
  const MemOp& op_;
  LdsShadow& shadow_;
  Role role_;
  const Inst* inst_;
  u32 bytes_, offset_, row_;
  LdsRecord record_;
  alignas(64) u32 known_[kMaxWaves];  // up to which stamp a record of each wave is known,
  u32 knownOfAll_;                    // and one of any
};

template <bool kWrites>
bool race(Wave& w, MemOp& op, u64 lanes, u32 bytes, u32 offset, u32 row) {
  LdsAccess<kWrites> access(w, op, bytes, offset, row);
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
    return false;
  }
  bool outside = false;
  for (u64 m = lanes; m; m &= m - 1) {
    int lane = __builtin_ctzll(m);
    u32 address = static_cast<u32>(op.addr[lane]) + offset;
    bool inside = bytes <= limit && address <= limit - bytes;
    outside |= !inside;
    if (inside) access.touch(address, address + bytes, lane);
  }
  return outside || access.meetsItself;
}

}  // namespace

bool raceLds(Wave& w, MemOp& op, u64 lanes, u32 bytes, u32 offset, u32 row, bool write) {
  return write ? race<true>(w, op, lanes, bytes, offset, row)
               : race<false>(w, op, lanes, bytes, offset, row);
}

const Inst* ownLdsReader(const Wave& w, u32 address) {
  if (address >= w.wg->ldsBytes) return nullptr;
  LdsShadow& shadow = *w.wg->shadow;
  u32 word = address / 4;
  const LdsCell& first = shadow.firstOf(word);
  if (first.state >> 1 != w.wg->clockBase) return nullptr;
  for (const LdsRecord& r : (first.state & 1 ? shadow.at(word) : first).readers) {
    bool own = r.by / 2 == w.id;
    if (own && (r.mask >> address % 4 & 1)) return &w.object->code[r.inst];
  }
  return nullptr;
}

}  // namespace sim
