// The device: workgroups are dealt to compute units as there is room, and events happen in order.
#include <algorithm>
#include <cmath>

#include "cycles.h"

namespace sim {

Device::Device(const Launch& launch, const SimCycles& p)
    : launch_(launch), p_(p), code_(timedCode(*launch.object, p)), memory_(p, p.sampled) {
  const Kernel& k = *launch.kernel;
  u32 granule = p.register_granule;
  registersPerWave_ = std::max(1u, (k.vgprs + granule - 1) / granule) * granule;
  ldsPerGroup_ = k.ldsBytes + launch.dynamicLds;
  wavesPerGroup_ = launch.wavesPerGroup;
  scratchLines_ = (k.privateBytes + 3) / 4 * 2;
  units_.resize(p.sampled * p.units);
  simds_.resize(units_.size() * p.simds);
  for (u32 n = 0; n < units_.size(); ++n) {
    ComputeUnit& unit = units_[n];
    unit.id = n;
    unit.die = n / p.units;
    unit.traced = n < p.traced;
    unit.l1.configure(p.l1_size, p.l1_ways, p.l1_line);
    unit.outstanding.assign(p.l1_outstanding, 0);
    for (u32 i = 0; i < p.simds; ++i) {
      Simd& s = simds_[n * p.simds + i];
      s.id = n * p.simds + i;
      s.unit = n;
    }
  }
  scalarCaches_.resize((units_.size() + p.scalar_sharers - 1) / p.scalar_sharers);
  for (ScalarCache& cache : scalarCaches_) cache.lines.configure(p.scalar_size, 4, 64);
  for (u32 die = 0; die < p.sampled; ++die) nextGroup_.push_back(die);
  dispatchFree_.assign(p.sampled, 0);
  nextUnit_.assign(p.sampled, 0);
  issued_.assign(code_.size(), 0);
  awaited_.assign(code_.size(), 0);
  stood_.assign(code_.size(), 0);
}

void Device::wake(Simd& s, double time) {
  // The SIMD's own cycles are every fourth.
  u32 phase = s.id % p_.simds;
  double turn = std::ceil((time - phase) / 4) * 4 + phase;
  if (turn >= s.next) return;
  s.next = turn;
  events_.push({turn, kSimdKey | s.id});
}

// Places one workgroup on a unit if its waves' registers and slots and its LDS fit.
bool Device::place(u32 number, u64 group, double now) {
  ComputeUnit& unit = units_[number];
  if (unit.lds + ldsPerGroup_ > p_.lds_bytes) return false;
  u32 free[8];
  u32 fits = 0;
  Simd* simds = &simds_[number * p_.simds];
  for (u32 i = 0; i < p_.simds; ++i) {
    u32 registers = (p_.registers - simds[i].registers) / registersPerWave_;
    free[i] = std::min<u32>(p_.waves - simds[i].waves.size(), registers);
    fits += free[i];
  }
  if (fits < wavesPerGroup_) return false;
  Group& g = groups_[group];
  g.unit = number;
  g.alive = wavesPerGroup_;
  unit.lds += ldsPerGroup_;
  const std::vector<WaveStream>& streams = launch_.recording->groups[group];
  for (u32 n = 0; n < wavesPerGroup_; ++n) {
    u32 best = unit.nextSimd;
    for (u32 i = 1; i < p_.simds; ++i) {
      u32 other = (unit.nextSimd + i) % p_.simds;
      if (free[other] > free[best]) best = other;
    }
    unit.nextSimd = (best + 1) % p_.simds;
    --free[best];
    if (freeWaves_.empty()) {
      freeWaves_.push_back(waves_.size());
      waves_.emplace_back();
    }
    u32 id = freeWaves_.back();
    freeWaves_.pop_back();
    TimedWave& w = waves_[id];
    w = TimedWave();
    w.stream = &streams[n];
    w.id = id;
    w.group = group;
    w.age = ages_++;
    w.simd = simds[best].id;
    w.state = TimedWave::Ready;
    w.ready = w.since = w.born = now + n * p_.dispatch_cycles;
    g.waves.push_back(id);
    Simd& s = simds[best];
    w.slot = __builtin_ctz(~s.slots);
    s.slots |= 1u << w.slot;
    if (unit.traced) {
      w.life = trace_.waves.size();
      trace_.waves.push_back({number, best, w.slot, n, group, w.ready, 0});
    }
    if (s.waves.empty()) account(s, std::max(now, s.accounted));
    s.waves.push_back(id);
    s.registers += registersPerWave_;
    wake(s, w.ready);
  }
  return true;
}

// Places the die's next workgroup on this unit.
bool Device::admit(u32 unit, double now) {
  u32 die = units_[unit].die;
  u64& group = nextGroup_[die];
  if (group >= launch_.workgroups) return false;
  double start = std::max(now, dispatchFree_[die]);
  if (!place(unit, group, start)) return false;
  dispatchFree_[die] = start + p_.dispatch_cycles * wavesPerGroup_;
  group += p_.dies;
  return true;
}

// Fills the units of a die in turn, at the start.
void Device::dispatch(u32 die, double now) {
  u32 failures = 0;
  while (failures < p_.units) {
    u32 unit = die * p_.units + nextUnit_[die];
    nextUnit_[die] = (nextUnit_[die] + 1) % p_.units;
    failures = admit(unit, now) ? 0 : failures + 1;
  }
}

void Device::leave(u32 id, double now) {
  TimedWave& w = waves_[id];
  Simd& s = simds_[w.simd];
  s.waves.erase(std::find(s.waves.begin(), s.waves.end(), id));
  s.registers -= registersPerWave_;
  s.slots &= ~(1u << w.slot);
  if (s.waves.empty()) s.why = Spent::Empty;
  Group& g = groups_[w.group];
  ComputeUnit& unit = units_[g.unit];
  if (unit.traced) trace_.waves[w.life].end = now;
  waveCycles_ += now - w.born;
  end_ = std::max(end_, now);
  ++ended_;
  --g.alive;
  barrier(g, now);
  if (g.alive) return;
  for (u32 k : g.waves) freeWaves_.push_back(k);
  u32 number = g.unit;
  unit.lds -= ldsPerGroup_;
  groups_.erase(w.group);
  while (admit(number, now)) {
  }
}

void Device::finish(const Operation& op, double done) {
  TimedWave& w = waves_[op.wave];
  if (w.age != op.age) return;
  (op.scalar ? w.lgkm : w.vm).done[op.entry] = done;
  if (w.state != TimedWave::Unknown) return;
  w.state = TimedWave::Ready;
  w.ready = done;
  wake(simds_[w.simd], done);
}

// When the last of what an operation finds was told, and had come so far; kUnknown: not yet.
double Device::found(const Operation& op) const {
  double last = 0;
  for (u32 n = 0; n < op.findCount; ++n) {
    auto told = toldAt_.find(op.finds[n].number);
    if (told == toldAt_.end()) return Flight::kUnknown;
    last = std::max(last, told->second + (code_[op.inst].atomic ? 0 : p_.flag_cycles));
  }
  return last;
}

void Device::finishWithFlags(const Operation& op, double ready) {
  double last = found(op);
  if (last == Flight::kUnknown) {
    listeners_.push_back({op, ready});
    return;
  }
  finish(op, std::max(ready, last));
  if (!op.tells) return;
  toldAt_[op.tells] = std::max(ready, last);
  std::vector<Listener> heard;
  std::erase_if(listeners_, [&](const Listener& l) {
    if (found(l.op) == Flight::kUnknown) return false;
    heard.push_back(l);
    return true;
  });
  for (const Listener& l : heard) finishWithFlags(l.op, l.ready);
}

void Device::send(const Operation& op, double time) {
  if (freeOperations_.empty()) {
    freeOperations_.push_back(operations_.size());
    operations_.emplace_back();
  }
  u32 place = freeOperations_.back();
  freeOperations_.pop_back();
  operations_[place] = op;
  events_.push({time, operationCount_++ << kPoolBits | place});
}

// Whether all lines of a scalar load are in the cache or known to come; when.
bool Device::arrived(ScalarCache& cache, const Operation& op, double& done) {
  for (u32 n = 0; n < op.count; ++n) {
    for (u32 half = 0; half < 2; ++half) {
      if (!(op.words[n] >> half & 1)) continue;
      u32 line = (op.words[n] >> 2) * 2 + half;
      double when = cache.lines.arrives(cache.lines.touch(line, false, false).slot);
      if (when == Flight::kUnknown) return false;
      done = std::max(done, when);
    }
  }
  return true;
}

// A scalar load missed its cache.
void Device::operateScalar(const Operation& op, double now) {
  u32 die = units_[op.unit].die;
  double done = now;
  for (u32 n = 0; n < op.count; ++n) {
    u32 line = memory_.place(op.words[n] >> 2), halves = op.words[n] & 3;
    double at = memory_.access(die, line, halves, MemorySystem::Access::Load, false,
                               now + p_.l2_latency / 2);
    done = std::max(done, at + p_.l2_latency / 2);
  }
  ScalarCache& cache = scalarCaches_[op.unit / p_.scalar_sharers];
  for (u32 n = 0; n < op.count; ++n) {
    for (u32 half = 0; half < 2; ++half) {
      if (!(op.words[n] >> half & 1)) continue;
      u32 line = (op.words[n] >> 2) * 2 + half;
      cache.lines.arrives(cache.lines.touch(line, false, false).slot) = done;
    }
  }
  finish(op, done);
  std::erase_if(cache.waiting, [&](const Operation& other) {
    double when = now;
    if (!arrived(cache, other, when)) return false;
    finish(other, when);
    return true;
  });
}

// A memory operation has come out of the address unit.
void Device::operate(u64 number, double now) {
  u32 place = number & ((1u << kPoolBits) - 1);
  Operation op = operations_[place];
  const TimedInst& t = code_[op.inst];
  ComputeUnit& unit = units_[op.unit];
  double toL2 = p_.l2_latency / 2, back = p_.l2_latency - toL2;
  if (op.scalar) {
    freeOperations_.push_back(place);
    operateScalar(op, now);
    return;
  }
  // The misses that L1 may have outstanding are limited; who comes too early waits, in order.
  u32 limit = unit.outstanding.size();
  double room = unit.outstanding[(unit.requests + std::min(op.count, limit) - 1) % limit];
  double start = std::max({now, unit.requestFree, op.count ? room : 0.0});
  if (start > now) {
    unit.requestFree = start;
    events_.push({start, number});
    return;
  }
  auto kind = t.store    ? MemorySystem::Access::Store
              : t.atomic ? MemorySystem::Access::Atomic
                         : MemorySystem::Access::Load;
  double ready = now + p_.l1_latency;
  u32 halves = 0, slots[2], slotCount = 0;
  for (u32 n = 0; n < op.count; ++n) {
    u32 line = op.words[n] >> 2, touched = op.words[n] & 3;
    if (op.scratch) line = (line + op.wave * scratchLines_) | 3u << 28;
    line = memory_.place(line);
    halves += __builtin_popcount(touched);
    if (t.load && !t.pastL1) {
      // An L1 line is 128 bytes, or one half of them.
      bool wide = p_.l1_line == 128;
      u32 missed = 0;
      slotCount = 0;
      for (u32 half = 0; half < (wide ? 1 : 2); ++half) {
        if (!wide && !(touched >> half & 1)) continue;
        ++memory_.counts().l1Requests;
        // A line that is still on its way is asked for again: the published hit rates of L2 on an
        // MI250X say so.
        auto r = unit.l1.touch(wide ? line : line * 2 + half, false, t.streaming);
        if (r.hit && unit.l1.arrives(r.slot) <= now) {
          ++memory_.counts().l1Hits;
        } else {
          missed |= wide ? 3 : 1 << half;
          slots[slotCount++] = r.slot;
        }
      }
      if (!missed) continue;
      touched = missed;
    }
    double at = memory_.access(unit.die, line, touched, kind, t.streaming, now + toL2) + back;
    if (kind != MemorySystem::Access::Store) unit.outstanding[unit.requests++ % limit] = at;
    for (u32 k = 0; k < slotCount; ++k) unit.l1.arrives(slots[k]) = at;
    ready = std::max(ready, at);
  }
  if (t.load) {
    // Loads return to the registers in order, through one path.
    unit.returnFree =
        std::max(unit.returnFree, ready - halves * 64 / p_.l1_bytes) + halves * 64 / p_.l1_bytes;
    ready = unit.returnFree;
    loadLatency_ += ready - op.issued;
    ++loads_;
  } else {
    storesDone_ = std::max(storesDone_, ready);
  }
  if (unit.traced) trace_.memory.push_back({op.life, op.inst, op.issued, ready});
  finishWithFlags(op, ready);
  freeOperations_.push_back(place);
  --unit.queued;
  for (u32 s : unit.blocked) {
    for (u32 k : simds_[s].waves) {
      TimedWave& other = waves_[k];
      if (other.state == TimedWave::Ready && other.ready == Flight::kUnknown) other.ready = now;
    }
    wake(simds_[s], now);
  }
  unit.blocked.clear();
}

void Device::run() {
  if (p_.warm) {
    for (const auto& group : launch_.recording->groups) {
      for (const WaveStream& stream : group) {
        u32 word = 0;
        for (const WaveStream::Run& run : stream.code) {
          for (u32 n = run.first; n < run.first + run.count; ++n) {
            if (!code_[n].memory) continue;
            if (code_[n].unit == Unit::Lds) {
              ++word;
              continue;
            }
            u32 count = stream.memory[word] & 0xffff;
            for (u32 k = 1; k <= count && !code_[n].scratch; ++k) {
              memory_.warm(memory_.place(stream.memory[word + k] >> 2));
            }
            word += 1 + count;
          }
        }
      }
    }
  }
  for (u32 die = 0; die < p_.sampled; ++die) dispatch(die, 0);
  while (!events_.empty()) {
    Event e = events_.top();
    events_.pop();
    if (e.key & kSimdKey) {
      Simd& s = simds_[static_cast<u32>(e.key)];
      if (e.time != s.next) continue;
      s.next = Flight::kUnknown;
      tick(s.id, e.time);
    } else {
      operate(e.key, e.time);
    }
  }
  end_ = std::max(end_, storesDone_);
  for (Simd& s : simds_) account(s, end_);
  double drained = memory_.drain(end_);
  drained_ = drained - end_;
  end_ = drained;
}

}  // namespace sim
