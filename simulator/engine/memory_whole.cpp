// The accesses that most kernels consist of, taken at once: all lanes lie in one buffer, or aligned
// in LDS, and what a load reads is known to be written. The others go lane by lane
// (memory_effects.cpp).
#include <algorithm>

#include "memory.h"

namespace sim {
namespace {

// Every lane of a wave, or those that are on.
template <class F>
void forEachLane(u64 lanes, F f) {
  if (lanes == ~0ull) {
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (; lanes; lanes &= lanes - 1) f(__builtin_ctzll(lanes));
  }
}

// A lane's 8 or 16 bytes move at once, as on hardware: other host threads may poll the last of
// them for the rest. Packed, because they need not be aligned. LDS is one thread's alone, which
// leaves the host's compiler free to move many lanes at once.
struct __attribute__((packed)) Two {
  u64 all;
};
struct __attribute__((packed)) Four {
  u32 all __attribute__((vector_size(16)));
};

template <bool kAtOnce, int kDwords>
void moveDwords(void* to, const void* from) {
  if constexpr (kAtOnce && kDwords == 2) {
    static_cast<volatile Two*>(to)->all = static_cast<const volatile Two*>(from)->all;
  } else if constexpr (kAtOnce && kDwords == 4) {
    static_cast<volatile Four*>(to)->all = static_cast<const volatile Four*>(from)->all;
  } else {
    std::memcpy(to, from, 4 * kDwords);
  }
}

// Moves `kDwords` of each lane from where `at(lane)` points.
template <bool kAtOnce, int kDwords, class At>
void loadDwords(MemOp& op, u32 row, At at) {
  forEachLane(op.mask, [&](int lane) {
    u32 x[kDwords];
    moveDwords<kAtOnce, kDwords>(x, at(lane));
    for (int r = 0; r < kDwords; ++r) op.data[row + r][lane] = x[r];
  });
}

// Says whether memory is different now.
template <bool kAtOnce, int kDwords, class At>
bool storeDwords(const MemOp& op, u32 row, At at) {
  u32 differs = 0;
  forEachLane(op.mask, [&](int lane) {
    u32 x[kDwords], old[kDwords];
    for (int r = 0; r < kDwords; ++r) x[r] = op.data[row + r][lane];
    std::memcpy(old, at(lane), sizeof old);
    moveDwords<kAtOnce, kDwords>(at(lane), x);
    for (int r = 0; r < kDwords; ++r) differs |= x[r] ^ old[r];
  });
  return differs != 0;
}

// f.operator()<dwords>() for accesses of 4, 8, 12 or 16 bytes.
template <class F>
bool byWidth(u32 bytes, F f) {
  switch (bytes) {
    case 4:
      return f.template operator()<1>();
    case 8:
      return f.template operator()<2>();
    case 12:
      return f.template operator()<3>();
    default:
      return f.template operator()<4>();
  }
}

bool globalWhole(Wave& w, MemOp& op, bool write) {
  const MemSpec& m = op.inst->mem;
  bool buffer = m.space == Space::Buffer;
  if ((m.space != Space::Global && !buffer) || m.bytes < 4 || !op.high) return false;
  if (buffer) {
    u64 cut = 0;  // lanes that reach beyond the resource's range
    for (int l = 0; l < kLanes; ++l) cut |= u64{op.validDwords[l] * 4u < m.bytes} << l;
    if (cut & op.mask) return false;
  }
  Buffer* b = findBuffer(*w.wg->worker, op.low, op.high - op.low);
  if (!b || (b->written && !write) || (b->readOnly && write)) return false;
  if (b->written && op.inARow) {
    std::memset(b->written + (op.low - b->begin), 1, op.high - op.low);
  } else if (b->written) {
    u8* flags = b->written;
    forEachLane(op.mask, [&](int l) { std::memset(flags + (op.addr[l] - b->begin), 1, m.bytes); });
  }
  auto at = [&](int lane) { return reinterpret_cast<u8*>(op.addr[lane]); };
  bool changed = byWidth(m.bytes, [&]<int kDwords>() {
    if (write) return storeDwords<true, kDwords>(op, 0, at);
    loadDwords<true, kDwords>(op, 0, at);
    return false;
  });
  if (changed) noteChange(w, op);
  return true;
}

bool ldsWhole(Wave& w, MemOp& op, bool write, u32 offset, u32 row) {
  const MemSpec& m = op.inst->mem;
  Workgroup& wg = *w.wg;
  if (m.space != Space::Lds || m.bytes < 4 || m.bytes == 12) return false;
  alignas(64) u32 address[kLanes];
  u32 last = 0, bits = 0;
  for (int l = 0; l < kLanes; ++l) {
    address[l] = static_cast<u32>(op.addr[l]) + offset;
    u32 on = op.mask >> l & 1 ? address[l] : 0;
    last = std::max(last, on);
    bits |= on;
  }
  if (bits % m.bytes || wg.ldsBytes < m.bytes || last > wg.ldsBytes - m.bytes) return false;
  if (wg.launch->options.uninit) {
    u64 all = (1ull << m.bytes) - 1, missing = 0;
    u64* written = wg.ldsInit.data();
    if (write) {
      forEachLane(op.mask, [&](int l) { written[address[l] / 64] |= all << address[l] % 64; });
    } else {
      forEachLane(op.mask,
                  [&](int l) { missing |= ~(written[address[l] / 64] >> address[l] % 64); });
    }
    if (missing & all) return false;
  }
  auto at = [&](int lane) { return wg.lds.data() + address[lane]; };
  bool changed = byWidth(m.bytes, [&]<int kDwords>() {
    if (write) return storeDwords<false, kDwords>(op, row, at);
    loadDwords<false, kDwords>(op, row, at);
    return false;
  });
  if (changed) noteChange(w, op);
  return true;
}

}  // namespace

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

bool performWhole(Wave& w, MemOp& op, bool write, u32 offset, u32 row) {
  return globalWhole(w, op, write) || ldsWhole(w, op, write, offset, row);
}

}  // namespace sim
