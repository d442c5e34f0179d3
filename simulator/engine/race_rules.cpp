// What the two race checkers share: when two accesses that nothing orders are no race, and the
// words for those that are.
#include "race.h"

namespace sim {

std::string describe(const Wave& w, const char* what, u32 who, u32 wave, const Inst* inst,
                     bool earlierWrites, const std::string& hint) {
  const World& world = *w.wg->launch->world;
  const CodeObject& its = *world.parts[world.partOf(who)].object;
  return std::string(what) + ": wave " + std::to_string(wave) +
         (who == w.wg->who ? "" : " of " + world.name(who, w.wg->launch->part)) +
         (earlierWrites ? " wrote it" : " read it") + " in '" + inst->text + "' (" +
         its.source(inst->address) + ") with nothing ordering the two" + hint;
}

// Do both accesses mean to meet? Then they are synchronisation and no race.
bool synchronise(const Wave& w, const Role& a, const Role& b, Reach reach, bool lds) {
  bool manyDies = w.object->gpu->manyDies;
  if (reach == Reach::Workgroup || !manyDies) {
    // Stores to flags of gfx90a, and flags in LDS, have no scope bits: one word and a polling
    // reader tell, in memory also a load that has them. One of LDS through a volatile pointer reads
    // data.
    bool scoped = !lds && !manyDies;
    auto flagged = [&](const Role& x, const Role& y) {
      return (x.poll || (scoped && !x.write && x.level)) && (y.flag || y.level || y.poll);
    };
    if (flagged(a, b) || flagged(b, a)) return true;
  }
  if (reach == Reach::System && manyDies) return a.system() && b.system();
  u8 needed = reach == Reach::Workgroup ? Role::kWorkgroup : Role::kDevice;
  return a.level >= needed && b.level >= needed;
}

// A word that waves of a workgroup share, read with scope bits and stored without: the hardware
// keeps them in order, the languages do not allow it.
bool halfSynchronised(const Role& a, const Role& b) {
  auto half = [](const Role& x, const Role& y) { return !x.write && x.level && y.flag; };
  return half(a, b) || half(b, a);
}

// Does the load only look, because what writes asks the word again? Then whatever it saw will do: a
// compare-and-swap has the value to compare, an atomic or a store runs only because of it. A store
// of what was made of the value does not ask again.
bool looksOnly(const Wave& w, const Inst& load, const Role& role, const Inst& write) {
  if (role.atomic() || load.mem.access != Access::Load) return false;
  Dependence d = w.wg->launch->dependences.of(*w.object, load, write);
  if (write.mem.access != Access::Atomic) return d.control && !d.data;
  bool compares = write.name.find("cmpswap") != std::string::npos ||
                  write.name.find("cmpst") != std::string::npos;
  return d.control || (d.data && compares);
}

// A byte of a store's data, `at` bytes into what a lane stores.
u8 dataByte(const MemOp& op, int lane, u32 at, u32 row) {
  u32 x = op.data[row + at / 4][lane];
  if (op.inst->mem.bytes < 4 && op.inst->mem.d16hi) x >>= 16;
  return x >> (8 * (at % 4));
}

// Why two accesses that look like synchronisation are not.
const char* hintFor(const Role& a, const Role& b, Reach reach) {
  auto means = [](const Role& x) { return x.poll || x.level || x.flag; };
  auto wide = [](const Role& x) { return x.level >= Role::kDevice || x.poll; };
  if (reach == Reach::System && means(a) && means(b) && (wide(a) || wide(b))) {
    return "; as a flag between devices it needs system scope (sc0 sc1) on both sides";
  }
  auto narrow = [&](const Role& x) { return x.level < Role::kDevice && means(x); };
  if ((narrow(a) && wide(b)) || (narrow(b) && wide(a))) {
    return "; as a flag between workgroups it needs device scope (sc1) on both sides";
  }
  return a.atomic() || b.atomic() ? "; one of them is atomic, the other is not" : "";
}

}  // namespace sim
