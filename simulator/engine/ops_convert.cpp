// Conversions between number formats.
#include <algorithm>
#include <limits>

#include "float8.h"

namespace sim {

namespace {

template <bool Bf8>
const Float8& format(const Wave& w) {
  return Bf8 ? bf8Format(w) : fp8Format(w);
}

// Two f32 to two bytes, in the half of the destination that op_sel picks.
template <bool Bf8>
void packTo8(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetchF32(w, i.src[1], tb);
  const u32* d = w.row(i.dst.index);
  const Float8 f = format<Bf8>(w);
  bool saturate = w.fp16Overflow() || i.clamp, high = i.opSel & 8;
  for (int l = 0; l < kLanes; ++l) {
    u32 pair = encode8(bits<float>(a[l]), f, saturate) | encode8(bits<float>(b[l]), f, saturate)
                                                             << 8;
    r.x[l] = high ? (d[l] & 0xffff) | pair << 16 : (d[l] & 0xffff0000u) | pair;
  }
  writeRow(w, i.dst, r.x);
}

// Stochastic rounding: random bits are added below the kept mantissa, then it truncates.
template <bool Bf8>
void stochasticTo8(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  const u32* d = w.row(i.dst.index);
  const Float8 f = format<Bf8>(w);
  bool saturate = w.fp16Overflow() || i.clamp;
  int byte = (i.opSel >> 2 & 1) | (i.opSel >> 3 & 1) << 1;
  for (int l = 0; l < kLanes; ++l) {
    float x = bits<float>(a[l]);
    if (std::isfinite(x)) {
      int e = std::max(std::ilogb(x == 0 ? 1e-30f : x), 1 - f.bias);
      double quantum = std::ldexp(1.0, e - f.mantissa);
      double q = std::fabs(x) / quantum + b[l] * 0x1p-32;
      x = std::copysign(static_cast<float>(std::floor(q) * quantum), x);
    }
    r.x[l] = (d[l] & ~(255u << (8 * byte))) | encode8(x, f, saturate) << (8 * byte);
  }
  writeRow(w, i.dst, r.x);
}

template <Float8 F>
void from8(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetch(w, i.src[0], ta);
  int shift = 8 * ((i.opSel & 1) << 1 | (i.opSel >> 1 & 1));
  for (int l = 0; l < kLanes; ++l) r.x[l] = bits<u32>(decode8<F>(a[l] >> shift & 255));
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

template <Float8 F>
void pairFrom8(Wave& w, const Inst& i) {
  Row ta, lo, hi;
  const u32* a = fetch(w, i.src[0], ta);
  int shift = (i.opSel & 1) ? 16 : 0;
  for (int l = 0; l < kLanes; ++l) {
    lo.x[l] = bits<u32>(decode8<F>(a[l] >> shift & 255));
    hi.x[l] = bits<u32>(decode8<F>(a[l] >> (shift + 8) & 255));
  }
  Operand second = i.dst;
  ++second.index;
  writeRow(w, i.dst, lo.x);
  writeRow(w, second, hi.x);
}

// By the dialect that the target has.
template <Handler Fnuz, Handler Ocp>
void byDialect(Wave& w, const Inst& i) {
  w.object->gpu->fnuz ? Fnuz(w, i) : Ocp(w, i);
}

template <class T>
u32 saturate(double x) {
  if (x != x) return 0;
  constexpr double lo = std::numeric_limits<T>::min(), hi = std::numeric_limits<T>::max();
  return static_cast<u32>(static_cast<T>(x <= lo ? lo : x >= hi ? hi : x));
}

template <auto F>
void f32ToInt(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetchF32(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = F(bits<float>(a[l]));
  writeRow(w, i.dst, r.x);
}

template <auto F>
void intToF32(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetch(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = bits<u32>(static_cast<float>(F(a[l])));
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

void f32FromF16(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetchF16(w, i, 0, ta);
  fromHalves(a, reinterpret_cast<float*>(r.x));
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

u32 halfChecked(float x, bool saturating) {
  u32 h = toHalf(x);
  return saturating && (h & 0x7fff) == 0x7c00 && !std::isinf(x) ? (h & 0x8000) | 0x7bff : h;
}

void f16FromF32(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetchF32(w, i.src[0], ta);
  bool saturating = w.fp16Overflow();
  if (saturating) {
    for (int l = 0; l < kLanes; ++l) r.x[l] = halfChecked(bits<float>(a[l]), true);
  } else {
    for (int l = 0; l < kLanes; ++l) r.x[l] = toHalf(bits<float>(a[l]));
  }
  finishHalf(w, i, r.x, false);
}

// Round toward zero: drop the bits that do not fit.
u32 halfTowardZero(float x) {
  u32 h = toHalf(x);
  if (x != x || std::isinf(x)) return h;
  if ((h & 0x7fff) == 0x7c00) return (h & 0x8000) | 0x7bff;
  return std::fabs(fromHalf(h)) > std::fabs(x) ? h - 1 : h;
}

template <auto F>
void packF32(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetchF32(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = (F(bits<float>(a[l])) & 0xffff) | F(bits<float>(b[l])) << 16;
  }
  writeRow(w, i.dst, r.x);
}

template <auto F>
void packInt(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) r.x[l] = (F(a[l]) & 0xffff) | F(b[l]) << 16;
  writeRow(w, i.dst, r.x);
}

u32 snorm(float x) {
  return saturate<i16>(std::nearbyint(std::fmin(std::fmax(x, -1.f), 1.f) * 32767.f));
}
u32 unorm(float x) {
  return saturate<u16>(std::nearbyint(std::fmin(std::fmax(x, 0.f), 1.f) * 65535.f));
}

void packHalves(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetchF16(w, i, 0, ta), *b = fetchF16(w, i, 1, tb);
  for (int l = 0; l < kLanes; ++l) r.x[l] = a[l] | b[l] << 16;
  writeRow(w, i.dst, r.x);
}

// v_cvt_pk_u8_f32: one byte of the third source is replaced.
void packByte(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  const u32* c = fetch(w, i.src[2], tc);
  for (int l = 0; l < kLanes; ++l) {
    int shift = 8 * (b[l] & 3);
    u32 byte = saturate<u8>(std::nearbyint(bits<float>(a[l])));
    r.x[l] = (c[l] & ~(255u << shift)) | byte << shift;
  }
  writeRow(w, i.dst, r.x);
}

template <class T>
void f16ToInt(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetchF16(w, i, 0, ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = saturate<T>(std::trunc(fromHalf(a[l]))) & 0xffff;
  writeRow16(w, i, r.x);
}
template <class T>
void intToF16(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetch16(w, i.src[0], i.opSel & 1, false, ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = toHalf(static_cast<float>(static_cast<T>(a[l])));
  finishHalf(w, i, r.x, false);
}

}  // namespace

void registerConvert(OpTable& t) {
  auto add = [&](const char* n, Handler h) { t[n] = {h, Class::Valu}; };
  add("v_cvt_pk_fp8_f32", packTo8<false>);
  add("v_cvt_pk_bf8_f32", packTo8<true>);
  add("v_cvt_sr_fp8_f32", stochasticTo8<false>);
  add("v_cvt_sr_bf8_f32", stochasticTo8<true>);
  add("v_cvt_f32_fp8", byDialect<from8<kE4M3Fnuz>, from8<kE4M3>>);
  add("v_cvt_f32_bf8", byDialect<from8<kE5M2Fnuz>, from8<kE5M2>>);
  add("v_cvt_pk_f32_fp8", byDialect<pairFrom8<kE4M3Fnuz>, pairFrom8<kE4M3>>);
  add("v_cvt_pk_f32_bf8", byDialect<pairFrom8<kE5M2Fnuz>, pairFrom8<kE5M2>>);

  add("v_cvt_f32_i32", intToF32<[](u32 x) { return i32(x); }>);
  add("v_cvt_f32_u32", intToF32<[](u32 x) { return x; }>);
  add("v_cvt_f32_ubyte0", intToF32<[](u32 x) { return x & 255; }>);
  add("v_cvt_f32_ubyte1", intToF32<[](u32 x) { return x >> 8 & 255; }>);
  add("v_cvt_f32_ubyte2", intToF32<[](u32 x) { return x >> 16 & 255; }>);
  add("v_cvt_f32_ubyte3", intToF32<[](u32 x) { return x >> 24; }>);
  add("v_cvt_off_f32_i4", intToF32<[](u32 x) { return (i32(x << 28) >> 28) / 16.0f; }>);
  add("v_cvt_i32_f32", f32ToInt<[](float x) { return saturate<i32>(std::trunc(x)); }>);
  add("v_cvt_u32_f32", f32ToInt<[](float x) { return saturate<u32>(std::trunc(x)); }>);
  add("v_cvt_rpi_i32_f32", f32ToInt<[](float x) { return saturate<i32>(std::floor(x + 0.5)); }>);
  add("v_cvt_flr_i32_f32", f32ToInt<[](float x) { return saturate<i32>(std::floor(x)); }>);
  add("v_cvt_f32_f16", f32FromF16);
  add("v_cvt_f16_f32", f16FromF32);
  add("v_cvt_f32_bf16", [](Wave& w, const Inst& i) {
    Row ta, r;
    const u32* a = fetch16(w, i.src[0], i.opSel & 1, false, ta);
    for (int l = 0; l < kLanes; ++l) r.x[l] = a[l] << 16;
    writeRow(w, i.dst, r.x);
  });
  add("v_cvt_pkrtz_f16_f32", packF32<halfTowardZero>);
  add("v_cvt_pk_f16_f32", packF32<[](float x) { return toHalf(x); }>);
  add("v_cvt_pk_bf16_f32", packF32<toBf16>);
  add("v_cvt_pknorm_i16_f32", packF32<snorm>);
  add("v_cvt_pknorm_u16_f32", packF32<unorm>);
  add("v_cvt_pk_u16_u32", packInt<[](u32 x) { return x > 65535 ? 65535u : x; }>);
  add("v_cvt_pk_i16_i32", packInt<[](u32 x) {
        i32 y = i32(x);
        return u32(y < -32768 ? -32768 : y > 32767 ? 32767 : y);
      }>);
  add("v_cvt_pk_u8_f32", packByte);
  add("v_pack_b32_f16", packHalves);
  add("v_cvt_u16_f16", f16ToInt<u16>);
  add("v_cvt_i16_f16", f16ToInt<i16>);
  add("v_cvt_f16_u16", intToF16<u16>);
  add("v_cvt_f16_i16", intToF16<i16>);
}

}  // namespace sim
