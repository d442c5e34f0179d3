// Templates that apply a scalar function to 64 lanes; the compiler turns the loops into vectors.
#pragma once

#include "operands.h"

namespace sim {

constexpr u32 kNan32 = 0x7fc00000u;

// x86 makes a negative NaN of an invalid operation, the GPU a positive one.
inline u32 gpuNan(float r, bool inputNan) { return r != r && !inputNan ? kNan32 : bits<u32>(r); }

template <auto F>
void unaryF32(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetchF32(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) {
    float x = bits<float>(a[l]);
    r.x[l] = gpuNan(F(x), x != x);
  }
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

template <auto F>
void binaryF32(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetchF32(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) {
    float x = bits<float>(a[l]), y = bits<float>(b[l]);
    r.x[l] = gpuNan(F(x, y), (x != x) | (y != y));
  }
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

template <auto F>
void ternaryF32(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetchF32(w, i.src[1], tb);
  const u32* c = fetchF32(w, i.src[2], tc);
  for (int l = 0; l < kLanes; ++l) {
    float x = bits<float>(a[l]), y = bits<float>(b[l]), z = bits<float>(c[l]);
    r.x[l] = gpuNan(F(x, y, z), (x != x) | (y != y) | (z != z));
  }
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

inline float fromHalf(u32 x) { return static_cast<float>(bits<Half>(static_cast<u16>(x))); }
inline u32 toHalf(float x) {
  return x != x ? 0x7e00u | (bits<u32>(x) >> 31 << 15) : bits<u16>(static_cast<Half>(x));
}

// The low halves of all lanes, sixteen at a time: of a loop over fromHalf the host's compiler makes
// one conversion a lane.
inline void fromHalves(const u32* x, float* out) {
  constexpr int kAtOnce = 16;
  using Words = u32 __attribute__((ext_vector_type(kAtOnce)));
  using Halves = u16 __attribute__((ext_vector_type(kAtOnce)));
  using Numbers = Half __attribute__((ext_vector_type(kAtOnce)));
  using Floats = float __attribute__((ext_vector_type(kAtOnce)));
  for (int l = 0; l < kLanes; l += kAtOnce) {
    Words words;
    std::memcpy(&words, x + l, sizeof words);
    auto halves = __builtin_bit_cast(Numbers, __builtin_convertvector(words, Halves));
    auto floats = __builtin_convertvector(halves, Floats);
    std::memcpy(out + l, &floats, sizeof floats);
  }
}

// f64 to f16 with one rounding: the step through f32 rounds to odd, so the last one sees it.
inline u32 toHalf(double x) {
  float f = static_cast<float>(x);
  u32 u = bits<u32>(f);
  bool inexact = static_cast<double>(f) != x && x == x;
  bool away = std::fabs(static_cast<double>(f)) > std::fabs(x);
  u = inexact ? (u - (away ? 1 : 0)) | 1 : u;
  return toHalf(bits<float>(u));
}

inline const u32* fetchF16(const Wave& w, const Inst& i, int n, Row& tmp) {
  const u32* p = fetch16(w, i.src[n], i.opSel >> n & 1, true, tmp);
  if (w.flush16()) {
    for (u32& x : tmp.x) x = (x & 0x7c00) ? x : x & 0x8000;
  }
  return p;
}

inline void finishHalf(Wave& w, const Inst& i, u32* r, bool keepHigh) {
  finishF16(w, i, r);
  if (w.flush16()) {
    for (int l = 0; l < kLanes; ++l) r[l] = (r[l] & 0x7c00) ? r[l] : r[l] & 0x8000;
  }
  if (keepHigh && !(i.opSel & 8)) {
    const u32* d = w.row(i.dst.index);
    for (int l = 0; l < kLanes; ++l) r[l] |= d[l] & 0xffff0000u;
  }
  writeRow16(w, i, r);
}

template <auto F>
void unaryF16(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetchF16(w, i, 0, ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = toHalf(F(fromHalf(a[l])));
  finishHalf(w, i, r.x, false);
}

template <auto F>
void binaryF16(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetchF16(w, i, 0, ta), *b = fetchF16(w, i, 1, tb);
  for (int l = 0; l < kLanes; ++l) r.x[l] = toHalf(F(fromHalf(a[l]), fromHalf(b[l])));
  finishHalf(w, i, r.x, false);
}

// Three-source 16-bit instructions of gfx9 keep the upper half of the destination, their legacy
// forms clear it.
template <auto F, bool Keep = true>
void ternaryF16(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetchF16(w, i, 0, ta), *b = fetchF16(w, i, 1, tb), *c = fetchF16(w, i, 2, tc);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = toHalf(F(fromHalf(a[l]), fromHalf(b[l]), fromHalf(c[l])));
  }
  finishHalf(w, i, r.x, Keep);
}

template <auto F>
void unaryU32(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetch(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = F(a[l]);
  writeRow(w, i.dst, r.x);
}

template <auto F>
void binaryU32(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) r.x[l] = F(a[l], b[l]);
  writeRow(w, i.dst, r.x);
}

template <auto F>
void ternaryU32(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  const u32* c = fetch(w, i.src[2], tc);
  for (int l = 0; l < kLanes; ++l) r.x[l] = F(a[l], b[l], c[l]);
  writeRow(w, i.dst, r.x);
}

template <auto F>
void binaryU16(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32* a = fetch16(w, i.src[0], i.opSel & 1, false, ta);
  const u32* b = fetch16(w, i.src[1], i.opSel & 2, false, tb);
  for (int l = 0; l < kLanes; ++l) r.x[l] = F(a[l], b[l]) & 0xffff;
  writeRow16(w, i, r.x);
}

template <auto F, bool Keep = true>
void ternaryU16(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32* a = fetch16(w, i.src[0], i.opSel & 1, false, ta);
  const u32* b = fetch16(w, i.src[1], i.opSel & 2, false, tb);
  const u32* c = fetch16(w, i.src[2], i.opSel & 4, false, tc);
  const u32* d = w.row(i.dst.index);
  for (int l = 0; l < kLanes; ++l) {
    u32 above = Keep && !(i.opSel & 8) ? d[l] & 0xffff0000u : 0;
    r.x[l] = (F(a[l], b[l], c[l]) & 0xffff) | above;
  }
  writeRow16(w, i, r.x);
}

inline float minimum(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
inline float maximum(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
// minimum and maximum of IEEE 754-2019, where NaN wins: the minimum3 and maximum3 instructions.
inline float lowest(float a, float b) { return a != a ? a : b != b ? b : minimum(a, b); }
inline float highest(float a, float b) { return a != a ? a : b != b ? b : maximum(a, b); }
inline float median(float a, float b, float c) {
  if ((a != a) | (b != b) | (c != c)) return minimum(minimum(a, b), c);
  float high = maximum(maximum(a, b), c);
  if (high == a) return maximum(b, c);
  if (high == b) return maximum(a, c);
  return maximum(a, b);
}

template <class T>
constexpr T median3(T a, T b, T c) {
  T lo = a < b ? a : b, hi = a < b ? b : a;
  return c < lo ? lo : c > hi ? hi : c;
}

}  // namespace sim
