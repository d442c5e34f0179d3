// Does a launch still move? A wave waits at a barrier, or when it comes back to a poll with the
// same registers and finds the same value: it will do so again until memory changes. When all waves
// that a device can hold wait, nothing will ever change it. Loops that count or look at the clock
// are never taken for that.
#include <algorithm>
#include <chrono>
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

// The wave comes to a place with a value: the same as the last time is waiting.
void note(Wave& w, u64 place, u64 value) {
  for (u32 s : w.s) value = mix(value, s);
  const Kernel& k = *w.wg->launch->kernel;
  u32 arch = k.vgprs - std::min(k.agprs, k.vgprs);
  for (u32 r = 0; r < arch; ++r) value = mix(value, w.row(r)[0] + 31ull * w.row(r)[kLanes - 1]);
  Wave::Poll& seen = w.polls[(place >> 40) % std::size(w.polls)];
  if (seen.place == place && seen.value == value) {
    w.waited = true;
  } else {
    w.moved = true;
  }
  seen = {place, value};
}

}  // namespace

// Remembers what polls found: the same value at the same place again is waiting.
void notePoll(Wave& w, const MemOp& op) {
  if (!polls(op)) return;
  u64 place = op.inst->address, value = w.pc;
  for (u64 m = op.mask; m; m &= m - 1) {
    int l = __builtin_ctzll(m);
    place = mix(place, op.addr[l]);
    for (u32 r = 0; r < op.inst->mem.dwords && r < 4; ++r) value = mix(value, op.data[r][l]);
  }
  note(w, place, value);
}

void noteBarrier(Workgroup& wg) {
  bool polled = std::any_of(wg.waves.begin(), wg.waves.end(),
                            [](const Wave& w) { return w.waited && !w.moved; });
  if (!polled) return;
  for (Wave& w : wg.waves) {
    if (w.state == State::Barrier && !w.waited) note(w, mix(~0ull, w.pc), w.pc);
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
  std::atomic<bool> othersExpected{false};
} running;

constexpr std::chrono::milliseconds kPatience{1000};  // a host thread may be about to launch

}  // namespace

void Together::expectOthers(bool expected) { running.othersExpected = expected; }

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
    if (!running.othersExpected && running.stuck.size() == 1) return true;
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
    if (all && now - running.since > kPatience) return true;
    if (!all && launch.world->open) return false;  // its thread has others to turn
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return false;
}

}  // namespace sim
