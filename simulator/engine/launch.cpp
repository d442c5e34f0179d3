// Launches: kernel arguments, the workers, and those that run together.
#include <algorithm>
#include <cfenv>
#include <map>
#include <numeric>
#include <thread>

#include "runner.h"

namespace sim {

void report(Wave& w, const Inst& i, const char* kind, u64 address, int lane, std::string message,
            Level level) {
  Launch& launch = *w.wg->launch;
  std::lock_guard guard(launch.findingsLock);
  auto [it, added] = launch.findings.try_emplace({kind, i.address, level});
  Finding& f = it->second;
  if (!added) {
    ++f.count;
    return;
  }
  f.kind = kind;
  f.level = level;
  f.kernel = launch.kernel->name;
  f.message = std::move(message);
  f.instruction = i.text;
  f.source = launch.object->source(i.address);
  f.address = address;
  f.codeAddress = i.address;
  std::copy_n(w.wg->id, 3, f.workgroup);
  f.wave = w.id;
  f.lane = lane;
}

void stop(Wave& w, const Inst& i, const std::string& why) {
  char address[32];
  std::snprintf(address, sizeof address, "0x%x", i.address);
  u32 index = w.object->indexAt(i.address);
  throw Error("kernel " + w.wg->launch->kernel->name + " stopped at '" + i.text + "' (address " +
              address + ", " + w.object->source(i.address) + ", workgroup " +
              std::to_string(w.wg->id[0]) + "," + std::to_string(w.wg->id[1]) + "," +
              std::to_string(w.wg->id[2]) + " wave " + std::to_string(w.id) + "): " + why + "\n" +
              w.object->disassembly(index, 4));
}

void setRounding(u32 mode) {
  static constexpr int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  static thread_local u32 now = 0;
  if ((mode & 3) != now) std::fesetround(modes[now = mode & 3]);
}

namespace {

void put(Bytes& bytes, u32 at, const void* value, u32 size) {
  if (bytes.size() < at + size) bytes.resize(at + size);
  std::memcpy(bytes.data() + at, value, size);
}

void fillHidden(Launch& l) {
  u32 dims = l.grid[2] * l.block[2] > 1 ? 3 : l.grid[1] * l.block[1] > 1 ? 2 : 1;
  for (const KernelArg& a : l.kernel->args) {
    if (a.kind.rfind("hidden_", 0) != 0) continue;
    u64 value = 0;
    for (int d = 0; d < 3; ++d) {
      std::string axis = std::string("_") + "xyz"[d];
      if (a.kind == "hidden_block_count" + axis) value = l.grid[d];
      if (a.kind == "hidden_group_size" + axis) value = l.block[d];
    }
    if (a.kind == "hidden_grid_dims") value = dims;
    if (a.kind == "hidden_dynamic_lds_size") value = l.dynamicLds;
    if (a.kind == "hidden_shared_base") value = kSharedBase >> 32;
    if (a.kind == "hidden_private_base") value = kPrivateBase >> 32;
    if (a.kind == "hidden_hostcall_buffer") {
      l.hostcalls = std::make_unique<Hostcalls>();
      value = l.hostcalls->address();
    }
    if (a.kind == "hidden_heap_v1") value = kMissingHeap;
    if (a.kind == "hidden_default_queue" || a.kind == "hidden_queue_ptr") value = kMissingQueue;
    // Remainders and offsets stay 0: grids are whole.
    put(l.kernarg, a.offset, &value, a.size);
  }
}

void checkLaunch(const Launch& l) {
  u64 threads = u64(l.block[0]) * l.block[1] * l.block[2];
  u64 groups = u64(l.grid[0]) * l.grid[1] * l.grid[2];
  if (threads == 0 || groups == 0) {
    throw Error("kernel " + l.kernel->name + ": grid and block need at least 1 in every dimension");
  }
  if (threads > 1024 || threads > l.kernel->maxWorkgroup) {
    throw Error("kernel " + l.kernel->name + ": required at most " +
                std::to_string(std::min(1024u, l.kernel->maxWorkgroup)) +
                " threads a workgroup (launch bounds), got " + std::to_string(threads));
  }
  u32 lds = l.kernel->ldsBytes + l.dynamicLds, limit = l.object->gpu->ldsKib;
  if (lds > limit * 1024) {
    throw Error("kernel " + l.kernel->name + ": required at most " + std::to_string(limit) +
                " KiB of LDS, got " + std::to_string(lds) + " bytes");
  }
  // Property 1: scratch through a swizzled buffer, not through scratch instructions.
  if (l.kernel->privateBytes && !l.object->gpu->flatScratch && (l.kernel->properties & 1)) {
    throw Error("kernel " + l.kernel->name + " uses scratch through buffers, which is not " +
                "implemented for " + l.object->gpu->target +
                ": compile with -Xclang -target-feature -Xclang +enable-flat-scratch");
  }
}

}  // namespace

// A launch made ready, and what it leaves behind.
class Execution {
 public:
  Execution(Launch& l, u32 threads) : launch_(l) {
    if (l.kernarg.size() < l.kernel->kernargBytes) l.kernarg.resize(l.kernel->kernargBytes);
    fillHidden(l);
    l.kernarg.resize((l.kernarg.size() + 79) / 16 * 16);  // wide scalar loads may read past the end
    auto own = [&](const void* p, u64 bytes, const char* name) {
      u64 begin = reinterpret_cast<u64>(p);
      l.ownBuffers.push_back({begin, begin + bytes, name, nullptr, {}});
      l.buffers.push_back(&l.ownBuffers.back());
    };
    for (int d = 0; d < 3; ++d) {
      dispatch_.workgroupSize[d] = l.block[d];
      dispatch_.gridSize[d] = l.grid[d] * l.block[d];
    }
    dispatch_.privateBytes = l.kernel->privateBytes;
    dispatch_.groupBytes = l.kernel->ldsBytes + l.dynamicLds;
    dispatch_.kernarg = reinterpret_cast<u64>(l.kernarg.data());
    own(l.kernarg.data(), l.kernarg.size(), "the kernel arguments");
    own(&dispatch_, sizeof dispatch_, "the dispatch packet");
    if (l.hostcalls) {
      own(reinterpret_cast<const void*>(l.hostcalls->address()), l.hostcalls->bytes(),
          "the buffer of host calls");
    }
    own(l.object->image.data(), l.object->image.size(), "the code object's data");
    std::sort(l.buffers.begin(), l.buffers.end(),
              [](const Buffer* a, const Buffer* b) { return a->begin < b->begin; });
    l.xcds.resize(kXcds);
    if (l.recording) l.recording->groups.resize(l.workgroups);
    l.workers = threads;
    l.infinity.shared = threads > 1;
    for (u32 n = 0; n < threads; ++n) {
      runners.push_back(std::make_unique<Runner>(l, dispatch_, n, threads));
    }
  }

  u64 finish() {
    Launch& l = launch_;
    for (auto& r : runners) {
      Worker& worker = r->worker();
      worker.cacheQueue.finish(l.infinity, worker.counters.cache);
      l.counters.add(worker.counters);
    }
    // What is dirty at the end goes to memory sooner or later: it counts for this launch.
    for (const XcdCaches& xcd : l.xcds) {
      for (u64 line : xcd.l2.dirtyLines()) l.infinity.write(line, l.counters.cache);
    }
    l.counters.cache.memoryWriteBytes += l.infinity.dirtyBytes();
    return std::accumulate(l.counters.executed.begin(), l.counters.executed.end(), u64{0});
  }

  std::vector<std::unique_ptr<Runner>> runners;

 private:
  Launch& launch_;
  Dispatch dispatch_;
};

namespace {

void count(Launch& l) {
  checkLaunch(l);
  l.workgroups = u64(l.grid[0]) * l.grid[1] * l.grid[2];
  l.wavesPerGroup = (u64(l.block[0]) * l.block[1] * l.block[2] + kLanes - 1) / kLanes;
}

void fail(Launch& l, const std::string& why) {
  std::lock_guard guard(l.findingsLock);
  if (!l.failed.exchange(true)) l.failure = why;
  setRounding(0);
}

}  // namespace

u64 runLaunch(Launch& l) {
  count(l);
  l.world = std::make_shared<World>();
  l.part = l.world->add(l, 0, {});
  u32 threads = l.options.threads ? l.options.threads : std::thread::hardware_concurrency();
  threads = std::max(1u, std::min({threads, kXcds, static_cast<u32>(l.workgroups)}));
  Execution all(l, threads);
  auto body = [&](Runner& r) {
    try {
      r.run();
    } catch (const std::exception& error) {
      fail(l, error.what());
    }
  };
  Together::enter(l);
  std::vector<std::thread> pool;
  for (u32 n = 1; n < threads; ++n) pool.emplace_back(body, std::ref(*all.runners[n]));
  body(*all.runners[0]);
  for (std::thread& t : pool) t.join();
  Together::leave(l);
  return all.finish();
}

Interleaving::Interleaving(u64 seed, bool open)
    : world_(std::make_shared<World>()), random_(seed * 0x9e3779b97f4a7c15ull + 1) {
  world_->open = open;
  world_->shared = true;
}

Interleaving::~Interleaving() = default;

u32 Interleaving::begin(Launch& l, u32 stream, u32 device, const std::vector<u32>& before) {
  count(l);
  l.world = world_;
  l.part = world_->add(l, device, before);
  auto at = std::find_if(active_.begin(), active_.end(),
                         [&](const Active& a) { return a.stream > stream; });
  active_.insert(at, {stream, &l, std::make_unique<Execution>(l, 1)});
  if (world_->open) {
    Together::enter(l);
  } else {
    world_->all.push_back(&l);
    world_->running[&l] = 0;
  }
  return l.part;
}

u32 Interleaving::draw(u32 bound) {
  random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<u32>((random_ >> 33) % bound);
}

Launch* Interleaving::turn() {
  if (active_.empty()) return nullptr;
  // For a while one of them is quick, and the others stand nearly still; or all go alike.
  if (!left_--) {
    left_ = 1 + draw(400);
    quick_ = draw(2 * active_.size());
  }
  u32 pick = quick_ < active_.size() && draw(32) ? quick_ : draw(active_.size());
  Launch& l = *active_[pick].launch;
  Execution& execution = *active_[pick].execution;
  try {
    if (execution.runners[0]->turn()) return nullptr;
  } catch (const std::exception& error) {
    fail(l, error.what());
  }
  execution.finish();
  if (world_->open) Together::leave(l);
  world_->running.erase(&l);
  active_.erase(active_.begin() + pick);
  return &l;
}

void runTogether(const std::vector<Stream>& streams, u64 seed) {
  Interleaving all(seed, false);
  std::map<const Launch*, std::pair<u32, size_t>> running;  // stream, place in it
  auto begin = [&](u32 stream, size_t n) {
    const std::vector<Launch*>& its = streams[stream].launches;
    if (n == its.size()) return;
    std::vector<u32> before;
    if (n) before.push_back(its[n - 1]->part);
    all.begin(*its[n], stream, streams[stream].device, before);
    running[its[n]] = {stream, n};
  };
  for (u32 s = 0; s < streams.size(); ++s) begin(s, 0);
  while (!running.empty()) {
    Launch* ended = all.turn();
    if (!ended) continue;
    auto [stream, n] = running.extract(ended).mapped();
    if (!ended->failed) {
      begin(stream, n + 1);
      continue;
    }
    auto endEarly = [&](u32 s, size_t first) {
      for (; first < streams[s].launches.size(); ++first) {
        fail(*streams[s].launches[first], "the launch ended early, because one of device " +
                                              std::to_string(streams[stream].device) + " stopped");
      }
    };
    endEarly(stream, n);
    for (const auto& [launch, place] : running) endEarly(place.first, place.second);
    return;
  }
}

u32 World::add(const Launch& launch, u32 device, const std::vector<u32>& before) {
  u32 number = parts.size();
  Part& p = parts.emplace_back();
  p.first = number ? parts[number - 1].first + parts[number - 1].workgroups : 0;
  p.workgroups = launch.workgroups;
  if (several()) partsByWho.insert(partsByWho.end(), p.workgroups, number);
  p.device = device;
  p.object = launch.object;
  p.kernel = launch.kernel;
  p.before.assign(number, false);
  for (u32 b : before) {
    p.before[b] = true;
    for (u32 n = 0; n < b; ++n) p.before[n] = p.before[n] || parts[b].before[n];
  }
  for (u32 n = 0; n < number; ++n) p.turn += parts[n].device == device;
  return number;
}

std::string World::name(u32 who, u32 part) const {
  const Part& p = parts[partOf(who)];
  std::string group = "workgroup " + std::to_string(who - p.first);
  if (&p == &parts[part]) return group;
  return group + " of launch " + std::to_string(p.turn) + " (" + p.kernel->name + ") of device " +
         std::to_string(p.device);
}

bool World::allWait(const Launch& launch) {
  u64 sum = 0;
  for (const Launch* l : all) sum += l->allChanges();
  running[&launch] = sum + 1;
  return std::all_of(running.begin(), running.end(),
                     [&](const auto& r) { return r.second == sum + 1; });
}

}  // namespace sim
