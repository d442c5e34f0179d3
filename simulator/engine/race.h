// What the checkers of global memory (race.cpp) and of LDS (race_lds.cpp) share (race_rules.cpp).
#pragma once

#include "memory.h"

namespace sim {

std::string describe(const Wave& w, const char* what, u32 who, u32 wave, const Inst* inst,
                     bool earlierWrites, const std::string& hint);

// Do both accesses mean to meet? Then they are synchronisation and no race.
enum class Reach : u8 { Workgroup, Device, System };
bool synchronise(const Wave& w, const Role& a, const Role& b, Reach reach, bool lds);

// A word that waves of a workgroup share, read with scope bits and stored without.
bool halfSynchronised(const Role& a, const Role& b);

// Does the load only look, because what writes asks the word again?
bool looksOnly(const Wave& w, const Inst& load, const Role& role, const Inst& write);

// A byte of a store's data, `at` bytes into what a lane stores.
u8 dataByte(const MemOp& op, int lane, u32 at, u32 row);

// Why two accesses that look like synchronisation are not.
const char* hintFor(const Role& a, const Role& b, Reach reach);

}  // namespace sim
