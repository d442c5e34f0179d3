// gfx950: conversions between narrow floats (8, 6 and 4 bits) and f32, f16 or bf16 with a scale,
// and stochastic rounding. The scale is a power of two: the exponent field of an f32 operand.
#include <algorithm>

#include "float8.h"

namespace sim {
namespace {

enum class Fmt { F32, F16, Bf16, Fp8, Bf8, Fp6, Bf6, Fp4 };

constexpr int width(Fmt f) {
  return f == Fmt::F32                     ? 32
         : f == Fmt::F16 || f == Fmt::Bf16 ? 16
         : f == Fmt::Fp8 || f == Fmt::Bf8  ? 8
         : f == Fmt::Fp4                   ? 4
                                           : 6;
}

// Mantissa bits and exponent bias of the formats without infinities or NaN.
struct Small {
  int mantissa, bias;
  u32 largest;
};
constexpr Small small(Fmt f) {
  return f == Fmt::Fp6 ? Small{3, 1, 31} : f == Fmt::Bf6 ? Small{2, 3, 31} : Small{1, 1, 7};
}

u32 nextRandom(u32 x) { return x << 1 ^ (x >> 31 ? 197 : 0); }

// |x| in steps of the format's spacing there, rounded to nearest even, or by adding `random` below
// the last place that is kept.
double rounded(double x, int mantissa, int bias, bool stochastic, u32 random) {
  double a = std::fabs(x);
  if (a == 0 || !std::isfinite(a)) return x;
  int exponent = std::max(std::ilogb(a), 1 - bias);
  double step = std::ldexp(1.0, exponent - mantissa), q = a / step;
  q = stochastic ? std::floor(q + random * 0x1p-32) : std::nearbyint(q);
  return std::copysign(q * step, x);
}

u32 encodeSmall(double x, const Small& f, bool stochastic, u32 random) {
  u32 sign = std::signbit(x) ? f.largest + 1 : 0;
  double r = std::fabs(rounded(x, f.mantissa, f.bias, stochastic, random));
  if (!(r < std::ldexp(1.0, 64))) return sign | f.largest;
  double unit = std::ldexp(1.0, 1 - f.bias - f.mantissa);  // of the subnormals
  if (r < std::ldexp(1.0, 1 - f.bias)) return sign | static_cast<u32>(r / unit);
  int exponent = std::ilogb(r);
  u32 code = static_cast<u32>(exponent + f.bias) << f.mantissa |
             (static_cast<u32>(std::ldexp(r, f.mantissa - exponent)) & ((1u << f.mantissa) - 1));
  return sign | std::min(code, f.largest);
}

u32 encode(const Wave& w, Fmt to, double x, bool clamp, bool stochastic, u32 random) {
  switch (to) {
    case Fmt::F32:
      return bits<u32>(static_cast<float>(x));
    case Fmt::F16:
      return stochastic ? toHalf(static_cast<float>(rounded(x, 10, 15, true, random))) : toHalf(x);
    case Fmt::Bf16:
      return toBf16(static_cast<float>(stochastic ? rounded(x, 7, 127, true, random) : x));
    case Fmt::Fp8:
    case Fmt::Bf8: {
      const Float8& f = to == Fmt::Fp8 ? kE4M3 : kE5M2;
      double y = stochastic ? rounded(x, f.mantissa, f.bias, true, random) : x;
      return encode8(static_cast<float>(y), f, w.fp16Overflow() || clamp);
    }
    default:
      return encodeSmall(x, small(to), stochastic, random);
  }
}

double decode(Fmt from, u32 x) {
  switch (from) {
    case Fmt::F32:
      return bits<float>(x);
    case Fmt::F16:
      return fromHalf(x);
    case Fmt::Bf16:
      return fromBf16(x & 0xffff);
    case Fmt::Fp8:
      return decode8<kE4M3>(x);
    case Fmt::Bf8:
      return decode8<kE5M2>(x);
    default: {
      Small f = small(from);
      double sign = x > f.largest ? -1 : 1;
      u32 m = x & ((1u << f.mantissa) - 1), e = (x & f.largest) >> f.mantissa;
      return sign * (e ? std::ldexp(1 + std::ldexp(double(m), -f.mantissa), e - f.bias)
                       : std::ldexp(double(m), 1 - f.bias - f.mantissa));
    }
  }
}

struct Spec {
  Fmt to, from;
  int count;         // elements
  bool stochastic;   // src[1] has the random bits
  bool two = false;  // elements alternate between src[0] and src[1]
  bool scaled = true;
};
const std::unordered_map<std::string, Spec>& specs();

// Bits [at, at + n) of the registers from `row` on.
u32 extract(const Wave& w, int row, int lane, int at, int n) {
  u64 x = w.row(row + at / 32)[lane];
  if (at % 32 + n > 32) x |= static_cast<u64>(w.row(row + at / 32 + 1)[lane]) << 32;
  return static_cast<u32>(x >> (at % 32) & ((1ull << n) - 1));
}

void convert(Wave& w, const Inst& i) {
  const Spec& s = specs().at(i.name);
  int from = width(s.from), to = width(s.to);
  // op_sel: of a narrow source the byte or half to start at; of a narrow destination where to
  // write.
  int start = from > 8 || s.count > 2     ? 0
              : from == 8 && s.count == 2 ? 16 * (i.opSel & 1)
                                          : 8 * (i.opSel & 3);
  int bitsOut = to * s.count, place = 0;
  if (bitsOut == 8) place = 8 * (i.opSel >> 2 & 3);
  if (bitsOut == 16) place = 16 * (i.opSel >> 3 & 1);
  bool scalarSeed = s.stochastic || s.two;
  const Operand& scaleOperand = i.src[s.scaled ? i.nsrc - 1 : 0];
  Row scaleRow, seedRow;
  const u32* scales = fetch(w, scaleOperand, scaleRow);
  const u32* seeds = scalarSeed && !s.two ? fetch(w, i.src[1], seedRow) : nullptr;
  bool pairOfF32 = s.from == Fmt::F32 && s.count == 2 && !s.stochastic;
  Row first, second;
  const u32* a = from == 32 && s.count <= 2 ? fetchF32(w, i.src[0], first) : nullptr;
  const u32* b = pairOfF32 ? fetchF32(w, i.src[1], second) : nullptr;
  for (u64 lanes = w.exec(); lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctzll(lanes);
    int exponent = s.scaled ? static_cast<int>(scales[lane] >> 23 & 255) - 127 : 0;
    u32 random = seeds ? seeds[lane] : 0;
    u32 out[33] = {};
    for (int n = 0; n < s.count; ++n) {
      u32 x;
      if (s.two) {
        x = w.row(i.src[n & 1].index + n / 2)[lane];
      } else if (pairOfF32) {
        x = (n ? b : a)[lane];
      } else if (i.src[0].is(Kind::Vgpr) && !(a && s.count == 1)) {
        x = extract(w, i.src[0].index, lane, start + n * from, from);
      } else {
        x = (a ? a[lane] : scalar32(w, i.src[0])) >> (start + n * from % 32);
        if (from < 32) x &= (1u << from) - 1;
      }
      double value = std::ldexp(decode(s.from, x), from > to ? -exponent : exponent);
      u64 code = encode(w, s.to, value, i.clamp, s.stochastic, random);
      random = nextRandom(random);
      int at = n * to;
      out[at / 32] |= static_cast<u32>(code << (at % 32));
      if (at % 32 + to > 32) out[at / 32 + 1] |= static_cast<u32>(code >> (32 - at % 32));
    }
    if (bitsOut < 32) {
      u32& d = w.row(i.dst.index)[lane];
      u32 mask = ((1u << bitsOut) - 1) << place;
      d = (d & ~mask) | (out[0] << place & mask);
    } else {
      for (int r = 0; r < bitsOut / 32; ++r) w.row(i.dst.index + r)[lane] = out[r];
    }
  }
}

const std::unordered_map<std::string, Spec>& specs() {
  static const std::unordered_map<std::string, Spec> all = [] {
    std::unordered_map<std::string, Spec> t;
    const std::pair<const char*, Fmt> wide[] = {
        {"f32", Fmt::F32}, {"f16", Fmt::F16}, {"bf16", Fmt::Bf16}};
    const std::string prefix = "v_cvt_scalef32_";
    for (auto [w, wideFmt] : wide) {
      for (auto [n, narrowFmt] : {std::pair{"fp8", Fmt::Fp8}, {"bf8", Fmt::Bf8}}) {
        std::string down = std::string(n) + "_" + w, up = std::string(w) + "_" + n;
        t[prefix + "pk_" + down] = {narrowFmt, wideFmt, 2, false};
        t[prefix + "sr_" + down] = {narrowFmt, wideFmt, 1, true};
        t[prefix + "pk_" + up] = {wideFmt, narrowFmt, 2, false};
        if (wideFmt != Fmt::Bf16) t[prefix + up] = {wideFmt, narrowFmt, 1, false};
      }
      std::string four = w;
      t[prefix + "pk_fp4_" + four] = {Fmt::Fp4, wideFmt, 2, false};
      t[prefix + "sr_pk_fp4_" + four] = {Fmt::Fp4, wideFmt, 2, true};
      t[prefix + "pk_" + four + "_fp4"] = {wideFmt, Fmt::Fp4, 2, false};
      for (auto [n, narrowFmt] : {std::pair{"fp6", Fmt::Fp6}, {"bf6", Fmt::Bf6}}) {
        std::string down = std::string(n) + "_" + w;
        t[prefix + "pk32_" + w + "_" + n] = {wideFmt, narrowFmt, 32, false};
        t[prefix + "sr_pk32_" + down] = {narrowFmt, wideFmt, 32, true};
        if (wideFmt == Fmt::F32) {
          t[prefix + "2xpk16_" + down] = {narrowFmt, wideFmt, 32, false, true};
        } else {
          t[prefix + "pk32_" + down] = {narrowFmt, wideFmt, 32, false};
        }
      }
    }
    t["v_cvt_sr_f16_f32"] = {Fmt::F16, Fmt::F32, 1, true, false, false};
    t["v_cvt_sr_bf16_f32"] = {Fmt::Bf16, Fmt::F32, 1, true, false, false};
    return t;
  }();
  return all;
}

void random(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetch(w, i.src[0], ta);
  for (int l = 0; l < kLanes; ++l) r.x[l] = nextRandom(a[l]);
  writeRow(w, i.dst, r.x);
}

}  // namespace

void registerScale(OpTable& t) {
  for (const auto& [name, spec] : specs()) t[name] = {convert, Class::Valu};
  t["v_prng_b32"] = {random, Class::Valu};
}

}  // namespace sim
