// The functional run's side of the cycle model: a wave's stream.
#include <algorithm>

#include "cycles.h"
#include "operands.h"

namespace sim {
namespace {

constexpr u32 kLineBits = 30;

// Lanes that one LDS cycle serves together, as bit masks; a cycle ends when no bank is asked twice.
// 128 bytes a cycle in consecutive lanes; gfx950 has 64 banks for reads of 8 and 16 bytes, and
// serves the latter in the four groups that were found by measurement.
struct LdsShape {
  u32 banks = 32;
  std::vector<u64> phases;
};

LdsShape ldsShape(u32 words, bool load, bool wide) {
  LdsShape shape;
  if (wide && load && words == 4) {
    shape.banks = 64;
    constexpr u64 first = 0x000000000ff0f00full, second = 0x00000000f00f0ff0ull;
    shape.phases = {first, second, first << 32, second << 32};
    return shape;
  }
  u32 lanes = 32 / words;
  if (words == 3) lanes = 8;
  if (wide && load && words == 2) {
    shape.banks = 64;
    lanes = 32;
  }
  for (u32 n = 0; n < kLanes; n += lanes) {
    shape.phases.push_back((lanes >= 64 ? ~0ull : (1ull << lanes) - 1) << n);
  }
  return shape;
}

u32 bankCycles(const MemOp& op, u32 bytes, u32 offset, bool load, bool wide) {
  u32 words = std::max(1u, bytes / 4), cycles = 0;
  LdsShape shape = ldsShape(words, load, wide);
  for (u64 phase : shape.phases) {
    u32 used[64] = {}, of[64][64], worst = 0;
    for (u64 m = op.mask & phase; m; m &= m - 1) {
      u32 first = (static_cast<u32>(op.addr[__builtin_ctzll(m)]) + offset) / 4;
      for (u32 k = 0; k < words; ++k) {
        u32 word = first + k, bank = word % shape.banks, count = used[bank];
        if (std::find(of[bank], of[bank] + count, word) != of[bank] + count || count == 64)
          continue;
        of[bank][used[bank]++] = word;
        worst = std::max(worst, used[bank]);
      }
    }
    cycles += worst;
  }
  return std::max(1u, cycles);
}

// Gathers the lines of 128 bytes that an instruction touches, with their halves.
class Lines {
 public:
  void add(u64 address, u32 bytes) {
    if (!bytes) return;
    for (u64 half = address / 64; half <= (address + bytes - 1) / 64; ++half) {
      u32 line = half / 2 & ((1u << kLineBits) - 1), bit = 1u << (half & 1);
      u32 n = count_;
      while (n > 0 && line_[n - 1] >> 2 != line) --n;
      if (n) {
        halves_ += !(line_[n - 1] & bit);
        line_[n - 1] |= bit;
      } else if (count_ < kMost) {
        line_[count_++] = line << 2 | bit;
        ++halves_;
      }
    }
  }
  // 16 lanes' addresses a cycle, 64 bytes of data a cycle.
  void write(std::vector<u32>& words, u32 lanes) const {
    u32 cycles = std::max({1u, (lanes + 15) / 16, halves_});
    words.push_back(count_ | cycles << 16);
    words.insert(words.end(), line_, line_ + count_);
  }

 private:
  static constexpr u32 kMost = 2 * kLanes;
  u32 line_[kMost], count_ = 0, halves_ = 0;
};

// What may be a flag: a load or a store of agent scope, an atomic.
bool mayBeFlag(const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  if (m.space != Space::Global && m.space != Space::Flat) return false;
  return m.access == Access::Atomic || op.inst->sc1;
}

// Before a load's words are written: a poll that comes again with nothing between takes the place
// of the one before.
void keepLastPoll(WaveStream& stream, const MemOp& op) {
  WaveStream::Poll& poll = stream.poll;
  u64 address = op.addr[__builtin_ctzll(op.mask)];
  if (poll.inst == op.inst->address && poll.address == address &&
      poll.end == stream.memory.size()) {
    stream.code.resize(poll.runs);
    stream.code.back().count = poll.count;
    stream.memory.resize(poll.memory);
    return;
  }
  poll.inst = op.inst->address;
  poll.address = address;
  poll.runs = stream.code.size();
  poll.count = stream.code.back().count;
  poll.memory = stream.memory.size();
}

// Operations of a wave need not take effect in the order of their issue; the replay has its flags
// in that order.
void put(std::vector<WaveStream::Flag>& flags, WaveStream::Flag flag) {
  flags.insert(std::ranges::upper_bound(flags, flag.word, {}, &WaveStream::Flag::word), flag);
}

}  // namespace

WaveStream* Recording::start(u64 group, u32 wave, u32 waves) {
  if (group % xcds >= sampled) return nullptr;
  std::vector<WaveStream>& streams = groups[group];
  if (streams.empty()) streams.resize(waves);
  return &streams[wave];
}

void recordFlag(Recording& recording, WaveStream& stream, const MemOp& op) {
  const MemSpec& m = op.inst->mem;
  const bool looks = m.access == Access::Load;
  const bool tells = m.access == Access::Store || m.access == Access::Atomic;
  u32 number = tells ? ++recording.told : 0;
  if (looks && stream.looked != op.place) {
    for (auto [word, seen] : stream.seen) stream.known[word] = seen.count;
    stream.seen.clear();
    stream.looked = op.place;
  }
  if (looks) {  // the turn before of the same loop had this place
    auto before = std::ranges::equal_range(stream.finds, op.place, {}, &WaveStream::Flag::word);
    stream.finds.erase(before.begin(), before.end());
  }
  std::vector<u32> found;
  auto find = [&](u32 other) {
    if (std::ranges::find(found, other) == found.end()) found.push_back(other);
  };
  for (u64 mask = globalLanes(op); mask; mask &= mask - 1) {
    u64 begin = op.addr[__builtin_ctzll(mask)] / 4;
    for (u64 word = begin; word < begin + std::max(1, m.bytes / 4); ++word) {
      auto told = recording.toldBy.find(word);
      if (m.access != Access::Store && told != recording.toldBy.end() &&
          told->second.back() != number) {
        const std::vector<u32>& stores = told->second;
        size_t at = stores.size() - 1;
        if (looks) {
          auto known = stream.known.find(word);
          at = std::min<size_t>(at, known == stream.known.end() ? 0 : known->second);
          stream.seen[word] = {stores[at], static_cast<u32>(at + 1)};
        } else {
          find(stores[at]);
        }
      }
      if (tells) {
        std::vector<u32>& stores = recording.toldBy[word];
        if (m.access == Access::Atomic) stores.clear();
        if (stores.empty() || stores.back() != number) stores.push_back(number);
      }
    }
  }
  for (auto [word, seen] : stream.seen) {
    if (looks) find(seen.number);
  }
  for (u32 other : found) put(stream.finds, {op.place, other});
  if (tells) put(stream.tells, {op.place, number});
}

void recordMemory(Wave& w, MemOp& op) {
  const Inst& i = *op.inst;
  const MemSpec& m = i.mem;
  std::vector<u32>& words = w.stream->memory;
  Lines lines;
  if (m.space == Space::Lds) {
    bool load = m.access == Access::Load;
    bool wide = w.object->gpu->ldsKib > 64;
    u32 cycles = 2;  // lanes exchange registers
    if (m.bytes) {
      cycles = bankCycles(op, m.bytes, i.offset * (m.pair ? m.pairStride : 1), load, wide);
      if (m.pair) cycles += bankCycles(op, m.bytes, i.offset1 * m.pairStride, load, wide);
    }
    words.push_back(cycles);
    return;
  }
  if (m.space == Space::Scalar) {
    lines.add(op.scalarAddress, 4 * op.scalarDwords);
    lines.write(words, 1);
    return;
  }
  if (m.space == Space::Scratch) {
    // A dword of all lanes is one run of 256 bytes; the wave's own place comes with the replay.
    u64 last = ~0ull;
    for (u64 mask = op.mask; mask; mask &= mask - 1) {
      u64 at = op.addr[__builtin_ctzll(mask)];
      if (at == last) continue;
      last = at;
      for (u64 dword = at / 4; dword <= (at + m.bytes - 1) / 4; ++dword)
        lines.add(dword * 256, 256);
    }
    lines.write(words, __builtin_popcountll(op.mask));
    return;
  }
  Recording& recording = *w.wg->launch->recording;
  op.flag = recording.playsFlags && mayBeFlag(op);
  const bool poll = op.flag && m.access == Access::Load && op.mask;
  if (poll) keepLastPoll(*w.stream, op);
  op.place = words.size();
  u32 lanes = 0;
  for (u64 mask = op.mask; mask; mask &= mask - 1) {
    int lane = __builtin_ctzll(mask);
    u64 address = op.addr[lane];
    bool local = m.space == Space::Flat &&
                 (address >> 32 == kSharedBase >> 32 || address >> 32 == kPrivateBase >> 32);
    if (local || (m.space == Space::Buffer && !op.validDwords[lane])) continue;
    ++lanes;
    lines.add(address, m.bytes);
  }
  lines.write(words, lanes);
  if (poll) w.stream->poll.end = words.size();
}

std::vector<TimedInst> timedCode(const CodeObject& object, const SimCycles& p) {
  std::vector<TimedInst> code(object.code.size());
  for (size_t n = 0; n < code.size(); ++n) {
    const Inst& i = object.code[n];
    TimedInst& t = code[n];
    t.memory = i.fn == executeMemory;
    switch (i.cls) {
      case Class::Valu:
        // Quarter rate, as LLVM's scheduling model has them.
        if (i.name.starts_with("v_cvt")) t.cycles = p.conversion_cycles;
        break;
      case Class::Trans:
        t.cycles = p.transcendental_cycles;
        break;
      case Class::Matrix:
        t.unit = Unit::Matrix;
        t.cycles = i.passes;
        break;
      case Class::Salu:
      case Class::Smem:
        t.unit = Unit::Scalar;
        t.scalar = t.memory;
        break;
      case Class::Lds:
        t.unit = Unit::Lds;
        break;
      case Class::Vmem:
      case Class::Flat:
      case Class::Scratch:
        // Write-backs and invalidations of caches take no time of their own here.
        t.unit = t.memory ? Unit::Vmem : Unit::Internal;
        break;
      case Class::Branch:
        t.unit = Unit::Branch;
        break;
      default:
        t.unit = Unit::Internal;
    }
    const MemSpec& m = i.mem;
    t.store = m.access == Access::Store;
    t.atomic = m.access == Access::Atomic;
    t.load = t.memory && !t.store && !t.atomic;
    t.streaming =
        i.text.find(" nt") != std::string::npos || i.text.find(" slc") != std::string::npos;
    t.pastL1 = i.sc1;
    t.scratch = m.space == Space::Scratch;
    t.barrier = i.name == "s_barrier";
    t.end = i.name == "s_endpgm";
    t.wait = i.name == "s_waitcnt";
    if (t.wait) {
      t.vm = (i.simm & 15) | (i.simm >> 14 & 3) << 4;
      t.lgkm = i.simm >> 8 & 15;
    }
    if (i.name == "s_nop") t.sleep = 4 * i.simm;
    if (i.name == "s_sleep") t.sleep = 64 * (i.simm & 127);
    if (i.name == "s_setprio") t.priority = i.simm & 3;
  }
  return code;
}

}  // namespace sim
