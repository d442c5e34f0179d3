// Which loads poll a flag: the race checker takes them for synchronisation.
#include "decode.h"

namespace sim {
namespace {

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

// Loads, and atomics that return: a lock's compare-and-swap polls too.
bool isRead(const Inst& i) {
  return i.mem.access == Access::Load || (i.mem.access == Access::Atomic && i.mem.returns);
}

// Where the value of a register comes from, as far as straight code before `at` tells: a constant,
// or the instruction that made it.
struct Origin {
  bool constant = false;
  u64 value = 0;  // the constant, or the instruction's index; ~register for what lies further back
  bool operator==(const Origin&) const = default;
};

Origin origin(const std::vector<Inst>& code, u32 at, const Operand& o) {
  constexpr u32 kBack = 256;
  if (o.is(Kind::Imm)) return {true, o.isReal ? literal32(o) : o.imm};
  if (!o.present()) return {true, 0};
  for (u32 n = at; n-- > 0 && at - n <= kBack;) {
    const Inst& i = code[n];
    if (i.name == "s_endpgm") break;
    if (!writes(i, o)) continue;
    bool move = i.name == "v_mov_b32" || i.name == "s_mov_b32" || i.name == "s_movk_i32";
    if (move && i.fn != executeDpp && i.fn != executeSdwa) return origin(code, n, i.src[0]);
    return {false, n};
  }
  return {false, ~static_cast<u64>(o.index | (o.is(Kind::Sgpr) ? 0x10000 : 0))};
}

bool sameAddress(const std::vector<Inst>& code, u32 a, u32 b) {
  const Inst &x = code[a], &y = code[b];
  if (x.name != y.name || x.offset != y.offset || x.offset1 != y.offset1) return false;
  for (int n : {0, 1, 3}) {
    bool address = x.mem.space != Space::Lds || n == 0;
    if (address && !(origin(code, a, x.src[n]) == origin(code, b, y.src[n]))) return false;
  }
  return true;
}

// Loops are rotated: the first poll stands before the loop, with a branch between the two. It is a
// read of the same address where that can be seen; else the nearest access of its memory, if it is
// the same instruction: addresses are often computed anew for the loop.
void markFirstPoll(std::vector<Inst>& code, u32 first, u32 load) {
  constexpr u32 kBefore = 64;
  bool branched = false, nearest = true;
  Inst* likely = nullptr;
  for (u32 k = first; k-- > 0 && first - k <= kBefore && code[k].name != "s_endpgm";) {
    Inst& i = code[k];
    branched = branched || isBranch(i);
    if (i.mem.access == Access::None || i.mem.space != code[load].mem.space) continue;
    if (branched && isRead(i) && sameAddress(code, k, load)) {
      i.mem.spin = true;
      return;
    }
    if (branched && nearest && i.name == code[load].name) likely = &i;
    nearest = false;
  }
  if (likely) likely->mem.spin = true;
}

}  // namespace

// A polling load without scope bits: it sits in a loop that stores nothing and computes little, and
// its address is the same in every turn. Compilers move such a load out of the loop unless the
// source says volatile or atomic, so its address is a synchronisation flag by intent. LDS has no
// scope bits; in global memory sc0 or sc1 say the same of any load.
void markSpins(CodeObject& object) {
  constexpr u32 kMaxBody = 48;
  std::vector<Inst>& code = object.code;
  for (u32 last = 0; last < code.size(); ++last) {
    u32 first = code[last].simm;
    if (!isBranch(code[last]) || code[last].name.starts_with("s_setpc") ||
        code[last].name.starts_with("s_swappc") || first > last || last - first > kMaxBody) {
      continue;
    }
    bool quiet = true;
    for (u32 n = first; n <= last && quiet; ++n) {
      const Inst& i = code[n];
      quiet = (i.mem.access == Access::None || isRead(i)) && i.cls != Class::Barrier &&
              i.cls != Class::Matrix && i.cls != Class::Trans && i.name != "s_endpgm" &&
              i.name != "s_swappc_b64";
    }
    if (!quiet) continue;
    for (u32 n = first; n <= last; ++n) {
      Inst& load = code[n];
      if (!isRead(load) || !load.mem.bytes || load.mem.space == Space::Scalar) continue;
      bool fixed = true;
      for (int k : {0, 1, 3}) {  // the data of an LDS atomic may change
        bool address = load.mem.space != Space::Lds || k == 0;
        fixed = fixed && (!address || invariant(code, first, last, n, load.src[k]));
      }
      if (!fixed) continue;
      load.mem.spin = true;
      markFirstPoll(code, first, n);
    }
  }
}

void noteAcquires(const CodeObject& object, Kernel& kernel) {
  const std::vector<Inst>& code = object.code;
  u32 first = kernel.entry, end = first;
  while (end < code.size() && code[end].address < kernel.codeEnd &&
         !code[end].name.starts_with("s_swappc") && !code[end].name.starts_with("s_setpc")) {
    ++end;
  }
  if (end == first || (end < code.size() && code[end].address < kernel.codeEnd)) {
    first = 0;
    end = code.size();
  }
  for (u32 n = first; n < end; ++n) {
    const Inst& i = code[n];
    bool lds = i.mem.space == Space::Lds, flat = i.mem.space == Space::Flat;
    bool vector = flat || i.mem.space == Space::Global || i.mem.space == Space::Buffer;
    if (!isRead(i) || !i.mem.bytes || !(lds || vector)) continue;
    bool takes = i.mem.access == Access::Atomic || i.mem.spin || (vector && (i.sc0 || i.sc1));
    kernel.acquiresLds |= takes && (lds || flat);
    kernel.acquiresGlobal |= takes && vector;
  }
}

}  // namespace sim
