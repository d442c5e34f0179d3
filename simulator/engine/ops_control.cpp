// Program flow, waiting and messages.
#include <chrono>

#include "memory.h"
#include "operands.h"

namespace sim {
namespace {

template <auto Taken>
void branch(Wave& w, const Inst& i) {
  if (!Taken(w)) return;
  w.jumped = i.address;
  w.pc = i.simm;
}

void jumpTo(Wave& w, const Inst& i, u64 target) {
  u64 address = target - reinterpret_cast<u64>(w.object->image.data());
  i32 index = w.object->indexAt(address);
  if (index < 0) stop(w, i, "the jump target is not an instruction of this code object");
  w.pc = index;
}

u64 nextAddress(const Wave& w, const Inst& i) {
  return reinterpret_cast<u64>(w.object->image.data()) + i.address + i.size;
}

void waitCount(Wave& w, const Inst& i) {
  // vmcnt is split: bits 3:0 and 15:14; lgkmcnt is bits 11:8; expcnt guards nothing here.
  waitVm(w, (i.simm & 15) | (i.simm >> 14 & 3) << 4);
  waitLgkm(w, i.simm >> 8 & 15);
}

void barrier(Wave& w, const Inst&) {
  w.state = State::Barrier;
  ++w.wg->atBarrier;
}

// The barrier of the whole grid, of which one wave of each workgroup takes part. VDATA is how many
// of them there are besides it. The order of memory is the fences' affair, as everywhere.
void gridBarrier(Wave& w, const Inst& i) {
  if (!w.exec()) return;
  GridBarrier& barrier = w.wg->launch->gridBarrier;
  std::lock_guard guard(barrier.lock);
  u32 all = w.row(i.src[0].index)[__builtin_ctzll(w.exec())] + 1;
  if (!w.arrived) {
    gridArrive(w, barrier);
    w.arrived = barrier.round;
    w.wg->worker->change();
    if (++barrier.waves >= all) {
      barrier.waves = 0;
      ++barrier.round;
      barrier.given = std::move(barrier.gathered);
    }
  }
  if (w.arrived == barrier.round) {  // once more, in its next turn
    --w.pc;
    w.sleep = 1;
    w.waited = true;
    return;
  }
  gridLeave(w, barrier);
  w.arrived = 0;
}

void endProgram(Wave& w, const Inst&) {
  waitVm(w, 0);
  waitLgkm(w, 0);
  w.state = State::Done;
  --w.wg->alive;
}

void timeStamp(Wave& w, const Inst& i) {
  w.moved = true;  // a loop that looks at the clock ends by itself
  ++w.clockReads;
  writeScalar64(w, i.dst, w.wg->executed * 4 + 0x1000);
}

// s_set_gpr_idx_on s, gpr_idx(...): the index goes to M0.
void indexOn(Wave& w, const Inst& i) {
  w.s[kM0] = (w.s[kM0] & 0xffff0f00u) | (scalar32(w, i.src[0]) & 255) | i.simm << 12;
  w.indexed = i.simm;
}

}  // namespace

void executeIndexed(Wave& w, const Inst& i) {
  if (i.cls != Class::Valu && i.cls != Class::Trans) {
    i.fn(w, i);
    return;
  }
  if (i.inner) stop(w, i, "register indexing of DPP and SDWA forms is not implemented");
  Inst shifted = i;
  u32 index = w.s[kM0] & 255;
  for (int n = 0; n < 3; ++n) {
    if ((w.indexed >> n & 1) && shifted.src[n].is(Kind::Vgpr)) shifted.src[n].index += index;
  }
  if ((w.indexed & 8) && shifted.dst.is(Kind::Vgpr)) shifted.dst.index += index;
  shifted.fn(w, shifted);
}

void registerControl(OpTable& t) {
  auto nop = [](Wave&, const Inst&) {};
  auto add = [&](const char* name, Handler h, Class c) { t[name] = {h, c}; };
  add("s_branch", branch<[](const Wave&) { return true; }>, Class::Branch);
  add("s_cbranch_scc0", branch<[](const Wave& w) { return !w.scc; }>, Class::Branch);
  add("s_cbranch_scc1", branch<[](const Wave& w) { return w.scc; }>, Class::Branch);
  add("s_cbranch_vccz", branch<[](const Wave& w) { return special(w, kVccz); }>, Class::Branch);
  add("s_cbranch_vccnz", branch<[](const Wave& w) { return !special(w, kVccz); }>, Class::Branch);
  add("s_cbranch_execz", branch<[](const Wave& w) { return w.exec() == 0; }>, Class::Branch);
  add("s_cbranch_execnz", branch<[](const Wave& w) { return w.exec() != 0; }>, Class::Branch);
  add(
      "s_getpc_b64", [](Wave& w, const Inst& i) { writeScalar64(w, i.dst, nextAddress(w, i)); },
      Class::Salu);
  add(
      "s_setpc_b64", [](Wave& w, const Inst& i) { jumpTo(w, i, scalar64(w, i.src[0])); },
      Class::Branch);
  add(
      "s_swappc_b64",
      [](Wave& w, const Inst& i) {
        u64 target = scalar64(w, i.src[0]);
        writeScalar64(w, i.dst, nextAddress(w, i));
        jumpTo(w, i, target);
      },
      Class::Branch);
  add(
      "s_call_b64",
      [](Wave& w, const Inst& i) {
        writeScalar64(w, i.dst, nextAddress(w, i));
        w.pc = i.simm;
      },
      Class::Branch);
  add("s_waitcnt", waitCount, Class::Wait);
  add("s_barrier", barrier, Class::Barrier);
  add("ds_gws_barrier", gridBarrier, Class::Barrier);
  add("s_endpgm", endProgram, Class::Other);
  add("s_sleep", [](Wave& w, const Inst& i) { w.sleep = i.simm & 127; }, Class::Wait);
  add("s_memtime", timeStamp, Class::Smem);
  add("s_memrealtime", timeStamp, Class::Smem);
  for (const char* name : {"s_nop", "s_setprio", "s_sethalt", "s_icache_inv", "s_inst_prefetch",
                           "s_ttracedata", "s_decperflevel", "s_incperflevel", "s_dcache_inv",
                           "s_dcache_wb", "s_sendmsg", "v_nop", "ds_nop"}) {
    add(name, nop, Class::Other);
  }
  add("s_set_gpr_idx_on", indexOn, Class::Salu);
  add("s_set_gpr_idx_off", [](Wave& w, const Inst&) { w.indexed = 0; }, Class::Salu);
  add(
      "s_set_gpr_idx_idx",
      [](Wave& w, const Inst& i) { w.s[kM0] = (w.s[kM0] & ~255u) | (scalar32(w, i.src[0]) & 255); },
      Class::Salu);
  add("s_set_gpr_idx_mode", [](Wave& w, const Inst& i) { w.indexed = i.simm; }, Class::Salu);
  add(
      "s_trap",
      [](Wave& w, const Inst& i) {
        const Launch& launch = *w.wg->launch;
        // A failed assert says where it stands before it traps. Traps that the compiler has merged
        // are in no line: the branch that led there is.
        std::string said = launch.hostcalls ? launch.hostcalls->complaint() : "";
        while (said.ends_with('\n')) said.pop_back();
        std::string why = "the kernel trapped (an assertion or abort)";
        if (!said.empty()) {
          why += ": " + said;
        } else if (w.jumped) {
          why += "; the last branch to be taken is at " + w.object->source(w.jumped);
        }
        stop(w, i, why);
      },
      Class::Other);
  for (const char* name :
       {"buffer_inv", "buffer_wbl2", "buffer_wbinvl1", "buffer_wbinvl1_vol", "buffer_invl2"}) {
    add(name, cacheFence, Class::Vmem);
  }
}

}  // namespace sim
