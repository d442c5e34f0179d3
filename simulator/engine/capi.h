// The C interface of the engine, for the Python front end, the HIP stand-in and test harnesses.
// Functions that can fail return 0 or null and leave a sentence in sim_error().
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SimObject SimObject;

// A GPU for the cycle model, and what to play. Cycles are of the shader clock, latencies those of a
// single access from issue to result; rates are sustained bytes a cycle.
typedef struct {
  double clock_hz, launch_cycles;
  double l1_latency, l2_latency, infinity_latency, memory_latency, scalar_latency, lds_latency;
  double l1_bytes;                   // a compute unit
  double l2_bytes;                   // a channel of L2
  double fabric_bytes, write_bytes;  // a die: what L2 reads, what it writes back
  double memory_bytes;               // of the device, all channels together
  double dispatch_cycles;            // a wave, of one die's dispatcher
  double barrier_cycles;
  // Of the matrix pipes' cycles at full clock, with 16-bit and with 8-bit (and smaller) operands:
  // busier ones slow the clock down.
  double matrix_share, matrix_share_fp8;
  // From the moment at which a flag is in its L2 until a poll has found it; 0: polls wait for
  // nothing.
  double flag_cycles;
  uint32_t dies, units, simds;  // compute units a die, SIMDs a unit
  uint32_t waves, registers, register_granule, lds_bytes;
  uint32_t l1_size, l1_line, l1_ways, l1_outstanding, address_queue, lds_queue;
  uint32_t l2_size, l2_ways, l2_channels;
  uint32_t infinity_size, infinity_ways, memory_channels;  // size in KiB; 0 where there is none
  uint32_t scalar_size, scalar_sharers;
  uint32_t transcendental_cycles, conversion_cycles;
  // What to play: dies to sample (memory is shared out), an Infinity Cache that already holds what
  // fits of the launch's data, compute units of the first die whose waves are traced.
  uint32_t sampled, warm, traced;
} SimCycles;

typedef struct {
  uint32_t late, race, bounds, uninit, caches, threads;
  uint64_t seed, max_instructions;
  const SimCycles* cycles;  // null: no cycle model
} SimOptions;

typedef struct {
  void* data;
  uint64_t bytes;
  uint32_t initialised;  // 0: reading before the kernel wrote is a finding
  const char* name;
  uint8_t* written;    // null, or a flag for each byte that outlives the launch
  uint32_t read_only;  // 1: a write is a finding, and does not happen
} SimBuffer;

#define SIM_MAX_ARGS 64
typedef struct {
  uint32_t lds, scratch, vgprs, sgprs, max_workgroup, kernarg_bytes, arg_count;
  struct {
    uint32_t offset, size;
  } args[SIM_MAX_ARGS];  // explicit arguments in order
} SimKernel;

const char* sim_error(void);

// Launches may come from several host threads and wait for one another: a launch all of whose waves
// wait is a hang only when nothing changes for so many seconds. 0: nothing else comes.
void sim_expect_others(int seconds);

// Opens a code object, an offload bundle or a host file with a fat binary; `target` picks one of
// several (null: gfx942 if there).
SimObject* sim_open(const void* data, uint64_t bytes, const char* path, const char* target);
void sim_close(SimObject* object);

// JSON: target, kernels with arguments and resources, variables, and the names of instructions in
// the file that the simulator does not know.
const char* sim_describe(SimObject* object);

// Address and size of a device variable in the loaded image; null when there is none.
void* sim_variable(SimObject* object, const char* name, uint64_t* bytes);

// Resources and arguments of a kernel; 0 when there is none of that name.
int sim_kernel(SimObject* object, const char* kernel, SimKernel* out);

// Runs a kernel to its end. `kernarg` holds the explicit arguments; hidden ones are filled in.
// Returns JSON with counters, findings and, when the kernel stopped, an error; null when the
// launch itself was wrong. The text lives until the next call on the same thread.
const char* sim_launch(SimObject* object, const char* kernel, const uint32_t grid[3],
                       const uint32_t block[3], uint32_t dynamic_lds, const void* kernarg,
                       uint64_t kernarg_bytes, const SimBuffer* buffers, uint32_t buffer_count,
                       const SimOptions* options);

// A launch of several that run together.
typedef struct {
  SimObject* object;
  const char* kernel;
  uint32_t grid[3], block[3], dynamic_lds;
  uint32_t stream, device;  // the calls of a stream, which is of one device, follow one another
  const void* kernarg;
  uint64_t kernarg_bytes;
} SimCall;

// Runs launches of several devices on one thread, their waves interleaved in the order that the
// seed gives, and judges them together. Returns JSON, `launches` with a result for each call.
const char* sim_launch_together(const SimCall* calls, uint32_t call_count, const SimBuffer* buffers,
                                uint32_t buffer_count, const SimOptions* options);

// The same for launches that come while others run: an interleaving, a launch that begins, and
// turns until one has ended.
typedef struct SimInterleaving SimInterleaving;
SimInterleaving* sim_interleave(uint64_t seed);
// `before`: the numbers of the last launches that had to end first. Returns the number of this one;
// -1 when the launch itself was wrong.
int64_t sim_begin(SimInterleaving*, const SimCall* call, const SimBuffer* buffers,
                  uint32_t buffer_count, const SimOptions* options, const uint32_t* before,
                  uint32_t before_count);
// At most so many turns. Returns the number of the launch that ended, and its result as JSON, which
// lives until the next call on the same thread; -1 when all go on.
int64_t sim_turns(SimInterleaving*, uint32_t turns, const char** result);
void sim_end(SimInterleaving*);

#ifdef __cplusplus
}
#endif
