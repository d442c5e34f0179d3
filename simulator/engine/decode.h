// Between the files of the decoder.
#pragma once

#include "operands.h"

namespace sim {

// Splits at `separator` outside of brackets, parentheses and quotes; drops what is empty.
std::vector<std::string> split(const std::string& s, char separator);

// An operand of the instruction `name`. Throws Error when it cannot be read.
Operand parseOperand(std::string s, const std::string& name);

// Words such as offset:16 or row_mask:0xf, and what they set.
bool isModifier(const std::string& word);
void parseModifier(Inst& i, const std::string& word);

// Symbolic operands, as the instruction's immediate has them.
void parseWaitCounts(Inst& i, const std::string& rest);
u32 hardwareRegister(const std::string& s);  // hwreg(HW_REG_MODE, 0, 4)
u32 indexedOperands(const std::string& s);   // gpr_idx(SRC0,DST): which operands take the index

// Marks polling loads (MemSpec::spin).
void markSpins(CodeObject& object);

}  // namespace sim
