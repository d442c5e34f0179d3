// State of a simulated gfx9 device: instructions, waves, workgroups and launches.
//
// A code object is decoded once into an array of `Inst`. A wave is plain data (registers and an
// index into that array), so waves are stepped in slices by a scheduler and need no host stack.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "gpu.h"

namespace sim {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kLanes = 64;

// Vector register rows: the architectural file, the accumulation file, then rows that SDWA and DPP
// forms use for their selected operands.
constexpr int kAccBase = 256;
constexpr int kTempBase = 512;
constexpr int kRows = 516;

// Scalar registers are indexed as the ISA numbers them.
constexpr int kFlatScratch = 102, kVcc = 106, kTtmp = 108, kM0 = 124, kExec = 126;

// High halves of the addresses at which flat instructions see LDS and scratch. Host user-space
// addresses never reach them, so global pointers are host pointers.
constexpr u64 kSharedBase = 0x0100'0000'0000'0000ull;
constexpr u64 kPrivateBase = 0x0200'0000'0000'0000ull;
// Where device code finds the services that are missing here: its heap and its queue.
constexpr u64 kMissingHeap = 0x0300'0000'0000'0000ull, kMissingQueue = 0x0400'0000'0000'0000ull;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Kind : u8 { None, Vgpr, Sgpr, Imm, Special };
enum Special : u16 { kScc, kVccz, kExecz };

struct Operand {
  Kind kind = Kind::None;
  u8 dwords = 1;    // registers named in the text, v[0:3] is 4
  u16 index = 0;    // row, scalar register number or Special
  u64 imm = 0;      // an integer literal, or 32-bit pattern of a float literal
  double real = 0;  // value of a float literal; its bits depend on the operand's type
  bool isReal = false;
  bool neg = false, abs = false, sext = false;

  bool is(Kind k) const { return kind == k; }
  bool present() const { return kind != Kind::None; }
};

// Classes for the counters. The order is that of kClassNames in capi.cpp.
enum class Class : u8 {
  Salu,
  Smem,
  Valu,
  Trans,
  Matrix,
  Lds,
  Vmem,
  Flat,
  Scratch,
  Branch,
  Barrier,
  Wait,
  Other,
  Count
};

struct Wave;
struct Inst;
using Handler = void (*)(Wave&, const Inst&);

enum class Space : u8 { Global, Flat, Buffer, Scratch, Lds, Scalar };
enum class Access : u8 { None, Load, Store, Atomic, LoadToLds };

using AtomicFn = u64 (*)(u64 old, u64 data, u64 compare);

// What a memory instruction does, parsed from its name.
struct MemSpec {
  Space space{};
  Access access{};
  u8 bytes = 0;   // per lane and address
  u8 dwords = 0;  // registers of data (result of a load, source of a store)
  bool sext = false;
  bool d16 = false, d16hi = false;
  u8 pair = 0;  // ds_read2/write2: number of addresses (2), else 0
  u16 pairStride = 0;
  u8 transposed = 0;  // bits of an element that a transposing read of LDS moves, else 0
  bool returns = false;
  bool spin = false;  // a polling load, see decode_polling.cpp
  bool once = false;  // ds_append, ds_consume: M0 has the address, the data is the count of lanes
  AtomicFn atomic = nullptr;
  u8 atomicData = 0;  // dwords of data of an atomic, without the compare value
};

enum class DppKind : u8 {
  None,
  QuadPerm,
  RowShl,
  RowShr,
  RowRor,
  WaveShl,
  WaveShr,
  WaveRol,
  WaveRor,
  Mirror,
  HalfMirror,
  Bcast15,
  Bcast31,
  NewBcast
};

// A bit for each register of the two vector files and of the scalar one.
struct alignas(64) RegisterBits {
  u64 vector[kTempBase / 64] = {}, scalar[2] = {};
  void set(u32 reg, bool isScalar, bool on) {
    u64& word = isScalar ? scalar[reg / 64 % 2] : vector[reg / 64];
    u64 bit = 1ull << reg % 64;
    word = on ? word | bit : word & ~bit;
  }
  bool meets(const RegisterBits& o) const {
    u64 both = (scalar[0] & o.scalar[0]) | (scalar[1] & o.scalar[1]);
    for (u32 n = 0; n < std::size(vector); ++n) both |= vector[n] & o.vector[n];
    return both;
  }
};

struct Inst {
  Handler fn = nullptr;
  Operand dst, dst2, src[5];
  u8 nsrc = 0;
  Class cls = Class::Other;
  u8 passes = 0;  // MFMA: cycles of the matrix pipe
  u32 address = 0, size = 0;
  i32 offset = 0, offset1 = 0;
  u32 simm = 0;  // branch target index, wait counts, immediate of s_sleep and the like

  bool clamp = false, sc0 = false, sc1 = false, lds = false;
  bool offen = false, idxen = false;
  u8 omod = 0;
  u8 opSel = 0, opSelHi = 0xff, negLo = 0, negHi = 0;
  u8 cbsz = 0, abid = 0, blgp = 0, neg = 0;
  DppKind dpp = DppKind::None;
  u8 dppArg = 0, rowMask = 0xf, bankMask = 0xf;
  u8 quad[4] = {0, 1, 2, 3};
  bool boundCtrl = false;
  u8 dstSel = 6, dstUnused = 0, src0Sel = 6, src1Sel = 6;  // SDWA selections, 6 = DWORD

  MemSpec mem;
  Inst* inner = nullptr;  // SDWA and DPP: the plain operation on temporary rows
  std::string text, name;

  // Registers read and written, for the pending-register check: first row and count.
  struct Range {
    u16 first;
    u8 count;
  };
  std::vector<Range> readsV, writesV, readsS, writesS;
  RegisterBits touches;  // all of these
};

// Bytes that lie as a loader would put them, so that neither variables' alignment nor which lines
// they share depends on the host.
template <class T>
struct PageAligned {
  using value_type = T;
  static constexpr std::align_val_t kPage{4096};
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kPage)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kPage); }
  bool operator==(const PageAligned&) const { return true; }
};
using Bytes = std::vector<u8, PageAligned<u8>>;

struct KernelArg {
  std::string kind, name;
  u32 offset = 0, size = 0;
  std::string type;  // by the debug information: integer, float, pointer, structure; else empty
};

// A variable in a kernel's frame, by its debug information.
struct FrameVariable {
  std::string name;
  u32 offset = 0, bytes = 0;
};

struct Kernel {
  std::string name;
  u64 low = 0, high = 0;             // code addresses of its function, if `frame` is known
  std::vector<FrameVariable> frame;  // all arrays in scratch; empty when that is not known
  u64 descriptor = 0;                // address in the code object
  u32 entry = 0;                     // index of the first instruction
  u64 codeEnd = 0;                   // code address behind its function, 0: not known
  u32 ldsBytes = 0, privateBytes = 0, kernargBytes = 0;
  u32 rsrc1 = 0, rsrc2 = 0, rsrc3 = 0;
  u16 properties = 0, preload = 0;
  u32 vgprs = 0, agprs = 0, sgprs = 0, spills = 0, maxWorkgroup = 1024;
  bool dynamicStack = false;
  bool acquiresLds = false, acquiresGlobal = false;  // an instruction may take what a flag gives
  std::vector<KernelArg> args;
};

struct CodeObject {
  std::string path;
  const Gpu* gpu = nullptr;
  std::vector<Inst> code;
  std::vector<i32> indexOfWord;  // (address - base) / 4 -> instruction, or -1
  u64 textBase = 0, textEnd = 0;
  std::map<std::string, Kernel> kernels;
  std::map<std::string, std::pair<u64, u64>> variables;  // name -> address, size
  std::vector<u8> elf;
  Bytes image;  // the loaded segments; device address = image + virtual address
  std::deque<Inst> innerInsts;
  mutable std::map<u32, std::string> lines;  // cache of source lines by address
  mutable std::mutex linesLock;
  mutable std::shared_ptr<void> debug;  // the symbolizer, opened on first use

  i32 indexAt(u64 address) const;
  std::string source(u32 address) const;
  // Where the line of `source` was inlined, from the inside out.
  std::vector<std::string> callers(u32 address) const;
  // Was it inlined from a function whose name has the word in it?
  bool inlinedFrom(u32 address, const char* word) const;
  std::string disassembly(u32 index, int around) const;
};

std::shared_ptr<CodeObject> loadCodeObject(const void* data, size_t size, const std::string& path);
void decodeText(CodeObject& object, const u8* bytes, u64 base, u64 size);

// What a kernel's instructions, or those that they may call, may take as a flag.
void noteAcquires(const CodeObject& object, Kernel& kernel);

struct Options {
  bool late = true, race = true, bounds = true, uninit = true, caches = true;
  u64 seed = 0;
  u64 maxInstructions = 2'000'000'000;  // of one wave, then it is taken for stuck
  u32 threads = 0;                      // 0: one a host core
};

// What hardware may punish; and what it is known to forgive although no rule allows it.
enum class Level : u8 { Error, Suspicious };

struct Finding {
  std::string kind, kernel, message, source, instruction;
  Level level = Level::Error;
  u64 address = 0, codeAddress = 0, count = 1;
  u32 workgroup[3] = {}, wave = 0, lane = 0;
};

// Vector clocks. A wave's clock moves on when it hands something on; of a wave is known
//   kReached  up to which clock what it did is ordered before something. Global accesses carry the
//             clock of their issue, for the waves of a workgroup share the L1, which keeps that
//             order, and, for others, a stamp that moves on with the clock while a wait counter has
//             not shown them complete; scalar accesses and those of LDS have such a stamp alone
//   kWritten  up to which clock of their issue a write-back of L2 has carried global accesses out of
//             the die
enum Component : u32 { kReached, kWritten, kComponents };
constexpr int kMaxWaves = 16, kClocks = kComponents * kMaxWaves;
using Carried = std::array<u32, kMaxWaves>;
struct Clock {
  u32 at[kClocks];
  // By wave, as kWritten: what a write-back has carried that other devices see too. Null where
  // there are none.
  std::shared_ptr<const Carried> carried;
};
using Foreign = std::map<u32, Clock>;  // knowledge about other workgroups, by linear id
struct Knowledge {
  u64 number = 0;  // of what flags give to other workgroups
  Clock own{};
  std::shared_ptr<const Foreign> foreign;
};
using KnowledgePtr = std::shared_ptr<const Knowledge>;

struct MemOp {
  const Inst* inst = nullptr;
  u64 mask = 0;
  bool performed = false;
  bool mixedLds = false;      // a flat access with lanes in LDS
  bool inARow = false;        // a global access of all lanes, one behind the other
  bool flag = false;          // the cycle model notes what it tells and finds,
  u32 place = 0;              // by its place in the wave's stream
  u32 stamp = 0;              // the clock; operations in flight at a release get a new one
  u32 issued = 0;             // the wave's clock at its issue
  u64 low = 0, high = 0;      // a global access lies in [low, high)
  u64 born = 0;               // instruction count of the workgroup at issue
  KnowledgePtr known, fresh;  // what the wave knew at issue, and had acquired
  KnowledgePtr publish, publishForeign;  // what a flag write gives to readers
  KnowledgePtr acquired;                 // what a flag read took of its own workgroup's waves,
  std::vector<KnowledgePtr> given;       // and of others'
  u32 ldsBase = 0;                       // load-to-LDS: M0 and offset at issue
  u64 scalarAddress = 0;
  u32 scalarDwords = 0;
  alignas(64) u64 addr[kLanes];
  alignas(64) u32 data[4][kLanes];
  u32 scalar[16];
  u8 validDwords[kLanes];  // buffer accesses: the rest is out of the resource's range
};

enum class State : u8 { Running, Barrier, Done };

struct Workgroup;
struct Worker;
struct Launch;
struct WaveStream;

struct Wave {
  u32* v = nullptr;  // kRows x 64 dwords
  alignas(8) u32 s[128] = {};
  u32 pc = 0;
  u32 jumped = 0;  // address of the last branch that was taken
  bool scc = false;
  State state = State::Running;
  u32 mode = 0;
  u64 executed = 0;
  u32 sleep = 0;
  u32 indexed = 0;  // s_set_gpr_idx: operands whose register number M0 shifts (1, 2, 4, 8: DST)
  int id = 0;
  // What polls found, and whether since the last look some found the same again or something new.
  struct Poll {
    u64 place = 0, value = 0, found = 0;  // value: with the registers; found: without
    u64 changes = 0;                      // of all memory
    u32 number = 0, clockReads = 0;       // of the wave, until then
    // What it reads, lane after lane; without words one asks for changes of all memory.
    u64 begin = 0, stride = 0, lanes = 0;
    u32 words = 0, pc = 0;
    u16 lines[18] = {}, count = 0;  // of it, in World::stamps
    u64 stamp = 0;                  // their sum
  };
  u32 notes = 0, newest = 0, clockReads = 0;  // polls; the last that found something new
  bool waited = false, moved = false;
  // A wave all of whose polls find what they had found naps: its turns pass without it until what
  // they read changes, or for a while. kCounts: a register differs, it looks at the clock, or other
  // memory changes, so it may end its loop by itself.
  enum Nap : u8 { kAwake, kWaits, kCounts };
  Nap nap = kAwake;
  u32 naps = 0;  // turns that passed
  u64 sinceChanges = 0;
  Workgroup* wg = nullptr;
  const CodeObject* object = nullptr;
  u8* scratch = nullptr;         // privateBytes x 64, lane after lane
  u8* scratchWritten = nullptr;  // a flag for each of these bytes, or null
  u32 scratchBytes = 0;

  // Memory operations in flight, oldest first, and how many of them owe each register.
  std::deque<MemOp*> vm, lgkm;
  u8 owedV[kTempBase] = {}, owedS[128] = {};
  RegisterBits owing;  // those above 0
  u32 owed = 0, dmaInFlight = 0;

  WaveStream* stream = nullptr;  // for the cycle model, see cycles.h

  u32 unordered = 0, unorderedWrites = 0;  // global accesses that have not taken effect

  KnowledgePtr known;        // what is ordered before the wave's next access
  KnowledgePtr acquired;     // of other workgroups, by flags: loads see it after buffer_inv
  KnowledgePtr invalidated;  // what was last joined into `known` by inv
  u32 clock = 1;
  u64 arrived = 0;  // the round of the grid's barrier that the wave waits for, else 0

  // What is seldom looked at lies behind the rest.
  Poll polls[24];
  u64 taken[256] = {};  // numbers of what was joined into `acquired`, the last of each remainder

  u64& exec() { return *reinterpret_cast<u64*>(s + kExec); }
  u64 exec() const { return *reinterpret_cast<const u64*>(s + kExec); }
  u64& vcc() { return *reinterpret_cast<u64*>(s + kVcc); }
  u64& pair(int i) { return *reinterpret_cast<u64*>(s + i); }
  u32* row(int i) { return v + i * kLanes; }
  const u32* row(int i) const { return v + i * kLanes; }

  bool flush32() const { return ((mode >> 4) & 3) != 3; }
  bool flush16() const { return ((mode >> 6) & 3) != 3; }
  bool ieee() const { return mode >> 9 & 1; }
  bool dx10Clamp() const { return mode >> 8 & 1; }
  bool fp16Overflow() const { return mode >> 23 & 1; }
};

struct LdsShadow;

struct Workgroup {
  u32 id[3] = {}, linear = 0;
  u32 who = 0;  // among the workgroups of all launches that share a World
  std::deque<Wave> waves;
  std::vector<u8> lds;
  std::vector<u64> ldsInit;
  u32 ldsBytes = 0;
  std::unique_ptr<u8[]> scratch;
  u32* registers = nullptr;
  u32 alive = 0, atBarrier = 0;
  const Inst* apart[2] = {};  // two barriers that waves met in one turn
  u64 executed = 0;
  u32 clockBase = 1;
  std::unordered_map<u32, KnowledgePtr> ldsSync;
  std::unique_ptr<LdsShadow> shadow;
  u32 xcd = 0, cu = 0;
  Worker* worker = nullptr;
  Launch* launch = nullptr;
};

// Adds a finding; equal kind, level and instruction only counts up.
void report(Wave& w, const Inst& i, const char* kind, u64 address, int lane, std::string message,
            Level level = Level::Error);

// The host rounds as MODE says (its f32 field) while a wave runs.
void setRounding(u32 mode);

// Runs an instruction under s_set_gpr_idx_on.
void executeIndexed(Wave& w, const Inst& i);

[[noreturn]] void stop(Wave& w, const Inst& i, const std::string& why);

}  // namespace sim
