// Caches and LDS banks: what the counters say about memory traffic.
#include <algorithm>
#include <bit>

#include "memory.h"

namespace sim {

void Counters::add(const Counters& o) {
  if (executed.size() < o.executed.size()) executed.resize(o.executed.size());
  for (size_t n = 0; n < o.executed.size(); ++n) executed[n] += o.executed[n];
  readBytes += o.readBytes;
  writtenBytes += o.writtenBytes;
  lines64 += o.lines64;
  lines128 += o.lines128;
  ldsCycles += o.ldsCycles;
  ldsConflictCycles += o.ldsConflictCycles;
  ldsBytes += o.ldsBytes;
  atomics += o.atomics;
  tickets += o.tickets;
  scratchBytes += o.scratchBytes;
  scalarBytes += o.scalarBytes;
  cache.l1Hits += o.cache.l1Hits;
  cache.l2Hits += o.cache.l2Hits;
  cache.l2Misses += o.cache.l2Misses;
  cache.l2WriteBacks += o.cache.l2WriteBacks;
  cache.infinityHits += o.cache.infinityHits;
  cache.memoryReadBytes += o.cache.memoryReadBytes;
  cache.memoryWriteBytes += o.cache.memoryWriteBytes;
}

TagCache::TagCache(u32 sets, u32 ways)
    : sets_(sets),
      ways_(ways),
      tags_(static_cast<u64*>(std::calloc(u64(sets) * ways, sizeof(u64))), &std::free) {
  if (!tags_) throw Error("no memory for the tags of a cache");
}

// Sets are hashed so that power-of-two strides do not pile up in one set.
u64* TagCache::setOf(u64 line) const {
  u64 hash = line ^ line >> 11 ^ line >> 21;
  return tags_.get() + (hash & (sets_ - 1)) * ways_;  // the sets are a power of two
}

void TagCache::prefetch(u64 line) const {
  for (u32 n = 0; n < ways_; n += 8) __builtin_prefetch(setOf(line) + n, 1);
}

TagCache::Result TagCache::touch(u64 line, bool write) {
  u64* set = setOf(line);
  u64 tag = line + 1, found = 0, evicted = 0;
  u32 at = ways_ - 1;
  for (u32 first = 0; first < ways_; first += 8) {  // the ways are a multiple of 8
    u32 hits = 0;
    for (u32 n = 0; n < 8; ++n) hits |= static_cast<u32>((set[first + n] & ~kDirty) == tag) << n;
    if (hits) {
      at = first + __builtin_ctz(hits);
      break;
    }
  }
  bool hit = (set[at] & ~kDirty) == tag;
  if (hit) {
    found = set[at];
  } else {
    evicted = set[at] & kDirty ? set[at] & ~kDirty : 0;
    found = tag;
  }
  std::copy_backward(set, set + at, set + at + 1);
  dirty_ += write && !(found & kDirty);
  dirty_ -= evicted != 0;
  set[0] = found | (write ? kDirty : 0);
  return {hit, evicted};
}

std::vector<u64> TagCache::dirtyLines() const {
  std::vector<u64> lines;
  for (u64 n = 0; n < u64(sets_) * ways_ && lines.size() < dirty_; ++n) {
    u64 t = tags_.get()[n];
    if (t & kDirty) lines.push_back((t & ~kDirty) - 1);
  }
  return lines;
}

// 256 MiB: 16 stripes of 8192 sets x 16 ways x 128 bytes.
InfinityCache::InfinityCache() {
  for (u32 n = 0; n < kStripes; ++n) stripes_.emplace_back(8192, 16);
}

void InfinityCache::prefetch(u64 line) const {
  stripes_[line % kStripes].prefetch(line / kStripes);
}

void InfinityCache::read(u64 line, CacheCounts& counts) {
  u32 stripe = line % kStripes;
  std::unique_lock guard(locks_[stripe], std::defer_lock);
  if (shared) guard.lock();
  auto r = stripes_[stripe].touch(line / kStripes, false);
  if (r.hit) {
    ++counts.infinityHits;
  } else {
    counts.memoryReadBytes += kLineBytes;
  }
  if (r.evictedDirty) counts.memoryWriteBytes += kLineBytes;
}

void InfinityCache::write(u64 line, CacheCounts& counts) {
  u32 stripe = line % kStripes;
  std::unique_lock guard(locks_[stripe], std::defer_lock);
  if (shared) guard.lock();
  auto r = stripes_[stripe].touch(line / kStripes, true);
  if (r.evictedDirty) counts.memoryWriteBytes += kLineBytes;
}

u64 InfinityCache::dirtyBytes() const {
  u64 lines = 0;
  for (const TagCache& stripe : stripes_) lines += stripe.dirtyCount();
  return lines * kLineBytes;
}

void countGlobal(Wave& w, const MemOp& op, u32 bytes, bool write) {
  Worker& worker = *w.wg->worker;
  Launch& launch = *w.wg->launch;
  Counters& c = worker.counters;
  u64 lines[2 * kLanes], lines64 = 0;
  u32 count = 0;
  (write ? c.writtenBytes : c.readBytes) += bytes * __builtin_popcountll(op.mask);
  if (op.inARow) {
    u64 first = op.addr[0], last = first + kLanes * bytes - 1;
    lines64 = last / 64 - first / 64 + 1;
    for (u64 line = first / kLineBytes; line <= last / kLineBytes; ++line) lines[count++] = line;
  } else {
    u64 last64 = ~0ull;
    u8 slots[256] = {};  // index + 1 in `lines`, by a hash of the line
    for (u64 m = op.mask; m; m &= m - 1) {
      u64 a = op.addr[__builtin_ctzll(m)];
      for (u64 line = a / 64; line <= (a + bytes - 1) / 64; ++line) {
        if (line == last64) continue;
        last64 = line;
        ++lines64;
        u64 wide = line / 2;
        u32 slot = (wide ^ wide >> 8) % 256;
        while (slots[slot] && lines[slots[slot] - 1] != wide) slot = (slot + 1) % 256;
        if (slots[slot]) continue;
        lines[count] = wide;
        slots[slot] = ++count;
      }
    }
  }
  c.lines64 += lines64;
  c.lines128 += count;
  if (!launch.options.caches) return;
  XcdCaches& xcd = launch.xcds[w.wg->xcd];
  TagCache& l1 = xcd.l1[w.wg->cu];
  // Level by level, so that the host has the tags of the next one on their way.
  u32 asked = 0;
  for (u32 n = 0; n < count; ++n) {
    if (!write && !op.inst->sc1 && l1.touch(lines[n], false).hit) {
      ++c.cache.l1Hits;
      continue;
    }
    xcd.l2.prefetch(lines[n]);
    lines[asked++] = lines[n];
  }
  struct Beyond {
    u64 line;
    bool write;
  } beyond[4 * kLanes];
  u32 far = 0;
  for (u32 n = 0; n < asked; ++n) {
    auto r = xcd.l2.touch(lines[n], write);
    if (r.evictedDirty) {
      ++c.cache.l2WriteBacks;
      beyond[far++] = {r.evictedDirty - 1, true};
    }
    ++(r.hit ? c.cache.l2Hits : c.cache.l2Misses);
    // A store that covers a part of a line does not fetch it: L2 keeps byte masks.
    if (!r.hit && !write) beyond[far++] = {lines[n], false};
  }
  for (u32 n = 0; n < far; ++n) launch.infinity.prefetch(beyond[n].line);
  for (u32 n = 0; n < far; ++n) {
    if (beyond[n].write) {
      launch.infinity.write(beyond[n].line, c.cache);
    } else {
      launch.infinity.read(beyond[n].line, c.cache);
    }
  }
}

// 32 banks of 4 bytes: lanes are served in groups that move 128 bytes; a group takes as many
// cycles as the bank with the most different words.
void countLds(Wave& w, const MemOp& op, u32 bytes, u32 offset) {
  Counters& c = w.wg->worker->counters;
  u32 words = std::max(1u, bytes / 4), group = 32 / words;
  if (words == 3) group = 8;
  for (int first = 0; first < kLanes; first += group) {
    u64 m = op.mask >> first & (group >= 64 ? ~0ull : (1ull << group) - 1);
    if (!m) continue;
    c.ldsBytes += bytes * __builtin_popcountll(m);
    // Mostly every lane has banks of its own.
    u32 taken = 0;
    bool apart = true;
    for (u64 rest = m; rest; rest &= rest - 1) {
      u32 a = static_cast<u32>(op.addr[first + __builtin_ctzll(rest)]) + offset;
      u32 banks = std::rotl((1u << words) - 1, a / 4 % 32);
      apart = apart && !(taken & banks);
      taken |= banks;
    }
    if (apart) {
      ++c.ldsCycles;
      continue;
    }
    u32 used[32] = {}, wordsOf[32][32];
    u32 worst = 1;
    for (; m; m &= m - 1) {
      u32 a = static_cast<u32>(op.addr[first + __builtin_ctzll(m)]) + offset;
      for (u32 k = 0; k < words; ++k) {
        u32 wordIndex = a / 4 + k, bank = wordIndex % 32;
        bool seen = false;
        for (u32 n = 0; n < used[bank] && !seen; ++n) seen = wordsOf[bank][n] == wordIndex;
        if (!seen && used[bank] < 32) wordsOf[bank][used[bank]++] = wordIndex;
        worst = std::max(worst, used[bank]);
      }
    }
    c.ldsCycles += worst;
    c.ldsConflictCycles += worst - 1;
  }
}

}  // namespace sim
