// What a memory operation does when it takes effect: bounds, initialised bytes, data, atomics.
#include <algorithm>
#include <mutex>

#include "cycles.h"
#include "memory.h"
#include "operands.h"

namespace sim {
namespace {

// The buffer that lies closest, for the message.
std::string nearest(Launch& launch, u64 address) {
  const Buffer* best = nullptr;
  u64 distance = ~0ull;
  for (const Buffer* b : launch.buffers) {
    u64 d = address < b->begin ? b->begin - address : address - (b->end - 1);
    if (address >= b->begin && address < b->end) d = 0;
    if (d < distance) {
      distance = d;
      best = b;
    }
  }
  if (!best) return "the launch was given no buffer";
  std::string size = std::to_string(best->end - best->begin);
  if (address >= best->begin && address < best->end) {
    return "it crosses the end of " + best->name + " (" + size + " bytes)";
  }
  bool before = address < best->begin;
  return "it lies " + std::to_string(distance) + " bytes " +
         (before ? "before" : "past the end of") + " the nearest buffer, " + best->name + " (" +
         size + " bytes)";
}

// What an access that meets some written bytes misses may be the padding of a structure that is
// copied whole.
const char* unwritten(bool none) {
  return none ? " that nobody wrote"
              : ", some of which nobody wrote: if that is a structure's padding, it does no harm";
}

// Host pointer behind a global access, or null (with a finding) outside of every buffer.
u8* globalPointer(Wave& w, const MemOp& op, int lane, u64 address, u32 bytes, bool write) {
  Worker& worker = *w.wg->worker;
  Buffer* b = findBuffer(worker, address, bytes);
  if (!b) {
    if (address >> 56 == kMissingHeap >> 56) {
      stop(w, *op.inst, "device malloc, free and new are not implemented: pass memory in");
    }
    if (address >> 56 == kMissingQueue >> 56) {
      stop(w, *op.inst, "the kernel looks at its queue, which is not implemented");
    }
    const Options& o = worker.launch->options;
    if (o.bounds) {
      report(w, *op.inst, "out-of-bounds", address, lane,
             std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at " +
                 hex(address) + ": " + nearest(*worker.launch, address));
    }
    // The process's own memory is never touched outside of the buffers, checked or not.
    return nullptr;
  }
  if (b->readOnly && (write || op.inst->mem.access == Access::Atomic)) {
    report(w, *op.inst, "read-only", address, lane,
           "writes " + std::to_string(bytes) + " bytes of " + b->name + " at offset " +
               std::to_string(address - b->begin) + ", which the caller may only read");
    return nullptr;
  }
  if (b->written) {
    u8* flags = b->written + (address - b->begin);
    if (write) {
      std::memset(flags, 1, bytes);
    } else if (worker.launch->options.uninit && std::memchr(flags, 0, bytes)) {
      bool none = !std::memchr(flags, 1, bytes);
      report(w, *op.inst, "uninitialised", address, lane,
             "reads " + std::to_string(bytes) + " bytes of " + b->name + " at offset " +
                 std::to_string(address - b->begin) + unwritten(none),
             none ? Level::Error : Level::Suspicious);
    }
  }
  return reinterpret_cast<u8*>(address);
}

u8* ldsPointer(Wave& w, const MemOp& op, int lane, u64 address, u32 bytes, bool write) {
  Workgroup& wg = *w.wg;
  if (address + bytes > wg.ldsBytes) {
    if (wg.launch->options.bounds) {
      report(w, *op.inst, "out-of-bounds", address, lane,
             std::string(write ? "writes " : "reads ") + std::to_string(bytes) +
                 " bytes of LDS at offset " + std::to_string(address) + ", the allocation has " +
                 std::to_string(wg.ldsBytes));
    }
    return nullptr;
  }
  if (wg.launch->options.uninit) {
    // The bytes lie in one word of flags, or in two.
    u64 all = (1ull << bytes) - 1, at = address % 64;
    u64 masks[2] = {all << at, at + bytes > 64 ? all >> (64 - at) : 0};
    bool written = true, none = true;
    for (u32 n = 0; n < 2 && masks[n]; ++n) {
      u64& word = wg.ldsInit[address / 64 + n];
      if (write) word |= masks[n];
      written = written && (word & masks[n]) == masks[n];
      none = none && !(word & masks[n]);
    }
    if (!written) {
      report(w, *op.inst, "uninitialised", address, lane,
             "reads " + std::to_string(bytes) + " bytes of LDS at offset " +
                 std::to_string(address) + unwritten(none),
             none ? Level::Error : Level::Suspicious);
    }
  }
  return wg.lds.data() + address;
}

// Accesses with an address in vector registers are the program's own; the others may be spilled
// registers, of which lanes that are off were never stored.
u8* scratchPointer(Wave& w, const MemOp& op, int lane, u64 offset, u32 bytes, bool write) {
  const Launch& launch = *w.wg->launch;
  const Kernel& kernel = *launch.kernel;
  auto complain = [&](const char* kind, const std::string& what) {
    report(w, *op.inst, kind, offset, lane,
           std::string(write ? "writes " : "reads ") + std::to_string(bytes) +
               " bytes of scratch at offset " + std::to_string(offset) + what);
  };
  if (offset + bytes > w.scratchBytes) {
    complain("out-of-bounds", ", a lane has " + std::to_string(w.scratchBytes) + " bytes");
    return nullptr;
  }
  bool indexed = op.inst->mem.space == Space::Flat || op.inst->src[0].is(Kind::Vgpr);
  u64 at = op.inst->address;
  if (indexed && launch.options.bounds && at >= kernel.low && at < kernel.high) {
    const FrameVariable* last = nullptr;
    bool inside = false;
    for (const FrameVariable& v : kernel.frame) {
      inside = inside || (offset >= v.offset && offset + bytes <= v.offset + v.bytes);
      if (v.offset <= offset) last = &v;
    }
    // A fixed place is the compiler's own: a variable that the debug information leaves out.
    if (!inside && !kernel.frame.empty() &&
        !w.wg->launch->dependences.fixedAddress(*w.object, *op.inst)) {
      const FrameVariable& near = last ? *last : kernel.frame.front();
      complain("out-of-bounds", std::string(": no variable lies there, the ") +
                                    (last ? "one before, " : "first, ") + near.name + ", has " +
                                    std::to_string(near.bytes) + " bytes at " +
                                    std::to_string(near.offset));
    }
  }
  u64 first = static_cast<u64>(lane) * w.scratchBytes + offset;
  if (w.scratchWritten) {
    u8* flags = w.scratchWritten + first;
    if (write) {
      std::memset(flags, 1, bytes);
    } else if ((indexed || !kernel.spills) && !std::memchr(flags, 1, bytes)) {
      complain("uninitialised", " that the lane never wrote");
    }
  }
  return w.scratch + first;
}

u8* pointer(Wave& w, const MemOp& op, int lane, u64 address, u32 bytes, bool write) {
  switch (op.inst->mem.space) {
    case Space::Lds:
      return ldsPointer(w, op, lane, address, bytes, write);
    case Space::Scratch:
      return scratchPointer(w, op, lane, address, bytes, write);
    case Space::Flat:
      if (address >> 32 == kSharedBase >> 32) {
        return ldsPointer(w, op, lane, address & 0xffffffff, bytes, write);
      }
      if (address >> 32 == kPrivateBase >> 32) {
        return scratchPointer(w, op, lane, address & 0xffffffff, bytes, write);
      }
      [[fallthrough]];
    default:
      return globalPointer(w, op, lane, address, bytes, write);
  }
}

// ---- effects ----------------------------------------------------------------------------------

void loadLane(MemOp& op, int lane, const u8* p, u32 bytes, u32 firstRow) {
  const MemSpec& m = op.inst->mem;
  if (bytes >= 4) {
    for (u32 r = 0; r < bytes / 4; ++r) {
      u32 x;
      std::memcpy(&x, p + 4 * r, 4);
      op.data[firstRow + r][lane] = x;
    }
    return;
  }
  u32 x = bytes == 1 ? *p : *p | p[1] << 8;
  if (m.sext) x = bytes == 1 ? static_cast<i8>(x) : static_cast<i16>(x);
  op.data[firstRow][lane] = x;
}

// Says whether memory is different now.
bool storeLane(const MemOp& op, int lane, u8* p, u32 bytes, u32 firstRow) {
  bool differs = false;
  if (bytes >= 4) {
    for (u32 r = 0; r < bytes / 4; ++r) {
      const u32* x = &op.data[firstRow + r][lane];
      differs |= std::memcmp(p + 4 * r, x, 4) != 0;
      std::memcpy(p + 4 * r, x, 4);
    }
    return differs;
  }
  u32 x = op.data[firstRow][lane];
  if (op.inst->mem.d16hi) x >>= 16;
  differs = std::memcmp(p, &x, bytes) != 0;
  std::memcpy(p, &x, bytes);
  return differs;
}

template <class T>
u64 hostAtomic(u8* p, AtomicFn fn, u64 data, u64 compare, bool shared, bool& changed) {
  T* cell = reinterpret_cast<T*>(p);
  if (!shared) {
    T old;
    std::memcpy(&old, p, sizeof old);
    T now = static_cast<T>(fn(old, data, compare));
    std::memcpy(p, &now, sizeof now);
    changed |= now != old;
    return old;
  }
  T old = __atomic_load_n(cell, __ATOMIC_SEQ_CST), now;
  do {
    now = static_cast<T>(fn(old, data, compare));
  } while (
      !__atomic_compare_exchange_n(cell, &old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  changed |= now != old;
  return old;
}

// `offset` is that of an LDS instruction, `row` the first of data and result.
void performAtomic(Wave& w, MemOp& op, u32 offset, u32 row) {
  const MemSpec& m = op.inst->mem;
  // ds_append and ds_consume are one operation of the wave, all lanes get its result.
  u64 lanes = m.once ? op.mask & -op.mask : op.mask;
  bool changed = false;
  for (u64 mask = lanes; mask; mask &= mask - 1) {
    int lane = __builtin_ctzll(mask);
    if (m.space == Space::Buffer && op.validDwords[lane] * 4 < m.bytes) {
      op.data[0][lane] = op.data[1][lane] = 0;
      continue;
    }
    u64 address = op.addr[lane];
    if (m.space == Space::Lds) address = static_cast<u32>(address + offset);
    if (address % m.bytes) {
      report(w, *op.inst, "misaligned", address, lane, "atomic at an unaligned address");
      continue;
    }
    u8* p = pointer(w, op, lane, address, m.bytes, false);
    if (!p) continue;
    bool wide = m.bytes == 8;
    u64 data = op.data[row][lane], compare = m.pair ? 0 : op.data[wide ? 2 : 1][lane];
    if (wide) {
      data |= static_cast<u64>(op.data[row + 1][lane]) << 32;
      if (!m.pair) compare |= static_cast<u64>(op.data[3][lane]) << 32;
    }
    u64 old = wide ? hostAtomic<u64>(p, m.atomic, data, compare, m.space != Space::Lds, changed)
                   : hostAtomic<u32>(p, m.atomic, data, compare, m.space != Space::Lds, changed);
    op.data[row][lane] = static_cast<u32>(old);
    if (wide) op.data[row + 1][lane] = old >> 32;
  }
  if (changed) noteChange(w, op);
  if (m.once && lanes) std::fill_n(op.data[0], kLanes, op.data[0][__builtin_ctzll(lanes)]);
}

void performScalar(Wave& w, MemOp& op) {
  u32 bytes = 4 * op.scalarDwords;
  w.wg->worker->counters.scalarBytes += bytes;
  const u8* p = bytes ? globalPointer(w, op, 0, op.scalarAddress, bytes, false) : nullptr;
  for (u32 n = 0; n < 16; ++n) op.scalar[n] = 0;
  if (p) std::memcpy(op.scalar, p, bytes);
  if (p && w.wg->launch->options.race) raceScalar(w, op);
}

void checkRaces(Wave& w, MemOp& op, bool write) {
  const MemSpec& m = op.inst->mem;
  if (m.space == Space::Scratch || m.bytes == 0) return;
  bool store = m.access == Access::Store;
  if (m.space == Space::Lds) {
    auto check = [&](u32 offset, u32 row) {
      bool meet = raceLds(w, op, op.mask, m.bytes, offset, row, write);
      if (store && meet) checkCollisions(w, op, op.mask, offset, row);
    };
    check(op.inst->offset * (m.pair ? m.pairStride : 1), 0);
    if (m.pair) check(op.inst->offset1 * m.pairStride, m.dwords);
    return;
  }
  u64 lanes = globalLanes(op);
  bool meetInLds = op.mixedLds && raceLds(w, op, ldsLanes(op), m.bytes, 0, 0, write);
  bool meet = raceGlobal(w, op, lanes, write);
  if (store && meetInLds) checkCollisions(w, op, ldsLanes(op), 0, 0);
  if (!store || !meet) return;
  if (m.space == Space::Buffer) {
    for (int l = 0; l < kLanes; ++l) lanes &= ~(static_cast<u64>(!op.validDwords[l]) << l);
  }
  checkCollisions(w, op, lanes, 0, 0);
}

void performLanes(Wave& w, MemOp& op, bool write, u32 offset, u32 firstRow) {
  const MemSpec& m = op.inst->mem;
  if (performWhole(w, op, write, offset, firstRow)) return;
  bool changed = false;
  for (u64 mask = op.mask; mask; mask &= mask - 1) {
    int lane = __builtin_ctzll(mask);
    u32 bytes = m.bytes;
    if (m.space == Space::Buffer) {
      u32 valid = op.validDwords[lane];
      if (bytes >= 4 ? valid * 4 < bytes : valid == 0) {
        if (!write) {
          for (u32 r = 0; r < m.dwords; ++r) op.data[firstRow + r][lane] = 0;
        }
        bytes = bytes >= 4 ? valid * 4 : 0;
        if (bytes == 0) continue;
      }
    }
    // LDS addresses wrap at 32 bits: compilers fold a negative base into the offset.
    u64 address = m.space == Space::Lds ? static_cast<u32>(op.addr[lane] + offset) : op.addr[lane];
    u8* p = pointer(w, op, lane, address, bytes, write);
    if (!p) {
      if (!write) {
        for (u32 r = 0; r < m.dwords; ++r) op.data[firstRow + r][lane] = 0;
      }
      continue;
    }
    if (write) {
      changed |= storeLane(op, lane, p, bytes, firstRow);
    } else {
      loadLane(op, lane, p, bytes, firstRow);
    }
  }
  if (changed && m.space != Space::Scratch) noteChange(w, op);
}

void performToLds(Wave& w, MemOp& op) {
  performLanes(w, op, false, 0, 0);
  const MemSpec& m = op.inst->mem;
  u32 width = std::max<u32>(4, m.bytes);
  for (int lane = 0; lane < kLanes; ++lane) op.addr[lane] = op.ldsBase + lane * width;
  if (w.wg->launch->options.race) raceLds(w, op, op.mask, width, 0, 0, true);
  for (u64 mask = op.mask; mask; mask &= mask - 1) {
    int lane = __builtin_ctzll(mask);
    u8* p = ldsPointer(w, op, lane, op.addr[lane], width, true);
    for (u32 r = 0; p && r < width / 4; ++r) std::memcpy(p + 4 * r, &op.data[r][lane], 4);
  }
}

// What 16 lanes have read is a matrix of 16 columns, lane after lane; each lane gets a column of
// it.
void transpose(MemOp& op) {
  int width = op.inst->mem.transposed, count = op.inst->mem.bytes * 8 / width;
  u32 rows = op.inst->mem.dwords;
  u32 out[3][kLanes] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int e = 0; e < count; ++e) {
      int linear = 16 * e + lane % 16;
      int from = (lane & ~15) + linear / count, at = linear % count * width;
      u64 x = op.data[at / 32][from];
      if (at % 32 + width > 32) x |= static_cast<u64>(op.data[at / 32 + 1][from]) << 32;
      u64 element = x >> (at % 32) & ((1u << width) - 1);
      int to = e * width;
      out[to / 32][lane] |= static_cast<u32>(element << (to % 32));
      if (to % 32 + width > 32) {
        out[to / 32 + 1][lane] |= static_cast<u32>(element >> (32 - to % 32));
      }
    }
  }
  for (u32 r = 0; r < rows; ++r) std::memcpy(op.data[r], out[r], sizeof out[r]);
}

}  // namespace

void perform(Wave& w, MemOp& op) {
  if (op.performed) return;
  op.performed = true;
  tookEffect(w, op);
  const MemSpec& m = op.inst->mem;
  bool race = w.wg->launch->options.race;
  if (m.access == Access::None) return;  // a cache operation that only counts
  if (m.space == Space::Scalar) {
    performScalar(w, op);
    return;
  }
  bool write = m.access == Access::Store || m.access == Access::Atomic;
  std::unique_lock<std::mutex> noted;
  if (op.flag) {
    Recording& recording = *w.wg->launch->recording;
    noted = std::unique_lock(recording.lock);
    recordFlag(recording, *w.stream, op);
  }
  // For those who look whether they store the same.
  std::atomic<u64>* storing = nullptr;
  if (race && write && w.wg->launch->workers > 1) {
    storing = &w.wg->launch->storing[w.wg->worker->index];
    // Nobody else writes the count: an exchange keeps what follows behind it, as an addition would.
    storing->exchange(storing->load(std::memory_order_relaxed) + 1, std::memory_order_acq_rel);
  }
  if (race) checkRaces(w, op, write);
  // Workers run side by side: who sees a word must have been told all that was released with it. So
  // a release comes before its value, an acquire after it, and an atomic does both at once.
  bool syncs = race && m.bytes && m.space != Space::Scratch;
  std::unique_lock<std::mutex> together(w.wg->launch->atomicLock, std::defer_lock);
  bool handsOn = m.space != Space::Lds && takenElsewhere(w);
  if (syncs && m.access == Access::Atomic && handsOn) together.lock();
  if (syncs && m.access != Access::Load) performSync(w, op);
  switch (m.access) {
    case Access::Atomic:
      performAtomic(w, op, op.inst->offset * (m.pair ? m.pairStride : 1), 0);
      if (m.pair) performAtomic(w, op, op.inst->offset1 * m.pairStride, m.dwords);
      break;
    case Access::LoadToLds:
      performToLds(w, op);
      break;
    default:
      if (m.bytes == 0) break;  // lane exchange, done at issue
      if (m.pair) {
        performLanes(w, op, write, op.inst->offset * m.pairStride, 0);
        performLanes(w, op, write, op.inst->offset1 * m.pairStride, m.dwords);
      } else {
        performLanes(w, op, write, m.space == Space::Lds ? op.inst->offset : 0, 0);
      }
  }
  if (storing) {
    storing->store(storing->load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  if (m.transposed) transpose(op);
  if (syncs && m.access == Access::Load) performSync(w, op);
}

}  // namespace sim
