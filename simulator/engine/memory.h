// Memory of a launch: buffers, pending operations, caches and the race checker's shadow.
#pragma once

#include <array>
#include <cstdlib>

#include "core.h"
#include "hostcall.h"

namespace sim {

// A range that kernels may touch. `written` points to a flag for each byte when the contents are
// not known to be initialised; `flags` is where they are when the launch owns them.
struct Buffer {
  u64 begin = 0, end = 0;
  std::string name;
  u8* written = nullptr;
  std::vector<u8> flags;
  bool readOnly = false;
};

// A buffer as the caller gives it.
struct BufferSpec {
  u64 begin = 0, bytes = 0;
  bool initialised = true;
  std::string name;
  u8* written = nullptr;
  bool readOnly = false;
};

struct CacheCounts {
  u64 l1Hits = 0, l2Hits = 0, l2Misses = 0, l2WriteBacks = 0;
  u64 infinityHits = 0, memoryReadBytes = 0, memoryWriteBytes = 0;
};

// What one worker counts; workers are added up at the end of a launch.
struct Counters {
  std::vector<u64> executed;  // by instruction
  u64 readBytes = 0, writtenBytes = 0, lines64 = 0, lines128 = 0;
  u64 ldsCycles = 0, ldsConflictCycles = 0, ldsBytes = 0;
  u64 atomics = 0, tickets = 0, scratchBytes = 0, scalarBytes = 0;
  CacheCounts cache;
  void add(const Counters& o);
};

constexpr u32 kXcds = 8, kCusPerXcd = 38, kLineBytes = 128;

// Set-associative, least recently used; tags are line numbers + 1.
class TagCache {
 public:
  TagCache(u32 sets, u32 ways);
  struct Result {
    bool hit;
    u64 evictedDirty;  // line + 1 of a dirty line that had to go, or 0
  };
  Result touch(u64 line, bool write);
  void prefetch(u64 line) const;  // the host's caches will have its tags
  std::vector<u64> dirtyLines() const;
  u64 dirtyCount() const { return dirty_; }

 private:
  static constexpr u64 kDirty = 1ull << 63;
  u64* setOf(u64 line) const;
  u32 sets_, ways_;
  u64 dirty_ = 0;
  std::unique_ptr<void, decltype(&std::free)>
      memory_;  // pages that no line needs are never touched
  u64* tags_;   // in it, aligned
};

class InfinityCache {
 public:
  InfinityCache();
  void read(u64 line, CacheCounts& counts);
  void write(u64 line, CacheCounts& counts);
  void prefetch(u64 line) const;
  u64 dirtyBytes() const;
  bool shared = true;  // by several workers

 private:
  static constexpr u32 kStripes = 16;
  std::vector<TagCache> stripes_;
  std::array<std::mutex, kStripes> locks_;
};

struct XcdCaches {
  std::vector<TagCache> l1;
  TagCache l2;
  XcdCaches() : l2(2048, 16) {
    for (u32 n = 0; n < kCusPerXcd; ++n) l1.emplace_back(4, 64);
  }
};

// What a worker asks the modelled caches for, in its order: each level one access after the one
// before it, when the host has got the tags from its memory.
class CacheQueue {
 public:
  // l1: null where the access passes it by.
  void ask(TagCache* l1, TagCache& l2, InfinityCache& infinity, bool write, const u64* lines,
           u32 count, CacheCounts& counts);
  void finish(InfinityCache& infinity, CacheCounts& counts);

 private:
  void touchDie(const InfinityCache& infinity, CacheCounts& counts);
  void touchInfinity(InfinityCache& infinity, CacheCounts& counts);
  TagCache *l1_ = nullptr, *l2_ = nullptr;
  bool write_ = false;
  u32 count_ = 0, far_ = 0;
  u64 lines_[2 * kLanes];
  struct Beyond {
    u64 line;
    bool write;
  } beyond_[4 * kLanes];
};

// How an access takes part in synchronisation.
struct Role {
  // By sc0 and sc1: the scope of a load or store; of a read-modify-write, device or system.
  enum Level : u8 { kPlain, kWorkgroup, kDevice, kSystem, kAtomic, kSystemAtomic };
  u8 level : 4 = kPlain;
  bool write : 1 = false;
  bool poll : 1 = false;  // it sits in a polling loop
  bool flag : 1 = false;  // a store that may set a flag: it has no scope bits, but one word
  bool atomic() const { return level >= kAtomic; }
  bool system() const { return level == kSystem || level == kSystemAtomic; }
};
static_assert(sizeof(Role) == 1);  // there is one in each record below

// Race shadow of global memory: for each 64-byte line the last writers and readers, by byte mask.
struct AccessRecord {
  u64 mask = 0;
  u32 who = 0, stamp = 0, issued = 0;  // who: its workgroup
  u8 wave = 0;
  bool scalar : 1 = false;
  bool writeBack : 1 = false;  // other workgroups see it after a write-back only
  bool carry : 1 = false;      // other devices do
  bool same : 1 = false;       // it stored what others had stored there, with nothing ordering them
  Role role;
  const Inst* inst = nullptr;
};
struct LineReaders {
  AccessRecord last[3];
};
struct LineWriters {
  AccessRecord last[4];
};
class GlobalShadow {
 public:
  static constexpr u32 kPageLines = 64;
  struct Page {
    std::atomic_flag busy = ATOMIC_FLAG_INIT;  // held for some tens of instructions
    LineReaders readers[kPageLines];
    std::unique_ptr<LineWriters[]> writers;  // since the first write: most pages have none
  };
  Page& page(u64 number);  // lives as long as the launch

 private:
  static constexpr u32 kStripes = 64;
  std::array<std::mutex, kStripes> locks_;
  std::array<std::unordered_map<u64, std::unique_ptr<Page>>, kStripes> pages_;
};

// Race shadow of LDS, by dword with a byte mask. Four dwords that were only ever touched together
// share the first one's cell. That cell also says so, and for which workgroup: clocks only grow
// within one worker, so records of an earlier one need no clearing before they are met.
struct LdsRecord {
  u32 stamp = 0, inst = 0;  // inst: index of the instruction
  u8 by = 0, mask = 0;      // by: twice the wave, + 1 for a load to LDS
  Role role;
  bool same = false;  // as in AccessRecord
};
struct alignas(64) LdsCell {
  LdsRecord writers[2], readers[3];
  u32 state =
      0;  // of a first cell: twice the clockBase it is for, + 1 when all four have their own
};
static_assert(sizeof(LdsCell) == 64);
struct LdsShadow {
  static constexpr u32 kShared = 4;    // dwords
  std::vector<LdsCell> first, others;  // of each four; the first alone, so that they lie close
  LdsCell& firstOf(u32 word) { return first[word / kShared]; }
  LdsCell* othersOf(u32 word) { return &others[word / kShared * (kShared - 1)]; }
  LdsCell& at(u32 word) {
    return word % kShared ? othersOf(word)[word % kShared - 1] : firstOf(word);
  }
};

// What words of one 64-byte line carry for those who read them as flags: to waves of the workgroup
// that wrote them last, and to all others.
struct FlagWords {
  u16 words = 0;
  u32 who = 0;
  KnowledgePtr local, foreign;
  u64 number = 0;  // of `foreign`
};
class FlagTable {
 public:
  void release(u64 line, u16 words, const Wave& w, const MemOp& op);
  void acquire(u64 line, u16 words, const Wave& w, MemOp& op);

 private:
  static constexpr u32 kStripes = 64;
  std::array<std::mutex, kStripes> locks_;
  std::array<std::unordered_map<u64, std::vector<FlagWords>>, kStripes> lines_;
};

// How an instruction that writes depends on a loaded value (depends.cpp).
struct Dependence {
  bool data = false, control = false;
};
class Dependences {
 public:
  Dependence of(const CodeObject& object, const Inst& load, const Inst& write);
  // Is the address of a scratch access the same for all lanes and times: a variable's own place?
  bool fixedAddress(const CodeObject& object, const Inst& access);

 private:
  std::mutex lock_;
  std::map<std::pair<const Inst*, const Inst*>, Dependence> known_;
  std::map<const Inst*, bool> fixed_;
};

struct Recording;

// ds_gws_barrier, the barrier of a whole grid: rounds, and what its waves know of one another.
struct GridBarrier {
  std::mutex lock;
  u64 round = 1;
  u32 waves = 0;
  KnowledgePtr gathered, given;
};

// What launches share that run beside or after one another: on several devices, which see one
// another's memory, or on streams of one.
struct World {
  struct Part {                     // a launch
    u32 first = 0, workgroups = 0;  // `who` of its first workgroup, and how many it has
    u32 device = 0;
    u32 turn = 0;              // of its device's launches
    std::vector<bool> before;  // the parts that had ended when it began
    const CodeObject* object = nullptr;
    const Kernel* kernel = nullptr;
    KnowledgePtr known, given;  // by its predecessors when it began; by it when it ended
  };
  // A launch of `workgroups` that begins when those of `before` have ended.
  u32 add(const Launch& launch, u32 device, const std::vector<u32>& before);
  u32 partOf(u32 who) const { return several() ? partsByWho[who] : 0; }
  bool several() const { return shared; }
  bool precedes(u32 a, u32 b) const { return a < parts[b].before.size() && parts[b].before[a]; }
  // The workgroup in words, as seen from one of `part`.
  std::string name(u32 who, u32 part) const;
  // All of this launch waits. Do all others that run, with memory as it was when they said so?
  bool allWait(const Launch& launch);

  bool shared = false;  // there are other launches, or may be
  bool open = false;    // launches may come from outside while all that run wait
  std::vector<Part> parts;
  std::vector<u32> partsByWho;
  FlagTable flags;
  GlobalShadow shadow;
  // How often memory has changed, and lines of it, by a hash; where there are several launches.
  static constexpr u32 kStamps = 4096;
  std::atomic<u64> changes{0};
  std::array<u32, kStamps> stamps{};
  // Write-backs that a release did not wait for, by workgroup and wave.
  std::mutex outrunLock;
  std::map<std::pair<u32, u32>, const Inst*> outrun;
  // Of launches that one thread turns, and no others may come: all that have begun, and those that
  // are under way.
  std::vector<const Launch*> all;
  std::map<const Launch*, u64> running;  // at which sum of changes it waited, + 1
};

struct Launch {
  const CodeObject* object = nullptr;
  const Kernel* kernel = nullptr;
  Options options;
  u32 grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  u32 dynamicLds = 0;
  Bytes kernarg;
  std::vector<Buffer*> buffers;  // sorted by address
  std::deque<Buffer> ownBuffers;

  std::mutex findingsLock;
  std::map<std::tuple<std::string, u64, Level>, Finding> findings;
  std::string failure;
  std::atomic<bool> failed{false};

  std::mutex atomicLock;         // of atomics on global memory that may hand something on
  std::shared_ptr<World> world;  // its own, unless it runs together with others
  u32 part = 0;                  // of the world
  GridBarrier gridBarrier;
  Dependences dependences;
  InfinityCache infinity;
  std::vector<XcdCaches> xcds;
  Counters counters;

  std::unique_ptr<Hostcalls> hostcalls;  // for kernels that may call the host

  // Progress: changes of memory by worker, and at which sum of them a worker got stuck.
  static constexpr u64 kFinished = ~0ull;
  u32 workers = 1;
  std::atomic<u64> started{0};  // workgroups
  std::atomic<u64> changes[kXcds] = {}, stuckAt[kXcds] = {};
  std::atomic<u64> storing[kXcds] = {};  // odd while a worker's store takes effect
  u64 allChanges() const;
  u64 workgroups = 0, wavesPerGroup = 0;
  std::shared_ptr<Recording> recording;  // null unless the cycle model runs
};

struct Worker {
  Launch* launch = nullptr;
  u32 index = 0;
  u64 random = 0;
  u32 clockBase = 1;  // LDS stamps of finished workgroups lie below it
  u32 lastBuffer = 0;
  std::array<std::pair<u64, GlobalShadow::Page*>, 2048> pages{};  // number + 1, of the last ones
  std::vector<MemOp*> freeOps;
  std::deque<MemOp> allOps;
  Counters counters;
  CacheQueue cacheQueue;

  u32 next(u32 bound) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<u32>((random >> 33) % bound);
  }
  MemOp* takeOp();
  // Memory has changed, or a workgroup came or went.
  void change() {
    std::atomic<u64>& c = launch->changes[index];
    c.store(c.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (!launch->world->several()) return;
    std::atomic<u64>& all = launch->world->changes;  // one thread turns all launches
    all.store(all.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  // How often memory has changed, in all that this worker's waves may wait for.
  u64 changes() const {
    return launch->world->several() ? launch->world->changes.load(std::memory_order_relaxed)
                                    : launch->allChanges();
  }
};

// Watches one worker's workgroups (progress.cpp).
class Progress {
 public:
  enum State { kMoves, kWaits };
  Progress(Launch& launch, u32 worker);
  // Called after each turn of a workgroup.
  State look(const std::vector<std::unique_ptr<Workgroup>>& resident);
  // After kWaits with nobody left to start: do all other workers wait too?
  bool stuckForGood();

 private:
  Launch& launch_;
  u32 worker_;
  u64 steps_ = 0, last_ = 0;
  bool settled_ = false;
};
void notePoll(Wave& w, const MemOp& op);
// A turn of a wave that would find nothing new: says whether it has passed without the wave. What
// the engine does not see, as what the host stores, wakes it within kNapTurns.
constexpr u32 kNapTurns = 128, kNapInstructions = 64;
bool naps(Wave& w);
// Memory has changed by an operation.
void noteChange(const Wave& w, const MemOp& op);
// At a barrier whose waves wait for what one of them polls: they come back as they were.
void noteBarrier(Workgroup& wg);

// Launches that run at once, from several host threads: they share the host's memory, and one that
// waits may wait for another. On them a hang is told when all wait and nothing has changed for a
// while; the engine alone does not expect others (progress.cpp).
class Together {
 public:
  static void expectOthers(int seconds);
  static void enter(Launch& launch);
  static void leave(Launch& launch);
  // All of this launch waits. Do all others too, and for long?
  static bool stuckForGood(Launch& launch);
};

// Takes an operation's effect on memory and reads its result, once (memory_effects.cpp).
void perform(Wave& w, MemOp& op);

// The same for a load or store that needs no look at single lanes; says whether that was so
// (memory_whole.cpp). offset: of an LDS instruction; row: the first of its data.
bool performWhole(Wave& w, MemOp& op, bool write, u32 offset, u32 row);
// The buffer that holds all of a range, or null.
Buffer* findBuffer(Worker& worker, u64 address, u64 bytes);

// Puts an operation under its wait counter, or completes it at once without late completion
// (memory_pending.cpp).
void issue(Wave& w, MemOp* op);

// Completes operations until at most `left` are outstanding.
void waitVm(Wave& w, u32 left);
void waitLgkm(Wave& w, u32 left);
// buffer_inv, buffer_wbl2 and their kin: no data, but VMCNT counts them and the race checker
// follows them.
void cacheFence(Wave& w, const Inst& i);

// Reports registers of `i` that a load in flight still owes.
void checkPending(Wave& w, const Inst& i);

// Makes stores and captured loads that waited long visible to others; registers stay pending.
void performAged(Workgroup& wg, u64 age);

// Before a global access: what others of the workgroup have in flight to the same bytes takes
// effect, because they share an L1 that keeps the order (memory_order.cpp).
void orderInWorkgroup(Wave& w, MemOp& op);

// When a buffer_wbl2 is complete: what the workgroup's waves issued before it has taken effect,
// since it came to the L2 before the write-back, through the same L1. Without this a store stayed
// late after the flag that hands it over was seen.
void writeBackWorkgroup(const Wave& w, const MemOp& fence);
void tookEffect(Wave& w, const MemOp& op);

// Lanes of an operation that address LDS or global memory; flat accesses may have both.
u64 ldsLanes(const MemOp& op);
u64 globalLanes(const MemOp& op);

// Who releases and acquires what (sync.cpp).
Role roleOf(const Wave& w, const MemOp& op);
void initKnowledge(Workgroup& wg);
// May anybody take what the wave's flags in global memory give: its kernel, or another launch's?
bool takenElsewhere(const Wave& w);
void endKnowledge(const Workgroup& wg);
void workgroupBarrier(Workgroup& wg);
void issueSync(Wave& w, MemOp& op);
void performSync(Wave& w, MemOp& op);
void completeSync(Wave& w, MemOp& op);
void gridArrive(Wave& w, GridBarrier& barrier);  // under its lock
void gridLeave(Wave& w, const GridBarrier& barrier);

// Race checker (race.cpp). Accesses are checked when they take effect; `lanes` are those meant.
// Both say whether some of them may have met one another.
bool raceGlobal(Wave& w, MemOp& op, u64 lanes, bool write);
void raceScalar(Wave& w, MemOp& op);
// row: the first of a store's data.
bool raceLds(Wave& w, MemOp& op, u64 lanes, u32 bytes, u32 offset, u32 row, bool write);
// The wave's own last load of a byte, as far as the checker remembers it.
const Inst* ownReader(const Wave& w, u64 address);
const Inst* ownLdsReader(const Wave& w, u32 address);
// Lanes of one store that meet; offset: of an LDS instruction (collisions.cpp).
void checkCollisions(Wave& w, const MemOp& op, u64 lanes, u32 offset, u32 row);

// Cache and bank models (model.cpp).
void countGlobal(Wave& w, const MemOp& op, u32 bytes, bool write);
void countLds(Wave& w, const MemOp& op, u32 bytes, u32 offset);

// Makes buffers known to the launch, and gives the flags of written bytes back (buffers.cpp).
void addBuffers(Launch& launch, const std::vector<BufferSpec>& given);
void returnFlags(const Launch& launch, const std::vector<BufferSpec>& given);

std::string hex(u64 x);  // 0x10

u64 runLaunch(Launch& launch);

// Launches of several devices or streams on one thread, their waves interleaved as `seed` says.
class Execution;
class Interleaving {
 public:
  // open: launches may come while all that run wait, and what others run on threads of their own
  // may be what they wait for.
  Interleaving(u64 seed, bool open);
  ~Interleaving();
  // Begins a launch, and returns its number; `before`: the last ones that had to end first. Those
  // of a stream follow one another.
  u32 begin(Launch& launch, u32 stream, u32 device, const std::vector<u32>& before);
  // Lets one of them take a turn; returns it when that was its last one.
  Launch* turn();

 private:
  struct Active {
    u32 stream;
    Launch* launch;
    std::unique_ptr<Execution> execution;
  };
  u32 draw(u32 bound);
  std::shared_ptr<World> world_;
  std::vector<Active> active_;  // in the order of streams
  u64 random_;
  u32 left_ = 0, quick_ = 0;
};

// Runs the launches of all streams to their ends.
struct Stream {
  u32 device = 0;
  std::vector<Launch*> launches;
};
void runTogether(const std::vector<Stream>& streams, u64 seed);

}  // namespace sim
