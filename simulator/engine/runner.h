// One worker of a launch: its workgroups, their initial registers, and the turns of their waves.
#pragma once

#include <algorithm>

#include "cycles.h"
#include "memory.h"
#include "occupancy.h"
#include "operands.h"

namespace sim {

constexpr u32 kPoisonRegister = 0x7fd1deadu;
constexpr u64 kAgeLimit = 20'000;     // instructions of a workgroup until a store is seen anyway
constexpr u64 kStallLimit = 200'000;  // instructions without an end until one more is admitted

struct Dispatch {
  // hsa_kernel_dispatch_packet_t, as far as device code reads it.
  u16 header = 2, setup = 3;
  u16 workgroupSize[3] = {};
  u16 reserved = 0;
  u32 gridSize[3] = {};
  u32 privateBytes = 0, groupBytes = 0;
  u64 kernelObject = 0, kernarg = 0, reserved2 = 0, signal = 0;
};

inline u32 deviceHolds(const Launch& l) {
  const Kernel& k = *l.kernel;
  u32 threads = l.block[0] * l.block[1] * l.block[2];
  const Gpu& gpu = *l.object->gpu;
  return gpu.computeUnits *
         workgroupsPerCu(gpu, {k.vgprs, k.sgprs, k.ldsBytes + l.dynamicLds, threads});
}

class Runner {
 public:
  Runner(Launch& launch, Dispatch& dispatch, u32 index, u32 threads)
      : launch_(launch), dispatch_(dispatch), progress_(launch, index) {
    worker_.launch = &launch;
    worker_.index = index;
    u32 xcds = (kXcds - index + threads - 1) / threads;
    capacity_ = std::max(1u, deviceHolds(launch) * xcds / kXcds);
    worker_.random = launch.options.seed * 0x9e3779b97f4a7c15ull + index + 1;
    worker_.counters.executed.assign(launch.object->code.size(), 0);
    u64 total = u64(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    for (u64 n = 0; n < total; ++n) {
      if (n % kXcds % threads == index) todo_.push_back(n);
    }
    if (launch.options.late) shuffle();
  }

  void run() {
    while (!launch_.failed && turn()) {
    }
  }

  // A workgroup starts or gets a turn. Says whether there is more to do.
  bool turn() {
    if (next_ == todo_.size() && resident_.empty()) {
      launch_.stuckAt[worker_.index] = Launch::kFinished;
      return false;
    }
    u32 wanted = std::max(wanted_, launch_.options.late ? 2u : 1u);
    bool room = next_ < todo_.size() && resident_.size() < capacity_;
    if (room && (resident_.size() < wanted || stalled_ > kStallLimit)) {
      resident_.push_back(create(todo_[next_++]));
      ++launch_.started;
      worker_.change();
      stalled_ = 0;
      return true;
    }
    Workgroup& wg = *resident_[worker_.next(resident_.size())];
    u64 before = wg.executed;
    step(wg);
    if (launch_.hostcalls && launch_.hostcalls->serve()) worker_.change();
    stalled_ += wg.executed - before;
    if (wg.alive == 0) {
      retire(wg);
      worker_.change();
      stalled_ = 0;
      wanted_ = 0;
    }
    if (progress_.look(resident_) == Progress::kWaits) othersMustCome();
    return true;
  }

  Worker& worker() { return worker_; }

 private:
  // All resident workgroups wait: for some that have not started, or for ever.
  void othersMustCome() {
    bool waiting = next_ < todo_.size();
    if (waiting && resident_.size() < capacity_) {
      wanted_ = 2 * resident_.size() + 1;
      return;
    }
    if (!progress_.stuckForGood()) return;
    for (const auto& wg : resident_) {
      for (Wave& w : wg->waves) {
        if (w.state != State::Running) continue;
        const Inst& at = launch_.object->code[w.pc];
        if (launch_.started == launch_.workgroups) {
          stop(w, at,
               launch_.world->parts.size() > 1
                   ? "every wave of every launch waits for something that never comes"
                   : "every wave waits for something that never comes");
        }
        const Gpu& gpu = *launch_.object->gpu;
        u32 holds = deviceHolds(launch_);
        stop(w, at,
             "the launch hangs on hardware: it waits for workgroups that cannot start. " +
                 std::string(gpu.product) + " holds " + std::to_string(holds) + " of its " +
                 std::to_string(launch_.workgroups) + " workgroups (" +
                 std::to_string(holds / gpu.computeUnits) + " a compute unit, by " +
                 std::to_string(launch_.kernel->vgprs) + " vector registers, " +
                 std::to_string(launch_.kernel->ldsBytes + launch_.dynamicLds) +
                 " bytes of LDS and " + std::to_string(launch_.wavesPerGroup) +
                 " waves each), and all of them wait");
      }
    }
  }

  // Workgroups start in a seeded order, but not far from their turn: caches see a real order.
  void shuffle() {
    for (size_t n = 0; n < todo_.size(); ++n) {
      std::swap(todo_[n], todo_[n + worker_.next(std::min<size_t>(32, todo_.size() - n))]);
    }
  }

  // One turn: some slices of waves, then the barrier if all have come to it.
  void step(Workgroup& wg) {
    bool late = launch_.options.late;
    u32 turns = wg.waves.size() * 2;
    for (u32 n = 0; n < turns && wg.alive; ++n) {
      u32 pick = late ? worker_.next(wg.waves.size()) : n % wg.waves.size();
      Wave& w = wg.waves[pick];
      if (w.state == State::Running && !naps(w)) {
        u32 slice = !late ? 512 : worker_.next(4) ? 1 + worker_.next(24) : 1 + worker_.next(300);
        runWave(wg, w, slice);
      }
      if (wg.alive && wg.atBarrier == wg.alive) {
        if (launch_.options.race) countBarrier(wg);
        workgroupBarrier(wg);
        noteBarrier(wg);
        wg.atBarrier = 0;
        for (Wave& other : wg.waves) {
          if (other.state == State::Barrier) other.state = State::Running;
        }
      }
    }
    if (late && wg.executed > agedAt_ + kAgeLimit / 4) {
      performAged(wg, kAgeLimit);
      agedAt_ = wg.executed;
    }
    if (late && wg.atBarrier) performAged(wg, kAgeLimit);
  }

  // All waves of a workgroup should come to as many barriers. The hardware forgets about waves that
  // have ended, so the others go on; but where they had met at different ones, a barrier did not
  // order what it should have.
  void countBarrier(Workgroup& wg) {
    Wave* waiting = nullptr;
    const Inst* at = nullptr;
    for (Wave& w : wg.waves) {
      if (w.state != State::Barrier) continue;
      const Inst* its = &launch_.object->code[w.pc - 1];
      if (at && its != at && !wg.apart[0]) wg.apart[0] = at, wg.apart[1] = its;
      waiting = &w;
      at = its;
    }
    if (wg.alive == wg.waves.size()) return;
    std::string message = std::to_string(wg.waves.size() - wg.alive) + " of the workgroup's " +
                          std::to_string(wg.waves.size()) + " waves have ended without it";
    if (wg.apart[0]) {
      message += ": before, waves that waited in " + launch_.object->source(wg.apart[0]->address) +
                 " met others that waited in " + launch_.object->source(wg.apart[1]->address);
    }
    report(*waiting, *at, "barrier-count", 0, 0, message,
           wg.apart[0] ? Level::Error : Level::Suspicious);
  }

  void runWave(Workgroup& wg, Wave& w, u32 slice) {
    const Inst* code = launch_.object->code.data();
    u64* executed = worker_.counters.executed.data();
    setRounding(w.mode);
    u32 n = 0;
    w.sleep = 0;
    while (n < slice && w.state == State::Running && !w.sleep) {
      const Inst& i = code[w.pc];
      ++executed[w.pc];
      if (w.stream) [[unlikely]] {
        w.stream->executed(w.pc);
      }
      ++w.pc;
      ++n;
      if (w.owed) checkPending(w, i);
      if (w.indexed) [[unlikely]] {
        executeIndexed(w, i);
      } else {
        i.fn(w, i);
      }
    }
    w.executed += n;
    // A polling wave costs its workgroup time too, so that stores of others come of age.
    wg.executed += n + w.sleep * 16;
    setRounding(0);
    if (w.executed > launch_.options.maxInstructions) {
      stop(w, code[w.pc],
           "a wave ran " + std::to_string(w.executed) +
               " instructions: it waits for something that never comes, or the "
               "limit (max_instructions) is too low");
    }
  }

  std::unique_ptr<Workgroup> create(u64 linear) {
    auto wg = std::make_unique<Workgroup>();
    const Kernel& k = *launch_.kernel;
    wg->launch = &launch_;
    wg->worker = &worker_;
    wg->linear = linear;
    wg->who = launch_.world->parts[launch_.part].first + linear;
    wg->id[0] = linear % launch_.grid[0];
    wg->id[1] = linear / launch_.grid[0] % launch_.grid[1];
    wg->id[2] = linear / launch_.grid[0] / launch_.grid[1];
    wg->xcd = linear % kXcds;
    wg->cu = linear / kXcds % kCusPerXcd;
    wg->ldsBytes = k.ldsBytes + launch_.dynamicLds;
    u32 threads = launch_.block[0] * launch_.block[1] * launch_.block[2];
    u32 waves = (threads + kLanes - 1) / kLanes;
    wg->lds.assign(wg->ldsBytes, 0xad);
    wg->ldsInit.assign(wg->ldsBytes / 64 + 1, 0);
    wg->alive = waves;
    wg->registers = takeRegisters(waves);
    u32 scratch = (k.privateBytes + 3) & ~3u;
    // Kernels with a dynamic stack say only what they know; give them room.
    if (k.dynamicStack) scratch += 16384;
    u64 scratchOfAll = u64(scratch) * kLanes * waves;
    bool flagged = launch_.options.uninit;
    if (scratch) wg->scratch = std::make_unique<u8[]>(scratchOfAll * (flagged ? 2 : 1));
    for (u32 n = 0; n < waves; ++n) {
      Wave& w = wg->waves.emplace_back();
      w.v = wg->registers + u64(n) * kRows * kLanes;
      w.wg = wg.get();
      w.object = launch_.object;
      w.id = n;
      w.pc = k.entry;
      w.scratchBytes = scratch;
      w.scratch = wg->scratch.get() + u64(scratch) * kLanes * n;
      if (launch_.recording) w.stream = launch_.recording->start(linear, n, waves);
      if (scratch && flagged) w.scratchWritten = w.scratch + scratchOfAll;
      initRegisters(w, threads);
    }
    if (launch_.options.race) {
      if (shadows_.empty()) shadows_.push_back(std::make_unique<LdsShadow>());
      wg->shadow = std::move(shadows_.back());
      shadows_.pop_back();
      size_t cells = wg->ldsBytes / (4 * LdsShadow::kShared) + 1;
      if (wg->shadow->first.size() < cells) {
        wg->shadow->first.resize(cells);
        wg->shadow->others.resize(cells * (LdsShadow::kShared - 1));
      }
      initKnowledge(*wg);
    }
    return wg;
  }

  void initRegisters(Wave& w, u32 threads) {
    const Kernel& k = *launch_.kernel;
    for (u32& s : w.s) s = kPoisonRegister;
    u32 arch = k.vgprs - std::min(k.agprs, k.vgprs);
    std::fill_n(w.v, u64(std::min(256u, arch + 8)) * kLanes, kPoisonRegister);
    std::fill_n(w.row(kAccBase), u64(std::min(256u, k.agprs + 4)) * kLanes, kPoisonRegister);
    w.mode = k.rsrc1 >> 12 & 0xff;
    w.mode |= (k.rsrc1 >> 21 & 1) << 8 | (k.rsrc1 >> 23 & 1) << 9 | (k.rsrc1 >> 26 & 1) << 23;
    u32 at = 0;
    auto user = [&](u64 value, u32 dwords) {
      for (u32 d = 0; d < dwords; ++d) w.s[at++] = static_cast<u32>(value >> (32 * d));
    };
    u64 kernarg = reinterpret_cast<u64>(launch_.kernarg.data());
    u16 p = k.properties;
    if (p & 1) at += 4;  // private segment buffer: unused with flat scratch
    if (p & 2) user(reinterpret_cast<u64>(&dispatch_), 2);
    if (p & 4) user(0, 2);
    if (p & 8) user(kernarg, 2);
    if (p & 16) user(0, 2);
    if (p & 32) user(0, 2);
    if (p & 64) user(w.scratchBytes, 1);
    u32 length = k.preload & 127, offset = k.preload >> 7;
    for (u32 d = 0; d < length; ++d) {
      u32 x = 0;
      u64 from = 4ull * (offset + d);
      if (from + 4 <= launch_.kernarg.size()) {
        std::memcpy(&x, launch_.kernarg.data() + from, 4);
      }
      w.s[at++] = x;
    }
    for (int d = 0; d < 3; ++d) {
      if (k.rsrc2 >> (7 + d) & 1) w.s[at++] = w.wg->id[d];
    }
    if (k.rsrc2 >> 10 & 1) w.s[at++] = 0;
    w.pair(kFlatScratch) = kPrivateBase;
    w.s[kM0] = 0;
    u32 last = threads - w.id * kLanes;
    w.exec() = last >= kLanes ? ~0ull : (1ull << last) - 1;
    const u32* b = launch_.block;
    for (u32 l = 0; l < kLanes; ++l) {
      u32 t = w.id * kLanes + l;
      w.v[l] = t % b[0] | (t / b[0] % b[1]) << 10 | (t / b[0] / b[1]) << 20;
    }
  }

  u32* takeRegisters(u32 waves) {
    if (registers_.empty()) {
      u64 bytes = u64(waves) * kRows * kLanes * 4;
      void* p = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
      if (!p) throw Error("no memory for the registers of a workgroup");
      owned_.emplace_back(static_cast<u32*>(p), &std::free);
      registers_.push_back(static_cast<u32*>(p));
    }
    u32* r = registers_.back();
    registers_.pop_back();
    return r;
  }

  void retire(Workgroup& wg) {
    if (launch_.options.race) endKnowledge(wg);
    registers_.push_back(wg.registers);
    for (Wave& w : wg.waves) {
      worker_.clockBase = std::max(worker_.clockBase, w.clock + 1);
    }
    if (wg.shadow) shadows_.push_back(std::move(wg.shadow));
    agedAt_ = 0;
    std::erase_if(resident_, [&](const auto& p) { return p.get() == &wg; });
  }

  Launch& launch_;
  Dispatch& dispatch_;
  Worker worker_;
  std::vector<u64> todo_;
  std::vector<std::unique_ptr<Workgroup>> resident_;
  std::vector<u32*> registers_;
  std::vector<std::unique_ptr<u32, decltype(&std::free)>> owned_;
  std::vector<std::unique_ptr<LdsShadow>> shadows_;
  u64 agedAt_ = 0, stalled_ = 0;  // stalled: instructions since a workgroup began or ended
  Progress progress_;
  size_t next_ = 0;                // of todo_
  u32 capacity_ = 1, wanted_ = 0;  // workgroups that fit its share of the device; that are needed
};

}  // namespace sim
