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
      memory_(std::calloc(u64(sets) * ways + 8, sizeof(u64)), &std::free) {
  if (!memory_) throw Error("no memory for the tags of a cache");
  tags_ = reinterpret_cast<u64*>((reinterpret_cast<u64>(memory_.get()) + 63) / 64 * 64);
}

// Sets are hashed so that power-of-two strides do not pile up in one set.
u64* TagCache::setOf(u64 line) const {
  u64 hash = line ^ line >> 11 ^ line >> 21;
  return tags_ + (hash & (sets_ - 1)) * ways_;  // the sets are a power of two
}

void TagCache::prefetch(u64 line) const {
  for (u32 n = 0; n < ways_; n += 8) __builtin_prefetch(setOf(line) + n, 1);
}

TagCache::Result TagCache::touch(u64 line, bool write) {
  // Eight ways at a time, of which there is a multiple.
  using Ways = u64 __attribute__((ext_vector_type(8)));
  using Flags = bool __attribute__((ext_vector_type(8)));
  Ways* set = reinterpret_cast<Ways*>(setOf(line));
  u64 tag = line + 1, found = tag, evicted = 0;
  u32 at = ways_ - 1;
  bool hit = false;
  for (u32 n = 0; n < ways_ / 8 && !hit; ++n) {
    auto same = __builtin_convertvector((set[n] & ~kDirty) == tag, Flags);
    u8 hits = __builtin_bit_cast(u8, same);
    hit = hits;
    if (hit) at = 8 * n + __builtin_ctz(hits);
  }
  u64 last = set[at / 8][at % 8];
  if (hit) {
    found = last;
  } else {
    evicted = last & kDirty ? last & ~kDirty : 0;
  }
  dirty_ += write && !(found & kDirty);
  dirty_ -= evicted != 0;
  // It goes to the front, those before it one place back.
  u64 in = found | (write ? kDirty : 0);
  const Ways places = {0, 1, 2, 3, 4, 5, 6, 7};
  for (u32 n = 0; n <= at / 8; ++n) {
    Ways old = set[n], moved = __builtin_shufflevector(old, Ways(in), 8, 0, 1, 2, 3, 4, 5, 6);
    set[n] = places + 8 * n <= at ? moved : old;
    in = old[7];
  }
  return {hit, evicted};
}

std::vector<u64> TagCache::dirtyLines() const {
  std::vector<u64> lines;
  for (u64 n = 0; n < u64(sets_) * ways_ && lines.size() < dirty_; ++n) {
    u64 t = tags_[n];
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

void CacheQueue::ask(TagCache* l1, TagCache& l2, InfinityCache& infinity, bool write,
                     const u64* lines, u32 count, CacheCounts& counts) {
  touchInfinity(infinity, counts);
  touchDie(infinity, counts);
  l1_ = l1;
  l2_ = &l2;
  write_ = write;
  count_ = count;
  std::copy_n(lines, count, lines_);
  for (u32 n = 0; n < count; ++n) l2.prefetch(lines[n]);
}

void CacheQueue::finish(InfinityCache& infinity, CacheCounts& counts) {
  touchInfinity(infinity, counts);
  touchDie(infinity, counts);
  touchInfinity(infinity, counts);
}

void CacheQueue::touchDie(const InfinityCache& infinity, CacheCounts& counts) {
  for (u32 n = 0; n < count_; ++n) {
    if (l1_ && l1_->touch(lines_[n], false).hit) {
      ++counts.l1Hits;
      continue;
    }
    auto r = l2_->touch(lines_[n], write_);
    if (r.evictedDirty) {
      ++counts.l2WriteBacks;
      beyond_[far_++] = {r.evictedDirty - 1, true};
    }
    ++(r.hit ? counts.l2Hits : counts.l2Misses);
    // A store that covers a part of a line does not fetch it: L2 keeps byte masks.
    if (!r.hit && !write_) beyond_[far_++] = {lines_[n], false};
  }
  count_ = 0;
  for (u32 n = 0; n < far_; ++n) infinity.prefetch(beyond_[n].line);
}

void CacheQueue::touchInfinity(InfinityCache& infinity, CacheCounts& counts) {
  for (u32 n = 0; n < far_; ++n) {
    if (beyond_[n].write) {
      infinity.write(beyond_[n].line, counts);
    } else {
      infinity.read(beyond_[n].line, counts);
    }
  }
  far_ = 0;
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
  // The data too will be on its way when the access takes effect.
  for (u32 n = 0; n < count; ++n) {
    const char* data = reinterpret_cast<const char*>(lines[n] * kLineBytes);
    __builtin_prefetch(data);
    __builtin_prefetch(data + 64);
  }
  if (!launch.options.caches) return;
  XcdCaches& xcd = launch.xcds[w.wg->xcd];
  TagCache* l1 = write || op.inst->sc1 ? nullptr : &xcd.l1[w.wg->cu];
  worker.cacheQueue.ask(l1, xcd.l2, launch.infinity, write, lines, count, c.cache);
}

// 32 banks of 4 bytes: lanes are served in groups that move 128 bytes; a group takes as many
// cycles as the bank with the most different words.
void countLds(Wave& w, const MemOp& op, u32 bytes, u32 offset) {
  Counters& c = w.wg->worker->counters;
  u32 words = std::max(1u, bytes / 4), group = 32 / words;
  if (words == 3) group = 8;
  alignas(64) u32 banks[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    u32 its = std::rotl((1u << words) - 1, (static_cast<u32>(op.addr[l]) + offset) / 4 % 32);
    banks[l] = op.mask >> l & 1 ? its : 0;
  }
  c.ldsBytes += bytes * __builtin_popcountll(op.mask);
  for (u32 first = 0; first < kLanes; first += group) {
    u64 m = op.mask >> first & ((1ull << group) - 1);
    if (!m) continue;
    u32 taken = 0;
    for (u32 l = 0; l < group; ++l) taken |= banks[first + l];
    // Mostly every lane has banks of its own.
    if (std::popcount(taken) == static_cast<int>(words) * std::popcount(m)) {
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
