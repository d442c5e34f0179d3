// L2, Infinity Cache and memory: a request finds its level and waits in that level's queues.
#include <algorithm>

#include "cycles.h"

namespace sim {

void TimedCache::configure(u64 bytes, u32 ways, u32 lineBytes) {
  ways_ = ways;
  sets_ = bytes / lineBytes / ways;
  tag_.assign(u64(sets_) * ways, 0);
  used_.assign(tag_.size(), 0);
  dirty_.assign(tag_.size(), 0);
  arrives_.assign(tag_.size(), 0);
}

TimedCache::Result TimedCache::touch(u32 line, bool write, bool streaming) {
  // The set is as good as random, as the published fetch sizes on an MI250X say: reuse that just
  // fits the cache hits by half, where evenly filled sets would keep it all.
  u32 hash = line * 0x9e3779b1u;
  hash = (hash ^ hash >> 15) * 0x85ebca77u;
  hash ^= hash >> 13;
  u32 base = hash % sets_ * ways_, tag = line + 1;
  const u32* tags = &tag_[base];
  u32 way = ways_;
  for (u32 n = 0; n < ways_; ++n) way = tags[n] == tag ? n : way;
  Result r{way < ways_, 0, 0};
  if (!r.hit) {
    const u32* used = &used_[base];
    way = 0;
    for (u32 n = 1; n < ways_; ++n) way = used[n] < used[way] ? n : way;
    if (dirty_[base + way]) r.evictedDirty = tags[way];
    dirty_[base + way] = 0;
    tag_[base + way] = tag;
    arrives_[base + way] = 0;
  }
  r.slot = base + way;
  dirty_[r.slot] |= write;
  used_[r.slot] = streaming ? 1 : ++stamp_;
  return r;
}

u64 TimedCache::dirtyLines() const { return std::count(dirty_.begin(), dirty_.end(), 1); }

MemorySystem::MemorySystem(const SimCycles& p, u32 dies) : p_(p), dies_(dies) {
  for (Die& d : dies_) {
    d.l2.configure(p.l2_size, p.l2_ways, kLineBytes);
    d.channels.assign(p.l2_channels, 0);
  }
  if (p.infinity_size) {
    u64 share = u64(p.infinity_size) * 1024 * dies / p.dies;
    infinity_.configure(share, p.infinity_ways, kLineBytes);
  }
  memory_.assign(p.memory_channels, 0);
  // A sample of the dies gets its share of the memory's rate.
  double rate = p.memory_bytes / p.memory_channels * dies / p.dies;
  memoryCycles_ = kLineBytes / rate;
  fabricCycles_ = kLineBytes / p.fabric_bytes;
  writeCycles_ = kLineBytes / p.write_bytes;
}

double MemorySystem::channel(u32 line, double now, double cycles) {
  // Channels take turns by 256 bytes, hashed as above.
  u32 block = line >> 1;
  u32 hash = block ^ block >> 7 ^ block >> 13 ^ block >> 19;
  double& free = memory_[hash % memory_.size()];
  double start = std::max(now, free);
  free = start + cycles;
  counts_.busy += cycles;
  return start;
}

double MemorySystem::fetch(u32 die, u32 line, double now) {
  Die& d = dies_[die];
  double start = std::max(now, d.fabric);
  d.fabric = start + fabricCycles_;
  counts_.fetchBytes += kLineBytes;
  if (infinity_.present()) {
    ++counts_.infinityRequests;
    TimedCache::Result r = infinity_.touch(line, false, false);
    if (r.evictedDirty) {
      counts_.memoryWriteBytes += kLineBytes;
      channel(r.evictedDirty - 1, start, memoryCycles_);
    }
    double fabric = p_.infinity_latency - p_.l2_latency;
    if (r.hit) {
      ++counts_.infinityHits;
      return std::max(start + fabric, infinity_.arrives(r.slot));
    }
    double begin = channel(line, start, memoryCycles_);
    counts_.memoryReadBytes += kLineBytes;
    return infinity_.arrives(r.slot) = begin + memoryCycles_ + p_.memory_latency - p_.l2_latency;
  }
  counts_.memoryReadBytes += kLineBytes;
  double begin = channel(line, start, memoryCycles_);
  return begin + memoryCycles_ + p_.memory_latency - p_.l2_latency;
}

void MemorySystem::writeBack(u32 die, u32 line, double now) {
  Die& d = dies_[die];
  double start = std::max(now, d.fabricWrite);
  d.fabricWrite = start + writeCycles_;
  ++d.written;
  counts_.writeBytes += kLineBytes;
  if (infinity_.present()) {
    TimedCache::Result r = infinity_.touch(line, true, false);
    if (!r.evictedDirty) return;
    line = r.evictedDirty - 1;
  }
  counts_.memoryWriteBytes += kLineBytes;
  channel(line, start, memoryCycles_);
}

double MemorySystem::access(u32 die, u32 line, u32 halves, Access kind, bool streaming,
                            double now) {
  Die& d = dies_[die];
  u32 block = line >> 1;
  double& free = d.channels[(block ^ block >> 5 ^ block >> 11) % d.channels.size()];
  double start = std::max(now, free);
  u32 bytes = halves == 3 ? 128 : 64;
  (kind == Access::Load ? counts_.l2ReadBytes : counts_.l2WriteBytes) += bytes;
  free = start + std::max(1.0, bytes * (kind == Access::Load ? 1 : 2) / p_.l2_bytes);
  ++counts_.l2Requests;
  TimedCache::Result r = d.l2.touch(line, kind != Access::Load, streaming);
  counts_.l2Hits += r.hit;
  if (kind != Access::Load && d.firstWrite < 0) d.firstWrite = start;
  if (r.evictedDirty) writeBack(die, r.evictedDirty - 1, start);
  if (r.hit) return std::max(start, d.l2.arrives(r.slot));
  // A store that covers a part of a line does not fetch it: L2 keeps byte masks.
  if (kind == Access::Store) return start;
  double back = fetch(die, line, start);
  d.l2.arrives(r.slot) = back;
  return back;
}

// L2 writes back whenever the way out is free, so what is left at the end is what all the writes
// need more than the time since the first.
double MemorySystem::drain(double now) {
  double end = now;
  for (Die& d : dies_) {
    u64 lines = d.l2.dirtyLines();
    if (d.firstWrite < 0) continue;
    counts_.writeBytes += lines * kLineBytes;
    end = std::max(end, d.firstWrite + (d.written + lines) * writeCycles_);
    if (infinity_.present()) continue;
    counts_.memoryWriteBytes += lines * kLineBytes;
    counts_.busy += lines * memoryCycles_;
  }
  return end;
}

u64 MemorySystem::dirtyBytes() const {
  if (!infinity_.present()) return 0;  // drained
  u64 lines = infinity_.dirtyLines();
  for (const Die& d : dies_) lines += d.l2.dirtyLines();
  return lines * kLineBytes;
}

double MemorySystem::settled() const {
  u64 bytes = counts_.memoryReadBytes + counts_.memoryWriteBytes + dirtyBytes();
  return bytes / kLineBytes * memoryCycles_ / memory_.size();
}

}  // namespace sim
