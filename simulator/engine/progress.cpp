// Does a launch still move? A wave waits at a barrier, or when it comes back to a poll with the
// same registers and finds the same value: it will do so again until memory changes. When all waves
// that a device can hold wait, nothing will ever change it. Loops that count or look at the clock
// are never taken for that.
//
// A wave all of whose polls find what they had found naps: its turns pass without it until what
// they read changes. So ranks that wait for one another cost little, however many they are.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "memory.h"

namespace sim {
namespace {

u64 mix(u64 h, u64 x) { return (h ^ x) * 0x9e3779b97f4a7c15ull + (h >> 29); }

bool polls(const MemOp& op) {
  const Inst& i = *op.inst;
  if (i.mem.access == Access::Atomic) return i.mem.returns;
  bool scoped = (i.sc0 || i.sc1) && i.mem.space != Space::Lds && i.mem.space != Space::Scalar;
  return i.mem.access == Access::Load && i.mem.bytes && (i.mem.spin || scoped);
}

}  // namespace

namespace {

u16 stampIndex(u64 line) { return (line ^ line >> 12) % World::kStamps; }

// The lines of global memory that an operation touches.
template <class F>
void forLines(const MemOp& op, F f) {
  u64 last = ~0ull;
  for (u64 m = globalLanes(op); m; m &= m - 1) {
    u64 begin = op.addr[__builtin_ctzll(m)], end = begin + op.inst->mem.bytes - 1;
    for (u64 line = begin / 64; line <= end / 64; ++line) {
      if (line != last) f(line);
      last = line;
    }
  }
}

u64 stampOf(const World& world, const Wave::Poll& poll) {
  u64 sum = 0;
  for (u32 n = 0; n < poll.count; ++n) sum += world.stamps[poll.lines[n]];
  return sum;
}

// Where a poll looks, when one can look there again: whole words of the same distance.
void watch(Wave::Poll& poll, const MemOp& op, const World& world) {
  const MemSpec& m = op.inst->mem;
  bool plain = m.space == Space::Global || (m.space == Space::Flat && !op.mixedLds);
  poll.words = poll.count = 0;
  if (!plain || m.access != Access::Load || m.bytes % 4 || !world.several()) return;
  u32 first = __builtin_ctzll(op.mask);
  u64 others = op.mask & (op.mask - 1);
  u64 stride = 0;
  if (others) {
    u32 second = __builtin_ctzll(others);
    stride = (op.addr[second] - op.addr[first]) / (second - first);
  }
  u64 begin = op.addr[first] - first * stride;
  for (u64 lanes = op.mask; lanes; lanes &= lanes - 1) {
    u32 lane = __builtin_ctzll(lanes);
    if (op.addr[lane] != begin + lane * stride) return;
  }
  if (stride > 16) return;  // 18 lines hold the 64 lanes
  poll.begin = begin;
  poll.stride = stride;
  poll.lanes = op.mask;
  poll.words = m.bytes / 4;
  forLines(op, [&](u64 line) { poll.lines[poll.count++] = stampIndex(line); });
}

// Would the wave find something else now?
bool findsNew(const Worker& worker, Wave::Poll& poll, u64 changes) {
  if (!poll.words) return poll.changes != changes;
  u64 stamp = stampOf(*worker.launch->world, poll);
  if (stamp == poll.stamp) return false;
  poll.stamp = stamp;
  u64 found = poll.pc;
  for (u64 lanes = poll.lanes; lanes; lanes &= lanes - 1) {
    u32 words[4];
    const u64 at = poll.begin + __builtin_ctzll(lanes) * poll.stride;
    std::memcpy(words, reinterpret_cast<const void*>(at), 4 * poll.words);
    for (u32 n = 0; n < poll.words; ++n) found = mix(found, words[n]);
  }
  return found != poll.found;
}

// The wave comes to a place with a value: the same as the last time is waiting.
void note(Wave& w, u64 place, u64 found, const MemOp* op) {
  u64 value = found;
  for (u32 s : w.s) value = mix(value, s);
  const Kernel& k = *w.wg->launch->kernel;
  u32 arch = k.vgprs - std::min(k.agprs, k.vgprs);
  for (u32 r = 0; r < arch; ++r) value = mix(value, w.row(r)[0] + 31ull * w.row(r)[kLanes - 1]);
  Wave::Poll* seen = w.polls;  // the last time, or the oldest
  for (Wave::Poll& p : w.polls) {
    if (p.number < seen->number) seen = &p;
    if (p.place != place) continue;
    seen = &p;
    break;
  }
  const Worker& worker = *w.wg->worker;
  u64 changes = worker.changes();
  bool same = seen->place == place && seen->found == found;
  bool asItWas = same && seen->value == value;
  (asItWas ? w.waited : w.moved) = true;
  ++w.notes;
  if (!same) w.newest = w.notes;
  bool exact = asItWas && seen->changes == changes && seen->clockReads == w.clockReads;
  w.nap = !same || seen->number < w.newest ? Wave::kAwake : exact ? Wave::kWaits : Wave::kCounts;
  w.naps = 0;
  // What changed since the load took effect counts as new: the nap begins with a look.
  w.sinceChanges = exact ? changes : ~0ull;
  const World& world = *w.wg->launch->world;
  if (seen->place != place) {
    seen->place = place;
    seen->words = seen->count = 0;
    if (op) watch(*seen, *op, world);
  }
  seen->pc = w.pc;
  seen->value = value;
  seen->found = found;
  seen->changes = changes;
  seen->stamp = ~0ull;
  seen->number = w.notes;
  seen->clockReads = w.clockReads;
}

}  // namespace

// Remembers what polls found: the same value at the same place again is waiting.
void notePoll(Wave& w, const MemOp& op) {
  if (!polls(op)) return;
  u64 place = op.inst->address, found = w.pc;
  for (u64 m = op.mask; m; m &= m - 1) {
    int l = __builtin_ctzll(m);
    place = mix(place, op.addr[l]);
    for (u32 r = 0; r < op.inst->mem.dwords && r < 4; ++r) found = mix(found, op.data[r][l]);
  }
  note(w, place, found, &op);
}

bool naps(Wave& w) {
  if (w.nap == Wave::kAwake) return false;
  const Worker& worker = *w.wg->worker;
  bool wakes = ++w.naps > kNapTurns;
  if (u64 now = worker.changes(); now != w.sinceChanges && !wakes) {
    w.sinceChanges = now;
    w.nap = Wave::kCounts;
    wakes = std::any_of(std::begin(w.polls), std::end(w.polls), [&](Wave::Poll& p) {
      return p.number >= w.newest && findsNew(worker, p, now);
    });
  }
  if (wakes) {
    w.nap = Wave::kAwake;
    return false;
  }
  (w.nap == Wave::kWaits ? w.waited : w.moved) = true;
  w.wg->executed += kNapInstructions;
  return true;
}

void noteChange(const Wave& w, const MemOp& op) {
  w.wg->worker->change();
  World& world = *w.wg->launch->world;
  if (world.several()) forLines(op, [&](u64 line) { ++world.stamps[stampIndex(line)]; });
}

void noteBarrier(Workgroup& wg) {
  bool polled = std::any_of(wg.waves.begin(), wg.waves.end(),
                            [](const Wave& w) { return w.waited && !w.moved; });
  if (!polled) return;
  for (Wave& w : wg.waves) {
    if (w.state == State::Barrier && !w.waited) note(w, mix(~0ull, w.pc), w.pc, nullptr);
  }
}

u64 Launch::allChanges() const {
  u64 sum = 0;
  for (const std::atomic<u64>& c : changes) sum += c.load(std::memory_order_relaxed);
  return sum;
}

Progress::Progress(Launch& launch, u32 worker) : launch_(launch), worker_(worker) {}

Progress::State Progress::look(const std::vector<std::unique_ptr<Workgroup>>& resident) {
  if (++steps_ < std::max<u64>(256, 24 * resident.size())) return kMoves;
  steps_ = 0;
  u64 now = launch_.allChanges();
  bool still = now == last_;
  last_ = now;
  for (const auto& wg : resident) {
    for (Wave& w : wg->waves) {
      if (w.state == sim::State::Running) still = still && w.waited && !w.moved;
      w.waited = w.moved = false;
    }
  }
  if (!still) {
    settled_ = false;
    launch_.stuckAt[worker_] = 0;
    return kMoves;
  }
  if (!settled_) {  // stores that nothing waits for may be what the others need
    for (const auto& wg : resident) performAged(*wg, 0);
    settled_ = true;
    return kMoves;
  }
  return kWaits;
}

bool Progress::stuckForGood() {
  launch_.stuckAt[worker_] = last_ + 1;
  for (u32 n = 0; n < launch_.workers; ++n) {
    u64 at = launch_.stuckAt[n];
    if (at != Launch::kFinished && at != last_ + 1) return false;
  }
  if (launch_.allChanges() != last_) return false;
  return launch_.world->all.empty() ? Together::stuckForGood(launch_)
                                    : launch_.world->allWait(launch_);
}

namespace {

struct Running {
  std::mutex lock;
  std::map<Launch*, bool> stuck;  // of each launch that runs
  u64 changes = 0;
  std::chrono::steady_clock::time_point since;
  std::atomic<int> patience{0};  // seconds: a host thread may be about to launch
} running;

}  // namespace

void Together::expectOthers(int seconds) { running.patience = seconds; }

void Together::enter(Launch& launch) {
  std::lock_guard guard(running.lock);
  running.stuck[&launch] = false;
  running.since = std::chrono::steady_clock::now();
}

void Together::leave(Launch& launch) {
  std::lock_guard guard(running.lock);
  running.stuck.erase(&launch);
  running.since = std::chrono::steady_clock::now();
}

bool Together::stuckForGood(Launch& launch) {
  {
    std::lock_guard guard(running.lock);
    if (!running.patience && running.stuck.size() == 1) return true;
    auto now = std::chrono::steady_clock::now();
    running.stuck[&launch] = true;
    u64 changes = 0;
    bool all = true;
    for (const auto& [other, stuck] : running.stuck) {
      changes += other->allChanges();
      all = all && stuck;
    }
    if (changes != running.changes) {
      running.changes = changes;
      running.since = now;
      for (auto& [other, stuck] : running.stuck) stuck = false;
    }
    if (all && now - running.since > std::chrono::seconds(running.patience)) return true;
    if (!all && launch.world->open) return false;  // its thread has others to turn
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return false;
}

}  // namespace sim
