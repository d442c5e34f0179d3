// Scalar ALU: SOP1, SOP2, SOPK, SOPC.
#include "operands.h"

namespace sim {
namespace {

void set32(Wave& w, const Inst& i, u32 value) { w.s[i.dst.index] = value; }
void set64(Wave& w, const Inst& i, u64 value) { writeScalar64(w, i.dst, value); }

// d = f(a, b); SCC = result != 0 when `Scc`.
template <auto F, bool Scc>
void binary32(Wave& w, const Inst& i) {
  u32 r = F(scalar32(w, i.src[0]), scalar32(w, i.src[1]));
  set32(w, i, r);
  if (Scc) w.scc = r != 0;
}

template <auto F, bool Scc>
void binary64(Wave& w, const Inst& i) {
  u64 r = F(scalar64(w, i.src[0]), scalar64(w, i.src[1]));
  set64(w, i, r);
  if (Scc) w.scc = r != 0;
}

template <auto F>
void shift64(Wave& w, const Inst& i) {
  u64 r = F(scalar64(w, i.src[0]), scalar32(w, i.src[1]) & 63);
  set64(w, i, r);
  w.scc = r != 0;
}

template <auto F, bool Scc>
void unary32(Wave& w, const Inst& i) {
  u32 r = F(scalar32(w, i.src[0]));
  set32(w, i, r);
  if (Scc) w.scc = r != 0;
}

template <auto F, bool Scc>
void unary64(Wave& w, const Inst& i) {
  u64 r = F(scalar64(w, i.src[0]));
  set64(w, i, r);
  if (Scc) w.scc = r != 0;
}

template <auto F>
void count64(Wave& w, const Inst& i) {
  u32 r = F(scalar64(w, i.src[0]));
  set32(w, i, r);
}

template <auto F>
void compare32(Wave& w, const Inst& i) {
  w.scc = F(scalar32(w, i.src[0]), scalar32(w, i.src[1]));
}

// exec = f(source, exec); the old exec goes to the destination.
template <auto F>
void saveExec(Wave& w, const Inst& i) {
  u64 source = scalar64(w, i.src[0]), old = w.exec();
  u64 r = F(source, old);
  set64(w, i, old);
  w.exec() = r;
  w.scc = r != 0;
}

// exec = f(source, exec); the result goes to the destination too.
template <auto F>
void writeExec(Wave& w, const Inst& i) {
  u64 r = F(scalar64(w, i.src[0]), w.exec());
  set64(w, i, r);
  w.exec() = r;
  w.scc = r != 0;
}

void addU32(Wave& w, const Inst& i) {
  u64 r = static_cast<u64>(scalar32(w, i.src[0])) + scalar32(w, i.src[1]);
  set32(w, i, r);
  w.scc = r >> 32;
}
void subU32(Wave& w, const Inst& i) {
  u32 a = scalar32(w, i.src[0]), b = scalar32(w, i.src[1]);
  set32(w, i, a - b);
  w.scc = b > a;
}
void addI32(Wave& w, const Inst& i) {
  i32 r;
  w.scc = __builtin_add_overflow(static_cast<i32>(scalar32(w, i.src[0])),
                                 static_cast<i32>(scalar32(w, i.src[1])), &r);
  set32(w, i, r);
}
void subI32(Wave& w, const Inst& i) {
  i32 r;
  w.scc = __builtin_sub_overflow(static_cast<i32>(scalar32(w, i.src[0])),
                                 static_cast<i32>(scalar32(w, i.src[1])), &r);
  set32(w, i, r);
}
void addcU32(Wave& w, const Inst& i) {
  u64 r = static_cast<u64>(scalar32(w, i.src[0])) + scalar32(w, i.src[1]) + w.scc;
  set32(w, i, r);
  w.scc = r >> 32;
}
void subbU32(Wave& w, const Inst& i) {
  u64 a = scalar32(w, i.src[0]), b = static_cast<u64>(scalar32(w, i.src[1])) + w.scc;
  set32(w, i, a - b);
  w.scc = b > a;
}

template <class T, bool Max>
void minMax(Wave& w, const Inst& i) {
  T a = scalar32(w, i.src[0]), b = scalar32(w, i.src[1]);
  w.scc = Max ? a > b : a < b;
  set32(w, i, w.scc ? a : b);
}

void absDiff(Wave& w, const Inst& i) {
  i32 r = scalar32(w, i.src[0]) - scalar32(w, i.src[1]);
  r = r < 0 ? 0u - static_cast<u32>(r) : r;
  set32(w, i, r);
  w.scc = r != 0;
}

template <int Shift>
void shiftAdd(Wave& w, const Inst& i) {
  u64 r = (static_cast<u64>(scalar32(w, i.src[0])) << Shift) + scalar32(w, i.src[1]);
  set32(w, i, r);
  w.scc = r >> 32;
}

u32 bfe(u32 a, u32 b, bool isSigned) {
  u32 offset = b & 31, width = b >> 16 & 127;
  if (!width) return 0;
  if (isSigned) {
    i32 x = static_cast<i32>(a) >> offset;
    return width >= 32 ? x : (x << (32 - width)) >> (32 - width);
  }
  u32 x = a >> offset;
  return width >= 32 ? x : x & ((1u << width) - 1);
}

u64 bfe64(u64 a, u64 b, bool isSigned) {
  u32 offset = b & 63, width = b >> 16 & 127;
  if (!width) return 0;
  if (isSigned) {
    i64 x = static_cast<i64>(a) >> offset;
    return width >= 64 ? x : (x << (64 - width)) >> (64 - width);
  }
  u64 x = a >> offset;
  return width >= 64 ? x : x & ((1ull << width) - 1);
}

void bfe64Handler(Wave& w, const Inst& i, bool isSigned) {
  u64 r = bfe64(scalar64(w, i.src[0]), scalar32(w, i.src[1]), isSigned);
  set64(w, i, r);
  w.scc = r != 0;
}

void cselect32(Wave& w, const Inst& i) { set32(w, i, scalar32(w, i.src[w.scc ? 0 : 1])); }
void cselect64(Wave& w, const Inst& i) { set64(w, i, scalar64(w, i.src[w.scc ? 0 : 1])); }
void cmov32(Wave& w, const Inst& i) {
  if (w.scc) set32(w, i, scalar32(w, i.src[0]));
}
void cmov64(Wave& w, const Inst& i) {
  if (w.scc) set64(w, i, scalar64(w, i.src[0]));
}

template <bool Set, bool Wide>
void bitSet(Wave& w, const Inst& i) {
  u64 old = Wide ? scalar64(w, i.dst) : scalar32(w, i.dst);
  u64 bit = 1ull << (scalar32(w, i.src[0]) & (Wide ? 63 : 31));
  u64 r = Set ? old | bit : old & ~bit;
  Wide ? set64(w, i, r) : set32(w, i, r);
}

u32 quadMask(u64 x, int bitsWide) {
  u32 r = 0;
  for (int q = 0; q < bitsWide / 4; ++q) r |= static_cast<u32>((x >> (4 * q) & 15) != 0) << q;
  return r;
}
u64 wholeQuad(u64 x, int bitsWide) {
  u64 r = 0;
  for (int q = 0; q < bitsWide / 4; ++q) {
    if (x >> (4 * q) & 15) r |= 15ull << (4 * q);
  }
  return r;
}

u64 reverse64(u64 x) { return __builtin_bitreverse64(x); }

// Position of the highest bit that differs from the sign.
u32 flbit(u64 x, int width) {
  i64 wide = width == 64 ? static_cast<i64>(x) : static_cast<i32>(x);
  u64 y = wide < 0 ? ~wide : wide;
  return y ? __builtin_clzll(y) - (64 - width) : ~0u;
}

u32 pack(u32 a, u32 b, bool highA, bool highB) {
  return (highA ? a >> 16 : a & 0xffff) | (highB ? b & 0xffff0000u : b << 16);
}

// s_getreg/s_setreg address a field of a hardware register: id, offset, width.
u32 fieldMask(u32 simm) {
  u32 width = (simm >> 11 & 31) + 1;
  return width == 32 ? ~0u : (1u << width) - 1;
}

u32 hardwareRegister(const Wave& w, u32 id) {
  switch (id) {
    case 1:
      return w.mode;
    case 2:
      return w.scc;
    case 4:
      return (w.wg->cu & 15) << 8 | (w.id & 3) << 4;
    case 6:
      return (w.wg->ldsBytes / 512) << 12;
    case 20:
      return w.wg->xcd;
    default:
      return 0;
  }
}

void getReg(Wave& w, const Inst& i) {
  u32 value = hardwareRegister(w, i.simm & 63);
  set32(w, i, value >> (i.simm >> 6 & 31) & fieldMask(i.simm));
}

void setReg(Wave& w, const Inst& i) {
  if ((i.simm & 63) != 1) stop(w, i, "only the MODE register can be written");
  u32 offset = i.simm >> 6 & 31, mask = fieldMask(i.simm) << offset;
  w.mode = (w.mode & ~mask) | (scalar32(w, i.src[0]) << offset & mask);
  setRounding(w.mode);
}

template <auto F>
void compareK(Wave& w, const Inst& i) {
  w.scc = F(scalar32(w, i.dst), scalar32(w, i.src[0]));
}

template <class T>
void compareTable(OpTable& t, const std::string& prefix, const std::string& type) {
  auto add = [&](const char* name, Handler h, Handler k) {
    t[prefix + name + "_" + type] = {h, Class::Salu};
    t["s_cmpk_" + std::string(name) + "_" + type] = {k, Class::Salu};
  };
#define CMP(name, op)                                                                       \
  add(name, compare32<[](u32 a, u32 b) { return static_cast<T>(a) op static_cast<T>(b); }>, \
      compareK<[](u32 a, u32 b) { return static_cast<T>(a) op static_cast<T>(b); }>)
  CMP("eq", ==);
  CMP("lg", !=);
  CMP("gt", >);
  CMP("ge", >=);
  CMP("lt", <);
  CMP("le", <=);
#undef CMP
}

u32 relative(Wave& w, const Inst& i, const Operand& o, u32 registers) {
  u32 at = o.index + w.s[kM0];
  if (!o.is(Kind::Sgpr) || at + registers > 102) stop(w, i, "M0 leads out of the scalar registers");
  return at;
}

}  // namespace

void registerSalu(OpTable& t) {
  auto add = [&](const char* name, Handler h) { t[name] = {h, Class::Salu}; };
  add("s_mov_b32", unary32<[](u32 a) { return a; }, false>);
  add("s_mov_b64", unary64<[](u64 a) { return a; }, false>);
  add("s_movk_i32", unary32<[](u32 a) { return a; }, false>);
  add("s_cmovk_i32", cmov32);
  add("s_cmov_b32", cmov32);
  // M0 is added to the number of the source's register, or the destination's.
  add("s_movrels_b32",
      [](Wave& w, const Inst& i) { w.s[i.dst.index] = w.s[relative(w, i, i.src[0], 1)]; });
  add("s_movreld_b32",
      [](Wave& w, const Inst& i) { w.s[relative(w, i, i.dst, 1)] = scalar32(w, i.src[0]); });
  add("s_movrels_b64", [](Wave& w, const Inst& i) {
    u32 from = relative(w, i, i.src[0], 2);
    writeScalar64(w, i.dst, w.s[from] | static_cast<u64>(w.s[from + 1]) << 32);
  });
  add("s_movreld_b64", [](Wave& w, const Inst& i) {
    Operand to = i.dst;
    to.index = relative(w, i, i.dst, 2);
    writeScalar64(w, to, scalar64(w, i.src[0]));
  });
  add("s_cmov_b64", cmov64);
  add("s_not_b32", unary32<[](u32 a) { return ~a; }, true>);
  add("s_not_b64", unary64<[](u64 a) { return ~a; }, true>);
  add("s_wqm_b32", unary32<[](u32 a) { return static_cast<u32>(wholeQuad(a, 32)); }, true>);
  add("s_wqm_b64", unary64<[](u64 a) { return wholeQuad(a, 64); }, true>);
  add("s_quadmask_b32", unary32<[](u32 a) { return quadMask(a, 32); }, true>);
  add("s_quadmask_b64", unary64<[](u64 a) { return static_cast<u64>(quadMask(a, 64)); }, true>);
  add("s_brev_b32", unary32<[](u32 a) { return __builtin_bitreverse32(a); }, false>);
  add("s_brev_b64", unary64<reverse64, false>);
  add("s_bcnt1_i32_b32", unary32<[](u32 a) { return u32(__builtin_popcount(a)); }, true>);
  add("s_bcnt0_i32_b32", unary32<[](u32 a) { return u32(__builtin_popcount(~a)); }, true>);
  add("s_bcnt1_i32_b64", [](Wave& w, const Inst& i) {
    set32(w, i, __builtin_popcountll(scalar64(w, i.src[0])));
    w.scc = w.s[i.dst.index] != 0;
  });
  add("s_bcnt0_i32_b64", [](Wave& w, const Inst& i) {
    set32(w, i, __builtin_popcountll(~scalar64(w, i.src[0])));
    w.scc = w.s[i.dst.index] != 0;
  });
  add("s_ff0_i32_b32", unary32<[](u32 a) { return ~a ? u32(__builtin_ctz(~a)) : ~0u; }, false>);
  add("s_ff1_i32_b32", unary32<[](u32 a) { return a ? u32(__builtin_ctz(a)) : ~0u; }, false>);
  add("s_ff0_i32_b64", count64<[](u64 a) { return ~a ? u32(__builtin_ctzll(~a)) : ~0u; }>);
  add("s_ff1_i32_b64", count64<[](u64 a) { return a ? u32(__builtin_ctzll(a)) : ~0u; }>);
  add("s_flbit_i32_b32", unary32<[](u32 a) { return a ? u32(__builtin_clz(a)) : ~0u; }, false>);
  add("s_flbit_i32_b64", count64<[](u64 a) { return a ? u32(__builtin_clzll(a)) : ~0u; }>);
  add("s_flbit_i32", unary32<[](u32 a) { return flbit(a, 32); }, false>);
  add("s_flbit_i32_i64", count64<[](u64 a) { return flbit(a, 64); }>);
  add("s_sext_i32_i8", unary32<[](u32 a) { return u32(i32(i8(a))); }, false>);
  add("s_sext_i32_i16", unary32<[](u32 a) { return u32(i32(i16(a))); }, false>);
  add("s_abs_i32", unary32<[](u32 a) { return i32(a) < 0 ? 0u - a : a; }, true>);
  add("s_bitset0_b32", bitSet<false, false>);
  add("s_bitset1_b32", bitSet<true, false>);
  add("s_bitset0_b64", bitSet<false, true>);
  add("s_bitset1_b64", bitSet<true, true>);
  add("s_bitreplicate_b64_b32", [](Wave& w, const Inst& i) {
    u64 a = scalar32(w, i.src[0]), r = 0;
    for (int b = 0; b < 32; ++b) r |= (a >> b & 1) * (3ull << (2 * b));
    set64(w, i, r);
  });

  add("s_and_saveexec_b64", saveExec<[](u64 s, u64 e) { return s & e; }>);
  add("s_or_saveexec_b64", saveExec<[](u64 s, u64 e) { return s | e; }>);
  add("s_xor_saveexec_b64", saveExec<[](u64 s, u64 e) { return s ^ e; }>);
  add("s_andn2_saveexec_b64", saveExec<[](u64 s, u64 e) { return s & ~e; }>);
  add("s_orn2_saveexec_b64", saveExec<[](u64 s, u64 e) { return s | ~e; }>);
  add("s_nand_saveexec_b64", saveExec<[](u64 s, u64 e) { return ~(s & e); }>);
  add("s_nor_saveexec_b64", saveExec<[](u64 s, u64 e) { return ~(s | e); }>);
  add("s_xnor_saveexec_b64", saveExec<[](u64 s, u64 e) { return ~(s ^ e); }>);
  add("s_andn1_saveexec_b64", saveExec<[](u64 s, u64 e) { return ~s & e; }>);
  add("s_orn1_saveexec_b64", saveExec<[](u64 s, u64 e) { return ~s | e; }>);
  add("s_andn1_wrexec_b64", writeExec<[](u64 s, u64 e) { return ~s & e; }>);
  add("s_andn2_wrexec_b64", writeExec<[](u64 s, u64 e) { return s & ~e; }>);

  add("s_add_u32", addU32);
  add("s_sub_u32", subU32);
  add("s_add_i32", addI32);
  add("s_sub_i32", subI32);
  add("s_addc_u32", addcU32);
  add("s_subb_u32", subbU32);
  add("s_min_i32", minMax<i32, false>);
  add("s_min_u32", minMax<u32, false>);
  add("s_max_i32", minMax<i32, true>);
  add("s_max_u32", minMax<u32, true>);
  add("s_cselect_b32", cselect32);
  add("s_cselect_b64", cselect64);
#define LOGIC(name, expr)                                                        \
  add("s_" name "_b32", binary32<[](u32 a, u32 b) { return u32(expr); }, true>); \
  add("s_" name "_b64", binary64<[](u64 a, u64 b) { return u64(expr); }, true>)
  LOGIC("and", a & b);
  LOGIC("or", a | b);
  LOGIC("xor", a ^ b);
  LOGIC("andn2", a & ~b);
  LOGIC("orn2", a | ~b);
  LOGIC("nand", ~(a & b));
  LOGIC("nor", ~(a | b));
  LOGIC("xnor", ~(a ^ b));
#undef LOGIC
  add("s_lshl_b32", binary32<[](u32 a, u32 b) { return a << (b & 31); }, true>);
  add("s_lshr_b32", binary32<[](u32 a, u32 b) { return a >> (b & 31); }, true>);
  add("s_ashr_i32", binary32<[](u32 a, u32 b) { return u32(i32(a) >> (b & 31)); }, true>);
  add("s_lshl_b64", shift64<[](u64 a, u32 b) { return a << b; }>);
  add("s_lshr_b64", shift64<[](u64 a, u32 b) { return a >> b; }>);
  add("s_ashr_i64", shift64<[](u64 a, u32 b) { return u64(i64(a) >> b); }>);
  add("s_bfm_b32",
      binary32<[](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }, false>);
  add("s_bfm_b64", [](Wave& w, const Inst& i) {
    u32 a = scalar32(w, i.src[0]), b = scalar32(w, i.src[1]);
    set64(w, i, ((1ull << (a & 63)) - 1) << (b & 63));
  });
  add("s_bfe_u32", binary32<[](u32 a, u32 b) { return bfe(a, b, false); }, true>);
  add("s_bfe_i32", binary32<[](u32 a, u32 b) { return bfe(a, b, true); }, true>);
  add("s_bfe_u64", [](Wave& w, const Inst& i) { bfe64Handler(w, i, false); });
  add("s_bfe_i64", [](Wave& w, const Inst& i) { bfe64Handler(w, i, true); });
  add("s_mul_i32", binary32<[](u32 a, u32 b) { return a * b; }, false>);
  add("s_mul_hi_u32", binary32<[](u32 a, u32 b) { return u32(u64(a) * b >> 32); }, false>);
  add("s_mul_hi_i32",
      binary32<[](u32 a, u32 b) { return u32(i64(i32(a)) * i32(b) >> 32); }, false>);
  add("s_absdiff_i32", absDiff);
  add("s_lshl1_add_u32", shiftAdd<1>);
  add("s_lshl2_add_u32", shiftAdd<2>);
  add("s_lshl3_add_u32", shiftAdd<3>);
  add("s_lshl4_add_u32", shiftAdd<4>);
  add("s_pack_ll_b32_b16", binary32<[](u32 a, u32 b) { return pack(a, b, 0, 0); }, false>);
  add("s_pack_lh_b32_b16", binary32<[](u32 a, u32 b) { return pack(a, b, 0, 1); }, false>);
  add("s_pack_hh_b32_b16", binary32<[](u32 a, u32 b) { return pack(a, b, 1, 1); }, false>);
  add("s_addk_i32", [](Wave& w, const Inst& i) {
    i32 r;
    w.scc = __builtin_add_overflow(static_cast<i32>(w.s[i.dst.index]),
                                   static_cast<i32>(scalar32(w, i.src[0])), &r);
    set32(w, i, r);
  });
  add("s_mulk_i32",
      [](Wave& w, const Inst& i) { set32(w, i, w.s[i.dst.index] * scalar32(w, i.src[0])); });

  compareTable<i32>(t, "s_cmp_", "i32");
  compareTable<u32>(t, "s_cmp_", "u32");
  add("s_cmp_eq_u64",
      [](Wave& w, const Inst& i) { w.scc = scalar64(w, i.src[0]) == scalar64(w, i.src[1]); });
  add("s_cmp_lg_u64",
      [](Wave& w, const Inst& i) { w.scc = scalar64(w, i.src[0]) != scalar64(w, i.src[1]); });
  add("s_bitcmp0_b32", compare32<[](u32 a, u32 b) { return !(a >> (b & 31) & 1); }>);
  add("s_bitcmp1_b32", compare32<[](u32 a, u32 b) { return bool(a >> (b & 31) & 1); }>);
  add("s_bitcmp0_b64", [](Wave& w, const Inst& i) {
    w.scc = !(scalar64(w, i.src[0]) >> (scalar32(w, i.src[1]) & 63) & 1);
  });
  add("s_bitcmp1_b64", [](Wave& w, const Inst& i) {
    w.scc = scalar64(w, i.src[0]) >> (scalar32(w, i.src[1]) & 63) & 1;
  });
  add("s_getreg_b32", getReg);
  add("s_setreg_b32", setReg);
  add("s_setreg_imm32_b32", setReg);
}

}  // namespace sim
