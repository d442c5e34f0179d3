// f32 and f16 vector arithmetic.
#include "lanewise.h"

namespace sim {
namespace {

// The transcendental unit flushes f32 subnormals whatever MODE says.
float flushed(float x) { return bits<float>(flushBits(bits<u32>(x))); }

template <auto F>
float trans(float x) {
  return flushed(F(flushed(x)));
}

float rcp(float x) { return 1.0f / x; }
float rsq(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
float sine(float x) {
  if (std::isinf(x)) return NAN;
  double turns = static_cast<double>(x) - std::floor(static_cast<double>(x));
  return static_cast<float>(std::sin(2 * M_PI * turns));
}
float cosine(float x) {
  if (std::isinf(x)) return NAN;
  double turns = static_cast<double>(x) - std::floor(static_cast<double>(x));
  return static_cast<float>(std::cos(2 * M_PI * turns));
}
float fract(float x) {
  float f = x - std::floor(x);
  return f >= 1.0f ? bits<float>(0x3f7fffffu) : f;
}
float frexpMant(float x) {
  if (x != x || std::isinf(x)) return x;
  int e;
  return std::frexp(x, &e);
}
int frexpExp(float x) {
  if (x != x || std::isinf(x) || x == 0) return 0;
  int e;
  std::frexp(x, &e);
  return e;
}

void ldexpF32(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = bits<u32>(std::ldexp(bits<float>(a[l]), static_cast<i32>(b[l])));
  }
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

void ldexpF16(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32* a = fetchF16(w, i, 0, ta);
  const u32* b = fetch16(w, i.src[1], i.opSel & 2, false, tb);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = toHalf(std::ldexp(static_cast<double>(fromHalf(a[l])), static_cast<i16>(b[l])));
  }
  finishHalf(w, i, r.x, false);
}

template <bool Half16>
void frexpExpI(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = Half16 ? fetchF16(w, i, 0, ta) : fetchF32(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) {
    i32 e = frexpExp(Half16 ? fromHalf(a[l]) : bits<float>(a[l]));
    r.x[l] = Half16 ? e & 0xffff : e;
  }
  writeRow(w, i.dst, r.x);
}

int exponent(float x) { return bits<u32>(x) >> 23 & 255; }
bool subnormal(float x) { return x != 0 && exponent(x) == 0; }

// v_div_scale: scales a numerator or denominator so that the division steps stay in range. The
// mask says which lanes v_div_fmas must scale back.
void divScaleF32(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetchF32(w, i.src[1], tb);
  const u32* c = fetchF32(w, i.src[2], tc);
  u64 mask = 0;
  for (int l = 0; l < kLanes; ++l) {
    float x = bits<float>(a[l]), den = bits<float>(b[l]), num = bits<float>(c[l]);
    bool isDen = a[l] == b[l], isNum = a[l] == c[l], vcc = false;
    float d = x;
    if (num == 0 || den == 0) {
      d = bits<float>(kNan32);
    } else if (exponent(num) - exponent(den) >= 96) {
      vcc = true;
      if (isDen) d = std::ldexp(x, 64);
    } else if (subnormal(den)) {
      d = std::ldexp(x, 64);
    } else if (subnormal(num / den) || std::fabs(static_cast<double>(num) / den) < 0x1p-126) {
      vcc = true;
      if (isNum) d = std::ldexp(x, 64);
    } else if (exponent(num) <= 23) {
      d = std::ldexp(x, 64);
    }
    r.x[l] = bits<u32>(d);
    mask |= static_cast<u64>(vcc) << l;
  }
  writeRow(w, i.dst, r.x);
  writeScalar64(w, i.dst2, mask & w.exec());
}

void divFmasF32(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetchF32(w, i.src[1], tb);
  const u32* c = fetchF32(w, i.src[2], tc);
  u64 vcc = w.vcc();
  for (int l = 0; l < kLanes; ++l) {
    float f = std::fma(bits<float>(a[l]), bits<float>(b[l]), bits<float>(c[l]));
    if (vcc >> l & 1) f = std::ldexp(f, exponent(bits<float>(c[l])) > 127 ? 64 : -64);
    r.x[l] = bits<u32>(f);
  }
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

float divFixup(float q, float den, float num) {
  u32 sign = (bits<u32>(den) ^ bits<u32>(num)) & 0x80000000u;
  float magnitude;
  if (num != num) return num;
  if (den != den) return den;
  bool infDen = std::isinf(den), infNum = std::isinf(num);
  if ((den == 0 && num == 0) || (infDen && infNum)) return bits<float>(0xffc00000u);
  if (den == 0 || infNum) {
    magnitude = INFINITY;
  } else if (infDen || num == 0) {
    magnitude = 0;
  } else if (exponent(num) - exponent(den) < -150) {
    magnitude = 0;
  } else {
    magnitude = std::fabs(q);
  }
  return bits<float>((bits<u32>(magnitude) & 0x7fffffffu) | sign);
}

void divFixupF32(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetchF32(w, i.src[0], ta), *b = fetchF32(w, i.src[1], tb);
  const u32* c = fetchF32(w, i.src[2], tc);
  for (int l = 0; l < kLanes; ++l) {
    u32 x = bits<u32>(divFixup(bits<float>(a[l]), bits<float>(b[l]), bits<float>(c[l])));
    r.x[l] = (x & 0x7fffffffu) > 0x7f800000u ? x | 0x400000u : x;
  }
  finishF32(w, i, r.x);
  writeRow(w, i.dst, r.x);
}

template <bool Keep>
void fmaF16(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetchF16(w, i, 0, ta), *b = fetchF16(w, i, 1, tb), *c = fetchF16(w, i, 2, tc);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = toHalf(static_cast<double>(fromHalf(a[l])) * fromHalf(b[l]) + fromHalf(c[l]));
  }
  finishHalf(w, i, r.x, Keep);
}

// v_mad_mix: each source is an f32 or, where op_sel_hi is set, a half picked by op_sel.
template <int Mode>  // 0: f32 result, 1: low half, 2: high half
void fmaMix(Wave& w, const Inst& i) {
  Row t[3], r;
  const u32* p[3];
  for (int n = 0; n < 3; ++n) {
    Operand plain = i.src[n];
    plain.neg = plain.abs = false;
    bool half = i.opSelHi >> n & 1, neg = i.src[n].neg, abs = i.src[n].abs;
    const u32* s = half ? fetch16(w, plain, i.opSel >> n & 1, true, t[n]) : fetch(w, plain, t[n]);
    u32 keep = abs ? 0x7fffffffu : ~0u, flip = neg ? 0x80000000u : 0;
    Row wide;
    if (half) {
      fromHalves(s, reinterpret_cast<float*>(wide.x));
      s = wide.x;
    }
    for (int l = 0; l < kLanes; ++l) t[n].x[l] = (s[l] & keep) ^ flip;
    p[n] = t[n].x;
  }
  const u32* d = w.row(i.dst.index);
  for (int l = 0; l < kLanes; ++l) {
    float a = bits<float>(p[0][l]), b = bits<float>(p[1][l]), c = bits<float>(p[2][l]);
    float f = std::fma(a, b, c);
    if (i.clamp) f = f > 0 ? (f < 1 ? f : 1.0f) : 0.0f;
    u32 h = Mode ? toHalf(f) : 0;
    r.x[l] = Mode == 0   ? gpuNan(f, (a != a) | (b != b) | (c != c))
             : Mode == 1 ? (d[l] & 0xffff0000u) | h
                         : (d[l] & 0xffffu) | h << 16;
  }
  writeRow(w, i.dst, r.x);
}

float add(float a, float b) { return a + b; }
float sub(float a, float b) { return a - b; }
float mul(float a, float b) { return a * b; }
float min3(float a, float b, float c) { return minimum(minimum(a, b), c); }
float max3(float a, float b, float c) { return maximum(maximum(a, b), c); }
float mulLegacy(float a, float b) { return a == 0 || b == 0 ? 0.0f : a * b; }
float fma32(float a, float b, float c) { return std::fma(a, b, c); }
float mad32(float a, float b, float c) { return a * b + c; }
float exp2(float x) { return ::exp2f(x); }
float log2(float x) { return ::log2f(x); }
float root(float x) { return std::sqrt(x); }
float floor_(float x) { return std::floor(x); }
float ceil_(float x) { return std::ceil(x); }
float trunc_(float x) { return std::trunc(x); }
float even(float x) { return std::nearbyint(x); }

}  // namespace

void registerFloat(OpTable& t) {
  auto valu = [&](const std::string& n, Handler h) { t[n] = {h, Class::Valu}; };
  auto trn = [&](const std::string& n, Handler h) { t[n] = {h, Class::Trans}; };
  valu("v_add_f32", binaryF32<add>);
  valu("v_sub_f32", binaryF32<sub>);
  valu("v_subrev_f32", binaryF32<[](float a, float b) { return b - a; }>);
  valu("v_mul_f32", binaryF32<mul>);
  valu("v_mul_legacy_f32", binaryF32<mulLegacy>);
  valu("v_min_f32", binaryF32<minimum>);
  valu("v_max_f32", binaryF32<maximum>);
  valu("v_fma_f32", ternaryF32<fma32>);
  for (const char* n : {"v_fmac_f32", "v_fmaak_f32", "v_fmamk_f32"}) valu(n, ternaryF32<fma32>);
  for (const char* n : {"v_mad_f32", "v_mac_f32", "v_madak_f32", "v_madmk_f32"}) {
    valu(n, ternaryF32<mad32>);
  }
  valu("v_min3_f32", ternaryF32<min3>);
  valu("v_minimum3_f32",
       ternaryF32<[](float a, float b, float c) { return lowest(lowest(a, b), c); }>);
  valu("v_maximum3_f32",
       ternaryF32<[](float a, float b, float c) { return highest(highest(a, b), c); }>);
  valu("v_max3_f32", ternaryF32<max3>);
  valu("v_med3_f32", ternaryF32<median>);
  valu("v_ldexp_f32", ldexpF32);
  valu("v_div_scale_f32", divScaleF32);
  valu("v_div_fmas_f32", divFmasF32);
  valu("v_div_fixup_f32", divFixupF32);
  valu("v_floor_f32", unaryF32<floor_>);
  valu("v_ceil_f32", unaryF32<ceil_>);
  valu("v_trunc_f32", unaryF32<trunc_>);
  valu("v_rndne_f32", unaryF32<even>);
  valu("v_fract_f32", unaryF32<fract>);
  valu("v_frexp_mant_f32", unaryF32<frexpMant>);
  valu("v_frexp_exp_i32_f32", frexpExpI<false>);
  trn("v_exp_f32", unaryF32<trans<exp2>>);
  trn("v_log_f32", unaryF32<trans<log2>>);
  trn("v_rcp_f32", unaryF32<trans<rcp>>);
  trn("v_rcp_iflag_f32", unaryF32<trans<rcp>>);
  trn("v_rsq_f32", unaryF32<trans<rsq>>);
  trn("v_sqrt_f32", unaryF32<trans<root>>);
  trn("v_sin_f32", unaryF32<trans<sine>>);
  trn("v_cos_f32", unaryF32<trans<cosine>>);
  trn("v_exp_legacy_f32", unaryF32<trans<exp2>>);
  trn("v_log_legacy_f32", unaryF32<trans<log2>>);

  valu("v_add_f16", binaryF16<add>);
  valu("v_sub_f16", binaryF16<sub>);
  valu("v_subrev_f16", binaryF16<[](float a, float b) { return b - a; }>);
  valu("v_mul_f16", binaryF16<mul>);
  valu("v_min_f16", binaryF16<minimum>);
  valu("v_max_f16", binaryF16<maximum>);
  for (const char* n : {"v_fma_f16", "v_fmac_f16", "v_fmaak_f16", "v_fmamk_f16", "v_mad_f16",
                        "v_mac_f16", "v_madak_f16", "v_madmk_f16"}) {
    valu(n, fmaF16<true>);
  }
  for (const char* n : {"v_fma_legacy_f16", "v_mad_legacy_f16"}) valu(n, fmaF16<false>);
  valu("v_min3_f16", ternaryF16<min3>);
  valu("v_max3_f16", ternaryF16<max3>);
  valu("v_med3_f16", ternaryF16<median>);
  valu("v_div_fixup_f16", ternaryF16<divFixup>);
  valu("v_div_fixup_legacy_f16", ternaryF16<divFixup, false>);
  valu("v_ldexp_f16", ldexpF16);
  valu("v_floor_f16", unaryF16<floor_>);
  valu("v_ceil_f16", unaryF16<ceil_>);
  valu("v_trunc_f16", unaryF16<trunc_>);
  valu("v_rndne_f16", unaryF16<even>);
  valu("v_fract_f16", unaryF16<[](float x) {
         float f = x - std::floor(x);
         return f >= 0x1.ffcp-1f ? 0x1.ffcp-1f : f;
       }>);
  valu("v_frexp_mant_f16", unaryF16<frexpMant>);
  valu("v_frexp_exp_i16_f16", frexpExpI<true>);
  trn("v_exp_f16", unaryF16<exp2>);
  trn("v_log_f16", unaryF16<log2>);
  trn("v_rcp_f16", unaryF16<rcp>);
  trn("v_rsq_f16", unaryF16<rsq>);
  trn("v_sqrt_f16", unaryF16<root>);
  trn("v_sin_f16", unaryF16<sine>);
  trn("v_cos_f16", unaryF16<cosine>);
  for (const char* n : {"v_fma_mix_f32", "v_mad_mix_f32"}) valu(n, fmaMix<0>);
  for (const char* n : {"v_fma_mixlo_f16", "v_mad_mixlo_f16"}) valu(n, fmaMix<1>);
  for (const char* n : {"v_fma_mixhi_f16", "v_mad_mixhi_f16"}) valu(n, fmaMix<2>);
}

}  // namespace sim
