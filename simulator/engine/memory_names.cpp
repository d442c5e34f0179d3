// What a memory instruction does, from its name: space, width, direction, atomic operation.
#include <algorithm>

#include "float8.h"

namespace sim {
namespace {

template <class T, auto F>
u64 integerAtomic(u64 old, u64 data, u64) {
  return static_cast<std::make_unsigned_t<T>>(F(static_cast<T>(old), static_cast<T>(data)));
}

template <class T>
AtomicFn integerOperation(const std::string& op) {
  using U = std::make_unsigned_t<T>;
  using S = std::make_signed_t<T>;
  if (op == "add") return integerAtomic<U, [](U a, U b) { return U(a + b); }>;
  if (op == "sub") return integerAtomic<U, [](U a, U b) { return U(a - b); }>;
  if (op == "rsub") return integerAtomic<U, [](U a, U b) { return U(b - a); }>;
  if (op == "smin") return integerAtomic<S, [](S a, S b) { return std::min(a, b); }>;
  if (op == "smax") return integerAtomic<S, [](S a, S b) { return std::max(a, b); }>;
  if (op == "umin") return integerAtomic<U, [](U a, U b) { return std::min(a, b); }>;
  if (op == "umax") return integerAtomic<U, [](U a, U b) { return std::max(a, b); }>;
  if (op == "and") return integerAtomic<U, [](U a, U b) { return U(a & b); }>;
  if (op == "or") return integerAtomic<U, [](U a, U b) { return U(a | b); }>;
  if (op == "xor") return integerAtomic<U, [](U a, U b) { return U(a ^ b); }>;
  if (op == "inc") return integerAtomic<U, [](U a, U b) { return U(a >= b ? 0 : a + 1); }>;
  if (op == "dec") return integerAtomic<U, [](U a, U b) { return U(a == 0 || a > b ? b : a - 1); }>;
  if (op == "swap") return integerAtomic<U, [](U, U b) { return b; }>;
  if (op == "cmpswap") return [](u64 old, u64 data, u64 cmp) { return old == cmp ? data : old; };
  return nullptr;
}

u64 addPackedF16(u64 old, u64 data, u64) {
  u32 lo = toHalf(fromHalf(old) + fromHalf(data));
  u32 hi = toHalf(fromHalf(old >> 16) + fromHalf(data >> 16));
  return lo | hi << 16;
}
u64 addPackedBf16(u64 old, u64 data, u64) {
  auto sum = [](u32 a, u32 b) { return toBf16(fromBf16(a & 0xffff) + fromBf16(b & 0xffff)); };
  return sum(old, data) | sum(old >> 16, data >> 16) << 16;
}
template <class T, auto F>
u64 floatAtomic(u64 old, u64 data, u64) {
  using U = std::conditional_t<sizeof(T) == 4, u32, u64>;
  return bits<U>(F(bits<T>(static_cast<U>(old)), bits<T>(static_cast<U>(data))));
}

// The compare value of DS_CMPST, DS_MSKOR and DS_WRAP is their first data operand.
template <class T>
u64 compareFloats(u64 old, u64 data, u64 compare) {
  using U = std::conditional_t<sizeof(T) == 4, u32, u64>;
  return bits<T>(static_cast<U>(old)) == bits<T>(static_cast<U>(compare)) ? data : old;
}
u64 maskedOr(u64 old, u64 data, u64 mask) { return (old & ~mask) | data; }
u64 wrap(u64 old, u64 data, u64 limit) {
  return static_cast<u32>(old >= limit ? old - limit : old + data);
}

bool parseAtomic(std::string op, MemSpec& m) {
  m.access = Access::Atomic;
  m.bytes = 4;
  if (op == "add_f32") m.atomic = floatAtomic<float, [](float a, float b) { return a + b; }>;
  if (op == "min_f32") m.atomic = floatAtomic<float, minimum>;
  if (op == "max_f32") m.atomic = floatAtomic<float, maximum>;
  if (op == "pk_add_f16") m.atomic = addPackedF16;
  if (op == "pk_add_bf16") m.atomic = addPackedBf16;
  if (!m.atomic && op.size() > 4 && op.substr(op.size() - 4) == "_f64") {
    m.bytes = 8;
    if (op == "add_f64") m.atomic = floatAtomic<double, [](double a, double b) { return a + b; }>;
    if (op == "min_f64")
      m.atomic = floatAtomic<double, [](double a, double b) { return std::fmin(a, b); }>;
    if (op == "max_f64")
      m.atomic = floatAtomic<double, [](double a, double b) { return std::fmax(a, b); }>;
  }
  if (!m.atomic && op.size() > 3 && op.substr(op.size() - 3) == "_x2") {
    m.bytes = 8;
    m.atomic = integerOperation<u64>(op.substr(0, op.size() - 3));
  } else if (!m.atomic) {
    m.atomic = integerOperation<u32>(op);
  }
  m.dwords = m.bytes / 4;
  m.atomicData = m.dwords;
  return m.atomic != nullptr;
}

struct Width {
  const char* name;
  u8 bytes;
  bool sext, d16, high;
};
constexpr Width kWidths[] = {
    {"ubyte", 1, false, false, false},     {"sbyte", 1, true, false, false},
    {"byte", 1, false, false, false},      {"ushort", 2, false, false, false},
    {"sshort", 2, true, false, false},     {"short", 2, false, false, false},
    {"dword", 4, false, false, false},     {"dwordx2", 8, false, false, false},
    {"dwordx3", 12, false, false, false},  {"dwordx4", 16, false, false, false},
    {"ubyte_d16", 1, false, true, false},  {"ubyte_d16_hi", 1, false, true, true},
    {"sbyte_d16", 1, true, true, false},   {"sbyte_d16_hi", 1, true, true, true},
    {"short_d16", 2, false, true, false},  {"short_d16_hi", 2, false, true, true},
    {"byte_d16_hi", 1, false, true, true}, {"u8", 1, false, false, false},
    {"i8", 1, true, false, false},         {"u16", 2, false, false, false},
    {"i16", 2, true, false, false},        {"b8", 1, false, false, false},
    {"b16", 2, false, false, false},       {"b32", 4, false, false, false},
    {"b64", 8, false, false, false},       {"b96", 12, false, false, false},
    {"b128", 16, false, false, false},     {"u8_d16", 1, false, true, false},
    {"u8_d16_hi", 1, false, true, true},   {"i8_d16", 1, true, true, false},
    {"i8_d16_hi", 1, true, true, true},    {"u16_d16", 2, false, true, false},
    {"u16_d16_hi", 2, false, true, true},  {"b8_d16_hi", 1, false, true, true},
    {"b16_d16_hi", 2, false, true, true},
};

bool parseWidth(const std::string& name, MemSpec& m) {
  for (const Width& w : kWidths) {
    if (name == w.name) {
      m.bytes = w.bytes;
      m.dwords = std::max(1, w.bytes / 4);
      m.sext = w.sext;
      m.d16 = w.d16;
      m.d16hi = w.high;
      return true;
    }
  }
  return false;
}

bool parseLds(std::string op, MemSpec& m) {
  m.space = Space::Lds;
  for (auto [prefix, access] : {std::pair{"read", Access::Load}, {"write", Access::Store}}) {
    if (!op.starts_with(prefix)) continue;
    std::string rest = op.substr(std::strlen(prefix));
    u16 scale = 0;
    if (rest.starts_with("2st64_")) {
      scale = 64;
      rest = rest.substr(6);
    } else if (rest.starts_with("2_")) {
      scale = 1;
      rest = rest.substr(2);
    } else if (rest.starts_with("_")) {
      rest = rest.substr(1);
    }
    // Transposing reads of gfx950: b64_tr_b16, b64_tr_b8, b64_tr_b4, b96_tr_b6.
    if (size_t tr = rest.find("_tr_b"); tr != std::string::npos) {
      m.transposed = std::atoi(rest.c_str() + tr + 5);
      rest.resize(tr);
    }
    if (!parseWidth(rest, m)) return false;
    m.access = access;
    if (scale) {
      m.pair = 2;
      m.pairStride = scale * m.bytes;
    }
    return true;
  }
  if (op == "bpermute_b32" || op == "permute_b32" || op == "swizzle_b32") {
    m.access = Access::Load;
    m.bytes = 0;  // lanes exchange values; no LDS memory is touched
    m.dwords = 1;
    return true;
  }
  if (size_t at = op.find("_rtn"); at != std::string::npos) op.erase(at, 4);
  if (op == "append" || op == "consume") {  // one operation for the wave: lanes are counted
    m.once = true;
    return parseAtomic(op == "append" ? "add" : "sub", m);
  }
  static const std::map<std::string, std::pair<AtomicFn, u8>> odd = {
      {"cmpst_f32", {compareFloats<float>, 4}},
      {"cmpst_f64", {compareFloats<double>, 8}},
      {"mskor_b32", {maskedOr, 4}},
      {"mskor_b64", {maskedOr, 8}},
      {"wrap_b32", {wrap, 4}}};
  if (auto it = odd.find(op); it != odd.end()) {
    m.access = Access::Atomic;
    m.atomic = it->second.first;
    m.bytes = it->second.second;
    m.dwords = m.atomicData = m.bytes / 4;
    return true;
  }
  if (op.starts_with("wrxchg2")) {
    m.pair = 2;
    bool wide = op.ends_with("_b64");
    m.pairStride = (op.starts_with("wrxchg2st64") ? 64 : 1) * (wide ? 8 : 4);
    return (op.ends_with("_b32") || wide) && parseAtomic(wide ? "swap_x2" : "swap", m);
  }
  static const std::map<std::string, std::string> renamed = {
      {"add_u", "add"},     {"sub_u", "sub"},      {"rsub_u", "rsub"}, {"inc_u", "inc"},
      {"dec_u", "dec"},     {"min_i", "smin"},     {"max_i", "smax"},  {"min_u", "umin"},
      {"max_u", "umax"},    {"and_b", "and"},      {"or_b", "or"},     {"xor_b", "xor"},
      {"wrxchg_b", "swap"}, {"cmpst_b", "cmpswap"}};
  size_t digits = std::max<size_t>(op.size(), 2) - 2;
  std::string size = op.substr(digits);
  if (auto it = renamed.find(op.substr(0, digits)); it != renamed.end()) {
    return parseAtomic(it->second + (size == "64" ? "_x2" : ""), m);
  }
  return parseAtomic(op, m);
}

bool parse(const std::string& name, MemSpec& m) {
  if (name.starts_with("ds_")) return parseLds(name.substr(3), m);
  if (name.starts_with("s_load_dword") || name.starts_with("s_buffer_load_dword")) {
    m.space = Space::Scalar;
    m.access = Access::Load;
    std::string count = name.substr(name.find("dword") + 5);
    m.dwords = count.empty() ? 1 : std::atoi(count.c_str() + 1);
    return true;
  }
  static const std::pair<const char*, Space> spaces[] = {{"global_", Space::Global},
                                                         {"flat_", Space::Flat},
                                                         {"buffer_", Space::Buffer},
                                                         {"scratch_", Space::Scratch}};
  for (auto [prefix, space] : spaces) {
    if (!name.starts_with(prefix)) continue;
    m.space = space;
    std::string op = name.substr(std::strlen(prefix));
    if (op.starts_with("load_lds_")) {
      m.access = Access::LoadToLds;
      return parseWidth(op.substr(9), m);
    }
    if (op.starts_with("load_")) {
      m.access = Access::Load;
      return parseWidth(op.substr(5), m);
    }
    if (op.starts_with("store_")) {
      m.access = Access::Store;
      return parseWidth(op.substr(6), m);
    }
    if (op.starts_with("atomic_")) return parseAtomic(op.substr(7), m);
  }
  return false;
}

}  // namespace

// A name that is half understood must not run: what is not parsed leaves no trace.
bool parseMemory(const std::string& name, MemSpec& m) {
  if (parse(name, m)) return true;
  m = MemSpec{};
  return false;
}

}  // namespace sim
