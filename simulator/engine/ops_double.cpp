// f64 vector arithmetic and its conversions.
#include <limits>

#include "lanewise.h"

namespace sim {
namespace {

u64 gpuNan64(double r, bool inputNan) {
  return r != r && !inputNan ? 0x7ff8000000000000ull : bits<u64>(r);
}

void finish(Wave& w, const Inst& i, u64* r) {
  if (i.omod | i.clamp) {
    for (int l = 0; l < kLanes; ++l) {
      double x = bits<double>(r[l]);
      x = i.omod == 1 ? x * 2 : i.omod == 2 ? x * 4 : i.omod == 3 ? x * 0.5 : x;
      if (i.clamp) x = x > 0 ? (x < 1 ? x : 1.0) : 0.0;
      r[l] = bits<u64>(x);
    }
  }
  writeRow64(w, i.dst, r);
}

template <auto F>
void unary(Wave& w, const Inst& i) {
  Row64 ta, r;
  const u64* a = fetchF64(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) {
    double x = bits<double>(a[l]);
    r.x[l] = gpuNan64(F(x), x != x);
  }
  finish(w, i, r.x);
}

template <auto F>
void binary(Wave& w, const Inst& i) {
  Row64 ta, tb, r;
  const u64 *a = fetchF64(w, i.src[0], ta), *b = fetchF64(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) {
    double x = bits<double>(a[l]), y = bits<double>(b[l]);
    r.x[l] = gpuNan64(F(x, y), (x != x) | (y != y));
  }
  finish(w, i, r.x);
}

template <auto F>
void ternary(Wave& w, const Inst& i) {
  Row64 ta, tb, tc, r;
  const u64 *a = fetchF64(w, i.src[0], ta), *b = fetchF64(w, i.src[1], tb);
  const u64* c = fetchF64(w, i.src[2], tc);
  for (int l = 0; l < kLanes; ++l) {
    double x = bits<double>(a[l]), y = bits<double>(b[l]), z = bits<double>(c[l]);
    r.x[l] = gpuNan64(F(x, y, z), (x != x) | (y != y) | (z != z));
  }
  finish(w, i, r.x);
}

double minimum64(double a, double b) {
  if (a != a) return b;
  if (b != b) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
double maximum64(double a, double b) {
  if (a != a) return b;
  if (b != b) return a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}

int exponent(double x) { return bits<u64>(x) >> 52 & 2047; }
bool subnormal(double x) { return x != 0 && exponent(x) == 0; }

void divScale(Wave& w, const Inst& i) {
  Row64 ta, tb, tc, r;
  const u64 *a = fetchF64(w, i.src[0], ta), *b = fetchF64(w, i.src[1], tb);
  const u64* c = fetchF64(w, i.src[2], tc);
  u64 mask = 0;
  for (int l = 0; l < kLanes; ++l) {
    double x = bits<double>(a[l]), den = bits<double>(b[l]), num = bits<double>(c[l]), d = x;
    bool isDen = a[l] == b[l], isNum = a[l] == c[l], vcc = false;
    bool tinyReciprocal = subnormal(1 / den), tiny = std::fabs(num / den) < 0x1p-1022;
    if (num == 0 || den == 0) {
      d = NAN;
    } else if (exponent(num) - exponent(den) >= 768) {
      vcc = true;
      if (isDen) d = std::ldexp(x, 128);
    } else if (subnormal(den)) {
      d = std::ldexp(x, 128);
    } else if (tinyReciprocal && tiny) {
      vcc = true;
      if (isDen) d = std::ldexp(x, 128);
    } else if (tinyReciprocal) {
      d = std::ldexp(x, -128);
    } else if (tiny) {
      vcc = true;
      if (isNum) d = std::ldexp(x, 128);
    } else if (exponent(num) <= 53) {
      d = std::ldexp(x, 128);
    }
    r.x[l] = bits<u64>(d);
    mask |= static_cast<u64>(vcc) << l;
  }
  writeRow64(w, i.dst, r.x);
  writeScalar64(w, i.dst2, mask & w.exec());
}

void divFmas(Wave& w, const Inst& i) {
  Row64 ta, tb, tc, r;
  const u64 *a = fetchF64(w, i.src[0], ta), *b = fetchF64(w, i.src[1], tb);
  const u64* c = fetchF64(w, i.src[2], tc);
  for (int l = 0; l < kLanes; ++l) {
    double f = std::fma(bits<double>(a[l]), bits<double>(b[l]), bits<double>(c[l]));
    if (w.vcc() >> l & 1) f = std::ldexp(f, exponent(bits<double>(c[l])) > 1023 ? 128 : -128);
    r.x[l] = bits<u64>(f);
  }
  finish(w, i, r.x);
}

double divFixup(double q, double den, double num) {
  if (num != num) return num;
  if (den != den) return den;
  bool negative = std::signbit(num) != std::signbit(den);
  bool infDen = std::isinf(den), infNum = std::isinf(num);
  if ((den == 0 && num == 0) || (infDen && infNum)) return bits<double>(0xfff8000000000000ull);
  double magnitude = den == 0 || infNum                      ? INFINITY
                     : infDen || num == 0                    ? 0
                     : exponent(num) - exponent(den) < -1075 ? 0
                                                             : std::fabs(q);
  return negative ? -magnitude : magnitude;
}

void ldexp64(Wave& w, const Inst& i) {
  Row64 ta, r;
  Row tb;
  const u64* a = fetchF64(w, i.src[0], ta);
  const u32* b = fetch(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = bits<u64>(std::ldexp(bits<double>(a[l]), static_cast<i32>(b[l])));
  }
  finish(w, i, r.x);
}

template <auto F>
void toWord(Wave& w, const Inst& i) {
  Row64 ta;
  Row r;
  const u64* a = fetchF64(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = F(bits<double>(a[l]));
  writeRow(w, i.dst, r.x);
}

template <auto F>
void fromWord(Wave& w, const Inst& i) {
  Row ta;
  Row64 r;
  const u32* a = fetch(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = bits<u64>(static_cast<double>(F(a[l])));
  writeRow64(w, i.dst, r.x);
}

void fromF32(Wave& w, const Inst& i) {
  Row ta;
  Row64 r;
  const u32* a = fetchF32(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = bits<u64>(static_cast<double>(bits<float>(a[l])));
  finish(w, i, r.x);
}

template <class T>
u32 saturate(double x) {
  if (x != x) return 0;
  constexpr double lo = std::numeric_limits<T>::min(), hi = std::numeric_limits<T>::max();
  return static_cast<u32>(static_cast<T>(x <= lo ? lo : x >= hi ? hi : x));
}

double mant(double x) {
  int e;
  return std::isfinite(x) ? std::frexp(x, &e) : x;
}
u32 exponentOf(double x) {
  int e = 0;
  if (std::isfinite(x) && x != 0) std::frexp(x, &e);
  return e;
}
double fract(double x) {
  double f = x - std::floor(x);
  return f >= 1.0 ? 0x1.fffffffffffffp-1 : f;
}

}  // namespace

void registerDouble(OpTable& t) {
  auto add = [&](const char* n, Handler h) { t[n] = {h, Class::Valu}; };
  auto trn = [&](const char* n, Handler h) { t[n] = {h, Class::Trans}; };
  add("v_add_f64", binary<[](double a, double b) { return a + b; }>);
  add("v_mul_f64", binary<[](double a, double b) { return a * b; }>);
  add("v_min_f64", binary<minimum64>);
  add("v_max_f64", binary<maximum64>);
  add("v_fma_f64", ternary<[](double a, double b, double c) { return std::fma(a, b, c); }>);
  add("v_fmac_f64", ternary<[](double a, double b, double c) { return std::fma(a, b, c); }>);
  add("v_div_scale_f64", divScale);
  add("v_div_fmas_f64", divFmas);
  add("v_div_fixup_f64", ternary<divFixup>);
  add("v_ldexp_f64", ldexp64);
  add("v_floor_f64", unary<[](double x) { return std::floor(x); }>);
  add("v_ceil_f64", unary<[](double x) { return std::ceil(x); }>);
  add("v_trunc_f64", unary<[](double x) { return std::trunc(x); }>);
  add("v_rndne_f64", unary<[](double x) { return std::nearbyint(x); }>);
  add("v_fract_f64", unary<fract>);
  add("v_frexp_mant_f64", unary<mant>);
  add("v_frexp_exp_i32_f64", toWord<exponentOf>);
  // The hardware's estimates are good to about 2^-14 (rcp, rsq); refinement code follows them.
  trn("v_rcp_f64", unary<[](double x) { return 1 / x; }>);
  trn("v_rsq_f64", unary<[](double x) { return 1 / std::sqrt(x); }>);
  trn("v_sqrt_f64", unary<[](double x) { return std::sqrt(x); }>);
  add("v_cvt_f32_f64", toWord<[](double x) { return bits<u32>(static_cast<float>(x)); }>);
  add("v_cvt_f64_f32", fromF32);
  add("v_cvt_i32_f64", toWord<[](double x) { return saturate<i32>(std::trunc(x)); }>);
  add("v_cvt_u32_f64", toWord<[](double x) { return saturate<u32>(std::trunc(x)); }>);
  add("v_cvt_f64_i32", fromWord<[](u32 x) { return i32(x); }>);
  add("v_cvt_f64_u32", fromWord<[](u32 x) { return x; }>);
}

}  // namespace sim
