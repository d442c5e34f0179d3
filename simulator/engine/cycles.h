// The cycle model: what the waves executed, recorded by the functional run, is played again on
// compute units, caches and memory that take time.
//
//   cycles_record.cpp   the functional run writes each wave's stream
//   cycles_memory.cpp   L1, L2, Infinity Cache and memory, each with its queue
//   cycles_unit.cpp     a SIMD issues from its waves, and says where its cycles went
//   cycles_run.cpp      workgroups are dealt to compute units; the order of events
//   cycles_report.cpp   the result as JSON
//
// Time is in cycles of the shader clock. Every resource is a "free from" time: who comes earlier
// waits. All numbers of a GPU come from `SimCycles` (capi.h), which simulator/cycles.py fills in.
#pragma once

#include <llvm/Support/JSON.h>

#include <queue>

#include "capi.h"
#include "memory.h"

namespace sim {

// ---- what the functional run records ------------------------------------------------------------

// A wave's instructions as runs of consecutive ones, and some words for each memory instruction:
//   LDS     the cycles that its banks take
//   others  lines | cycles of the address unit << 16, then for each line of 128 bytes the line << 2
//           and which 64-byte halves were touched
struct WaveStream {
  struct Run {
    u32 first, count;
  };
  std::vector<Run> code;
  std::vector<u32> memory;
  // Which of its operations, by the place of their first word, tell others something or find what
  // was told. Of the turns of a polling loop the last is kept, which finds what it waits for.
  struct Flag {
    u32 word, number;
  };
  std::vector<Flag> tells, finds;
  struct Poll {
    u32 inst = ~0u;
    u64 address = 0;
    size_t runs = 0, count = 0, memory = 0, end = 0;
  } poll;  // that was issued last
  // The place of the poll that looked last, and by its words the last store that it found and how
  // many the wave then knows. Lanes leave a loop one by one, each with what it found.
  struct Seen {
    u32 number, count;
  };
  u32 looked = ~0u;
  std::unordered_map<u64, Seen> seen;
  std::unordered_map<u64, u32> known;  // how many, of all polls before
  void executed(u32 index) {
    if (code.empty() || code.back().first + code.back().count != index) code.push_back({index, 0});
    ++code.back().count;
  }
};

struct Recording {
  u32 xcds = 8, sampled = 8;  // workgroups of the first `sampled` of `xcds` dies are recorded
  bool playsFlags = false;
  // Held while an operation that may be a flag takes effect and is noted: a load finds the stores
  // whose values it could read, no more and no less.
  std::mutex lock;
  // word -> numbers of its stores of agent scope, or of the last atomic. Who looks for a flag finds
  // the first store that it does not know, though others may have followed when it looked in the
  // functional run; who looks at a counter finds all that counted.
  std::unordered_map<u64, std::vector<u32>> toldBy;
  u32 told = 0;
  std::vector<std::vector<WaveStream>> groups;  // by linear workgroup, then wave
  WaveStream* start(u64 group, u32 wave, u32 waves);
};

// Called for each memory instruction at issue, while `op` holds its addresses.
void recordMemory(Wave& w, MemOp& op);
// Called for each `op.flag` when it takes effect, within the recording's lock.
void recordFlag(Recording& recording, WaveStream& stream, const MemOp& op);

// ---- memory -------------------------------------------------------------------------------------

// Set-associative, least recently used; streaming lines are the first to go. Line numbers have 30
// bits: those of the recording.
class TimedCache {
 public:
  struct Result {
    bool hit;
    u32 slot;          // for the time at which the line arrives
    u32 evictedDirty;  // line + 1 of a dirty line that had to go, or 0
  };
  void configure(u64 bytes, u32 ways, u32 lineBytes);
  Result touch(u32 line, bool write, bool streaming);
  double& arrives(u32 slot) { return arrives_[slot]; }
  u64 dirtyLines() const;
  bool present() const { return sets_ != 0; }

 private:
  u32 sets_ = 0, ways_ = 0, stamp_ = 1;
  std::vector<u32> tag_, used_;
  std::vector<u8> dirty_;
  std::vector<double> arrives_;
};

struct MemoryCounts {
  u64 l1Requests = 0, l1Hits = 0;         // lines of loads
  u64 l2Requests = 0, l2Hits = 0;         // lines of loads, stores and atomics
  u64 l2ReadBytes = 0, l2WriteBytes = 0;  // of them, between L1 and L2; atomics are written
  u64 infinityRequests = 0, infinityHits = 0;
  u64 fetchBytes = 0, writeBytes = 0;  // over the fabric: what FETCH_SIZE and WRITE_SIZE count
  u64 memoryReadBytes = 0, memoryWriteBytes = 0;
  double busy = 0;  // cycles of all memory channels
};

// L2 caches, Infinity Cache and memory of the sampled dies.
class MemorySystem {
 public:
  MemorySystem(const SimCycles& p, u32 dies);
  enum class Access { Load, Store, Atomic };
  // A line (with the halves touched) reaches the die's L2 at `now`; returns when the answer is back
  // there. Streaming lines do not stay.
  double access(u32 die, u32 line, u32 halves, Access kind, bool streaming, double now);
  void warm(u32 line) { infinity_.touch(line, false, false); }
  // Where a line lies in memory. Pages of 64 KiB are dealt out in the order of their first touch,
  // so that a run does not depend on where the host put its arrays.
  u32 place(u32 line) {
    u32& page = pages_[line >> 9];
    if (!page) page = ++pageCount_;
    return page << 9 | (line & 511);
  }
  // Cycles that the dirty lines of L2 need to leave when the kernel ends.
  double drain(double now);
  // What lies in the caches when the launch is over and memory has not seen.
  u64 dirtyBytes() const;
  // Cycles of memory for all that the launch moves, this included.
  double settled() const;
  const MemoryCounts& counts() const { return counts_; }
  MemoryCounts& counts() { return counts_; }

 private:
  double fetch(u32 die, u32 line, double now);
  void writeBack(u32 die, u32 line, double now);
  double channel(u32 line, double now, double cycles);
  struct Die {
    TimedCache l2;
    std::vector<double> channels;
    double fabric = 0, fabricWrite = 0, firstWrite = -1;
    u64 written = 0;  // lines written back
  };
  const SimCycles& p_;
  std::vector<Die> dies_;
  TimedCache infinity_;
  std::vector<u32> pages_ = std::vector<u32>(1u << 21);  // of 30-bit line numbers
  u32 pageCount_ = 0;
  std::vector<double> memory_;
  double memoryCycles_, fabricCycles_, writeCycles_;
  MemoryCounts counts_;
};

// ---- compute units ------------------------------------------------------------------------------

// One instruction of each goes from a SIMD in its cycle, all from different waves. What the
// instruction buffer does itself (waits, barriers, s_nop) takes no unit.
enum class Unit : u8 { Valu, Matrix, Scalar, Lds, Vmem, Branch, Internal, Count };

// Where a SIMD's cycles went: something was issued or executed, or its oldest wave waited.
enum class Spent : u8 {
  Valu,
  Matrix,
  Scalar,
  Lds,
  Vmem,
  Branch,
  Internal,
  WaitMemory,
  WaitLds,
  WaitScalar,
  MemoryQueue,
  LdsQueue,
  Barrier,
  Sleep,
  Empty,
  Count
};
constexpr u32 kSpent = static_cast<u32>(Spent::Count), kUnits = static_cast<u32>(Unit::Count);

// What the model needs to know of an instruction.
struct TimedInst {
  Unit unit = Unit::Valu;
  u8 cycles = 4;
  bool load = false, store = false, atomic = false, scalar = false, streaming = false;
  bool memory = false;  // it has words in the recording
  bool pastL1 = false;  // loads of agent or system scope
  bool scratch = false, barrier = false, end = false, wait = false;
  u32 vm = 63, lgkm = 15, sleep = 0;
  int priority = -1;
};
std::vector<TimedInst> timedCode(const CodeObject& object, const SimCycles& p);

// Operations in flight under one wait counter.
struct Flight {
  static constexpr u32 kMost = 64;
  static constexpr double kUnknown = 1e300;
  u32 issued = 0, retired = 0;
  double done[kMost];
  u32 inst[kMost];
  u32 add(u32 instruction, double when) {
    done[issued % kMost] = when;
    inst[issued % kMost] = instruction;
    return issued++ % kMost;
  }
};

struct TimedWave {
  const WaveStream* stream = nullptr;
  u32 run = 0, at = 0, word = 0;
  u32 tell = 0, find = 0;  // the next of the stream's
  double ready = 0, born = 0;
  enum State : u8 { Free, Ready, Unknown, AtBarrier, Ended } state = Free;
  Spent why = Spent::Empty;  // while it cannot issue
  u32 waitingFor = 0;        // instruction that it waits for
  int priority = 0;
  u64 age = 0, group = 0;
  u32 id = 0, simd = 0, slot = 0;
  u32 life = 0;      // its entry in the trace
  double since = 0;  // when it came to its instruction
  Flight vm, lgkm;
  u32 pc() const { return stream->code[run].first + at; }
};

struct Simd {
  std::vector<u32> waves;                          // oldest first
  u32 id = 0, unit = 0, registers = 0, slots = 0;  // slots: taken wave slots, a bit each
  double next = 1e300, accounted = 0, valuFree = 0, matrixFree = 0;
  Spent why = Spent::Empty;
  u32 whyFor = 0;
  std::array<double, kSpent> spent{};
  std::array<u64, kUnits> issued{};
};

struct ComputeUnit {
  u32 id = 0, die = 0, lds = 0, nextSimd = 0, queued = 0;
  bool traced = false;
  double addressFree = 0, ldsFree = 0, returnFree = 0, requestFree = 0;
  TimedCache l1;
  std::vector<double> outstanding;
  u64 requests = 0;
  std::vector<u32> blocked;  // SIMDs that wait for the address unit's queue
};

struct Group {
  u32 unit = 0, alive = 0, waiting = 0;
  std::vector<u32> waves;
};

struct Trace {
  struct Span {
    u32 who, what;
    double begin, end;
  };
  struct Wait {
    u32 wave, inst;
    Spent why;
    double begin, end;
  };
  struct Life {
    u32 unit, simd, slot, wave;
    u64 group;
    double begin, end;
  };
  std::vector<Life> waves;
  std::vector<Span> memory, matrix, lds;
  std::vector<Wait> waits;
  void waited(const TimedWave& w, double until);
};

class Device {
 public:
  Device(const Launch& launch, const SimCycles& p);
  void run();
  llvm::json::Object report() const;

 private:
  struct Event {
    double time;
    u64 key;  // operations come before SIMDs, and in their order
    bool operator<(const Event& o) const { return time != o.time ? time > o.time : key > o.key; }
  };
  struct Operation {
    u32 wave, entry, inst;
    const u32* words;
    u32 count;
    bool scalar, scratch;
    double issued;
    u64 age;  // of the wave: it may have ended, and its place may be another's
    u32 unit, life;
    u32 tells = 0;  // number of a flag, or 0
    const WaveStream::Flag* finds = nullptr;
    u32 findCount = 0;
  };
  // An operation that waits for what another is to tell.
  struct Listener {
    Operation op;
    double ready;
  };
  struct ScalarCache {
    TimedCache lines;
    std::vector<Operation> waiting;  // for lines that another load asked for
  };
  // Keys: a SIMD's number with the top bit, or an operation's turn and its place in the pool.
  static constexpr u64 kSimdKey = 1ull << 63;
  static constexpr u32 kPoolBits = 24;

  // cycles_run.cpp
  void dispatch(u32 die, double now);
  bool admit(u32 unit, double now);
  bool place(u32 unit, u64 group, double now);
  void leave(u32 wave, double now);
  void wake(Simd& simd, double time);
  void operate(u64 number, double now);
  void finish(const Operation& op, double done);
  void finishWithFlags(const Operation& op, double ready);
  double found(const Operation& op) const;
  void operateScalar(const Operation& op, double now);
  bool arrived(ScalarCache& cache, const Operation& op, double& done);
  void send(const Operation& op, double time);

  // cycles_unit.cpp
  void tick(u32 simd, double now);
  void account(Simd& simd, double now);
  bool settle(TimedWave& w, Flight& flight, u32 left, Spent why, double now);
  void internal(TimedWave& w, const TimedInst& t, double now);
  bool available(Simd& simd, TimedWave& w, const TimedInst& t, double now);
  void issue(Simd& simd, TimedWave& w, const TimedInst& t, double now);
  void issueMemory(ComputeUnit& unit, TimedWave& w, const TimedInst& t, double now);
  void issueScalar(ComputeUnit& unit, TimedWave& w, const TimedInst& t, double now);
  void barrier(Group& group, double now);
  void advance(TimedWave& w, double now, double ready);

  const Launch& launch_;
  const SimCycles& p_;
  std::vector<TimedInst> code_;
  MemorySystem memory_;
  std::vector<TimedWave> waves_;
  std::vector<u32> freeWaves_;
  std::vector<Simd> simds_;
  std::vector<ComputeUnit> units_;
  std::vector<ScalarCache> scalarCaches_;
  std::unordered_map<u64, Group> groups_;
  std::vector<u64> nextGroup_;
  std::vector<double> dispatchFree_;
  std::vector<u32> nextUnit_;
  std::priority_queue<Event> events_;
  std::vector<Operation> operations_;
  std::vector<u32> freeOperations_;
  std::unordered_map<u32, double> toldAt_;
  std::vector<Listener> listeners_;
  u64 operationCount_ = 0, ages_ = 0, instructions_ = 0, ended_ = 0;
  u32 wavesPerGroup_ = 0, registersPerWave_ = 0, ldsPerGroup_ = 0;
  u32 scratchLines_ = 0;
  double end_ = 0, drained_ = 0, storesDone_ = 0, waveCycles_ = 0, loadLatency_ = 0;
  u64 loads_ = 0;
  // By instruction: issued, cycles of idle SIMDs while the oldest wave waited for its result,
  // cycles that waves stood at it.
  std::vector<u64> issued_;
  std::vector<double> awaited_, stood_;
  Trace trace_;
};

// Plays a recorded launch.
llvm::json::Object runCycles(const Launch& launch, const SimCycles& p);

}  // namespace sim
