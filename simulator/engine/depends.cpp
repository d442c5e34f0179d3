// What becomes of a loaded value: whether an instruction that writes takes it as data, or runs only
// because of it. `if (v < *p) atomicMin(p, v)` looks and then asks again; `*p += v` trusts its
// look.
#include <algorithm>
#include <bitset>

#include "memory.h"

namespace sim {
namespace {

constexpr u32 kSteps = 4000;  // instructions that are followed, on all paths together

using Indices = std::vector<bool>;

bool ends(const Inst& i) {
  return i.name == "s_endpgm" || i.name.starts_with("s_setpc") || i.name.starts_with("s_swappc");
}

bool isConditional(const Inst& i) { return i.name.starts_with("s_cbranch"); }

// Instructions that can follow `from`, up to the load.
Indices reachable(const std::vector<Inst>& code, u32 from, u32 load) {
  Indices seen(code.size());
  std::vector<u32> todo{from};
  for (u32 steps = 0; !todo.empty() && steps < kSteps; ++steps) {
    u32 at = todo.back();
    todo.pop_back();
    if (at >= code.size() || at == load || seen[at]) continue;
    seen[at] = true;
    const Inst& i = code[at];
    if (ends(i)) continue;
    if (isConditional(i) || i.name == "s_branch") todo.push_back(i.simm);
    if (i.name != "s_branch") todo.push_back(at + 1);
  }
  return seen;
}

struct Path {
  u32 at = 0;
  std::bitset<kTempBase> v;  // registers that hold the value, or what was made of it
  std::bitset<128> s;
  bool scc = false;
  // Where EXEC was saved when the value switched lanes off: until it comes back from there, what is
  // executed depends on the value.
  struct Guard {
    u16 saved;
    std::bitset<kTempBase> v;  // what lanes that are off still have
  };
  std::vector<Guard> guards;

  bool holds(const Operand& o) const {
    for (u32 n = 0; n < o.dwords; ++n) {
      if (o.is(Kind::Vgpr) && o.index + n < v.size() && v[o.index + n]) return true;
      if (o.is(Kind::Sgpr) && o.index + n < s.size() && s[o.index + n]) return true;
    }
    return (o.is(Kind::Special) && o.index == kScc && scc) ||
           (o.is(Kind::Sgpr) && o.index == kExec && !guards.empty());
  }
};

class Follower {
 public:
  Follower(const std::vector<Inst>& code, u32 load, u32 write)
      : code_(code), load_(load), write_(write), visits_(code.size()) {}

  Dependence run() {
    Path first;
    first.at = load_ + 1;
    mark(first, code_[load_], true);
    todo_.push_back(std::move(first));
    for (u32 steps = 0; !todo_.empty() && steps < kSteps;) {
      Path path = std::move(todo_.back());
      todo_.pop_back();
      while (steps++ < kSteps && path.at < code_.size() && path.at != load_ &&
             visits_[path.at]++ < 3 && step(path)) {
      }
    }
    return found_;
  }

 private:
  // False at the end of a path.
  bool step(Path& path) {
    const Inst& i = code_[path.at];
    if (path.at == write_) {
      bool lds = i.mem.space == Space::Lds;
      found_.data |= path.holds(i.src[2]) || (lds && path.holds(i.src[1]));
      found_.control |= !path.guards.empty();
      return false;
    }
    if (ends(i)) return false;
    if (i.name == "s_branch") {
      path.at = i.simm;
      return true;
    }
    if (isConditional(i)) {
      bool scc = i.name.starts_with("s_cbranch_scc"), vcc = i.name.starts_with("s_cbranch_vcc");
      if ((scc && path.scc) || (vcc && path.s[kVcc])) {
        found_.control |=
            reachable(code_, path.at + 1, load_)[write_] != reachable(code_, i.simm, load_)[write_];
      }
      todo_.push_back(path);
      todo_.back().at = i.simm;
      ++path.at;
      return true;
    }
    bool tainted = false;
    for (const Operand& o : i.src) tainted = tainted || path.holds(o);
    for (const Inst::Range& r : i.readsV) {
      for (u32 n = r.first; n < u32{r.first} + r.count; ++n) {
        tainted = tainted || (n < path.v.size() && path.v[n]);
      }
    }
    if (i.name.starts_with("s_cselect") || i.name.starts_with("s_addc") ||
        i.name.starts_with("s_subb") || i.name.starts_with("s_cmov")) {
      tainted = tainted || path.scc;
    }
    follow(path, i, tainted);
    mark(path, i, tainted);
    ++path.at;
    return true;
  }

  // Lanes that are switched off and on again, and the condition code.
  void follow(Path& path, const Inst& i, bool tainted) {
    bool intoExec = i.dst.is(Kind::Sgpr) && i.dst.index == kExec;
    auto restores = [&](u16 saved) {
      for (const auto& g : path.guards) {
        if (g.saved == saved) path.v |= g.v;
      }
      std::erase_if(path.guards, [&](const auto& g) { return g.saved == saved; });
    };
    if (i.name.find("saveexec") != std::string::npos) {
      if (i.name.starts_with("s_or_")) restores(i.src[0].index);
      if (tainted) path.guards.push_back({i.dst.index, path.v});
    } else if (intoExec && i.name.starts_with("s_or_b64")) {
      restores(i.src[1].index);
    } else if (intoExec && i.name == "s_mov_b64") {
      for (const auto& g : path.guards) path.v |= g.v;
      path.guards.clear();
    } else if (intoExec && tainted && path.guards.empty()) {
      path.guards.push_back({i.src[1].index, path.v});
    }
    bool keeps = i.name.starts_with("s_mov") || i.name.starts_with("s_cmov") ||
                 i.name.starts_with("s_cselect") || i.name.starts_with("s_mul") ||
                 i.name.starts_with("s_pack");
    if (i.cls == Class::Salu && !keeps) path.scc = tainted;
  }

  void mark(Path& path, const Inst& i, bool tainted) {
    for (const Inst::Range& r : i.writesV) {
      for (u32 n = r.first; n < u32{r.first} + r.count && n < path.v.size(); ++n) {
        path.v[n] = tainted;
      }
    }
    for (const Inst::Range& r : i.writesS) {
      for (u32 n = r.first; n < u32{r.first} + r.count && n < path.s.size(); ++n) {
        if (n < kExec) path.s[n] = tainted;
      }
    }
  }

  const std::vector<Inst>& code_;
  u32 load_, write_;
  std::vector<u8> visits_;
  std::vector<Path> todo_;
  Dependence found_;
};

// What was written last, in the order of the code, to a register that an address is made of. The
// walk ends at a load, a lane's number or a register that nothing in sight wrote: all those may
// differ from lane to lane, or from time to time. Branches are not followed: a loop's index is told
// by an instruction that reads what it writes.
bool isFixed(const std::vector<Inst>& code, u32 at, u32 wanted, bool scalar, u32& budget) {
  auto has = [&](const Inst::Range& r) { return r.first <= wanted && wanted < r.first + r.count; };
  while (at > 0 && budget) {
    --at, --budget;
    const Inst& i = code[at];
    if (ends(i)) return false;
    const auto& writes = scalar ? i.writesS : i.writesV;
    if (std::none_of(writes.begin(), writes.end(), has)) continue;
    if (i.name == "v_readlane_b32" || i.name == "v_readfirstlane_b32") return true;  // was spilled
    if (i.cls != Class::Salu && i.cls != Class::Valu) return false;
    const auto& own = scalar ? i.readsS : i.readsV;
    bool counts = !i.name.starts_with("s_cselect");
    if (counts && std::any_of(own.begin(), own.end(), has)) return false;
    for (bool other : {false, true}) {
      for (const Inst::Range& r : other ? i.readsS : i.readsV) {
        for (u32 n = r.first; n < u32{r.first} + r.count; ++n) {
          bool constant = other && (n >= kVcc || n == 32 || n == 33);  // or the frame's begin
          if (!constant && !isFixed(code, at, n, other, budget)) return false;
        }
      }
    }
    return true;
  }
  return false;
}

}  // namespace

bool Dependences::fixedAddress(const CodeObject& object, const Inst& access) {
  std::lock_guard guard(lock_);
  auto [it, added] = fixed_.try_emplace(&access);
  if (added) {
    u32 at = &access - object.code.data();
    const Operand& address = access.src[0];
    u32 budget = kSteps;
    it->second = address.is(Kind::Vgpr) && isFixed(object.code, at, address.index, false, budget);
  }
  return it->second;
}

Dependence Dependences::of(const CodeObject& object, const Inst& load, const Inst& write) {
  std::lock_guard guard(lock_);
  auto [it, added] = known_.try_emplace({&load, &write});
  if (added) {
    const Inst* first = object.code.data();
    it->second = Follower(object.code, &load - first, &write - first).run();
  }
  return it->second;
}

}  // namespace sim
