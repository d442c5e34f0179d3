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

}  // namespace

// A polling load: it sits in a loop that stores nothing and computes little, and its address is the
// same in every turn. Compilers move such a load out of the loop unless the source says volatile
// or atomic, so its address is a synchronisation flag by intent. Loops are rotated: the first poll
// stands before the loop, with the same result register and a branch between the two.
void markSpins(CodeObject& object) {
  constexpr u32 kMaxBody = 48, kBefore = 32;
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

}  // namespace sim
