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

// The value of one of the 256 encodings, by arithmetic that the host does for many lanes at once.
template <Float8 F>
float decode8(u32 x) {
  u32 magnitude = x & 127;
  u32 normal = (magnitude << (23 - F.mantissa)) + (u32{127 - F.bias} << 23);
  constexpr float quantum = bits<float>(u32{127 + 1 - F.bias - F.mantissa} << 23);
  u32 subnormal = bits<u32>(static_cast<float>(static_cast<i32>(magnitude)) * quantum);
  u32 value = magnitude >> F.mantissa ? normal : subnormal;
  if (F.infinity) value = magnitude > F.largest ? 0x7f800000u : value;
  value |= (x & 128) << 24;
  bool isNan = F.fnuz ? x == 128 : magnitude > F.largest + F.infinity;
  return bits<float>(isNan ? kNan32 : value);
}

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
