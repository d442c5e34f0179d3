// Memory instructions at issue: addresses and data are taken, the rest happens when they complete.
#include "memory.h"

#include <algorithm>

#include "cycles.h"
#include "operands.h"

namespace sim {

std::string hex(u64 x) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

MemOp* Worker::takeOp() {
  if (freeOps.empty()) {
    allOps.emplace_back();
    freeOps.push_back(&allOps.back());
  }
  MemOp* op = freeOps.back();
  freeOps.pop_back();
  op->performed = op->mixedLds = op->inARow = op->flag = false;
  op->publish = op->publishForeign = op->acquired = nullptr;
  op->given.clear();
  return op;
}

namespace {

// Bits of M0 that are an LDS address: enough for the target's LDS.
u32 ldsAddressMask(const Wave& w) { return w.object->gpu->ldsKib > 64 ? 0x3ffff : 0xffff; }

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
  // Bit 63 swizzles by the index and the stride: without an index, or with no stride, the address
  // stays linear. (Some set it to bring the L2's channels into another order.)
  bool swizzled = resource[1] >> 31 && i.idxen && stride;
  if (swizzled || (resource[3] >> 23 & 1)) {
    stop(w, i, "swizzled buffers that are indexed, and add_tid, are not implemented");
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
      // ds_cmpst has the compare value first; ds_wrxchg2 has data for each address.
      bool compare = i.src[2].is(Kind::Vgpr) && !m.pair;
      if (m.once) std::fill_n(op.data[0], kLanes, __builtin_popcountll(op.mask));
      if (i.src[1].is(Kind::Vgpr)) copy(i.src[1], n, compare ? n : 0);
      if (i.src[2].is(Kind::Vgpr)) copy(i.src[2], n, compare ? 0 : n);
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
  if (i.name.starts_with("s_buffer")) {
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
  if (w.stream) recordMemory(w, *op);
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
  if (m.access == Access::Atomic) {
    c.atomics += __builtin_popcountll(exec);
    if (m.returns && m.space != Space::Lds) c.tickets += __builtin_popcountll(exec);
  }
  switch (m.space) {
    case Space::Lds: {
      const u32* a = w.row(i.src[0].index);
      u32 uniform = w.s[kM0] & ldsAddressMask(w);
      for (int l = 0; l < kLanes; ++l) op->addr[l] = m.once ? uniform : a[l];
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
    u64 lanes = globalLanes(*op);
    if (m.space == Space::Buffer) {
      for (int l = 0; l < kLanes; ++l) lanes &= ~(static_cast<u64>(!op->validDwords[l]) << l);
    }
    std::swap(op->mask, lanes);
    u64 apart = ~op->mask;
    for (u32 l = 0; l < kLanes; ++l) apart |= op->addr[l] ^ (op->addr[0] + l * m.bytes);
    if (m.space == Space::Buffer) {
      for (u32 l = 0; l < kLanes; ++l) apart |= op->validDwords[l] * 4u < m.bytes;
    }
    op->inARow = !apart;
    countGlobal(w, *op, m.bytes, write);
    std::swap(op->mask, lanes);
  }
  if (m.access == Access::LoadToLds) op->ldsBase = (w.s[kM0] & ldsAddressMask(w)) + i.offset;
  captureData(w, i, *op);
  if (w.stream) recordMemory(w, *op);
  issue(w, op);
}

}  // namespace sim
