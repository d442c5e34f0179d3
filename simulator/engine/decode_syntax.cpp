// The disassembler's notation: operands, modifiers and symbolic fields.
#include <cstdlib>
#include <set>

#include "decode.h"

namespace sim {
namespace {

u64 number(const std::string& s) { return std::strtoull(s.c_str(), nullptr, 0); }

// [1,0,1] as bits, the first element lowest.
u32 bitList(const std::string& s, size_t* count = nullptr) {
  std::vector<std::string> parts = split(s.substr(1, s.size() - 2), ',');
  u32 r = 0;
  for (size_t n = 0; n < parts.size(); ++n) r |= (parts[n] == "1") << n;
  if (count) *count = parts.size();
  return r;
}

// ds_swizzle: symbolic forms back to the offset field's meaning.
u32 swizzleOffset(const std::string& s) {
  std::vector<std::string> p = split(s.substr(8, s.size() - 9), ',');
  auto arg = [&](size_t n) { return static_cast<u32>(number(p.at(n))); };
  auto mask = [](u32 andMask, u32 orMask, u32 xorMask) {
    return (andMask & 31) | (orMask & 31) << 5 | (xorMask & 31) << 10;
  };
  if (p[0] == "QUAD_PERM") return 0x8000 | arg(1) | arg(2) << 2 | arg(3) << 4 | arg(4) << 6;
  if (p[0] == "BROADCAST") return mask(~(arg(1) - 1), arg(2), 0);
  if (p[0] == "REVERSE") return mask(31, 0, arg(1) - 1);
  if (p[0] == "SWAP") return mask(31, 0, arg(1));
  if (p[0] == "ROTATE") return 0xc000 | arg(1) << 10 | arg(2) << 5;
  if (p[0] == "BITMASK_PERM") {
    u32 a = 0, o = 0, x = 0;
    for (int n = 0; n < 5; ++n) {
      char c = p[1][1 + n];
      u32 bit = 1u << (4 - n);
      if (c == 'p' || c == 'i') a |= bit;
      if (c == '1') o |= bit;
      if (c == 'i') x |= bit;
    }
    return mask(a, o, x);
  }
  throw Error("ds_swizzle mode " + p[0] + " is not implemented");
}

u8 sdwaSelect(const std::string& s) {
  static const std::map<std::string, u8> names = {{"BYTE_0", 0}, {"BYTE_1", 1}, {"BYTE_2", 2},
                                                  {"BYTE_3", 3}, {"WORD_0", 4}, {"WORD_1", 5},
                                                  {"DWORD", 6}};
  return names.at(s);
}

}  // namespace

std::vector<std::string> split(const std::string& s, char separator) {
  std::vector<std::string> parts(1);
  int depth = 0;
  bool quoted = false;
  for (char c : s) {
    if (c == '"') quoted = !quoted;
    if (c == '[' || c == '(') ++depth;
    if (c == ']' || c == ')') --depth;
    if (c == separator && depth == 0 && !quoted) {
      parts.emplace_back();
    } else if (c != ' ' || !parts.back().empty()) {
      parts.back() += c;
    }
  }
  for (std::string& p : parts) {
    while (!p.empty() && p.back() == ' ') p.pop_back();
  }
  std::erase(parts, "");
  return parts;
}

Operand parseOperand(std::string s, const std::string& name) {
  Operand o;
  auto unwrap = [&](const char* prefix, const char* suffix) {
    if (s.starts_with(prefix) && s.ends_with(suffix)) {
      s = s.substr(std::strlen(prefix), s.size() - std::strlen(prefix) - std::strlen(suffix));
      return true;
    }
    return false;
  };
  if (s.size() > 1 && s[0] == '-' && !std::isdigit(s[1])) {
    o.neg = true;
    s.erase(0, 1);
  }
  if (unwrap("neg(", ")")) o.neg = true;
  if (unwrap("|", "|") || unwrap("abs(", ")")) o.abs = true;
  if (unwrap("sext(", ")")) o.sext = true;
  unwrap("lit(", ")");  // a literal where an inline constant would do
  if (s == "off" || s == "null") return o;

  static const std::map<std::string, std::pair<int, int>> named = {
      {"vcc", {kVcc, 2}},
      {"vcc_lo", {kVcc, 1}},
      {"vcc_hi", {kVcc + 1, 1}},
      {"exec", {kExec, 2}},
      {"exec_lo", {kExec, 1}},
      {"exec_hi", {kExec + 1, 1}},
      {"m0", {kM0, 1}},
      {"flat_scratch", {kFlatScratch, 2}},
      {"flat_scratch_lo", {kFlatScratch, 1}},
      {"flat_scratch_hi", {kFlatScratch + 1, 1}},
      {"xnack_mask", {104, 2}},
      {"xnack_mask_lo", {104, 1}},
      {"xnack_mask_hi", {105, 1}}};
  if (auto it = named.find(s); it != named.end()) {
    o.kind = Kind::Sgpr;
    o.index = it->second.first;
    o.dwords = it->second.second;
    return o;
  }
  static const std::map<std::string, u64> apertures = {
      {"src_shared_base", kSharedBase},
      {"src_private_base", kPrivateBase},
      {"src_shared_limit", kSharedBase | 0xffffffff},
      {"src_private_limit", kPrivateBase | 0xffffffff}};
  if (auto it = apertures.find(s); it != apertures.end()) {
    o.kind = Kind::Imm;
    o.imm = it->second;
    return o;
  }
  static const std::map<std::string, int> specials = {{"src_scc", kScc},     {"scc", kScc},
                                                      {"src_vccz", kVccz},   {"vccz", kVccz},
                                                      {"src_execz", kExecz}, {"execz", kExecz}};
  if (auto it = specials.find(s); it != specials.end()) {
    o.kind = Kind::Special;
    o.index = it->second;
    return o;
  }

  size_t digits = s.find_first_of("0123456789[");
  std::string file = digits == std::string::npos ? "" : s.substr(0, digits);
  if (file == "v" || file == "a" || file == "s" || file == "ttmp") {
    o.kind = file == "v" || file == "a" ? Kind::Vgpr : Kind::Sgpr;
    int base = file == "a" ? kAccBase : file == "ttmp" ? kTtmp : 0;
    if (s[digits] == '[') {
      size_t colon = s.find(':');
      int first = std::atoi(s.c_str() + digits + 1);
      int last = colon == std::string::npos ? first : std::atoi(s.c_str() + colon + 1);
      o.index = base + first;
      o.dwords = last - first + 1;
    } else {
      o.index = base + std::atoi(s.c_str() + digits);
    }
    return o;
  }
  if (!s.empty() && (std::isdigit(s[0]) || s[0] == '-')) {
    o.kind = Kind::Imm;
    if (s.starts_with("0x")) {
      o.imm = number(s);
      bool isSigned = name.ends_with("_i64");
      if (isSigned) o.imm = static_cast<i64>(static_cast<i32>(o.imm));
    } else if (s.find('.') != std::string::npos) {
      o.isReal = true;
      o.real = std::strtod(s.c_str(), nullptr);
    } else {
      o.imm = static_cast<u64>(std::strtoll(s.c_str(), nullptr, 10));
    }
    return o;
  }
  throw Error("cannot read the operand '" + s + "' of '" + name + "'");
}

bool isModifier(const std::string& word) {
  static const std::set<std::string> flags = {"sc0",   "sc1",   "nt",         "glc",
                                              "slc",   "gds",   "lds",        "offen",
                                              "idxen", "clamp", "row_mirror", "row_half_mirror"};
  if (flags.count(word)) return true;
  size_t colon = word.find(':'), bracket = word.find('[');
  return colon != std::string::npos && (bracket == std::string::npos || colon < bracket);
}

void parseModifier(Inst& i, const std::string& word) {
  size_t colon = word.find(':');
  std::string key = word.substr(0, colon);
  std::string value = colon == std::string::npos ? "" : word.substr(colon + 1);
  auto dpp = [&](DppKind kind) {
    i.dpp = kind;
    if (!value.empty()) i.dppArg = number(value);
  };
  if (key == "sc0")
    i.sc0 = true;
  else if (key == "sc1")
    i.sc1 = true;
  else if (key == "glc")  // of gfx90a: an atomic returns the old value, a load goes past L1
    i.sc0 = i.sc1 = true;
  else if (key == "nt" || key == "slc")
    return;  // a cache hint: results do not depend on it
  else if (key == "lds")
    i.lds = true;
  else if (key == "offen")
    i.offen = true;
  else if (key == "idxen")
    i.idxen = true;
  else if (key == "clamp")
    i.clamp = true;
  else if (key == "gds" && i.name == "ds_gws_barrier")
    ;  // it has no other form
  else if (key == "mul")
    i.omod = value == "2" ? 1 : 2;
  else if (key == "div")
    i.omod = 3;
  else if (key == "offset" && value.starts_with("swizzle("))
    i.offset = swizzleOffset(value);
  else if (key == "offset")
    i.offset = std::strtol(value.c_str(), nullptr, 0);
  else if (key == "offset0")
    i.offset = number(value);
  else if (key == "offset1")
    i.offset1 = number(value);
  else if (key == "op_sel_hi")
    i.opSelHi = bitList(value);
  else if (key == "neg_lo")
    i.negLo = bitList(value);
  else if (key == "neg_hi")
    i.negHi = bitList(value);
  else if (key == "neg")
    i.neg = bitList(value);
  else if (key == "op_sel") {
    size_t count;
    i.opSel = bitList(value, &count);
    // VOP3 lists the destination last; the hardware has it in bit 3.
    bool packed = i.name.starts_with("v_pk_") || i.name.starts_with("v_dot") ||
                  i.name.find("_mix") != std::string::npos || i.name.starts_with("v_mfma");
    if (!packed && count == i.nsrc + 1u && count < 4) {
      u8 last = i.opSel >> (count - 1) & 1;
      i.opSel = (i.opSel & ~(1u << (count - 1))) | last << 3;
    }
  } else if (key == "cbsz")
    i.cbsz = number(value);
  else if (key == "abid")
    i.abid = number(value);
  else if (key == "blgp")
    i.blgp = number(value);
  else if (key == "bitop3")
    i.simm = number(value);
  else if (key == "row_mask")
    i.rowMask = number(value);
  else if (key == "bank_mask")
    i.bankMask = number(value);
  else if (key == "bound_ctrl")
    i.boundCtrl = true;
  else if (key == "row_shl")
    dpp(DppKind::RowShl);
  else if (key == "row_shr")
    dpp(DppKind::RowShr);
  else if (key == "row_ror")
    dpp(DppKind::RowRor);
  else if (key == "wave_shl")
    dpp(DppKind::WaveShl);
  else if (key == "wave_shr")
    dpp(DppKind::WaveShr);
  else if (key == "wave_rol")
    dpp(DppKind::WaveRol);
  else if (key == "wave_ror")
    dpp(DppKind::WaveRor);
  else if (key == "row_mirror")
    dpp(DppKind::Mirror);
  else if (key == "row_half_mirror")
    dpp(DppKind::HalfMirror);
  else if (key == "row_bcast")
    dpp(value == "15" ? DppKind::Bcast15 : DppKind::Bcast31);
  else if (key == "row_newbcast")
    dpp(DppKind::NewBcast);
  else if (key == "quad_perm") {
    std::vector<std::string> p = split(value.substr(1, value.size() - 2), ',');
    for (int n = 0; n < 4; ++n) i.quad[n] = number(p.at(n));
    i.dpp = DppKind::QuadPerm;
  } else if (key == "dst_sel")
    i.dstSel = sdwaSelect(value);
  else if (key == "src0_sel")
    i.src0Sel = sdwaSelect(value);
  else if (key == "src1_sel")
    i.src1Sel = sdwaSelect(value);
  else if (key == "dst_unused") {
    i.dstUnused = value == "UNUSED_PAD" ? 0 : value == "UNUSED_SEXT" ? 1 : 2;
  } else {
    throw Error("cannot read the modifier '" + word + "' of '" + i.text + "'");
  }
}

void parseWaitCounts(Inst& i, const std::string& rest) {
  u32 vm = 63, exp = 7, lgkm = 15;
  for (std::string word : split(rest, ' ')) {
    size_t paren = word.find('(');
    if (paren == std::string::npos) continue;
    u32 n = number(word.substr(paren + 1));
    if (word.starts_with("vmcnt")) vm = n;
    if (word.starts_with("expcnt")) exp = n;
    if (word.starts_with("lgkmcnt")) lgkm = n;
  }
  i.simm = (vm & 15) | exp << 4 | lgkm << 8 | (vm >> 4) << 14;
}

u32 hardwareRegister(const std::string& s) {
  std::vector<std::string> p = split(s.substr(6, s.size() - 7), ',');
  static const std::map<std::string, u32> ids = {{"HW_REG_MODE", 1},      {"HW_REG_STATUS", 2},
                                                 {"HW_REG_TRAPSTS", 3},   {"HW_REG_HW_ID", 4},
                                                 {"HW_REG_GPR_ALLOC", 5}, {"HW_REG_LDS_ALLOC", 6},
                                                 {"HW_REG_IB_STS", 7},    {"HW_REG_XCC_ID", 20}};
  auto it = ids.find(p[0]);
  u32 id = it != ids.end() ? it->second : number(p[0]);
  u32 offset = p.size() > 1 ? number(p[1]) : 0, width = p.size() > 2 ? number(p[2]) : 32;
  return id | offset << 6 | (width - 1) << 11;
}

u32 indexedOperands(const std::string& s) {
  static const std::map<std::string, u32> names = {
      {"SRC0", 1}, {"SRC1", 2}, {"SRC2", 4}, {"DST", 8}};
  u32 r = 0;
  for (const std::string& p : split(s.substr(8, s.size() - 9), ',')) r |= names.at(p);
  return r;
}

}  // namespace sim
