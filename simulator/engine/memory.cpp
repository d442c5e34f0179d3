// Memory instructions: addresses at issue, effects when the counter that guards them is waited for.
#include "memory.h"

#include <algorithm>

#include "operands.h"

namespace sim {
namespace {

constexpr u32 kPoison = 0x7fd1deadu;  // a NaN, so that arithmetic on it shows

bool starts(const std::string& s, const char* p) { return s.rfind(p, 0) == 0; }

}  // namespace

// ---- buffers ----------------------------------------------------------------------------------

Buffer* findBuffer(Worker& worker, u64 address, u64 bytes) {
  std::vector<Buffer*>& list = worker.launch->buffers;
  if (list.empty()) return nullptr;
  Buffer* b = list[worker.lastBuffer];
  if (address >= b->begin && address + bytes <= b->end) return b;
  auto it = std::upper_bound(list.begin(), list.end(), address,
                             [](u64 a, const Buffer* x) { return a < x->begin; });
  if (it == list.begin()) return nullptr;
  --it;
  if (address + bytes > (*it)->end) return nullptr;
  worker.lastBuffer = it - list.begin();
  return *it;
}

MemOp* Worker::takeOp() {
  if (freeOps.empty()) {
    allOps.emplace_back();
    freeOps.push_back(&allOps.back());
  }
  MemOp* op = freeOps.back();
  freeOps.pop_back();
  op->performed = op->mixedLds = false;
  op->publish = op->publishForeign = op->acquired = op->acquiredForeign = nullptr;
  return op;
}

namespace {

std::string hex(u64 x) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

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

// Host pointer behind a global access, or null (with a finding) outside of every buffer.
u8* globalPointer(Wave& w, const MemOp& op, int lane, u64 address, u32 bytes, bool write) {
  Worker& worker = *w.wg->worker;
  Buffer* b = findBuffer(worker, address, bytes);
  if (!b) {
    const Options& o = worker.launch->options;
    if (o.bounds) {
      report(w, *op.inst, "out-of-bounds", address, lane,
             std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at " +
                 hex(address) + ": " + nearest(*worker.launch, address));
    }
    // The process's own memory is never touched outside of the buffers, checked or not.
    return nullptr;
  }
  if (b->written) {
    u8* flags = b->written + (address - b->begin);
    if (write) {
      std::memset(flags, 1, bytes);
    } else if (worker.launch->options.uninit && std::memchr(flags, 0, bytes)) {
      report(w, *op.inst, "uninitialised", address, lane,
             "reads " + std::to_string(bytes) + " bytes of " + b->name + " at offset " +
                 std::to_string(address - b->begin) + " that nobody wrote");
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
    for (u64 a = address; a < address + bytes; ++a) {
      u64& word = wg.ldsInit[a / 64];
      u64 bit = 1ull << (a % 64);
      if (write) {
        word |= bit;
      } else if (!(word & bit)) {
        report(w, *op.inst, "uninitialised", address, lane,
               "reads " + std::to_string(bytes) + " bytes of LDS at offset " +
                   std::to_string(address) + " that nobody wrote");
        break;
      }
    }
  }
  return wg.lds.data() + address;
}

u8* scratchPointer(Wave& w, const MemOp& op, int lane, u64 offset, u32 bytes) {
  if (offset + bytes > w.scratchBytes) {
    report(w, *op.inst, "out-of-bounds", offset, lane,
           "touches scratch at offset " + std::to_string(offset) + ", a lane has " +
               std::to_string(w.scratchBytes) + " bytes");
    return nullptr;
  }
  return w.scratch + static_cast<u64>(lane) * w.scratchBytes + offset;
}

u8* pointer(Wave& w, const MemOp& op, int lane, u64 address, u32 bytes, bool write) {
  switch (op.inst->mem.space) {
    case Space::Lds:
      return ldsPointer(w, op, lane, address, bytes, write);
    case Space::Scratch:
      return scratchPointer(w, op, lane, address, bytes);
    case Space::Flat:
      if (address >> 32 == kSharedBase >> 32) {
        return ldsPointer(w, op, lane, address & 0xffffffff, bytes, write);
      }
      if (address >> 32 == kPrivateBase >> 32) {
        return scratchPointer(w, op, lane, address & 0xffffffff, bytes);
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

void storeLane(const MemOp& op, int lane, u8* p, u32 bytes, u32 firstRow) {
  if (bytes >= 4) {
    for (u32 r = 0; r < bytes / 4; ++r) std::memcpy(p + 4 * r, &op.data[firstRow + r][lane], 4);
    return;
  }
  u32 x = op.data[firstRow][lane];
  if (op.inst->mem.d16hi) x >>= 16;
  std::memcpy(p, &x, bytes);
}

template <class T>
u64 hostAtomic(u8* p, AtomicFn fn, u64 data, u64 compare, bool shared) {
  T* cell = reinterpret_cast<T*>(p);
  if (!shared) {
    T old;
    std::memcpy(&old, p, sizeof old);
    T now = static_cast<T>(fn(old, data, compare));
    std::memcpy(p, &now, sizeof now);
    return old;
  }
  T old = __atomic_load_n(cell, __ATOMIC_SEQ_CST), now;
  do {
    now = static_cast<T>(fn(old, data, compare));
  } while (
      !__atomic_compare_exchange_n(cell, &old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}

void performAtomic(Wave& w, MemOp& op) {
  const MemSpec& m = op.inst->mem;
  for (u64 mask = op.mask; mask; mask &= mask - 1) {
    int lane = __builtin_ctzll(mask);
    if (m.space == Space::Buffer && op.validDwords[lane] * 4 < m.bytes) {
      op.data[0][lane] = op.data[1][lane] = 0;
      continue;
    }
    u64 address = op.addr[lane];
    if (m.space == Space::Lds) address = static_cast<u32>(address + op.inst->offset);
    if (address % m.bytes) {
      report(w, *op.inst, "misaligned", address, lane, "atomic at an unaligned address");
      continue;
    }
    u8* p = pointer(w, op, lane, address, m.bytes, false);
    if (!p) continue;
    bool wide = m.bytes == 8;
    u64 data = op.data[0][lane], compare = op.data[wide ? 2 : 1][lane];
    if (wide) {
      data |= static_cast<u64>(op.data[1][lane]) << 32;
      compare |= static_cast<u64>(op.data[3][lane]) << 32;
    }
    u64 old = wide ? hostAtomic<u64>(p, m.atomic, data, compare, m.space != Space::Lds)
                   : hostAtomic<u32>(p, m.atomic, data, compare, m.space != Space::Lds);
    op.data[0][lane] = static_cast<u32>(old);
    if (wide) op.data[1][lane] = old >> 32;
  }
}

void performScalar(Wave& w, MemOp& op) {
  u32 bytes = 4 * op.scalarDwords;
  w.wg->worker->counters.scalarBytes += bytes;
  const u8* p = bytes ? globalPointer(w, op, 0, op.scalarAddress, bytes, false) : nullptr;
  for (u32 n = 0; n < 16; ++n) op.scalar[n] = 0;
  if (p) std::memcpy(op.scalar, p, bytes);
}

// A flat access may mix spaces; the race checker and the caches see its global lanes only.
u64 globalLanes(const MemOp& op) {
  if (op.inst->mem.space != Space::Flat) return op.mask;
  u64 r = 0;
  for (u64 m = op.mask; m; m &= m - 1) {
    int l = __builtin_ctzll(m);
    u64 high = op.addr[l] >> 32;
    if (high != kSharedBase >> 32 && high != kPrivateBase >> 32) r |= 1ull << l;
  }
  return r;
}

void checkRaces(Wave& w, MemOp& op, bool write) {
  const MemSpec& m = op.inst->mem;
  if (m.space == Space::Scratch || m.bytes == 0) return;
  if (m.space == Space::Lds) {
    raceLds(w, op, m.bytes, op.inst->offset * (m.pair ? m.pairStride : 1), write);
    if (m.pair) raceLds(w, op, m.bytes, op.inst->offset1 * m.pairStride, write);
    return;
  }
  raceGlobal(w, op, m.bytes, write);
}

void performLanes(Wave& w, MemOp& op, bool write, u32 offset, u32 firstRow) {
  const MemSpec& m = op.inst->mem;
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
    write ? storeLane(op, lane, p, bytes, firstRow) : loadLane(op, lane, p, bytes, firstRow);
  }
}

void performToLds(Wave& w, MemOp& op) {
  performLanes(w, op, false, 0, 0);
  const MemSpec& m = op.inst->mem;
  u32 width = std::max<u32>(4, m.bytes);
  MemOp& target = op;
  for (int lane = 0; lane < kLanes; ++lane) op.addr[lane] = op.ldsBase + lane * width;
  if (w.wg->launch->options.race) raceLds(w, target, width, 0, true);
  for (u64 mask = op.mask; mask; mask &= mask - 1) {
    int lane = __builtin_ctzll(mask);
    u8* p = ldsPointer(w, op, lane, op.addr[lane], width, true);
    for (u32 r = 0; p && r < width / 4; ++r) std::memcpy(p + 4 * r, &op.data[r][lane], 4);
  }
}

void perform(Wave& w, MemOp& op) {
  if (op.performed) return;
  op.performed = true;
  const MemSpec& m = op.inst->mem;
  bool race = w.wg->launch->options.race;
  if (m.access == Access::None) return;  // a cache operation that only counts
  if (m.space == Space::Scalar) {
    performScalar(w, op);
    return;
  }
  bool write = m.access == Access::Store || m.access == Access::Atomic;
  if (race) {
    checkRaces(w, op, write);
    if (m.bytes && m.space != Space::Scratch) {
      performSync(w, op, m.space == Space::Lds, m.space == Space::Lds ? op.inst->offset : 0);
    }
  }
  switch (m.access) {
    case Access::Atomic:
      performAtomic(w, op);
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
}

u32 resultRows(const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  if (m.access == Access::Load) return m.pair ? 2 * m.dwords : m.dwords;
  return m.access == Access::Atomic && m.returns ? m.dwords : 0;
}

void writeBack(Wave& w, MemOp& op) {
  const Inst& i = *op.inst;
  if (i.mem.space == Space::Scalar) {
    for (u32 n = 0; n < op.scalarDwords; ++n) w.s[i.dst.index + n] = op.scalar[n];
    return;
  }
  u32 rows = resultRows(op);
  for (u32 r = 0; r < rows; ++r) {
    u32* d = w.row(i.dst.index + r);
    const u32* value = op.data[r];
    if (i.mem.d16) {
      for (int l = 0; l < kLanes; ++l) {
        u32 merged = i.mem.d16hi ? (d[l] & 0xffff) | value[l] << 16
                                 : (d[l] & 0xffff0000u) | (value[l] & 0xffff);
        d[l] = (op.mask >> l & 1) ? merged : d[l];
      }
    } else if (op.mask == ~0ull) {
      std::memcpy(d, value, kLanes * 4);
    } else {
      for (int l = 0; l < kLanes; ++l) d[l] = (op.mask >> l & 1) ? value[l] : d[l];
    }
  }
}

// Marks the registers that an operation will write, or unmarks them.
void owe(Wave& w, const MemOp& op, int change) {
  const Inst& i = *op.inst;
  if (i.mem.access == Access::LoadToLds) w.dmaInFlight += change;
  if (i.mem.space == Space::Scalar && i.mem.access != Access::None) {
    for (u32 n = 0; n < op.scalarDwords; ++n) w.owedS[i.dst.index + n] += change;
    w.owed += change;
    return;
  }
  u32 rows = resultRows(op);
  for (u32 r = 0; r < rows; ++r) w.owedV[i.dst.index + r] += change;
  if (rows) w.owed += change;
}

void poison(Wave& w, const MemOp& op) {
  const Inst& i = *op.inst;
  if (i.mem.space == Space::Scalar) {
    for (u32 n = 0; n < op.scalarDwords; ++n) w.s[i.dst.index + n] = kPoison;
    return;
  }
  if (i.mem.d16) return;  // the other half must survive
  u32 rows = resultRows(op);
  for (u32 r = 0; r < rows; ++r) {
    u32* d = w.row(i.dst.index + r);
    for (int l = 0; l < kLanes; ++l) d[l] = (op.mask >> l & 1) ? kPoison : d[l];
  }
}

void complete(Wave& w, MemOp* op, bool wasQueued) {
  perform(w, *op);
  if (op->inst->mem.access != Access::None) writeBack(w, *op);
  if (w.wg->launch->options.race) completeSync(w, *op);
  if (wasQueued) owe(w, *op, -1);
  op->known = nullptr;
  w.wg->worker->freeOps.push_back(op);
}

bool isScalar(const MemOp* op) {
  return op->inst->mem.space == Space::Scalar && op->inst->mem.access != Access::None;
}

void issue(Wave& w, MemOp* op) {
  const Inst& i = *op->inst;
  Workgroup& wg = *w.wg;
  const Options& o = wg.launch->options;
  op->born = wg.executed;
  if (o.race) issueSync(w, *op);
  if (!o.late) {
    complete(w, op, false);
    return;
  }
  owe(w, *op, 1);
  if (i.mem.access != Access::None) poison(w, *op);
  bool lgkm = i.mem.space == Space::Scalar || i.mem.space == Space::Lds || op->mixedLds;
  if (i.mem.access == Access::None) lgkm = false;
  std::deque<MemOp*>& queue = lgkm ? w.lgkm : w.vm;
  // The counters are 6 and 4 bits wide: the hardware stalls when they are full.
  if (!lgkm && w.vm.size() >= 63) waitVm(w, 62);
  if (lgkm && w.lgkm.size() >= 64) waitLgkm(w, 0);
  queue.push_back(op);
}

// ---- addresses --------------------------------------------------------------------------------

void flatAddresses(Wave& w, const Inst& i, MemOp& op) {
  const Operand &va = i.src[0], &sa = i.src[1];
  u64 base = sa.is(Kind::Sgpr) ? scalar64(w, sa) : 0;
  if (sa.is(Kind::Sgpr)) {
    const u32* v = va.is(Kind::Vgpr) ? w.row(va.index) : nullptr;
    for (int l = 0; l < kLanes; ++l) op.addr[l] = base + (v ? v[l] : 0) + i.offset;
    return;
  }
  const u32 *lo = w.row(va.index), *hi = w.row(va.index + 1);
  for (int l = 0; l < kLanes; ++l) {
    op.addr[l] = (lo[l] | static_cast<u64>(hi[l]) << 32) + i.offset;
  }
}

void scratchAddresses(Wave& w, const Inst& i, MemOp& op) {
  const u32* v = i.src[0].is(Kind::Vgpr) ? w.row(i.src[0].index) : nullptr;
  u32 s = i.src[1].is(Kind::Sgpr) ? w.s[i.src[1].index] : 0;
  for (int l = 0; l < kLanes; ++l) op.addr[l] = static_cast<u32>((v ? v[l] : 0) + s + i.offset);
}

void bufferAddresses(Wave& w, const Inst& i, MemOp& op) {
  const u32* resource = w.s + i.src[1].index;
  u64 base = resource[0] | static_cast<u64>(resource[1] & 0xffff) << 32;
  u32 stride = resource[1] >> 16 & 0x3fff, records = resource[2];
  u32 soffset = i.src[3].present() ? scalar32(w, i.src[3]) : 0;
  if ((resource[1] >> 31) || (resource[3] >> 23 & 1)) {
    stop(w, i, "swizzled buffers and add_tid are not implemented");
  }
  const u32* v = i.src[0].is(Kind::Vgpr) ? w.row(i.src[0].index) : nullptr;
  u32 width = std::max<u32>(1, i.mem.bytes / 4);
  for (int l = 0; l < kLanes; ++l) {
    u64 index = i.idxen ? v[l] : 0;
    u64 offset = static_cast<u64>(i.offset) + (i.offen ? v[(i.idxen ? kLanes : 0) + l] : 0);
    op.addr[l] = base + soffset + offset + index * stride;
    u32 valid = 0;
    if (stride && i.idxen) {
      valid = index < records ? width : 0;
    } else {
      u64 at = offset + soffset;
      u32 unit = std::min<u32>(4, i.mem.bytes);
      while (valid < width && at + 4 * valid + unit <= records) ++valid;
    }
    op.validDwords[l] = valid;
  }
}

void captureData(Wave& w, const Inst& i, MemOp& op) {
  const MemSpec& m = i.mem;
  auto copy = [&](const Operand& o, u32 rows, u32 to) {
    for (u32 r = 0; r < rows; ++r) {
      std::memcpy(op.data[to + r], w.row(o.index + r), kLanes * 4);
    }
  };
  if (m.access == Access::Store) {
    if (m.space == Space::Lds) {
      copy(i.src[1], m.dwords, 0);
      if (m.pair) copy(i.src[2], m.dwords, m.dwords);
    } else {
      copy(i.src[2], m.dwords, 0);
    }
  } else if (m.access == Access::Atomic) {
    u32 n = m.atomicData;
    if (m.space == Space::Lds) {
      // ds_cmpst has the compare value first.
      bool compare = i.src[2].is(Kind::Vgpr);
      if (i.src[1].is(Kind::Vgpr)) copy(i.src[1], n, compare ? n : 0);
      if (compare) copy(i.src[2], n, 0);
    } else {
      copy(i.src[2], std::min<u32>(i.src[2].dwords, 2 * n), 0);
    }
  }
}

// ds_permute, ds_bpermute and ds_swizzle: values move between lanes.
void exchange(Wave& w, const Inst& i, MemOp& op) {
  u64 exec = op.mask;
  u32* out = op.data[0];
  std::fill_n(out, kLanes, 0);
  const u32* first = w.row(i.src[0].index);
  if (i.name == "ds_swizzle_b32") {
    u32 offset = i.offset;
    for (int l = 0; l < kLanes; ++l) {
      int from;
      if ((offset & 0xff00) == 0x8000) {
        from = (l & ~3) + (offset >> (2 * (l & 3)) & 3);
      } else if (offset >= 0xc000) {
        int n = offset >> 5 & 31;
        from = (l & 32) + ((offset >> 10 & 1) ? (l - n) & 31 : (l + n) & 31);
      } else {
        u32 in = l & 31;
        from = (l & 32) + (((in & offset) | (offset >> 5 & 31)) ^ (offset >> 10 & 31));
      }
      out[l] = (exec >> from & 1) ? first[from] : 0;
    }
    return;
  }
  const u32* data = w.row(i.src[1].index);
  for (int l = 0; l < kLanes; ++l) {
    int other = (first[l] + i.offset) / 4 % kLanes;
    if (i.name == "ds_bpermute_b32") {
      out[l] = (exec >> other & 1) ? data[other] : 0;
    } else if (exec >> l & 1) {
      out[other] = data[l];
    }
  }
}

void checkDma(Wave& w, const Inst& i, const MemOp& op) {
  if (!w.dmaInFlight || i.mem.bytes == 0) return;
  for (const MemOp* dma : w.vm) {
    if (dma->inst->mem.access != Access::LoadToLds) continue;
    u64 begin = dma->ldsBase, end = begin + kLanes * std::max<u32>(4, dma->inst->mem.bytes);
    for (u64 m = op.mask; m; m &= m - 1) {
      int l = __builtin_ctzll(m);
      u64 a = op.addr[l] + i.offset * (i.mem.pair ? i.mem.pairStride : 1);
      if (a < end && begin < a + i.mem.bytes) {
        report(w, i, "missing-wait", a, l,
               "touches LDS at offset " + std::to_string(a) + " that a load to LDS (" +
                   dma->inst->text + ") has not written yet: s_waitcnt vmcnt is missing");
        return;
      }
    }
  }
}

void executeScalarLoad(Wave& w, const Inst& i) {
  Worker& worker = *w.wg->worker;
  MemOp* op = worker.takeOp();
  op->inst = &i;
  op->mask = 1;
  op->scalarDwords = i.mem.dwords;
  u64 offset = (i.src[3].present() ? scalar32(w, i.src[3]) : 0) + static_cast<i64>(i.offset);
  if (i.src[3].is(Kind::Imm)) offset = static_cast<i64>(i.src[3].imm) + i.offset;
  if (starts(i.name, "s_buffer")) {
    const u32* resource = w.s + i.src[1].index;
    u64 base = resource[0] | static_cast<u64>(resource[1] & 0xffff) << 32;
    op->scalarAddress = base + (offset & ~3ull);
    if (offset + 4 * i.mem.dwords > resource[2]) {
      op->scalarDwords = 0;
      for (u32 n = 0; n < i.mem.dwords; ++n) w.s[i.dst.index + n] = 0;
    }
  } else {
    op->scalarAddress = (scalar64(w, i.src[1]) + offset) & ~3ull;
  }
  issue(w, op);
}

}  // namespace

void executeMemory(Wave& w, const Inst& i) {
  const MemSpec& m = i.mem;
  if (m.space == Space::Scalar) {
    executeScalarLoad(w, i);
    return;
  }
  u64 exec = w.exec();
  MemOp* op = w.wg->worker->takeOp();
  op->inst = &i;
  op->mask = exec;
  Counters& c = w.wg->worker->counters;
  bool write = m.access == Access::Store || m.access == Access::Atomic;
  if (m.access == Access::Atomic) c.atomics += __builtin_popcountll(exec);
  switch (m.space) {
    case Space::Lds: {
      const u32* a = w.row(i.src[0].index);
      for (int l = 0; l < kLanes; ++l) op->addr[l] = a[l];
      if (m.bytes == 0) {
        exchange(w, i, *op);
        c.ldsCycles += 2;
      } else {
        checkDma(w, i, *op);
        countLds(w, *op, m.bytes, i.offset * (m.pair ? m.pairStride : 1));
        if (m.pair) countLds(w, *op, m.bytes, i.offset1 * m.pairStride);
      }
      break;
    }
    case Space::Buffer:
      bufferAddresses(w, i, *op);
      break;
    case Space::Scratch:
      scratchAddresses(w, i, *op);
      c.scratchBytes += static_cast<u64>(m.bytes) * __builtin_popcountll(exec);
      break;
    default:
      flatAddresses(w, i, *op);
  }
  if (m.space == Space::Flat) {
    for (u64 k = exec; k; k &= k - 1) {
      op->mixedLds |= op->addr[__builtin_ctzll(k)] >> 32 == kSharedBase >> 32;
    }
  }
  if (m.space == Space::Global || m.space == Space::Buffer || m.space == Space::Flat) {
    u64 lanes = m.space == Space::Flat ? globalLanes(*op) : exec;
    if (m.space == Space::Buffer) {
      for (int l = 0; l < kLanes; ++l) lanes &= ~(static_cast<u64>(!op->validDwords[l]) << l);
    }
    std::swap(op->mask, lanes);
    countGlobal(w, *op, m.bytes, write);
    std::swap(op->mask, lanes);
  }
  if (m.access == Access::LoadToLds) op->ldsBase = (w.s[kM0] & 0xffff) + i.offset;
  captureData(w, i, *op);
  issue(w, op);
}

// ---- waiting ----------------------------------------------------------------------------------

void waitVm(Wave& w, u32 left) {
  while (w.vm.size() > left) {
    MemOp* op = w.vm.front();
    w.vm.pop_front();
    complete(w, op, true);
  }
}

// Scalar loads return in any order, so a count above 0 promises nothing about them; of the LDS
// operations, which keep their order, at most the newest `left` can be outstanding.
void waitLgkm(Wave& w, u32 left) {
  if (left == 0) {
    while (!w.lgkm.empty()) {
      MemOp* op = w.lgkm.front();
      w.lgkm.pop_front();
      complete(w, op, true);
    }
    return;
  }
  u32 ordered =
      std::count_if(w.lgkm.begin(), w.lgkm.end(), [](const MemOp* op) { return !isScalar(op); });
  for (auto it = w.lgkm.begin(); it != w.lgkm.end() && ordered > left;) {
    if (isScalar(*it)) {
      ++it;
      continue;
    }
    MemOp* op = *it;
    it = w.lgkm.erase(it);
    complete(w, op, true);
    --ordered;
  }
}

void performAged(Workgroup& wg, u64 age) {
  for (Wave& w : wg.waves) {
    for (std::deque<MemOp*>* queue : {&w.vm, &w.lgkm}) {
      for (MemOp* op : *queue) {
        if (op->born + age > wg.executed) break;
        perform(w, *op);
      }
    }
  }
}

void checkPending(Wave& w, const Inst& i) {
  auto find = [&](u32 reg, bool scalar) -> const MemOp* {
    for (const std::deque<MemOp*>* queue : {&w.vm, &w.lgkm}) {
      for (const MemOp* op : *queue) {
        if (op->inst->mem.access == Access::None || isScalar(op) != scalar) continue;
        u32 rows = scalar ? op->scalarDwords : resultRows(*op);
        u32 first = op->inst->dst.index;
        if (reg >= first && reg < first + rows) return op;
      }
    }
    return nullptr;
  };
  bool allLanes =
      i.cls == Class::Matrix || starts(i.name, "v_readlane") || starts(i.name, "v_writelane");
  auto complain = [&](u32 reg, bool scalar, bool writes) {
    const MemOp* op = find(reg, scalar);
    if (!op) return;
    if (!scalar && !allLanes && !(op->mask & w.exec())) return;
    // Operations under one in-order counter may reuse a result register.
    bool vm = !scalar && std::find(w.vm.begin(), w.vm.end(), op) != w.vm.end();
    if (writes && i.mem.access != Access::None && !scalar) {
      bool mine = i.mem.space != Space::Lds && i.mem.space != Space::Scalar;
      if (mine == vm) return;
    }
    int lane = scalar ? 0 : __builtin_ctzll(op->mask ? op->mask : 1);
    u64 address = scalar ? op->scalarAddress : op->addr[lane];
    std::string name = scalar ? "s" + std::to_string(reg)
                              : (reg >= kAccBase ? "a" + std::to_string(reg - kAccBase)
                                                 : "v" + std::to_string(reg));
    report(w, i, "missing-wait", address, lane,
           std::string(writes ? "overwrites " : "reads ") + name + " while '" + op->inst->text +
               "' (" + w.object->source(op->inst->address) + ", address " + hex(address) +
               ") has not written it yet: s_waitcnt " + (vm ? "vmcnt" : "lgkmcnt") + " is missing");
  };
  auto scan = [&](const std::vector<Inst::Range>& ranges, bool scalar, bool writes) {
    for (const Inst::Range& r : ranges) {
      for (u32 n = r.first; n < u32(r.first) + r.count; ++n) {
        if (scalar ? w.owedS[n & 127] : n < kTempBase && w.owedV[n]) complain(n, scalar, writes);
      }
    }
  };
  scan(i.readsV, false, false);
  scan(i.readsS, true, false);
  scan(i.writesV, false, true);
  scan(i.writesS, true, true);
}

void cacheFence(Wave& w, const Inst& i) {
  MemOp* op = w.wg->worker->takeOp();
  op->inst = &i;
  op->mask = 0;
  issue(w, op);
}

}  // namespace sim
