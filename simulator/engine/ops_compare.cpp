// VOPC: lane masks from comparisons, and the cmpx forms that write EXEC as well.
#include "lanewise.h"

namespace sim {
namespace {

void writeMask(Wave& w, const Inst& i, u64 mask, bool toExec) {
  mask &= w.exec();
  if (i.dst.is(Kind::Sgpr)) writeScalar64(w, i.dst, mask);
  if (toExec) w.exec() = mask;
}

enum Type { F32, F16, F64, I32, U32, I16, U16, I64, U64 };

template <Type K>
struct Value;
template <>
struct Value<F32> {
  using T = float;
};
template <>
struct Value<F16> {
  using T = float;
};
template <>
struct Value<F64> {
  using T = double;
};
template <>
struct Value<I32> {
  using T = i32;
};
template <>
struct Value<U32> {
  using T = u32;
};
template <>
struct Value<I16> {
  using T = i16;
};
template <>
struct Value<U16> {
  using T = u16;
};
template <>
struct Value<I64> {
  using T = i64;
};
template <>
struct Value<U64> {
  using T = u64;
};

template <Type K, class Out>
void load(const Wave& w, const Inst& i, int n, Out* out) {
  if constexpr (K == F64 || K == I64 || K == U64) {
    Row64 t;
    const u64* p = K == F64 ? fetchF64(w, i.src[n], t) : fetch64(w, i.src[n], t);
    for (int l = 0; l < kLanes; ++l) out[l] = bits<Out>(p[l]);
  } else if constexpr (K == F32) {
    Row t;
    const u32* p = fetchF32(w, i.src[n], t);
    for (int l = 0; l < kLanes; ++l) out[l] = bits<float>(p[l]);
  } else if constexpr (K == F16) {
    Row t;
    const u32* p = fetchF16(w, i, n, t);
    for (int l = 0; l < kLanes; ++l) out[l] = fromHalf(p[l]);
  } else if constexpr (K == I16 || K == U16) {
    Row t;
    const u32* p = fetch16(w, i.src[n], i.opSel >> n & 1, false, t);
    for (int l = 0; l < kLanes; ++l) out[l] = static_cast<Out>(p[l]);
  } else {
    Row t;
    const u32* p = fetch(w, i.src[n], t);
    for (int l = 0; l < kLanes; ++l) out[l] = static_cast<Out>(p[l]);
  }
}

template <Type K, auto F, bool X>
void compare(Wave& w, const Inst& i) {
  using T = typename Value<K>::T;
  alignas(64) T a[kLanes], b[kLanes];
  load<K>(w, i, 0, a);
  load<K>(w, i, 1, b);
  u64 mask = 0;
  for (int l = 0; l < kLanes; ++l) mask |= static_cast<u64>(F(a[l], b[l])) << l;
  writeMask(w, i, mask, X);
}

// Classes by bit: sNaN, qNaN, -inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +inf.
u32 classOf(u64 x, int exponentBits, int mantissaBits) {
  u64 mantissa = x & ((1ull << mantissaBits) - 1);
  u64 exponent = x >> mantissaBits & ((1ull << exponentBits) - 1);
  bool negative = x >> (mantissaBits + exponentBits) & 1;
  if (exponent == (1ull << exponentBits) - 1) {
    if (mantissa) return (mantissa >> (mantissaBits - 1) & 1) ? 2 : 1;
    return negative ? 4 : 1 << 9;
  }
  if (exponent) return negative ? 8 : 1 << 8;
  if (mantissa) return negative ? 16 : 1 << 7;
  return negative ? 32 : 1 << 6;
}

template <Type K, bool X>
void classify(Wave& w, const Inst& i) {
  u64 mask = 0;
  Row tb;
  const u32* select = fetch(w, i.src[1], tb);
  for (int l = 0; l < kLanes; ++l) {
    u32 c = 0;
    if constexpr (K == F64) {
      Row64 t;
      c = classOf(fetchF64(w, i.src[0], t)[l], 11, 52);
    } else if constexpr (K == F16) {
      Row t;
      c = classOf(fetch16(w, i.src[0], i.opSel & 1, true, t)[l], 5, 10);
    } else {
      Row t;
      Operand o = i.src[0];
      u32 x = fetch(w, o, t)[l];
      x = o.abs ? x & 0x7fffffffu : x;
      c = classOf(o.neg ? x ^ 0x80000000u : x, 8, 23);
    }
    mask |= static_cast<u64>((c & select[l]) != 0) << l;
  }
  writeMask(w, i, mask, X);
}

template <Type K, bool X>
void addAll(OpTable& t, const char* suffix) {
  std::string prefix = X ? "v_cmpx_" : "v_cmp_";
  using T = typename Value<K>::T;
  auto add = [&](const char* name, Handler h) {
    t[prefix + name + "_" + suffix] = {h, Class::Valu};
  };
  add("f", compare<K, [](T, T) { return false; }, X>);
  add("lt", compare<K, [](T a, T b) { return a < b; }, X>);
  add("eq", compare<K, [](T a, T b) { return a == b; }, X>);
  add("le", compare<K, [](T a, T b) { return a <= b; }, X>);
  add("gt", compare<K, [](T a, T b) { return a > b; }, X>);
  add("ge", compare<K, [](T a, T b) { return a >= b; }, X>);
  if constexpr (K == F32 || K == F16 || K == F64) {
    add("lg", compare<K, [](T a, T b) { return a < b || a > b; }, X>);
    add("o", compare<K, [](T a, T b) { return a == a && b == b; }, X>);
    add("u", compare<K, [](T a, T b) { return a != a || b != b; }, X>);
    add("nge", compare<K, [](T a, T b) { return !(a >= b); }, X>);
    add("nlg", compare<K, [](T a, T b) { return !(a < b || a > b); }, X>);
    add("ngt", compare<K, [](T a, T b) { return !(a > b); }, X>);
    add("nle", compare<K, [](T a, T b) { return !(a <= b); }, X>);
    add("neq", compare<K, [](T a, T b) { return !(a == b); }, X>);
    add("nlt", compare<K, [](T a, T b) { return !(a < b); }, X>);
    add("tru", compare<K, [](T, T) { return true; }, X>);
    add("class", classify<K, X>);
  } else {
    add("ne", compare<K, [](T a, T b) { return a != b; }, X>);
    add("t", compare<K, [](T, T) { return true; }, X>);
  }
}

template <Type K>
void addBoth(OpTable& t, const char* suffix) {
  addAll<K, false>(t, suffix);
  addAll<K, true>(t, suffix);
}

}  // namespace

void registerCompare(OpTable& t) {
  addBoth<F32>(t, "f32");
  addBoth<F16>(t, "f16");
  addBoth<F64>(t, "f64");
  addBoth<I32>(t, "i32");
  addBoth<U32>(t, "u32");
  addBoth<I16>(t, "i16");
  addBoth<U16>(t, "u16");
  addBoth<I64>(t, "i64");
  addBoth<U64>(t, "u64");
}

}  // namespace sim
