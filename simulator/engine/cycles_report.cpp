// What the cycle model found, as JSON: docs/simulator.md describes the fields.
#include "cycles.h"

using llvm::json::Array;
using llvm::json::Object;

namespace sim {
namespace {

// Of its cycles that a matrix instruction's pipe may be busy, by its operands.
double matrixShare(const SimCycles& p, const std::string& name) {
  auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("fp8") || has("bf8") || has("f8f6f4") || name.ends_with("i8")) return p.matrix_share_fp8;
  return has("bf16") || name.ends_with("_f16") ? p.matrix_share : 1.0;
}

constexpr const char* kSpentNames[] = {"valu",     "matrix",      "scalar",       "lds",
                                       "vmem",     "branch",      "internal",     "wait_memory",
                                       "wait_lds", "wait_scalar", "memory_queue", "lds_queue",
                                       "barrier",  "sleep",       "empty"};
static_assert(std::size(kSpentNames) == kSpent);
constexpr const char* kUnitNames[] = {"valu", "matrix", "scalar",  "lds",
                                      "vmem", "branch", "internal"};
static_assert(std::size(kUnitNames) == kUnits);

i64 num(u64 x) { return static_cast<i64>(x); }

Array spans(const std::vector<Trace::Span>& all) {
  Array out;
  for (const Trace::Span& s : all) out.push_back(Array{s.who, s.what, s.begin, s.end});
  return out;
}

Object machine(const SimCycles& p, double clock) {
  return Object{{"clock_hz", clock},
                {"dies", p.dies},
                {"units", p.units},
                {"simds", p.simds},
                {"waves", p.waves},
                {"registers", p.registers},
                {"register_granule", p.register_granule},
                {"lds_bytes", p.lds_bytes},
                {"l1_bytes", p.l1_bytes},
                {"l2_bytes", p.l2_bytes * p.l2_channels},
                {"fabric_bytes", p.fabric_bytes},
                {"memory_bytes", p.memory_bytes},
                {"l1_size", p.l1_size},
                {"l2_size", p.l2_size},
                {"infinity_kib", p.infinity_size}};
}

}  // namespace

Object Device::report() const {
  Object spent, issued;
  Array simds;
  double total[kSpent] = {};
  u64 issues[kUnits] = {};
  for (const Simd& s : simds_) {
    Array row;
    for (u32 n = 0; n < kSpent; ++n) {
      total[n] += s.spent[n];
      row.push_back(static_cast<i64>(s.spent[n]));
    }
    for (u32 n = 0; n < kUnits; ++n) issues[n] += s.issued[n];
    simds.push_back(std::move(row));
  }
  Array names;
  for (u32 n = 0; n < kSpent; ++n) {
    spent[kSpentNames[n]] = total[n];
    names.push_back(kSpentNames[n]);
  }
  for (u32 n = 0; n < kUnits; ++n) issued[kUnitNames[n]] = num(issues[n]);
  Array code;
  for (size_t n = 0; n < issued_.size(); ++n) {
    if (!issued_[n]) continue;
    const Inst& i = launch_.object->code[n];
    Array callers;
    for (const std::string& caller : launch_.object->callers(i.address)) callers.push_back(caller);
    code.push_back(Object{{"index", num(n)},
                          {"callers", std::move(callers)},
                          {"address", i.address},
                          {"text", i.text},
                          {"source", launch_.object->source(i.address)},
                          {"issued", num(issued_[n])},
                          {"awaited", awaited_[n]},
                          {"stood", stood_[n]}});
  }
  // Matrix pipes that are busier than power allows slow the clock down.
  double needed = 0;
  bool limited = false;
  for (size_t n = 0; n < issued_.size(); ++n) {
    const Inst& i = launch_.object->code[n];
    if (!issued_[n] || !i.passes) continue;
    double share = matrixShare(p_, i.name);
    limited = limited || share < 1;
    needed += issued_[n] * double(i.passes) / share;
  }
  double there = end_ * simds_.size();
  bool held = limited && needed > there;
  double clock = held ? p_.clock_hz * there / needed : p_.clock_hz;
  const MemoryCounts& c = memory_.counts();
  double cycles = end_ + p_.launch_cycles;
  Object memory{{"l1_requests", num(c.l1Requests)},
                {"l1_hits", num(c.l1Hits)},
                {"l2_requests", num(c.l2Requests)},
                {"l2_hits", num(c.l2Hits)},
                {"l2_read_bytes", num(c.l2ReadBytes)},
                {"l2_written_bytes", num(c.l2WriteBytes)},
                {"fetch_bytes", num(c.fetchBytes)},
                {"write_bytes", num(c.writeBytes)},
                {"infinity_requests", num(c.infinityRequests)},
                {"infinity_hits", num(c.infinityHits)},
                {"memory_read_bytes", num(c.memoryReadBytes)},
                {"memory_written_bytes", num(c.memoryWriteBytes)},
                {"dirty_bytes", num(memory_.dirtyBytes())},
                {"memory_busy", end_ ? c.busy / p_.memory_channels / end_ : 0.0},
                {"load_latency", loads_ ? loadLatency_ / loads_ : 0.0}};
  Object out{{"cycles", cycles},
             {"launch_cycles", p_.launch_cycles},
             {"drain_cycles", drained_},
             {"seconds", cycles / clock},
             {"settled_seconds",
              std::max(cycles / clock, p_.launch_cycles / clock + memory_.settled() / p_.clock_hz)},
             {"instructions", num(instructions_)},
             {"sampled_dies", p_.sampled},
             {"units", num(units_.size())},
             {"waves", num(ended_)},
             {"waves_per_simd", end_ ? waveCycles_ / end_ / simds_.size() : 0.0},
             {"spent", std::move(spent)},
             {"spent_names", std::move(names)},
             {"simds", std::move(simds)},
             {"issued", std::move(issued)},
             {"memory", std::move(memory)},
             {"code", std::move(code)},
             {"machine", machine(p_, clock)}};
  if (p_.traced) {
    Array waves, waits;
    for (const Trace::Life& w : trace_.waves) {
      waves.push_back(Array{w.unit, w.simd, w.slot, num(w.group), w.wave, w.begin, w.end});
    }
    for (const Trace::Wait& w : trace_.waits) {
      waits.push_back(Array{w.wave, w.inst, kSpentNames[u32(w.why)], w.begin, w.end});
    }
    out["trace"] = Object{{"waves", std::move(waves)},
                          {"waits", std::move(waits)},
                          {"memory", spans(trace_.memory)},
                          {"matrix", spans(trace_.matrix)},
                          {"lds", spans(trace_.lds)}};
  }
  return out;
}

Object runCycles(const Launch& launch, const SimCycles& p) {
  Device device(launch, p);
  device.run();
  return device.report();
}

}  // namespace sim
