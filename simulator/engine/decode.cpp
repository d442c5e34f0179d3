// From machine code to `Inst`: LLVM disassembles, its text is read into operands and a handler.
#include "decode.h"

#include <llvm-c/Disassembler.h>
#include <llvm-c/Target.h>

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
    registerScale(t);
    return t;
  }();
  return table;
}

void unknownInstruction(Wave& w, const Inst& i) {
  stop(w, i, "the simulator does not know this instruction: add it to an opcode table");
}

namespace {

// Operands of memory instructions: address, scalar base or resource, data, scalar offset.
void parseMemoryOperands(Inst& i, std::vector<Operand>& ops) {
  MemSpec& m = i.mem;
  size_t at = 0;
  auto next = [&]() -> Operand { return at < ops.size() ? ops[at++] : Operand{}; };
  bool toLds = m.access == Access::LoadToLds;
  if (m.access == Access::Atomic) {
    m.returns =
        m.once || (m.space == Space::Lds ? i.name.find("_rtn") != std::string::npos : i.sc0);
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
      if (!m.once) i.src[0] = next();
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
       {"s_cmp_",     "s_bitcmp",  "s_setpc",   "s_setreg",      "s_cbranch",
        "s_branch",   "s_endpgm",  "s_barrier", "s_nop",         "s_sleep",
        "s_setprio",  "s_trap",    "s_sethalt", "s_sendmsg",     "v_nop",
        "s_icache",   "s_dcache",  "s_ttrace",  "s_set_gpr_idx", "s_inst_prefetch",
        "buffer_inv", "buffer_wb", "s_decperf", "s_incperf",     "ds_gws_barrier"}) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

bool hasSecondDestination(const std::string& name) {
  return name.find("_co_u32") != std::string::npos || name.starts_with("v_div_scale_") ||
         name == "v_mad_u64_u32" || name == "v_mad_i64_i32";
}

bool accumulates(const std::string& name) {
  return name.starts_with("v_fmac") || name.starts_with("v_mac") || name == "v_pk_fmac_f16" ||
         (name.starts_with("v_dot") && name.find("c_") != std::string::npos);
}

void addRange(std::vector<Inst::Range>& v, std::vector<Inst::Range>& s, const Operand& o) {
  if (o.is(Kind::Vgpr)) v.push_back({o.index, o.dwords});
  if (o.is(Kind::Sgpr)) s.push_back({o.index, o.dwords});
}

void collectRegisters(Inst& i) {
  for (const Operand& o : i.src) addRange(i.readsV, i.readsS, o);
  addRange(i.writesV, i.writesS, i.dst);
  addRange(i.writesV, i.writesS, i.dst2);
  if (i.name.starts_with("v_swap") || i.name.starts_with("v_permlane")) {
    addRange(i.readsV, i.readsS, i.dst);
    addRange(i.writesV, i.writesS, i.src[0]);
  }
  if (i.name.starts_with("v_smfmac") || i.name.starts_with("s_cmpk") ||
      i.name.starts_with("s_addk") || i.name.starts_with("s_mulk") ||
      i.name.starts_with("s_bitset")) {
    addRange(i.readsV, i.readsS, i.dst);
  }
  // Part of the destination stays.
  if (i.name.starts_with("v_cvt_scalef32") && i.dst.dwords == 1) {
    addRange(i.readsV, i.readsS, i.dst);
  }
  if (i.name.starts_with("v_div_fmas") || i.name.starts_with("s_cbranch_vcc")) {
    i.readsS.push_back({kVcc, 2});
  }
  auto note = [&](const std::vector<Inst::Range>& ranges, bool scalar) {
    for (const Inst::Range& r : ranges) {
      for (u32 n = r.first; n < u32{r.first} + r.count; ++n) {
        if (scalar || n < kTempBase) i.touches.set(n, scalar, true);
      }
    }
  };
  note(i.readsV, false);
  note(i.writesV, false);
  note(i.readsS, true);
  note(i.writesS, true);
}

void parseText(Inst& i) {
  std::string text = i.text;
  size_t space = text.find_first_of(" \t");
  std::string mnemonic = text.substr(0, space);
  std::string rest = space == std::string::npos ? "" : text.substr(space + 1);
  bool sdwa = false, dpp = false;
  for (const char* suffix : {"_e32", "_e64", "_sdwa", "_dpp"}) {
    if (mnemonic.ends_with(suffix)) {
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
        } else if (word.starts_with("hwreg(")) {
          i.simm = hardwareRegister(word);
        } else if (word.starts_with("gpr_idx(")) {
          i.simm = indexedOperands(word);
        } else if (word.starts_with("sendmsg(")) {
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
    if (name.starts_with("s_cbranch") || name == "s_branch" || name == "s_call_b64" ||
        name == "s_sleep" || name == "s_nop" || name == "s_trap" || name == "s_setprio") {
      i.simm = static_cast<u32>(i.src[0].imm);
    }
    bool kImmediate = name.starts_with("s_movk") || name.starts_with("s_cmovk") ||
                      name.starts_with("s_addk") || name.starts_with("s_mulk") ||
                      (name.starts_with("s_cmpk") && name.ends_with("_i32"));
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
    // Operands of 6 and 4 bits, formats 2 to 4, are taken at twice the rate.
    if (name.ends_with("_f8f6f4") && i.cbsz >= 2 && i.blgp >= 2) i.passes /= 2;
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
      LLVMCreateDisasmCPU("amdgcn-amd-amdhsa", object.gpu->target, nullptr, 0, nullptr, nullptr);
  if (!context)
    throw Error(std::string("LLVM cannot disassemble for the target ") + object.gpu->target);
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
    if (i.name.starts_with("s_cbranch") || i.name == "s_branch" || i.name == "s_call_b64") {
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
