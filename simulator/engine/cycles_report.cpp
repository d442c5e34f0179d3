// What the cycle model found, as JSON: docs/simulator.md describes the fields.
#include "cycles.h"

using llvm::json::Array;
using llvm::json::Object;

namespace sim {
namespace {

constexpr const char* kSpentNames[] = {"valu",     "matrix",      "scalar",       "lds",
                                       "vmem",     "branch",      "internal",     "wait_memory",
                                       "wait_lds", "wait_scalar", "memory_queue", "lds_queue",
                                       "barrier",  "sleep",       "empty"};
static_assert(std::size(kSpentNames) == kSpent);
constexpr const char* kUnitNames[] = {"valu", "matrix", "scalar",  "lds",
                                      "vmem", "branch", "internal"};
static_assert(std::size(kUnitNames) == kUnits);

i64 num(u64 x) { return static_cast<i64>(x); }

Array span(const Trace::Span& s) { return Array{s.who, s.what, s.begin, s.end}; }

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
    code.push_back(Object{{"index", num(n)},
                          {"address", i.address},
                          {"text", i.text},
                          {"source", launch_.object->source(i.address)},
                          {"issued", num(issued_[n])},
                          {"awaited", awaited_[n]},
                          {"stood", stood_[n]}});
  }
  const MemoryCounts& c = memory_.counts();
  double cycles = end_ + p_.launch_cycles;
  Object memory{{"l1_requests", num(c.l1Requests)},
                {"l1_hits", num(c.l1Hits)},
                {"l2_requests", num(c.l2Requests)},
                {"l2_hits", num(c.l2Hits)},
                {"fetch_bytes", num(c.fetchBytes)},
                {"write_bytes", num(c.writeBytes)},
                {"infinity_requests", num(c.infinityRequests)},
                {"infinity_hits", num(c.infinityHits)},
                {"memory_read_bytes", num(c.memoryReadBytes)},
                {"memory_written_bytes", num(c.memoryWriteBytes)},
                {"memory_busy", end_ ? c.busy / p_.memory_channels / end_ : 0.0},
                {"load_latency", loads_ ? loadLatency_ / loads_ : 0.0}};
  Object out{{"cycles", cycles},
             {"launch_cycles", p_.launch_cycles},
             {"drain_cycles", drained_},
             {"seconds", cycles / p_.clock_hz},
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
             {"code", std::move(code)}};
  if (p_.traced) {
    Array waves, accesses, matrix, barriers;
    for (const Trace::Life& w : trace_.waves) {
      waves.push_back(Array{w.unit, w.simd, w.slot, num(w.group), w.wave, w.begin, w.end});
    }
    for (const Trace::Span& s : trace_.memory) accesses.push_back(span(s));
    for (const Trace::Span& s : trace_.matrix) matrix.push_back(span(s));
    for (const Trace::Span& s : trace_.barriers) barriers.push_back(span(s));
    out["trace"] = Object{{"waves", std::move(waves)},
                          {"memory", std::move(accesses)},
                          {"matrix", std::move(matrix)},
                          {"barriers", std::move(barriers)}};
  }
  return out;
}

Object runCycles(const Launch& launch, const SimCycles& p) {
  Device device(launch, p);
  device.run();
  return device.report();
}

}  // namespace sim
