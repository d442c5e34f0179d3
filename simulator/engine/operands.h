// Reading operands and writing results, 64 lanes at a time.
#pragma once

#include <bit>
#include <cmath>

#include "core.h"

namespace sim {

template <class To, class From>
constexpr To bits(From x) {
  return std::bit_cast<To>(x);
}

using Half = _Float16;
struct alignas(64) Row {
  u32 x[kLanes];
};
struct alignas(64) Row64 {
  u64 x[kLanes];
};

// A float literal takes the bits of the operand's type; an integer literal is used as it is.
inline u32 literal32(const Operand& o) {
  return o.isReal ? bits<u32>(static_cast<float>(o.real)) : static_cast<u32>(o.imm);
}
inline u32 literal16(const Operand& o) {
  return o.isReal ? bits<u16>(static_cast<Half>(o.real)) : static_cast<u32>(o.imm);
}

inline u32 special(const Wave& w, u16 which) {
  switch (which) {
    case kScc:
      return w.scc;
    case kVccz:
      return *reinterpret_cast<const u64*>(w.s + kVcc) == 0;
    default:
      return w.exec() == 0;
  }
}

inline u32 scalar32(const Wave& w, const Operand& o) {
  switch (o.kind) {
    case Kind::Sgpr:
      return w.s[o.index];
    case Kind::Imm:
      return literal32(o);
    case Kind::Special:
      return special(w, o.index);
    case Kind::Vgpr:
      return w.row(o.index)[0];
    default:
      return 0;
  }
}

// A 64-bit integer operand: integer literals are sign-extended from 32 bits by the decoder.
inline u64 scalar64(const Wave& w, const Operand& o) {
  switch (o.kind) {
    case Kind::Sgpr:
      return w.s[o.index] | static_cast<u64>(w.s[o.index + 1]) << 32;
    case Kind::Imm:
      return o.isReal ? bits<u64>(o.real) : o.imm;
    default:
      return special(w, o.index);
  }
}

inline const u32* fetch(const Wave& w, const Operand& o, Row& tmp) {
  if (o.kind == Kind::Vgpr) return w.row(o.index);
  u32 value = scalar32(w, o);
  for (u32& x : tmp.x) x = value;
  return tmp.x;
}

inline const u32* fetchF32(const Wave& w, const Operand& o, Row& tmp) {
  const u32* p = fetch(w, o, tmp);
  bool flush = w.flush32();
  if (!(o.abs | o.neg | flush)) return p;
  u32 clear = o.abs ? 0x7fffffffu : ~0u, flip = o.neg ? 0x80000000u : 0;
  if (flush) {
    for (int l = 0; l < kLanes; ++l) {
      u32 x = p[l];
      tmp.x[l] = (((x & 0x7f800000u) ? x : x & 0x80000000u) & clear) ^ flip;
    }
  } else {
    for (int l = 0; l < kLanes; ++l) tmp.x[l] = (p[l] & clear) ^ flip;
  }
  return tmp.x;
}

// 16-bit operands: `high` picks the upper half, as op_sel does.
inline const u32* fetch16(const Wave& w, const Operand& o, bool high, bool isFloat, Row& tmp) {
  u32 clear = isFloat && o.abs ? 0x7fff : 0xffff, flip = isFloat && o.neg ? 0x8000 : 0;
  if (o.kind == Kind::Vgpr) {
    const u32* p = w.row(o.index);
    int shift = high ? 16 : 0;
    for (int l = 0; l < kLanes; ++l) tmp.x[l] = ((p[l] >> shift) & clear) ^ flip;
    return tmp.x;
  }
  u32 value = o.kind == Kind::Imm && isFloat ? literal16(o) : scalar32(w, o);
  if (o.kind == Kind::Imm && !isFloat && o.isReal) value = literal16(o);
  if (high) value >>= 16;
  value = (value & clear) ^ flip;
  for (u32& x : tmp.x) x = value;
  return tmp.x;
}

inline const u64* fetch64(const Wave& w, const Operand& o, Row64& tmp) {
  if (o.kind == Kind::Vgpr) {
    const u32 *lo = w.row(o.index), *hi = w.row(o.index + 1);
    for (int l = 0; l < kLanes; ++l) tmp.x[l] = lo[l] | static_cast<u64>(hi[l]) << 32;
  } else {
    u64 value = scalar64(w, o);
    for (u64& x : tmp.x) x = value;
  }
  return tmp.x;
}

// f64 literals hold the high half of the value; float constants are widened.
inline const u64* fetchF64(const Wave& w, const Operand& o, Row64& tmp) {
  const u64* p = fetch64(w, o, tmp);
  if (o.kind == Kind::Imm && !o.isReal && (o.imm > 64 && static_cast<i64>(o.imm) > 64)) {
    for (u64& x : tmp.x) x = o.imm << 32;
  }
  if (o.abs | o.neg) {
    u64 clear = o.abs ? ~0ull >> 1 : ~0ull, flip = o.neg ? 1ull << 63 : 0;
    for (u64& x : tmp.x) x = (x & clear) ^ flip;
  }
  return p;
}

inline void writeRow(Wave& w, const Operand& o, const u32* value) {
  u32* d = w.row(o.index);
  u64 mask = w.exec();
  if (mask == ~0ull) {
    std::memcpy(d, value, kLanes * 4);
  } else {
    for (int l = 0; l < kLanes; ++l) d[l] = (mask >> l & 1) ? value[l] : d[l];
  }
}

inline void writeRow64(Wave& w, const Operand& o, const u64* value) {
  u32 *lo = w.row(o.index), *hi = w.row(o.index + 1);
  u64 mask = w.exec();
  for (int l = 0; l < kLanes; ++l) {
    bool on = mask >> l & 1;
    lo[l] = on ? static_cast<u32>(value[l]) : lo[l];
    hi[l] = on ? static_cast<u32>(value[l] >> 32) : hi[l];
  }
}

// 16-bit results: gfx9 clears the other half of the register, op_sel[3] writes the high half and
// keeps the low one.
inline void writeRow16(Wave& w, const Inst& i, const u32* value) {
  if (i.opSel & 8) {
    Row merged;
    const u32* d = w.row(i.dst.index);
    for (int l = 0; l < kLanes; ++l) merged.x[l] = (d[l] & 0xffff) | value[l] << 16;
    writeRow(w, i.dst, merged.x);
  } else {
    writeRow(w, i.dst, value);
  }
}

inline void writeScalar64(Wave& w, const Operand& o, u64 value) {
  w.s[o.index] = static_cast<u32>(value);
  w.s[o.index + 1] = static_cast<u32>(value >> 32);
}

inline u32 flushBits(u32 x) { return (x & 0x7f800000u) ? x : x & 0x80000000u; }

// Output modifiers of an f32 result: flush, omod, clamp.
inline void finishF32(const Wave& w, const Inst& i, u32* r) {
  if (!(i.omod | i.clamp) && !w.flush32()) return;
  for (int l = 0; l < kLanes; ++l) {
    float x = bits<float>(r[l]);
    x = i.omod == 1 ? x * 2 : i.omod == 2 ? x * 4 : i.omod == 3 ? x * 0.5f : x;
    if (i.clamp) x = x > 0 ? (x < 1 ? x : 1.0f) : (x != x && !w.dx10Clamp()) ? x : 0.0f;
    r[l] = w.flush32() ? flushBits(bits<u32>(x)) : bits<u32>(x);
  }
}

inline void finishF16(const Wave& w, const Inst& i, u32* r) {
  if (!i.clamp && !i.omod) return;
  for (int l = 0; l < kLanes; ++l) {
    float x = static_cast<float>(bits<Half>(static_cast<u16>(r[l])));
    x = i.omod == 1 ? x * 2 : i.omod == 2 ? x * 4 : i.omod == 3 ? x * 0.5f : x;
    if (i.clamp) x = x > 0 ? (x < 1 ? x : 1.0f) : (x != x && !w.dx10Clamp()) ? x : 0.0f;
    r[l] = bits<u16>(static_cast<Half>(x));
  }
}

// Opcode table: plain name (without _e32, _e64, _dpp, _sdwa) to handler and class.
struct OpInfo {
  Handler fn;
  Class cls;
  u8 passes = 0;
};
using OpTable = std::unordered_map<std::string, OpInfo>;
const OpTable& opTable();
void registerSalu(OpTable&);
void registerControl(OpTable&);
void registerFloat(OpTable&);
void registerInteger(OpTable&);
void registerCompare(OpTable&);
void registerPacked(OpTable&);
void registerConvert(OpTable&);
void registerDouble(OpTable&);
void registerLane(OpTable&);
void registerMatrix(OpTable&);
void registerScale(OpTable&);
bool parseMemory(const std::string& name, MemSpec& spec);
void executeMemory(Wave&, const Inst&);
void executeDpp(Wave&, const Inst&);
void executeSdwa(Wave&, const Inst&);
void unknownInstruction(Wave&, const Inst&);

}  // namespace sim
