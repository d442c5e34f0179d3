// 8-bit and brain floats. gfx942 has the FNUZ dialects, gfx950 the OCP ones.
#pragma once

#include "lanewise.h"

namespace sim {

struct Float8 {
  int mantissa, bias;
  u32 largest;    // bits of the largest finite value
  bool fnuz;      // one NaN, 0x80, and no negative zero
  bool infinity;  // overflow gives an infinity

  constexpr bool operator==(const Float8&) const = default;
};
constexpr Float8 kE4M3Fnuz{3, 8, 0x7f, true, false};
constexpr Float8 kE5M2Fnuz{2, 16, 0x7f, true, false};
constexpr Float8 kE4M3{3, 7, 0x7e, false, false};
constexpr Float8 kE5M2{2, 15, 0x7b, false, true};

// Decoded values of all 256 encodings.
const float* decodeTable(const Float8& format);

inline const Float8& fp8Format(const Wave& w) { return w.object->gpu->fnuz ? kE4M3Fnuz : kE4M3; }
inline const Float8& bf8Format(const Wave& w) { return w.object->gpu->fnuz ? kE5M2Fnuz : kE5M2; }

// Rounds to nearest even; `saturate` (MODE.FP16_OVFL) clamps finite and infinite overflow.
inline u32 encode8(float x, const Float8& f, bool saturate) {
  u32 u = bits<u32>(x), sign = u >> 24 & 0x80;
  u &= 0x7fffffffu;
  bool isNan = u > 0x7f800000u;
  int shift = 23 - f.mantissa;
  u32 normal = u + (1u << (shift - 1)) - 1 + (u >> shift & 1);
  normal = (normal - (static_cast<u32>(127 - f.bias) << 23)) >> shift;
  // Below the smallest normal, adding a power of two rounds at the fixed quantum.
  u32 magic = static_cast<u32>(127 + 1 - f.bias - f.mantissa + 23) << 23;
  u32 sub = bits<u32>(bits<float>(u) + bits<float>(magic)) - magic;
  u32 r = u < static_cast<u32>(128 - f.bias) << 23 ? sub : normal;
  bool overflow = u >= 0x7f800000u || r > f.largest;
  u32 nan = f.fnuz ? 0x80 : sign | 0x7f;
  u32 over = saturate ? f.largest | sign : f.infinity ? (f.largest + 1) | sign : nan;
  u32 result = r == 0 && f.fnuz ? 0 : r | sign;
  return isNan ? nan : overflow ? over : result;
}

inline float fromBf16(u32 x) { return bits<float>(x << 16); }
inline u32 toBf16(float x) {
  u32 u = bits<u32>(x);
  return x != x ? (u >> 16) | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

}  // namespace sim
