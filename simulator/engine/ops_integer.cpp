// Integer and bit vector instructions, 16, 32 and 64 bits wide.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "lanewise.h"

namespace sim {
namespace {

// Integer add and subtract saturate when the instruction has clamp.
template <class Wide, class T, auto F>
void saturating(Wave& w, const Inst& i) {
  constexpr bool narrow = sizeof(T) == 2;
  Row ta, tb, r;
  const u32* a = narrow ? fetch16(w, i.src[0], i.opSel & 1, false, ta) : fetch(w, i.src[0], ta);
  const u32* b = narrow ? fetch16(w, i.src[1], i.opSel & 2, false, tb) : fetch(w, i.src[1], tb);
  constexpr Wide lo = std::numeric_limits<T>::min(), hi = std::numeric_limits<T>::max();
  for (int l = 0; l < kLanes; ++l) {
    Wide x = F(static_cast<Wide>(static_cast<T>(a[l])), static_cast<Wide>(static_cast<T>(b[l])));
    if (i.clamp) x = x < lo ? lo : x > hi ? hi : x;
    r.x[l] = narrow ? static_cast<u16>(x) : static_cast<u32>(x);
  }
  narrow ? writeRow16(w, i, r.x) : writeRow(w, i.dst, r.x);
}

// Carry chain: mode 0 adds, 1 subtracts, 2 subtracts reversed.
template <int Mode, bool CarryIn>
void carry(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  u64 in = CarryIn ? scalar64(w, i.src[2]) : 0, out = 0;
  for (int l = 0; l < kLanes; ++l) {
    u64 x = Mode == 2 ? b[l] : a[l], y = Mode == 2 ? a[l] : b[l], c = in >> l & 1;
    u64 sum = Mode == 0 ? x + y + c : x - y - c;
    r.x[l] = static_cast<u32>(sum);
    out |= (sum >> 32 & 1) << l;
  }
  if (i.clamp) {
    for (int l = 0; l < kLanes; ++l) r.x[l] = (out >> l & 1) ? (Mode == 0 ? ~0u : 0) : r.x[l];
  }
  writeRow(w, i.dst, r.x);
  writeScalar64(w, i.dst2, out & w.exec());
}

void cndmask(Wave& w, const Inst& i) {
  Row ta, tb, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  u32 clear[2], flip[2];
  for (int n = 0; n < 2; ++n) {
    clear[n] = i.src[n].abs ? 0x7fffffffu : ~0u;
    flip[n] = i.src[n].neg ? 0x80000000u : 0;
  }
  u64 mask = scalar64(w, i.src[2]);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = (mask >> l & 1) ? (b[l] & clear[1]) ^ flip[1] : (a[l] & clear[0]) ^ flip[0];
  }
  writeRow(w, i.dst, r.x);
}

u32 permByte(u32 a, u32 b, u32 select) {
  u64 both = static_cast<u64>(a) << 32 | b;
  if (select < 8) return both >> (8 * select) & 255;
  if (select < 12) return (both >> (16 * (select - 8) + 15) & 1) ? 255 : 0;
  return select == 12 ? 0 : 255;
}
u32 perm(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int n = 0; n < 4; ++n) r |= permByte(a, b, c >> (8 * n) & 255) << (8 * n);
  return r;
}

u32 bfeU(u32 a, u32 b, u32 c) {
  u32 width = c & 31;
  return width ? (a >> (b & 31)) & ((1u << width) - 1) : 0;
}
u32 bfeI(u32 a, u32 b, u32 c) {
  u32 width = c & 31, offset = b & 31;
  if (!width) return 0;
  i32 x = static_cast<i32>(a) >> offset;
  return static_cast<i32>(static_cast<u32>(x) << (32 - width)) >> (32 - width);
}

i32 sext24(u32 x) { return static_cast<i32>(x << 8) >> 8; }
u32 ffbhI(u32 x) {
  u32 y = static_cast<i32>(x) < 0 ? ~x : x;
  return y ? __builtin_clz(y) : ~0u;
}
u32 sad8(u32 a, u32 b, u32 c) {
  for (int n = 0; n < 4; ++n) {
    i32 d = static_cast<i32>(a >> (8 * n) & 255) - static_cast<i32>(b >> (8 * n) & 255);
    c += d < 0 ? -d : d;
  }
  return c;
}
u32 sad16(u32 a, u32 b, u32 c) {
  for (int n = 0; n < 2; ++n) {
    i32 d = static_cast<i32>(a >> (16 * n) & 65535) - static_cast<i32>(b >> (16 * n) & 65535);
    c += d < 0 ? -d : d;
  }
  return c;
}

void mbcnt(Wave& w, const Inst& i, bool high) {
  Row ta, tb, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) {
    u64 below = (1ull << l) - 1;
    u32 mask = high ? static_cast<u32>(below >> 32) : static_cast<u32>(below);
    r.x[l] = b[l] + __builtin_popcount(a[l] & mask);
  }
  writeRow(w, i.dst, r.x);
}

template <class T>
void mad64(Wave& w, const Inst& i) {
  using Wide = std::conditional_t<std::is_signed_v<T>, i64, u64>;
  Row ta, tb;
  Row64 tc, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  const u64* c = fetch64(w, i.src[2], tc);
  u64 out = 0;
  for (int l = 0; l < kLanes; ++l) {
    u64 product = static_cast<Wide>(static_cast<T>(a[l])) * static_cast<T>(b[l]);
    r.x[l] = product + c[l];
    out |= static_cast<u64>(r.x[l] < c[l]) << l;
  }
  writeRow64(w, i.dst, r.x);
  writeScalar64(w, i.dst2, out & w.exec());
}

// 64-bit shift with the amount first.
template <auto F>
void shiftRev64(Wave& w, const Inst& i) {
  Row ta;
  Row64 tb, r;
  const u32* a = fetch(w, i.src[0], ta);
  const u64* b = fetch64(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) r.x[l] = F(b[l], a[l] & 63);
  writeRow64(w, i.dst, r.x);
}

void lshlAdd64(Wave& w, const Inst& i) {
  Row64 ta, tc, r;
  Row tb;
  const u64 *a = fetch64(w, i.src[0], ta), *c = fetch64(w, i.src[2], tc);
  const u32* b = fetch(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) r.x[l] = (a[l] << (b[l] & 7)) + c[l];
  writeRow64(w, i.dst, r.x);
}

void mov64(Wave& w, const Inst& i) {
  Row64 ta;
  writeRow64(w, i.dst, fetch64(w, i.src[0], ta));
}

void swap(Wave& w, const Inst& i) {
  u32 *a = w.row(i.dst.index), *b = w.row(i.src[0].index);
  for (int l = 0; l < kLanes; ++l) {
    if (w.exec() >> l & 1) std::swap(a[l], b[l]);
  }
}

// v_mov_b32 keeps float modifiers (only f32 forms carry them).
void mov32(Wave& w, const Inst& i) {
  Row ta, r;
  const u32* a = fetch(w, i.src[0], ta);
  u32 clear = i.src[0].abs ? 0x7fffffffu : ~0u, flip = i.src[0].neg ? 0x80000000u : 0;
  for (int l = 0; l < kLanes; ++l) r.x[l] = (a[l] & clear) ^ flip;
  writeRow(w, i.dst, r.x);
}

template <class T, bool Max>
u32 pick(u32 a, u32 b) {
  T x = static_cast<T>(a), y = static_cast<T>(b);
  return Max ? (x > y ? a : b) : (x < y ? a : b);
}
template <class T>
u32 med(u32 a, u32 b, u32 c) {
  return static_cast<u32>(median3<T>(static_cast<T>(a), static_cast<T>(b), static_cast<T>(c)));
}
template <class T, bool Max>
u32 pick3(u32 a, u32 b, u32 c) {
  return pick<T, Max>(pick<T, Max>(a, b), c);
}

template <class T>
void mad24(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  const u32* c = fetch(w, i.src[2], tc);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = (std::is_signed_v<T> ? static_cast<u32>(sext24(a[l]) * static_cast<i64>(sext24(b[l])))
                                  : (a[l] & 0xffffff) * (b[l] & 0xffffff)) +
             c[l];
  }
  writeRow(w, i.dst, r.x);
}

// 16-bit multiplicands, 32-bit sum.
template <class T>
void mad32From16(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32* a = fetch16(w, i.src[0], i.opSel & 1, false, ta);
  const u32* b = fetch16(w, i.src[1], i.opSel & 2, false, tb);
  const u32* c = fetch(w, i.src[2], tc);
  for (int l = 0; l < kLanes; ++l) {
    r.x[l] = static_cast<u32>(static_cast<i32>(static_cast<T>(a[l])) *
                              static_cast<i32>(static_cast<T>(b[l]))) +
             c[l];
  }
  writeRow(w, i.dst, r.x);
}

// gfx950: any function of three bits, by its table of truth.
template <bool Narrow>
void bitOperation(Wave& w, const Inst& i) {
  Row source[3], r;
  const u32* x[3];
  for (int n = 0; n < 3; ++n) {
    x[n] = Narrow ? fetch16(w, i.src[n], i.opSel >> n & 1, false, source[n])
                  : fetch(w, i.src[n], source[n]);
  }
  const u32* d = w.row(i.dst.index);
  for (int l = 0; l < kLanes; ++l) {
    u32 result = 0;
    for (int k = 0; k < 8; ++k) {
      u32 term = ((k & 4) ? x[0][l] : ~x[0][l]) & ((k & 2) ? x[1][l] : ~x[1][l]) &
                 ((k & 1) ? x[2][l] : ~x[2][l]);
      result |= (i.simm >> k & 1) ? term : 0;
    }
    u32 above = i.opSel & 8 ? 0 : d[l] & 0xffff0000u;
    r.x[l] = Narrow ? (result & 0xffff) | above : result;
  }
  Narrow ? writeRow16(w, i, r.x) : writeRow(w, i.dst, r.x);
}

// gfx950: two shifted integers, saturated to bytes, in the low half.
template <i32 Low, i32 High>
void shiftedBytes(Wave& w, const Inst& i) {
  Row ta, tb, tc, r;
  const u32 *a = fetch(w, i.src[0], ta), *b = fetch(w, i.src[1], tb);
  const u32* c = fetch(w, i.src[2], tc);
  auto byte = [](u32 x, u32 n) { return u32(u8(std::clamp(i32(x) >> (n & 31), Low, High))); };
  for (int l = 0; l < kLanes; ++l) r.x[l] = byte(a[l], c[l]) | byte(b[l], c[l]) << 8;
  writeRow(w, i.dst, r.x);
}

}  // namespace

void registerInteger(OpTable& t) {
  auto add = [&](const char* n, Handler h) { t[n] = {h, Class::Valu}; };
  add("v_mov_b32", mov32);
  add("v_accvgpr_read_b32", mov32);
  add("v_accvgpr_write_b32", mov32);
  add("v_accvgpr_mov_b32", mov32);
  add("v_mov_b64", mov64);
  add("v_swap_b32", swap);
  add("v_cndmask_b32", cndmask);
  add("v_not_b32", unaryU32<[](u32 a) { return ~a; }>);
  add("v_bfrev_b32", unaryU32<[](u32 a) { return __builtin_bitreverse32(a); }>);
  add("v_ffbh_u32", unaryU32<[](u32 a) { return a ? u32(__builtin_clz(a)) : ~0u; }>);
  add("v_ffbl_b32", unaryU32<[](u32 a) { return a ? u32(__builtin_ctz(a)) : ~0u; }>);
  add("v_ffbh_i32", unaryU32<ffbhI>);
  add("v_sat_pk_u8_i16", unaryU32<[](u32 a) {
        auto clampByte = [](i32 x) { return u32(x < 0 ? 0 : x > 255 ? 255 : x); };
        return clampByte(i16(a)) | clampByte(i16(a >> 16)) << 8;
      }>);

  add("v_add_u32", saturating<i64, u32, [](i64 a, i64 b) { return a + b; }>);
  add("v_sub_u32", saturating<i64, u32, [](i64 a, i64 b) { return a - b; }>);
  add("v_subrev_u32", saturating<i64, u32, [](i64 a, i64 b) { return b - a; }>);
  add("v_add_i32", saturating<i64, i32, [](i64 a, i64 b) { return a + b; }>);
  add("v_sub_i32", saturating<i64, i32, [](i64 a, i64 b) { return a - b; }>);
  add("v_add_u16", saturating<i32, u16, [](i32 a, i32 b) { return a + b; }>);
  add("v_sub_u16", saturating<i32, u16, [](i32 a, i32 b) { return a - b; }>);
  add("v_subrev_u16", saturating<i32, u16, [](i32 a, i32 b) { return b - a; }>);
  add("v_add_i16", saturating<i32, i16, [](i32 a, i32 b) { return a + b; }>);
  add("v_sub_i16", saturating<i32, i16, [](i32 a, i32 b) { return a - b; }>);
  add("v_add_co_u32", carry<0, false>);
  add("v_sub_co_u32", carry<1, false>);
  add("v_subrev_co_u32", carry<2, false>);
  add("v_addc_co_u32", carry<0, true>);
  add("v_subb_co_u32", carry<1, true>);
  add("v_subbrev_co_u32", carry<2, true>);

  add("v_and_b32", binaryU32<[](u32 a, u32 b) { return a & b; }>);
  add("v_or_b32", binaryU32<[](u32 a, u32 b) { return a | b; }>);
  add("v_xor_b32", binaryU32<[](u32 a, u32 b) { return a ^ b; }>);
  add("v_xnor_b32", binaryU32<[](u32 a, u32 b) { return ~(a ^ b); }>);
  add("v_lshlrev_b32", binaryU32<[](u32 a, u32 b) { return b << (a & 31); }>);
  add("v_lshrrev_b32", binaryU32<[](u32 a, u32 b) { return b >> (a & 31); }>);
  add("v_ashrrev_i32", binaryU32<[](u32 a, u32 b) { return u32(i32(b) >> (a & 31)); }>);
  add("v_lshlrev_b16", binaryU16<[](u32 a, u32 b) { return b << (a & 15); }>);
  add("v_lshrrev_b16", binaryU16<[](u32 a, u32 b) { return b >> (a & 15); }>);
  add("v_ashrrev_i16", binaryU16<[](u32 a, u32 b) { return u32(i16(b) >> (a & 15)); }>);
  add("v_min_u32", binaryU32<pick<u32, false>>);
  add("v_max_u32", binaryU32<pick<u32, true>>);
  add("v_min_i32", binaryU32<pick<i32, false>>);
  add("v_max_i32", binaryU32<pick<i32, true>>);
  add("v_min_u16", binaryU16<pick<u16, false>>);
  add("v_max_u16", binaryU16<pick<u16, true>>);
  add("v_min_i16", binaryU16<pick<i16, false>>);
  add("v_max_i16", binaryU16<pick<i16, true>>);
  add("v_mul_lo_u32", binaryU32<[](u32 a, u32 b) { return a * b; }>);
  add("v_mul_hi_u32", binaryU32<[](u32 a, u32 b) { return u32(u64(a) * b >> 32); }>);
  add("v_mul_hi_i32", binaryU32<[](u32 a, u32 b) { return u32(i64(i32(a)) * i32(b) >> 32); }>);
  add("v_mul_lo_u16", binaryU16<[](u32 a, u32 b) { return a * b; }>);
  add("v_mul_u32_u24", binaryU32<[](u32 a, u32 b) { return (a & 0xffffff) * (b & 0xffffff); }>);
  add("v_mul_i32_i24", binaryU32<[](u32 a, u32 b) { return u32(i64(sext24(a)) * sext24(b)); }>);
  add("v_mul_hi_u32_u24",
      binaryU32<[](u32 a, u32 b) { return u32(u64(a & 0xffffff) * (b & 0xffffff) >> 32); }>);
  add("v_mul_hi_i32_i24",
      binaryU32<[](u32 a, u32 b) { return u32(i64(sext24(a)) * sext24(b) >> 32); }>);
  add("v_bfm_b32", binaryU32<[](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }>);
  add("v_bcnt_u32_b32", binaryU32<[](u32 a, u32 b) { return b + __builtin_popcount(a); }>);
  add("v_mbcnt_lo_u32_b32", [](Wave& w, const Inst& i) { mbcnt(w, i, false); });
  add("v_mbcnt_hi_u32_b32", [](Wave& w, const Inst& i) { mbcnt(w, i, true); });

  add("v_bfe_u32", ternaryU32<bfeU>);
  add("v_bfe_i32", ternaryU32<bfeI>);
  add("v_bfi_b32", ternaryU32<[](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); }>);
  add("v_perm_b32", ternaryU32<perm>);
  add("v_alignbit_b32",
      ternaryU32<[](u32 a, u32 b, u32 c) { return u32((u64(a) << 32 | b) >> (c & 31)); }>);
  add("v_alignbyte_b32",
      ternaryU32<[](u32 a, u32 b, u32 c) { return u32((u64(a) << 32 | b) >> (8 * (c & 3))); }>);
  add("v_lshl_add_u32", ternaryU32<[](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }>);
  add("v_add_lshl_u32", ternaryU32<[](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); }>);
  add("v_lshl_or_b32", ternaryU32<[](u32 a, u32 b, u32 c) { return (a << (b & 31)) | c; }>);
  add("v_and_or_b32", ternaryU32<[](u32 a, u32 b, u32 c) { return (a & b) | c; }>);
  add("v_or3_b32", ternaryU32<[](u32 a, u32 b, u32 c) { return a | b | c; }>);
  add("v_add3_u32", ternaryU32<[](u32 a, u32 b, u32 c) { return a + b + c; }>);
  add("v_xad_u32", ternaryU32<[](u32 a, u32 b, u32 c) { return (a ^ b) + c; }>);
  add("v_sad_u8", ternaryU32<sad8>);
  add("v_sad_hi_u8", ternaryU32<[](u32 a, u32 b, u32 c) { return (sad8(a, b, 0) << 16) + c; }>);
  add("v_sad_u16", ternaryU32<sad16>);
  add("v_sad_u32", ternaryU32<[](u32 a, u32 b, u32 c) { return (a > b ? a - b : b - a) + c; }>);
  add("v_min3_u32", ternaryU32<pick3<u32, false>>);
  add("v_max3_u32", ternaryU32<pick3<u32, true>>);
  add("v_med3_u32", ternaryU32<med<u32>>);
  add("v_min3_i32", ternaryU32<pick3<i32, false>>);
  add("v_max3_i32", ternaryU32<pick3<i32, true>>);
  add("v_med3_i32", ternaryU32<med<i32>>);
  add("v_min3_u16", ternaryU16<pick3<u16, false>>);
  add("v_max3_u16", ternaryU16<pick3<u16, true>>);
  add("v_med3_u16", ternaryU16<med<u16>>);
  add("v_min3_i16", ternaryU16<pick3<i16, false>>);
  add("v_max3_i16", ternaryU16<pick3<i16, true>>);
  add("v_med3_i16", ternaryU16<med<i16>>);
  add("v_mad_u32_u24", mad24<u32>);
  add("v_mad_i32_i24", mad24<i32>);
  add("v_mad_u16", ternaryU16<[](u32 a, u32 b, u32 c) { return a * b + c; }>);
  add("v_mad_i16", ternaryU16<[](u32 a, u32 b, u32 c) { return a * b + c; }>);
  for (const char* name : {"v_mad_legacy_u16", "v_mad_legacy_i16"}) {
    add(name, ternaryU16<[](u32 a, u32 b, u32 c) { return a * b + c; }, false>);
  }
  add("v_mad_u32_u16", mad32From16<u16>);
  add("v_mad_i32_i16", mad32From16<i16>);
  add("v_mad_u64_u32", mad64<u32>);
  add("v_mad_i64_i32", mad64<i32>);
  add("v_lshl_add_u64", lshlAdd64);
  add("v_lshlrev_b64", shiftRev64<[](u64 a, u32 n) { return a << n; }>);
  add("v_lshrrev_b64", shiftRev64<[](u64 a, u32 n) { return a >> n; }>);
  add("v_ashrrev_i64", shiftRev64<[](u64 a, u32 n) { return u64(i64(a) >> n); }>);
  // gfx950
  add("v_bitop3_b32", bitOperation<false>);
  add("v_bitop3_b16", bitOperation<true>);
  add("v_ashr_pk_i8_i32", shiftedBytes<-128, 127>);
  add("v_ashr_pk_u8_i32", shiftedBytes<0, 255>);
}

}  // namespace sim
