// From machine code to `Inst`: LLVM disassembles, this file reads its text.
#include <llvm-c/Disassembler.h>
#include <llvm-c/Target.h>

#include <cstdlib>
#include <set>
#include <sstream>

#include "operands.h"

namespace sim {

const OpTable& opTable() {
  static const OpTable table = [] {
    OpTable t;
    registerSalu(t);
    registerControl(t);
    registerFloat(t);
    registerInteger(t);
    registerCompare(t);
    registerPacked(t);
    registerConvert(t);
    registerDouble(t);
    registerLane(t);
    registerMatrix(t);
    return t;
  }();
  return table;
}

void unknownInstruction(Wave& w, const Inst& i) {
  stop(w, i, "the simulator does not know this instruction: add it to an opcode table");
}

namespace {

bool startsWith(const std::string& s, const char* prefix) { return s.rfind(prefix, 0) == 0; }
bool endsWith(const std::string& s, const std::string& tail) {
  return s.size() >= tail.size() && s.compare(s.size() - tail.size(), tail.size(), tail) == 0;
}

// Splits at `separator` outside of brackets, parentheses and quotes.
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

bool isModifier(const std::string& word) {
  static const std::set<std::string> flags = {
      "sc0", "sc1", "nt", "gds", "lds", "offen", "idxen", "clamp", "row_mirror", "row_half_mirror"};
  if (flags.count(word)) return true;
  size_t colon = word.find(':'), bracket = word.find('[');
  return colon != std::string::npos && (bracket == std::string::npos || colon < bracket);
}

u64 number(const std::string& s) { return std::strtoull(s.c_str(), nullptr, 0); }

// [1,0,1] as bits, the first element lowest.
u32 bitList(const std::string& s, size_t* count = nullptr) {
  std::vector<std::string> parts = split(s.substr(1, s.size() - 2), ',');
  u32 r = 0;
  for (size_t n = 0; n < parts.size(); ++n) r |= (parts[n] == "1") << n;
  if (count) *count = parts.size();
  return r;
}

Operand parseOperand(std::string s, const std::string& name) {
  Operand o;
  auto unwrap = [&](const char* prefix, const char* suffix) {
    if (startsWith(s, prefix) && endsWith(s, suffix)) {
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
    if (startsWith(s, "0x")) {
      o.imm = number(s);
      bool isSigned = endsWith(name, "_i64");
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
  else if (key == "nt")
    return;  // a cache hint: results do not depend on it
  else if (key == "lds")
    i.lds = true;
  else if (key == "offen")
    i.offen = true;
  else if (key == "idxen")
    i.idxen = true;
  else if (key == "clamp")
    i.clamp = true;
  else if (key == "mul")
    i.omod = value == "2" ? 1 : 2;
  else if (key == "div")
    i.omod = 3;
  else if (key == "offset" && startsWith(value, "swizzle("))
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
    bool packed = startsWith(i.name, "v_pk_") || startsWith(i.name, "v_dot") ||
                  i.name.find("_mix") != std::string::npos || startsWith(i.name, "v_mfma");
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
    if (startsWith(word, "vmcnt")) vm = n;
    if (startsWith(word, "expcnt")) exp = n;
    if (startsWith(word, "lgkmcnt")) lgkm = n;
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

// gpr_idx(SRC0,DST): which operands take the index.
u32 indexedOperands(const std::string& s) {
  static const std::map<std::string, u32> names = {
      {"SRC0", 1}, {"SRC1", 2}, {"SRC2", 4}, {"DST", 8}};
  u32 r = 0;
  for (const std::string& p : split(s.substr(8, s.size() - 9), ',')) r |= names.at(p);
  return r;
}

// Operands of memory instructions: address, scalar base or resource, data, scalar offset.
void parseMemoryOperands(Inst& i, std::vector<Operand>& ops) {
  MemSpec& m = i.mem;
  size_t at = 0;
  auto next = [&]() -> Operand { return at < ops.size() ? ops[at++] : Operand{}; };
  bool toLds = m.access == Access::LoadToLds;
  if (m.access == Access::Atomic) {
    m.returns = m.space == Space::Lds ? i.name.find("_rtn") != std::string::npos : i.sc0;
  }
  bool result = (m.access == Access::Load) || (m.access == Access::Atomic && m.returns);
  switch (m.space) {
    case Space::Scalar:
      i.dst = next();
      i.src[1] = next();
      i.src[3] = next();
      break;
    case Space::Lds:
      if (result) i.dst = next();
      i.src[0] = next();
      i.src[1] = next();
      i.src[2] = next();
      break;
    case Space::Buffer:
      if (result)
        i.dst = next();
      else if (!toLds)
        i.src[2] = next();
      if (m.access == Access::Atomic && m.returns) i.src[2] = i.dst;
      i.src[0] = next();
      i.src[1] = next();
      i.src[3] = next();
      break;
    default:  // Global, Flat, Scratch
      if (result) i.dst = next();
      i.src[0] = next();
      if (m.access == Access::Store || m.access == Access::Atomic) i.src[2] = next();
      i.src[1] = next();
  }
}

bool hasNoDestination(const std::string& name) {
  for (const char* prefix :
       {"s_cmp_",     "s_bitcmp",    "s_setpc",   "s_setreg",      "s_cbranch",
        "s_branch",   "s_endpgm",    "s_barrier", "s_nop",         "s_sleep",
        "s_setprio",  "s_trap",      "s_sethalt", "s_sendmsg",     "v_nop",
        "s_icache",   "s_dcache",    "s_ttrace",  "s_set_gpr_idx", "s_inst_prefetch",
        "buffer_inv", "buffer_wbl2", "s_decperf", "s_incperf"}) {
    if (startsWith(name, prefix)) return true;
  }
  return false;
}

bool hasSecondDestination(const std::string& name) {
  return name.find("_co_u32") != std::string::npos || startsWith(name, "v_div_scale_") ||
         name == "v_mad_u64_u32" || name == "v_mad_i64_i32";
}

bool accumulates(const std::string& name) {
  return startsWith(name, "v_fmac") || startsWith(name, "v_mac") ||
         (startsWith(name, "v_dot") && name.find("c_") != std::string::npos);
}

void addRange(std::vector<Inst::Range>& v, std::vector<Inst::Range>& s, const Operand& o) {
  if (o.is(Kind::Vgpr)) v.push_back({o.index, o.dwords});
  if (o.is(Kind::Sgpr)) s.push_back({o.index, o.dwords});
}

void collectRegisters(Inst& i) {
  for (const Operand& o : i.src) addRange(i.readsV, i.readsS, o);
  addRange(i.writesV, i.writesS, i.dst);
  addRange(i.writesV, i.writesS, i.dst2);
  if (startsWith(i.name, "v_swap") || startsWith(i.name, "v_permlane")) {
    addRange(i.readsV, i.readsS, i.dst);
    addRange(i.writesV, i.writesS, i.src[0]);
  }
  if (startsWith(i.name, "v_smfmac") || startsWith(i.name, "s_cmpk") ||
      startsWith(i.name, "s_addk") || startsWith(i.name, "s_mulk") ||
      startsWith(i.name, "s_bitset")) {
    addRange(i.readsV, i.readsS, i.dst);
  }
  if (startsWith(i.name, "v_div_fmas") || startsWith(i.name, "s_cbranch_vcc")) {
    i.readsS.push_back({kVcc, 2});
  }
}

void parseText(Inst& i) {
  std::string text = i.text;
  size_t space = text.find_first_of(" \t");
  std::string mnemonic = text.substr(0, space);
  std::string rest = space == std::string::npos ? "" : text.substr(space + 1);
  bool sdwa = false, dpp = false;
  for (const char* suffix : {"_e32", "_e64", "_sdwa", "_dpp"}) {
    if (endsWith(mnemonic, suffix)) {
      mnemonic.resize(mnemonic.size() - std::strlen(suffix));
      sdwa = sdwa || std::string(suffix) == "_sdwa";
      dpp = dpp || std::string(suffix) == "_dpp";
    }
  }
  i.name = mnemonic;
  i.fn = unknownInstruction;
  const std::string& name = i.name;

  if (name == "s_waitcnt") {
    parseWaitCounts(i, rest);
  } else {
    std::vector<Operand> ops;
    std::vector<std::string> modifiers;
    std::vector<std::string> pieces = split(rest, ',');
    for (size_t n = 0; n < pieces.size(); ++n) {
      for (const std::string& word : split(pieces[n], ' ')) {
        if (isModifier(word)) {
          modifiers.push_back(word);
        } else if (startsWith(word, "hwreg(")) {
          i.simm = hardwareRegister(word);
        } else if (startsWith(word, "gpr_idx(")) {
          i.simm = indexedOperands(word);
        } else if (startsWith(word, "sendmsg(")) {
          continue;
        } else {
          ops.push_back(parseOperand(word, name));
        }
      }
    }
    if (parseMemory(name, i.mem)) {
      for (const std::string& m : modifiers) parseModifier(i, m);
      if (i.lds && i.mem.space == Space::Buffer) i.mem.access = Access::LoadToLds;
      parseMemoryOperands(i, ops);
      i.nsrc = 4;
    } else {
      size_t at = 0;
      if (!hasNoDestination(name) && !ops.empty()) i.dst = ops[at++];
      if (hasSecondDestination(name) && at < ops.size()) i.dst2 = ops[at++];
      for (; at < ops.size() && i.nsrc < 5; ++at) i.src[i.nsrc++] = ops[at];
      // Packed instructions take high halves for the high result unless told otherwise; the mixed
      // ones take f32 sources unless told otherwise.
      if (name.find("_mix") != std::string::npos) i.opSelHi = 0;
      for (const std::string& m : modifiers) parseModifier(i, m);
      if (accumulates(name)) i.src[i.nsrc++] = i.dst;
    }
    if (startsWith(name, "s_cbranch") || name == "s_branch" || name == "s_call_b64" ||
        name == "s_sleep" || name == "s_nop" || name == "s_trap" || name == "s_setprio") {
      i.simm = static_cast<u32>(i.src[0].imm);
    }
    bool kImmediate = startsWith(name, "s_movk") || startsWith(name, "s_cmovk") ||
                      startsWith(name, "s_addk") || startsWith(name, "s_mulk") ||
                      (startsWith(name, "s_cmpk") && endsWith(name, "_i32"));
    if (kImmediate)
      i.src[0].imm = static_cast<u32>(static_cast<i32>(static_cast<i16>(i.src[0].imm)));
  }

  if (i.mem.access != Access::None) {
    i.fn = executeMemory;
    i.cls = i.mem.space == Space::Scalar    ? Class::Smem
            : i.mem.space == Space::Lds     ? Class::Lds
            : i.mem.space == Space::Flat    ? Class::Flat
            : i.mem.space == Space::Scratch ? Class::Scratch
                                            : Class::Vmem;
  } else if (auto it = opTable().find(name); it != opTable().end()) {
    i.fn = it->second.fn;
    i.cls = it->second.cls;
    i.passes = it->second.passes;
  }
  collectRegisters(i);
  if ((sdwa || dpp) && i.fn != unknownInstruction) {
    i.inner = &i;  // replaced by wrap()
    i.fn = sdwa ? executeSdwa : executeDpp;
  }
}

// The plain operation behind a DPP or SDWA form works on temporary rows.
void wrap(CodeObject& object, Inst& i) {
  if (!i.inner) return;
  object.innerInsts.push_back(i);
  Inst& plain = object.innerInsts.back();
  plain.inner = nullptr;
  plain.fn = opTable().at(i.name).fn;
  auto redirect = [&](int n) {
    Operand& o = plain.src[n];
    o.kind = Kind::Vgpr;
    o.index = kTempBase + n;
    o.sext = false;
  };
  if (i.fn == executeDpp) {
    redirect(0);
  } else {
    redirect(0);
    // The carry-in of a v_addc is the third operand and stays.
    if (i.nsrc > 1 && i.src[1].present()) redirect(1);
    if (i.dst.is(Kind::Vgpr) && i.dst.dwords == 1) plain.dst.index = kTempBase + 2;
    if (accumulates(i.name)) plain.src[i.nsrc - 1] = plain.dst;
  }
  i.inner = &plain;
}

bool overlaps(const Inst::Range& r, const Operand& o) {
  return r.first < o.index + o.dwords && o.index < r.first + r.count;
}

bool writes(const Inst& i, const Operand& o) {
  const auto& ranges = o.is(Kind::Vgpr) ? i.writesV : i.writesS;
  for (const Inst::Range& r : ranges) {
    if ((o.is(Kind::Vgpr) || o.is(Kind::Sgpr)) && overlaps(r, o)) return true;
  }
  return false;
}

// Does the operand have the same value in every turn of the loop code[first..last], as seen by the
// instruction `at`? Either nothing in the loop writes it, or what writes it last before `at` is an
// arithmetic instruction of this turn whose sources all are the same in every turn.
bool invariant(const std::vector<Inst>& code, u32 first, u32 last, u32 at, const Operand& o,
               int depth = 0) {
  if (!o.is(Kind::Vgpr) && !o.is(Kind::Sgpr)) return true;
  if (depth > 6) return false;
  for (u32 n = at; n-- > first;) {
    if (!writes(code[n], o)) continue;
    if (code[n].mem.access != Access::None) return false;
    for (const Operand& source : code[n].src) {
      if (!invariant(code, first, last, n, source, depth + 1)) return false;
    }
    return true;
  }
  for (u32 n = at; n <= last; ++n) {
    if (writes(code[n], o)) return false;
  }
  return true;
}

bool isBranch(const Inst& i) { return i.cls == Class::Branch; }

// A polling load: it sits in a loop that stores nothing and computes little, and its address is the
// same in every turn. Compilers move such a load out of the loop unless the source says volatile
// or atomic, so its address is a synchronisation flag by intent. Loops are rotated: the first poll
// stands before the loop, with the same result register and a branch between the two.
void markSpins(CodeObject& object) {
  constexpr u32 kMaxBody = 48, kBefore = 32;
  std::vector<Inst>& code = object.code;
  for (u32 last = 0; last < code.size(); ++last) {
    u32 first = code[last].simm;
    if (!isBranch(code[last]) || startsWith(code[last].name, "s_setpc") ||
        startsWith(code[last].name, "s_swappc") || first > last || last - first > kMaxBody) {
      continue;
    }
    bool quiet = true;
    for (u32 n = first; n <= last && quiet; ++n) {
      const Inst& i = code[n];
      quiet = (i.mem.access == Access::None || i.mem.access == Access::Load) &&
              i.cls != Class::Barrier && i.cls != Class::Matrix && i.cls != Class::Trans &&
              i.name != "s_endpgm" && i.name != "s_swappc_b64";
    }
    if (!quiet) continue;
    for (u32 n = first; n <= last; ++n) {
      Inst& load = code[n];
      if (load.mem.access != Access::Load || load.mem.bytes > 8 || !load.mem.bytes) continue;
      bool fixed = true;
      for (const Operand& o : {load.src[0], load.src[1], load.src[3]}) {
        fixed = fixed && invariant(code, first, last, n, o);
      }
      if (!fixed) continue;
      load.mem.spin = true;
      bool branched = false;
      for (u32 k = first; k-- > 0 && first - k <= kBefore;) {
        branched = branched || isBranch(code[k]);
        if (code[k].mem.access == Access::None) continue;
        if (branched && code[k].name == load.name && code[k].dst.index == load.dst.index) {
          code[k].mem.spin = true;
        }
        break;
      }
    }
  }
}

}  // namespace

void decodeText(CodeObject& object, const u8* bytes, u64 base, u64 size) {
  static const bool ready = [] {
    LLVMInitializeAMDGPUTargetInfo();
    LLVMInitializeAMDGPUTargetMC();
    LLVMInitializeAMDGPUDisassembler();
    return true;
  }();
  (void)ready;
  LLVMDisasmContextRef context =
      LLVMCreateDisasmCPU("amdgcn-amd-amdhsa", object.target.c_str(), nullptr, 0, nullptr, nullptr);
  if (!context) throw Error("LLVM cannot disassemble for the target '" + object.target + "'");
  object.textBase = base;
  object.textEnd = base + size;
  object.indexOfWord.assign(size / 4 + 1, -1);
  for (u64 at = 0; at + 4 <= size;) {
    char text[512];
    size_t length = LLVMDisasmInstruction(context, const_cast<u8*>(bytes) + at, size - at,
                                          base + at, text, sizeof text);
    Inst i;
    i.address = base + at;
    i.size = length ? length : 4;
    i.text = length ? text : "(not an instruction)";
    while (!i.text.empty() && (i.text[0] == ' ' || i.text[0] == '\t')) i.text.erase(0, 1);
    object.indexOfWord[at / 4] = object.code.size();
    try {
      if (length) {
        parseText(i);
      } else {
        i.fn = unknownInstruction;
      }
    } catch (const Error& error) {
      // Padding between functions may decode to oddities: they fail when they are executed.
      i.text += "  [" + std::string(error.what()) + "]";
      i.fn = unknownInstruction;
    }
    object.code.push_back(std::move(i));
    at += object.code.back().size;
  }
  LLVMDisasmDispose(context);
  for (u32 n = 0; n < object.code.size(); ++n) {
    Inst& i = object.code[n];
    if (startsWith(i.name, "s_cbranch") || i.name == "s_branch" || i.name == "s_call_b64") {
      u64 target = i.address + 4 + 4 * static_cast<i64>(static_cast<i16>(i.simm));
      i32 index = object.indexAt(target);
      if (index < 0) i.fn = unknownInstruction;
      i.simm = index < 0 ? 0 : index;
    }
    wrap(object, i);
  }
  markSpins(object);
}

}  // namespace sim
