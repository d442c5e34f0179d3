// A SIMD in its cycle: which waves issue, what that occupies, and where the cycles went.
//
// The compute unit serves its four SIMDs in turn, so each has a turn every fourth cycle and issues
// up to one instruction of each unit, from different waves: those of higher priority (s_setprio)
// first, then the oldest.
#include <algorithm>

#include "cycles.h"

namespace sim {
namespace {

constexpr double kTurn = 4;
constexpr u32 kLgkmMost = 16;        // the counter has four bits
constexpr double kTakenBranch = 16;  // until a wave issues again after a jump

}  // namespace

// Cycles from the last look until `now`: pipes that were at work first, then what the oldest wave
// waited for.
void Device::account(Simd& s, double now) {
  auto until = [&](double end, Spent what) {
    double cycles = std::min(end, now) - s.accounted;
    if (cycles <= 0) return;
    s.spent[static_cast<u32>(what)] += cycles;
    s.accounted += cycles;
    bool wait = what == Spent::WaitMemory || what == Spent::WaitLds || what == Spent::WaitScalar;
    if (wait) awaited_[s.whyFor] += cycles;
  };
  until(s.matrixFree, Spent::Matrix);
  until(s.valuFree, Spent::Valu);
  until(now, s.why);
}

// A wave goes on after it stood for longer than a turn.
void Trace::waited(const TimedWave& w, double until) {
  if (until - w.since > kTurn) waits.push_back({w.life, w.pc(), w.why, w.since, until});
}

void Device::advance(TimedWave& w, double now, double ready) {
  u32 pc = w.pc();
  if (units_[simds_[w.simd].unit].traced) trace_.waited(w, now);
  ++issued_[pc];
  ++instructions_;
  stood_[pc] += now - w.since;
  w.since = w.ready = ready;
  if (++w.at == w.stream->code[w.run].count) {
    ++w.run;
    w.at = 0;
  }
}

// Retires operations until at most `left` are in flight. False when the wave must wait for one.
bool Device::settle(TimedWave& w, Flight& flight, u32 left, Spent why, double now) {
  while (flight.issued - flight.retired > left) {
    u32 entry = flight.retired % Flight::kMost;
    double done = flight.done[entry];
    if (done > now) {
      w.why = why;
      w.waitingFor = flight.inst[entry];
      if (done == Flight::kUnknown) {
        w.state = TimedWave::Unknown;
      } else {
        w.ready = done;
      }
      return false;
    }
    ++flight.retired;
  }
  return true;
}

void Device::barrier(Group& group, double now) {
  if (group.waiting < group.alive || !group.alive) return;
  group.waiting = 0;
  for (u32 id : group.waves) {
    TimedWave& w = waves_[id];
    if (w.state != TimedWave::AtBarrier) continue;
    w.state = TimedWave::Ready;
    advance(w, now, now + p_.barrier_cycles);
    wake(simds_[w.simd], w.ready);
  }
}

// What the instruction buffer does without a unit.
void Device::internal(TimedWave& w, const TimedInst& t, double now) {
  if (t.wait) {
    // Scalar loads and LDS share a counter; a wait is put down to what its oldest operation is.
    u32 oldest = w.lgkm.inst[w.lgkm.retired % Flight::kMost];
    bool scalar = w.lgkm.issued > w.lgkm.retired && code_[oldest].scalar;
    if (!settle(w, w.vm, t.vm, Spent::WaitMemory, now)) return;
    if (!settle(w, w.lgkm, t.lgkm, scalar ? Spent::WaitScalar : Spent::WaitLds, now)) return;
  } else if (t.barrier) {
    w.state = TimedWave::AtBarrier;
    w.why = Spent::Barrier;
    w.since = now;
    Group& group = groups_[w.group];
    ++group.waiting;
    barrier(group, now);
    return;
  } else if (t.end) {
    advance(w, now, now);
    w.state = TimedWave::Ended;
    return;
  }
  if (t.priority >= 0) w.priority = t.priority;
  advance(w, now, now + kTurn + t.sleep);
  w.why = Spent::Sleep;
}

bool Device::available(Simd& s, TimedWave& w, const TimedInst& t, double now) {
  ComputeUnit& unit = units_[s.unit];
  switch (t.unit) {
    case Unit::Valu:
      w.ready = std::max(w.ready, s.valuFree);
      w.why = Spent::Valu;
      return s.valuFree <= now;
    case Unit::Matrix:
      w.ready = std::max(w.ready, s.matrixFree);
      w.why = Spent::Matrix;
      return s.matrixFree <= now;
    case Unit::Lds:
      w.why = Spent::LdsQueue;
      w.ready = std::max(w.ready, unit.ldsFree - p_.lds_queue);
      if (w.ready > now) return false;
      return settle(w, w.lgkm, kLgkmMost - 1, Spent::WaitLds, now);
    case Unit::Vmem:
      if (!settle(w, w.vm, Flight::kMost - 1, Spent::WaitMemory, now)) return false;
      if (unit.queued < p_.address_queue) return true;
      w.why = Spent::MemoryQueue;
      unit.blocked.push_back(s.id);
      w.ready = Flight::kUnknown;  // until the queue has room
      return false;
    case Unit::Scalar:
      return !t.memory || settle(w, w.lgkm, kLgkmMost - 1, Spent::WaitScalar, now);
    default:
      return true;
  }
}

void Device::issueScalar(ComputeUnit& unit, TimedWave& w, const TimedInst& t, double now) {
  const u32* words = &w.stream->memory[w.word];
  u32 count = words[0] & 0xffff;
  w.word += 1 + count;
  ScalarCache& cache = scalarCaches_[unit.id / p_.scalar_sharers];
  bool miss = false;
  for (u32 n = 0; n < count; ++n) {
    for (u32 half = 0; half < 2; ++half) {
      if (!(words[1 + n] >> half & 1)) continue;
      TimedCache::Result r = cache.lines.touch((words[1 + n] >> 2) * 2 + half, false, false);
      if (!r.hit) cache.lines.arrives(r.slot) = Flight::kUnknown;
      miss |= !r.hit;
    }
  }
  Operation op{w.id, 0, w.pc(), words + 1, count, true, false, now, w.age, unit.id, w.life};
  double done = now + p_.scalar_latency;
  bool known = !miss && arrived(cache, op, done);
  op.entry = w.lgkm.add(w.pc(), known ? done : Flight::kUnknown);
  if (miss) {
    send(op, now + p_.scalar_latency / 2);
  } else if (!known) {
    cache.waiting.push_back(op);
  }
}

void Device::issueMemory(ComputeUnit& unit, TimedWave& w, const TimedInst& t, double now) {
  const u32* words = &w.stream->memory[w.word];
  u32 count = words[0] & 0xffff, cycles = words[0] >> 16, place = w.word;
  w.word += 1 + count;
  u32 entry = w.vm.add(w.pc(), Flight::kUnknown);
  unit.addressFree = std::max(now, unit.addressFree) + cycles;
  ++unit.queued;
  Operation op{w.id,      entry, w.pc(), words + 1, count, false,
               t.scratch, now,   w.age,  unit.id,   w.life};
  const std::vector<WaveStream::Flag>&tells = w.stream->tells, &finds = w.stream->finds;
  if (w.tell < tells.size() && tells[w.tell].word == place) op.tells = tells[w.tell++].number;
  op.finds = finds.data() + w.find;
  while (w.find < finds.size() && finds[w.find].word == place) ++w.find, ++op.findCount;
  send(op, unit.addressFree);
}

void Device::issue(Simd& s, TimedWave& w, const TimedInst& t, double now) {
  ComputeUnit& unit = units_[s.unit];
  double ready = now + kTurn;
  switch (t.unit) {
    case Unit::Valu:
      s.valuFree = now + t.cycles;
      break;
    case Unit::Matrix:
      s.matrixFree = now + t.cycles;
      if (unit.traced) trace_.matrix.push_back({w.life, w.pc(), now, now + t.cycles});
      break;
    case Unit::Lds: {
      double start = std::max(now, unit.ldsFree), cycles = 2;
      if (t.memory) cycles = w.stream->memory[w.word++];
      unit.ldsFree = start + cycles;
      if (unit.traced) trace_.lds.push_back({w.life, w.pc(), start, start + cycles});
      w.lgkm.add(w.pc(), start + cycles + p_.lds_latency - 2);
      break;
    }
    case Unit::Vmem:
      issueMemory(unit, w, t, now);
      break;
    case Unit::Scalar:
      if (t.memory) issueScalar(unit, w, t, now);
      break;
    case Unit::Branch: {
      const std::vector<WaveStream::Run>& runs = w.stream->code;
      bool last = w.at + 1 == runs[w.run].count;
      if (last && w.run + 1 < runs.size()) ready = now + kTakenBranch;
      break;
    }
    default:
      break;
  }
  advance(w, now, ready);
  w.why = Spent::Internal;
}

void Device::tick(u32 id, double now) {
  Simd& s = simds_[id];
  account(s, now);
  bool used[kUnits] = {}, any = false, said = false;
  double next = Flight::kUnknown;
  std::vector<u32> ended;
  int highest = 0, lowest = 3;
  for (u32 k : s.waves) {
    highest = std::max(highest, waves_[k].priority);
    lowest = std::min(lowest, waves_[k].priority);
  }
  for (int priority = highest; priority >= lowest; --priority) {
    for (u32 k : s.waves) {
      TimedWave& w = waves_[k];
      if (w.priority != priority || w.state == TimedWave::Ended) continue;
      bool can = w.state == TimedWave::Ready && w.ready <= now;
      bool retry = false;
      if (can) {
        const TimedInst& t = code_[w.pc()];
        bool& unit = used[static_cast<u32>(t.unit)];
        if (t.unit == Unit::Internal) {
          u32 before = w.run + w.at;
          internal(w, t, now);
          if (w.state == TimedWave::Ended) ended.push_back(k);
          unit |= w.run + w.at != before;
        } else if (unit) {
          retry = true;
        } else if (available(s, w, t, now)) {
          issue(s, w, t, now);
          ++s.issued[static_cast<u32>(t.unit)];
          unit = any = true;
        }
      }
      if (w.state == TimedWave::Ended) continue;
      bool waits = w.state != TimedWave::Ready || w.ready > now + kTurn;
      if (w.state == TimedWave::Ready) next = std::min(next, retry ? now + kTurn : w.ready);
      if (waits && !said) {
        said = true;
        s.why = w.why;
        s.whyFor = w.waitingFor;
      }
    }
  }
  if (!said) s.why = s.waves.empty() ? Spent::Empty : Spent::Internal;
  any |= used[static_cast<u32>(Unit::Internal)];
  if (any) {
    constexpr Unit order[] = {Unit::Matrix, Unit::Valu,   Unit::Lds,     Unit::Vmem,
                              Unit::Scalar, Unit::Branch, Unit::Internal};
    for (Unit u : order) {
      if (!used[static_cast<u32>(u)]) continue;
      Spent what = s.matrixFree > now ? Spent::Matrix : s.valuFree > now ? Spent::Valu : Spent(u);
      s.spent[static_cast<u32>(what)] += kTurn;
      break;
    }
    s.accounted = now + kTurn;
    next = std::max(next, now + kTurn);
  }
  if (next < Flight::kUnknown) wake(s, next);
  for (u32 k : ended) leave(k, now);
}

}  // namespace sim
