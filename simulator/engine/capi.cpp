#include "capi.h"

#include <llvm/Demangle/Demangle.h>
#include <llvm/Support/JSON.h>
#include <llvm/Support/raw_ostream.h>

#include <chrono>
#include <map>
#include <memory>

#include "codeobject.h"
#include "cycles.h"
#include "memory.h"
#include "operands.h"

using namespace sim;
using llvm::json::Array;
using llvm::json::Object;

struct SimObject {
  std::shared_ptr<CodeObject> code;
  std::string description;
};

namespace {

thread_local std::string lastError, lastResult;

const char* const kClassNames[] = {"salu", "smem",    "valu",   "trans",   "matrix", "lds",  "vmem",
                                   "flat", "scratch", "branch", "barrier", "wait",   "other"};
static_assert(std::size(kClassNames) == static_cast<size_t>(Class::Count));

std::string toText(Object object) {
  std::string out;
  llvm::raw_string_ostream stream(out);
  stream << llvm::json::Value(std::move(object));
  return out;
}

i64 num(u64 x) { return static_cast<i64>(x); }

Object describeKernel(const Kernel& k) {
  Array args;
  for (const KernelArg& a : k.args) {
    args.push_back(Object{{"kind", a.kind},
                          {"name", a.name},
                          {"offset", a.offset},
                          {"size", a.size},
                          {"type", a.type}});
  }
  return Object{{"args", std::move(args)},
                {"lds", k.ldsBytes},
                {"scratch", k.privateBytes},
                {"kernarg_bytes", k.kernargBytes},
                {"vgprs", k.vgprs},
                {"agprs", k.agprs},
                {"sgprs", k.sgprs},
                {"spills", k.spills},
                {"max_workgroup", k.maxWorkgroup},
                {"kernarg_preload", k.preload & 127}};
}

Object counters(const Launch& l) {
  const Counters& c = l.counters;
  u64 byClass[std::size(kClassNames)] = {}, total = 0, matrixCycles = 0;
  for (size_t n = 0; n < c.executed.size(); ++n) {
    const Inst& i = l.object->code[n];
    byClass[static_cast<int>(i.cls)] += c.executed[n];
    total += c.executed[n];
    matrixCycles += c.executed[n] * i.passes;
  }
  Object classes;
  for (size_t n = 0; n < std::size(kClassNames); ++n) classes[kClassNames[n]] = num(byClass[n]);
  return Object{{"instructions", num(total)},
                {"by_class", std::move(classes)},
                {"global_read_bytes", num(c.readBytes)},
                {"global_written_bytes", num(c.writtenBytes)},
                {"scalar_read_bytes", num(c.scalarBytes)},
                {"scratch_bytes", num(c.scratchBytes)},
                {"lines_64", num(c.lines64)},
                {"lines_128", num(c.lines128)},
                {"l1_hits", num(c.cache.l1Hits)},
                {"l2_hits", num(c.cache.l2Hits)},
                {"l2_misses", num(c.cache.l2Misses)},
                {"l2_write_backs", num(c.cache.l2WriteBacks)},
                {"infinity_hits", num(c.cache.infinityHits)},
                {"memory_read_bytes", num(c.cache.memoryReadBytes)},
                {"memory_written_bytes", num(c.cache.memoryWriteBytes)},
                {"lds_bytes", num(c.ldsBytes)},
                {"lds_cycles", num(c.ldsCycles)},
                {"lds_conflict_cycles", num(c.ldsConflictCycles)},
                {"matrix_cycles", num(matrixCycles)},
                {"atomics", num(c.atomics)},
                {"tickets", num(c.tickets)},
                {"workgroups", num(l.workgroups)},
                {"waves_per_workgroup", num(l.wavesPerGroup)}};
}

Array findings(const Launch& l) {
  Array out;
  for (const auto& [key, f] : l.findings) {
    out.push_back(Object{{"kind", f.kind},
                         {"level", f.level == Level::Error ? "error" : "suspicious"},
                         {"kernel", f.kernel},
                         {"message", f.message},
                         {"source", f.source},
                         {"instruction", f.instruction},
                         {"address", num(f.address)},
                         {"code_address", num(f.codeAddress)},
                         {"workgroup", Array{f.workgroup[0], f.workgroup[1], f.workgroup[2]}},
                         {"wave", f.wave},
                         {"lane", f.lane},
                         {"count", num(f.count)}});
  }
  return out;
}

// Executions by source line, for the hot-spot listing.
Array hotLines(const Launch& l) {
  std::map<std::string, std::pair<u64, u64>> lines;
  for (size_t n = 0; n < l.counters.executed.size(); ++n) {
    u64 count = l.counters.executed[n];
    if (!count) continue;
    auto& entry = lines[l.object->source(l.object->code[n].address)];
    entry.first += count;
    entry.second += count * l.object->code[n].passes;
  }
  Array out;
  for (const auto& [line, counts] : lines) {
    out.push_back(Object{{"source", line},
                         {"instructions", num(counts.first)},
                         {"matrix_cycles", num(counts.second)}});
  }
  return out;
}

// What a launch of the C interface asks for.
void prepare(Launch& l, SimObject* object, const char* kernel, const uint32_t grid[3],
             const uint32_t block[3], uint32_t dynamic_lds, const void* kernarg,
             uint64_t kernarg_bytes, const SimOptions& options) {
  const CodeObject& code = *object->code;
  auto it = code.kernels.find(kernel);
  if (it == code.kernels.end()) {
    std::string have;
    for (const auto& [name, k] : code.kernels) have += (have.empty() ? "" : ", ") + name;
    throw Error(code.path + ": there is no kernel " + kernel + "; it has " + have);
  }
  l.object = &code;
  l.kernel = &it->second;
  std::copy_n(grid, 3, l.grid);
  std::copy_n(block, 3, l.block);
  l.dynamicLds = dynamic_lds;
  const u8* bytes = static_cast<const u8*>(kernarg);
  l.kernarg.assign(bytes, bytes + kernarg_bytes);
  l.options = {options.late != 0,        options.race != 0,   options.bounds != 0,
               options.uninit != 0,      options.caches != 0, options.seed,
               options.max_instructions, options.threads};
  if (!code.gpu->modelled) l.options.caches = false;
}

std::vector<BufferSpec> specsOf(const SimBuffer* buffers, uint32_t count) {
  std::vector<BufferSpec> given;
  for (uint32_t n = 0; n < count; ++n) {
    const SimBuffer& b = buffers[n];
    given.push_back({reinterpret_cast<u64>(b.data), b.bytes, b.initialised != 0, b.name, b.written,
                     b.read_only != 0});
  }
  return given;
}

Object resultOf(const Launch& l, double seconds) {
  const Options& o = l.options;
  u64 instructions = 0;
  for (u64 n : l.counters.executed) instructions += n;
  Object result{{"kernel", l.kernel->name},
                {"readable", llvm::demangle(l.kernel->name)},
                {"checked", o.late && o.race && o.uninit},
                {"target", l.object->gpu->target},
                {"grid", Array{l.grid[0], l.grid[1], l.grid[2]}},
                {"block", Array{l.block[0], l.block[1], l.block[2]}},
                {"dynamic_lds", l.dynamicLds},
                {"resources", describeKernel(*l.kernel)},
                {"counters", counters(l)},
                {"findings", findings(l)},
                {"lines", hotLines(l)},
                {"host_seconds", seconds},
                {"instructions_per_second", instructions / std::max(1e-9, seconds)}};
  if (l.failed) result["error"] = l.failure;
  return result;
}

}  // namespace

extern "C" {

const char* sim_error(void) { return lastError.c_str(); }

void sim_expect_others(int seconds) { Together::expectOthers(seconds); }

SimObject* sim_open(const void* data, uint64_t bytes, const char* path, const char* target) try {
  std::vector<Bundled> all = openFile(data, bytes, path);
  std::vector<const Bundled*> wanted;
  std::string have;
  std::string want = target ? target : "gfx942";
  for (const Bundled& b : all) {
    have += (have.empty() ? "" : ", ") + b.target;
    if (b.target.empty() || b.target == want || (!target && all.size() == 1)) {
      wanted.push_back(&b);
    }
  }
  if (wanted.empty()) {
    throw Error(std::string(path) + ": required code for " + want + ", it has " + have);
  }
  if (wanted.size() > 1) {
    throw Error(std::string(path) + " holds several code objects for " + want +
                "; give one object file or code object");
  }
  auto object = std::make_unique<SimObject>();
  object->code = loadCodeObject(wanted[0]->elf.data(), wanted[0]->elf.size(), path);
  return object.release();
} catch (const std::exception& error) {
  lastError = error.what();
  return nullptr;
}

void sim_close(SimObject* object) { delete object; }

const char* sim_describe(SimObject* object) {
  Object kernels, variables;
  for (const auto& [name, k] : object->code->kernels) kernels[name] = describeKernel(k);
  for (const auto& [name, v] : object->code->variables) {
    variables[name] =
        Object{{"address", num(reinterpret_cast<u64>(object->code->image.data()) + v.first)},
               {"size", num(v.second)}};
  }
  std::map<std::string, int> unknown;
  for (const Inst& i : object->code->code) {
    if (i.fn == unknownInstruction && !i.name.empty()) ++unknown[i.name];
  }
  Array names;
  for (const auto& [name, count] : unknown) names.push_back(name);
  object->description = toText(Object{{"target", object->code->gpu->target},
                                      {"unknown", std::move(names)},
                                      {"kernels", std::move(kernels)},
                                      {"variables", std::move(variables)}});
  return object->description.c_str();
}

void* sim_variable(SimObject* object, const char* name, uint64_t* bytes) {
  auto it = object->code->variables.find(name);
  if (it == object->code->variables.end()) return nullptr;
  *bytes = it->second.second;
  return object->code->image.data() + it->second.first;
}

int sim_kernel(SimObject* object, const char* kernel, SimKernel* out) {
  auto it = object->code->kernels.find(kernel);
  if (it == object->code->kernels.end()) return 0;
  const Kernel& k = it->second;
  *out = {k.ldsBytes, k.privateBytes, k.vgprs, k.sgprs, k.maxWorkgroup, k.kernargBytes, 0, {}};
  for (const KernelArg& a : k.args) {
    if (a.kind.rfind("hidden_", 0) == 0) continue;
    if (out->arg_count == SIM_MAX_ARGS) {
      lastError = it->first + " has more than " + std::to_string(SIM_MAX_ARGS) + " arguments";
      return 0;
    }
    out->args[out->arg_count].offset = a.offset;
    out->args[out->arg_count++].size = a.size;
  }
  return 1;
}

const char* sim_launch(SimObject* object, const char* kernel, const uint32_t grid[3],
                       const uint32_t block[3], uint32_t dynamic_lds, const void* kernarg,
                       uint64_t kernarg_bytes, const SimBuffer* buffers, uint32_t buffer_count,
                       const SimOptions* options) try {
  Launch l;
  prepare(l, object, kernel, grid, block, dynamic_lds, kernarg, kernarg_bytes, *options);
  std::vector<BufferSpec> given = specsOf(buffers, buffer_count);
  addBuffers(l, given);
  if (options->cycles) {
    l.recording = std::make_shared<Recording>();
    l.recording->xcds = options->cycles->dies;
    l.recording->sampled = options->cycles->sampled;
    l.recording->playsFlags = options->cycles->flag_cycles > 0;
  }
  auto start = std::chrono::steady_clock::now();
  runLaunch(l);
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  returnFlags(l, given);
  Object result = resultOf(l, seconds.count());
  if (!l.failed && options->cycles) result["cycles"] = runCycles(l, *options->cycles);
  lastResult = toText(std::move(result));
  return lastResult.c_str();
} catch (const std::exception& error) {
  lastError = error.what();
  return nullptr;
}

const char* sim_launch_together(const SimCall* calls, uint32_t call_count, const SimBuffer* buffers,
                                uint32_t buffer_count, const SimOptions* options) try {
  std::deque<Launch> launches;
  std::vector<BufferSpec> given = specsOf(buffers, buffer_count);
  std::vector<Stream> streams;
  for (uint32_t n = 0; n < call_count; ++n) {
    const SimCall& c = calls[n];
    Launch& l = launches.emplace_back();
    prepare(l, c.object, c.kernel, c.grid, c.block, c.dynamic_lds, c.kernarg, c.kernarg_bytes,
            *options);
    l.options.seed = options->seed + n;
    // All of them may touch all memory, and share what is known of it.
    if (n == 0) {
      addBuffers(l, given);
    } else {
      l.buffers = launches.front().buffers;
    }
    if (streams.size() <= c.stream) streams.resize(c.stream + 1);
    streams[c.stream].device = c.device;
    streams[c.stream].launches.push_back(&l);
  }
  auto start = std::chrono::steady_clock::now();
  runTogether(streams, options->seed);
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (!launches.empty()) returnFlags(launches.front(), given);
  Array results;
  for (const Launch& l : launches) results.push_back(resultOf(l, seconds.count()));
  lastResult = toText(Object{{"launches", std::move(results)}});
  return lastResult.c_str();
} catch (const std::exception& error) {
  lastError = error.what();
  return nullptr;
}

struct SimInterleaving {
  struct Running {
    std::unique_ptr<Launch> launch;
    std::vector<BufferSpec> given;
    std::chrono::steady_clock::time_point start;
  };
  explicit SimInterleaving(u64 seed) : all(seed, true), seed(seed) {}
  std::map<Launch*, Running> running;
  Interleaving all;
  u64 seed, begun = 0;
};

SimInterleaving* sim_interleave(uint64_t seed) { return new SimInterleaving(seed); }

int64_t sim_begin(SimInterleaving* i, const SimCall* call, const SimBuffer* buffers,
                  uint32_t buffer_count, const SimOptions* options, const uint32_t* before,
                  uint32_t before_count) try {
  SimInterleaving::Running r{std::make_unique<Launch>(), specsOf(buffers, buffer_count),
                             std::chrono::steady_clock::now()};
  Launch& l = *r.launch;
  prepare(l, call->object, call->kernel, call->grid, call->block, call->dynamic_lds, call->kernarg,
          call->kernarg_bytes, *options);
  l.options.seed = i->seed + i->begun++;
  addBuffers(l, r.given);
  u32 number = i->all.begin(l, call->stream, call->device, {before, before + before_count});
  i->running[&l] = std::move(r);
  return number;
} catch (const std::exception& error) {
  lastError = error.what();
  return -1;
}

int64_t sim_turns(SimInterleaving* i, uint32_t turns, const char** result) {
  while (turns--) {
    Launch* ended = i->all.turn();
    if (!ended) continue;
    SimInterleaving::Running r = std::move(i->running.extract(ended).mapped());
    returnFlags(*ended, r.given);
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - r.start;
    lastResult = toText(resultOf(*ended, seconds.count()));
    *result = lastResult.c_str();
    return ended->part;
  }
  return -1;
}

void sim_end(SimInterleaving* i) { delete i; }

}  // extern "C"
