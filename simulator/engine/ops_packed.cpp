// VOP3P: two 16-bit or two 32-bit operations an instruction, and the dot products.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "float8.h"

namespace sim {
namespace {

// One half of a packed source: op_sel picks for the low result, op_sel_hi for the high one.
const u32* half(const Wave& w, const Inst& i, int n, bool highResult, bool isFloat, Row& tmp) {
  bool high = (highResult ? i.opSelHi : i.opSel) >> n & 1;
  Operand plain = i.src[n];
  plain.neg = (highResult ? i.negHi : i.negLo) >> n & 1;
  plain.abs = false;
  return fetch16(w, plain, high, isFloat, tmp);
}

template <int N, auto F>
void packedF16(Wave& w, const Inst& i) {
  Row t[3], out[2];
  for (int h = 0; h < 2; ++h) {
    const u32* s[3] = {};
    for (int n = 0; n < N; ++n) s[n] = half(w, i, n, h, true, t[n]);
    for (int l = 0; l < kLanes; ++l) {
      if constexpr (N == 3) {
        out[h].x[l] = F(s[0][l], s[1][l], s[2][l]);
      } else {
        out[h].x[l] = F(s[0][l], s[1][l]);
      }
    }
    finishF16(w, i, out[h].x);
  }
  for (int l = 0; l < kLanes; ++l) out[0].x[l] |= out[1].x[l] << 16;
  writeRow(w, i.dst, out[0].x);
}

// Integer halves; `Wide` results are clamped to T when the instruction says clamp.
template <int N, class T, auto F>
void packedInt(Wave& w, const Inst& i) {
  Row t[3], out[2];
  constexpr i32 lo = std::numeric_limits<T>::min(), hi = std::numeric_limits<T>::max();
  for (int h = 0; h < 2; ++h) {
    const u32* s[3] = {};
    for (int n = 0; n < N; ++n) s[n] = half(w, i, n, h, false, t[n]);
    for (int l = 0; l < kLanes; ++l) {
      i64 x;
      if constexpr (N == 3) {
        x = F(static_cast<T>(s[0][l]), static_cast<T>(s[1][l]), static_cast<T>(s[2][l]));
      } else {
        x = F(static_cast<T>(s[0][l]), static_cast<T>(s[1][l]));
      }
      if (i.clamp) x = x < lo ? lo : x > hi ? hi : x;
      out[h].x[l] = static_cast<u16>(x);
    }
  }
  for (int l = 0; l < kLanes; ++l) out[0].x[l] |= out[1].x[l] << 16;
  writeRow(w, i.dst, out[0].x);
}

// One word of a 64-bit source. Constants fill the low word only.
const u32* word(const Wave& w, const Inst& i, int n, bool highResult, bool isFloat, Row& tmp) {
  bool high = (highResult ? i.opSelHi : i.opSel) >> n & 1;
  Operand o = i.src[n];
  o.neg = isFloat && ((highResult ? i.negHi : i.negLo) >> n & 1);
  o.abs = false;
  if (high && o.is(Kind::Imm)) {
    o.imm = 0;
    o.isReal = false;
  } else if (high) {
    ++o.index;
  }
  return isFloat ? fetchF32(w, o, tmp) : fetch(w, o, tmp);
}

template <int N, auto F>
void packedF32(Wave& w, const Inst& i) {
  Row t[3], out[2];
  for (int h = 0; h < 2; ++h) {
    const u32* s[3] = {};
    for (int n = 0; n < N; ++n) s[n] = word(w, i, n, h, true, t[n]);
    for (int l = 0; l < kLanes; ++l) {
      float a = bits<float>(s[0][l]), b = bits<float>(s[1][l]);
      if constexpr (N == 3) {
        float c = bits<float>(s[2][l]);
        out[h].x[l] = gpuNan(F(a, b, c), (a != a) | (b != b) | (c != c));
      } else {
        out[h].x[l] = gpuNan(F(a, b), (a != a) | (b != b));
      }
    }
    finishF32(w, i, out[h].x);
  }
  Operand second = i.dst;
  ++second.index;
  writeRow(w, i.dst, out[0].x);
  writeRow(w, second, out[1].x);
}

// v_pk_mov_b32 takes its low word from source 0 and its high word from source 1.
void packedMov(Wave& w, const Inst& i) {
  Row t[2], lo, hi;
  std::memcpy(lo.x, word(w, i, 0, false, false, t[0]), sizeof lo);
  std::memcpy(hi.x, word(w, i, 1, false, false, t[1]), sizeof hi);
  Operand second = i.dst;
  ++second.index;
  writeRow(w, i.dst, lo.x);
  writeRow(w, second, hi.x);
}

u32 addH(u32 a, u32 b) { return toHalf(fromHalf(a) + fromHalf(b)); }
u32 mulH(u32 a, u32 b) { return toHalf(fromHalf(a) * fromHalf(b)); }
u32 minH(u32 a, u32 b) { return toHalf(minimum(fromHalf(a), fromHalf(b))); }
u32 maxH(u32 a, u32 b) { return toHalf(maximum(fromHalf(a), fromHalf(b))); }
u32 fmaH(u32 a, u32 b, u32 c) {
  return toHalf(static_cast<double>(fromHalf(a)) * fromHalf(b) + fromHalf(c));
}

template <auto Unpack>
void dot2F32(Wave& w, const Inst& i) {
  Row ta[2], tb[2], tc, r;
  const u32 *a[2], *b[2];
  for (int h = 0; h < 2; ++h) {
    a[h] = half(w, i, 0, h, true, ta[h]);
    b[h] = half(w, i, 1, h, true, tb[h]);
  }
  Operand plain = i.src[2];
  plain.neg = i.negLo >> 2 & 1;
  const u32* c = fetchF32(w, plain, tc);
  for (int l = 0; l < kLanes; ++l) {
    float sum = std::fma(Unpack(a[1][l]), Unpack(b[1][l]),
                         std::fma(Unpack(a[0][l]), Unpack(b[0][l]), bits<float>(c[l])));
    r.x[l] = bits<u32>(sum);
  }
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

// Integer dot product of 32 / Width elements; `Signed` for both sources.
template <int Width, bool Signed>
void dotInt(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  const u32* c = fetch(w, i.src[2], tc);
  auto element = [](u32 x, int n) {
    u32 top = x << (32 - Width * (n + 1));
    return Signed ? static_cast<i64>(static_cast<i32>(top) >> (32 - Width))
                  : static_cast<i64>(top >> (32 - Width));
  };
  for (int l = 0; l < kLanes; ++l) {
    i64 sum = Signed ? static_cast<i64>(static_cast<i32>(c[l])) : static_cast<i64>(c[l]);
    for (int n = 0; n < 32 / Width; ++n) sum += element(a[l], n) * element(b[l], n);
    if (i.clamp && Signed) sum = std::min<i64>(std::max<i64>(sum, INT32_MIN), INT32_MAX);
    if (i.clamp && !Signed) sum = std::min<i64>(sum, UINT32_MAX);
    r.x[l] = static_cast<u32>(sum);
  }
  writeRow(w, i.dst, r.x);
}

}  // namespace

void registerPacked(OpTable& t) {
  auto add = [&](const char* n, Handler h) { t[n] = {h, Class::Valu}; };
  add("v_pk_add_f16", packedF16<2, addH>);
  add("v_pk_mul_f16", packedF16<2, mulH>);
  add("v_pk_min_f16", packedF16<2, minH>);
  add("v_pk_max_f16", packedF16<2, maxH>);
  add("v_pk_fma_f16", packedF16<3, fmaH>);
  add("v_pk_fmac_f16", packedF16<3, fmaH>);
  add("v_pk_minimum3_f16", packedF16<3, [](u32 a, u32 b, u32 c) {
        return toHalf(lowest(lowest(fromHalf(a), fromHalf(b)), fromHalf(c)));
      }>);
  add("v_pk_maximum3_f16", packedF16<3, [](u32 a, u32 b, u32 c) {
        return toHalf(highest(highest(fromHalf(a), fromHalf(b)), fromHalf(c)));
      }>);
#define PK(name, T, expr) add(name, packedInt<2, T, [](i64 a, i64 b) -> i64 { return expr; }>)
  PK("v_pk_add_u16", u16, a + b);
  PK("v_pk_add_i16", i16, a + b);
  PK("v_pk_sub_u16", u16, a - b);
  PK("v_pk_sub_i16", i16, a - b);
  PK("v_pk_mul_lo_u16", u16, a * b);
  PK("v_pk_lshlrev_b16", u16, b << (a & 15));
  PK("v_pk_lshrrev_b16", u16, b >> (a & 15));
  PK("v_pk_ashrrev_i16", i16, b >> (a & 15));
  PK("v_pk_min_u16", u16, a < b ? a : b);
  PK("v_pk_max_u16", u16, a > b ? a : b);
  PK("v_pk_min_i16", i16, a < b ? a : b);
  PK("v_pk_max_i16", i16, a > b ? a : b);
#undef PK
  add("v_pk_mad_u16", packedInt<3, u16, [](i64 a, i64 b, i64 c) { return a * b + c; }>);
  add("v_pk_mad_i16", packedInt<3, i16, [](i64 a, i64 b, i64 c) { return a * b + c; }>);
  add("v_pk_add_f32", packedF32<2, [](float a, float b) { return a + b; }>);
  add("v_pk_mul_f32", packedF32<2, [](float a, float b) { return a * b; }>);
  add("v_pk_fma_f32", packedF32<3, [](float a, float b, float c) { return std::fma(a, b, c); }>);
  add("v_pk_mov_b32", packedMov);
  for (const char* n : {"v_dot2_f32_f16", "v_dot2c_f32_f16"}) add(n, dot2F32<fromHalf>);
  for (const char* n : {"v_dot2_f32_bf16", "v_dot2c_f32_bf16"}) add(n, dot2F32<fromBf16>);
  add("v_dot2_i32_i16", dotInt<16, true>);
  add("v_dot2_u32_u16", dotInt<16, false>);
  add("v_dot2c_i32_i16", dotInt<16, true>);
  add("v_dot4_i32_i8", dotInt<8, true>);
  add("v_dot4c_i32_i8", dotInt<8, true>);
  add("v_dot4_u32_u8", dotInt<8, false>);
  add("v_dot8_i32_i4", dotInt<4, true>);
  add("v_dot8c_i32_i4", dotInt<4, true>);
  add("v_dot8_u32_u4", dotInt<4, false>);
}

}  // namespace sim
