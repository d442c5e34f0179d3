// Which AMD kernel serves a product and how the work is cut: one pure function of shape, types and
// device facts. No HIP header: tests and tools include it too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../../gemm/schedule.h"
#include "../skinny_gemm.h"

namespace rocm_kernels {

struct SkinnyGemmConfig {
  enum class Design : int32_t {
    kStream,    // each wave streams w into registers (stream.h)
    kQueue,     // producer waves fill a queue in LDS, consumer waves multiply (queue.h)
    kPortable,  // no matrix instructions: any GPU (portable.h)
  };
  Design design = Design::kStream;
  int32_t sparse = 0;     // 1: the 4:2 sparse instruction serves 8 dense rows (FP8, M <= 8)
  int32_t rows = 16;      // of w, of a tile: 8, 16, 32 or 64
  int32_t waves = 8;      // of a block: 4 or 8
  int32_t split = 1;      // blocks that share the K of a tile; 0: stream-K over `blocks`
  int32_t blocks = 0;     // stream-K only
  int32_t xcds = 1;       // > 1: neighbouring intervals of work run on one XCD
  int32_t producers = 0;  // kQueue: waves that load; the others multiply
};

inline bool operator==(const SkinnyGemmConfig& a, const SkinnyGemmConfig& b) {
  return a.design == b.design && a.sparse == b.sparse && a.rows == b.rows && a.waves == b.waves &&
         a.split == b.split && a.blocks == b.blocks && a.xcds == b.xcds &&
         a.producers == b.producers;
}

// ---- A config as text --------------------------------------------------------------------------

constexpr size_t kConfigTextBytes = 160;
constexpr const char* kConfigDesigns[] = {"stream", "queue", "portable"};

// Writes the config in words; returns snprintf's count.
inline int describe(const SkinnyGemmConfig& c, char* text, size_t size) {
  return snprintf(text, size, "%s%s rows=%d waves=%d split=%d blocks=%d xcds=%d producers=%d",
                  kConfigDesigns[static_cast<int>(c.design)], c.sparse ? "+sparse" : "", c.rows,
                  c.waves, c.split, c.blocks, c.xcds, c.producers);
}

// Reads what describe() writes, and nothing else.
class ConfigReader {
 public:
  explicit ConfigReader(const char* text) : rest_(text) {}

  bool read(SkinnyGemmConfig& c) {
    int design = 0;
    while (!word(kConfigDesigns[design])) {
      if (++design == 3) return false;
    }
    c.design = static_cast<SkinnyGemmConfig::Design>(design);
    c.sparse = word("+sparse");
    return word(" rows=") && number(c.rows) && word(" waves=") && number(c.waves) &&
           word(" split=") && number(c.split) && word(" blocks=") && number(c.blocks) &&
           word(" xcds=") && number(c.xcds) && word(" producers=") && number(c.producers) &&
           *rest_ == '\0';
  }

 private:
  bool word(const char* expected) {
    const size_t length = strlen(expected);
    if (strncmp(rest_, expected, length) != 0) return false;
    rest_ += length;
    return true;
  }
  bool number(int32_t& value) {
    constexpr int kDigits = 8;
    const char* const begin = rest_;
    value = 0;
    while (*rest_ >= '0' && *rest_ <= '9' && rest_ - begin < kDigits) {
      value = 10 * value + (*rest_++ - '0');
    }
    return rest_ > begin;
  }
  const char* rest_;
};

// ---- Shapes and devices ------------------------------------------------------------------------

// What the choice depends on.
struct SkinnyGemmShape {
  int32_t m, n, k;
  int32_t a_bytes, w_bytes;  // of an element
  bool block_scaled;
};
struct SkinnyGemmDevice {
  int32_t compute_units = 304;
  int32_t lds_bytes = 65536;  // a CU
  int32_t xcds = 8;
  bool matrix_instructions = true;  // gfx942, gfx950
  float terabytes_per_s = 4.2f;     // sustained, from memory
  float gigahertz = 2.1f;
};

// Parts of a modelled time, in microseconds. Published rates and latencies, not measurements; what
// they were checked against is in docs/kernels/skinny_gemm.md.
struct SkinnyGemmTime {
  float memory;   // bytes that must cross the memory interface, at the sustained rate
  float cache;    // what the L2s must deliver
  float unit;     // what the busiest CU must take in, at the rate that its bytes in flight allow
  float latency;  // launch, first bytes of each round of blocks, the block's sums
  float sharing;  // partial sums of tiles with several owners
  float total() const { return std::max({memory, cache, unit}) + latency + sharing; }
};

constexpr int32_t kRowsATile = 16;

// Tiles of 16 rows of a that serve m rows: 1, 2 or 4.
inline int32_t a_tiles_of(int32_t m) { return m <= 16 ? 1 : m <= 32 ? 2 : 4; }

// Matrix instructions take 16 rows of w; a tile of 8 leaves half of theirs idle.
constexpr int32_t row_tiles_of(int32_t rows) { return rows < 16 ? 1 : rows / 16; }

// Whether a wave's registers hold so many tiles of a and rows of w: 256 serve two waves a SIMD.
// Tiles of 8 rows spare a small product the split of K; at M > 32 it would take in too much of a.
constexpr bool tiles_fit(int32_t a_tiles, int32_t rows, int32_t a_bytes) {
  if (rows == 8) return a_tiles <= 2;
  if (rows == 64) return a_bytes == 1 && a_tiles == 2;
  return rows == 16 || (rows == 32 && (a_bytes == 1 || a_tiles <= 2));
}

// Granules of K (128 elements) that a wave of the stream design keeps in flight.
constexpr int32_t stream_depth(int32_t a_tiles, int32_t rows, int32_t a_bytes, int32_t w_bytes) {
  if (rows == 8) return a_tiles * a_bytes <= 2 ? 4 : 2;
  return a_bytes == 1 && w_bytes == 1 && a_tiles == 1 && rows <= 32 ? 4 : 2;
}

inline int32_t granules_of(int32_t k) { return k <= 128 ? 1 : (k + 127) / 128; }

inline Schedule schedule_of(const SkinnyGemmShape& shape, const SkinnyGemmConfig& config) {
  return Schedule::make((shape.n + config.rows - 1) / config.rows, granules_of(shape.k),
                        config.split, config.blocks, config.xcds);
}

// LDS of a block: the waves turn tiles there, then leave their sums, padded by 4 floats a row, and
// the factors of rows and columns.
constexpr int32_t kLdsLimit = 65536 - 64;
constexpr int32_t turn_bytes(int32_t a_bytes, int32_t w_bytes) {
  return 16 * 128 * (a_bytes > w_bytes ? a_bytes : w_bytes);
}
// Slots of the queue design: 8 where they fit, else 4.
inline int32_t queue_slot_bytes(const SkinnyGemmShape& s, const SkinnyGemmConfig& c) {
  return (a_tiles_of(s.m) + row_tiles_of(c.rows)) * turn_bytes(s.a_bytes, s.w_bytes);
}
inline int32_t queue_slots(const SkinnyGemmShape& s, const SkinnyGemmConfig& c) {
  return 8 * (queue_slot_bytes(s, c) + 8) <= kLdsLimit ? 8 : 4;
}
inline int32_t lds_bytes_of(const SkinnyGemmShape& s, const SkinnyGemmConfig& c) {
  const bool queue = c.design == SkinnyGemmConfig::Design::kQueue;
  const int32_t adders = queue ? c.waves - c.producers : c.waves;
  const int32_t sums = 4 * (adders * s.m * (c.rows + 4) + s.m + 2 * c.rows);
  const int32_t turning = queue ? queue_slots(s, c) * (queue_slot_bytes(s, c) + 8)
                                : c.waves * turn_bytes(s.a_bytes, s.w_bytes);
  return sums > turning ? sums : turning;
}

// VGPRs of a wave of the stream design, close above what the compiler takes.
constexpr int32_t stream_vgprs(int32_t a_tiles, int32_t rows, int32_t a_bytes, int32_t w_bytes) {
  const int32_t ring =
      stream_depth(a_tiles, rows, a_bytes, w_bytes) * (rows * w_bytes / 2 + 8 * a_tiles * a_bytes);
  return 40 + ring + 8 * (a_tiles * a_bytes + w_bytes) + 4 * a_tiles * row_tiles_of(rows);
}

inline SkinnyGemmTime modelled_time(const SkinnyGemmShape& s, const SkinnyGemmConfig& c,
                                    const SkinnyGemmDevice& device) {
  constexpr float kMemoryUs = 0.8f;         // a load from memory, under load
  constexpr float kCacheUs = 0.3f;          // a load from L2, under load
  constexpr float kLaunchUs = 1.0f;         // dispatch, arguments, first instructions
  constexpr float kSumUs = 0.3f;            // LDS, barriers, the store
  constexpr float kTicketUs = 2.0f;         // stores written through, ticket, partial sums read
  constexpr float kCacheTerabytes = 25;     // a second, from all L2s
  constexpr float kLinesInFlight = 32768;   // bytes that the L1 of a CU tracks at once
  constexpr float kFillBytesPerClock = 48;  // L2 to L1, of 64
  constexpr float kSumBytesPerClock = 16;   // partial sums that a block reads

  const Schedule schedule = schedule_of(s, c);
  const float blocks = static_cast<float>(schedule.blocks());
  const float tiles = static_cast<float>(schedule.tiles);
  const float w_total = static_cast<float>(s.n) * s.k * s.w_bytes;
  const float a_once = static_cast<float>(s.m) * s.k * s.a_bytes;
  const float tile_sums = static_cast<float>(s.m) * c.rows * 4;  // bytes
  const float clocks_per_us = device.gigahertz * 1000;
  const int32_t a_tiles = a_tiles_of(s.m);

  SkinnyGemmTime time = {};
  const float owners = c.split != 0 ? static_cast<float>(c.split) : blocks / tiles + 1;
  const bool shared = schedule.slots() != 0;
  const float partials = shared ? tiles * owners * tile_sums : 0;
  time.memory =
      (w_total + a_once + s.m * 2.0f * s.n + 2 * partials) / (device.terabytes_per_s * 1e6f);
  time.cache = (w_total + a_once * tiles) / (kCacheTerabytes * 1e6f);

  // Blocks that a CU holds at once, and the rounds that it takes.
  const int32_t waves_per_simd =
      512 / ((stream_vgprs(a_tiles, c.rows, s.a_bytes, s.w_bytes) + 7) / 8 * 8);
  int32_t at_once = waves_per_simd * 4 / c.waves;
  const int32_t by_lds = device.lds_bytes / lds_bytes_of(s, c);
  if (at_once > by_lds) at_once = by_lds;
  if (at_once < 1) at_once = 1;
  const int32_t capacity = at_once * device.compute_units;
  const int32_t rounds = (schedule.blocks() + capacity - 1) / capacity;
  time.latency = kLaunchUs + kMemoryUs * rounds + kSumUs;

  // The busiest CU takes in its blocks' shares of w, and all of a for each tile. Little's law
  // twice: the waves' rings turn over in the time of a load from memory, and L1 tracks a line for
  // as long as its load takes.
  const int32_t busiest = (schedule.blocks() + device.compute_units - 1) / device.compute_units;
  const float a_total = a_once * tiles;
  const float ring = static_cast<float>(busiest < at_once ? busiest : at_once) * c.waves *
                     stream_depth(a_tiles, c.rows, s.a_bytes, s.w_bytes) * 128 *
                     static_cast<float>(c.rows * s.w_bytes + s.m * s.a_bytes);
  const float turns = (w_total + a_total) * kMemoryUs / ring;
  const float lines = (w_total * kMemoryUs + a_total * kCacheUs) / kLinesInFlight;
  const float fill = (w_total + a_total) / (kFillBytesPerClock * clocks_per_us);
  time.unit = busiest / blocks * std::max({turns, lines, fill});
  if (shared) {
    time.sharing = kTicketUs + owners * tile_sums / (kSumBytesPerClock * clocks_per_us);
  }
  return time;
}

// Whether the design can serve the shape: nullptr, or why not.
inline Status check_config(const SkinnyGemmShape& s, const SkinnyGemmConfig& c) {
  if (c.design == SkinnyGemmConfig::Design::kPortable) return nullptr;
  if (!tiles_fit(a_tiles_of(s.m), c.rows, s.a_bytes)) {
    return "skinny_gemm config: rows must be 8 (M <= 32), 16, 32 (not for 16-bit a of M > 32) or "
           "64 (FP8 a of M = 17 to 32)";
  }
  if (c.waves != 4 && c.waves != 8) return "skinny_gemm config: waves must be 4 or 8";
  if (c.design == SkinnyGemmConfig::Design::kQueue &&
      (c.waves != 8 || c.producers != 4 || c.rows < 16 || s.a_bytes != 1 || s.w_bytes != 1 ||
       s.block_scaled)) {
    return "skinny_gemm config: queue needs 8 waves, 4 of them producers, 16 rows or more, FP8 "
           "operands and no block scales";
  }
  if (c.sparse && (s.m > 8 || s.a_bytes != 1 || s.w_bytes != 1 || s.block_scaled)) {
    return "skinny_gemm config: sparse needs FP8 operands, M <= 8 and no block scales";
  }
  if (c.split < 0 || c.split > 255 || (c.split == 0 && c.blocks < 1)) {
    return "skinny_gemm config: split must be 1 to 255, or 0 with blocks >= 1 (stream-K)";
  }
  if (c.split > granules_of(s.k)) {
    return "skinny_gemm config: split must not exceed the granules of K (128 elements each)";
  }
  if (c.xcds < 1) return "skinny_gemm config: xcds must be at least 1";
  if (lds_bytes_of(s, c) > kLdsLimit) {
    return "skinny_gemm config: the sums of so many waves, rows and tiles exceed 64 KiB of LDS";
  }
  const Schedule schedule = schedule_of(s, c);
  if (c.split == 0 &&
      (c.blocks > schedule.tiles * schedule.granules || c.blocks / schedule.tiles >= 254)) {
    return "skinny_gemm config: more stream-K blocks than granules, or than 253 a tile";
  }
  if (c.xcds > schedule.blocks()) {
    return "skinny_gemm config: xcds must be at most the number of blocks";
  }
  return nullptr;
}

// The shape that speaks for its class of M (last_row_of_class): what serves it serves the class.
inline SkinnyGemmShape class_of(SkinnyGemmShape shape) {
  shape.m = static_cast<int32_t>(last_row_of_class(shape.m));
  return shape;
}

// Calls visit(config) for the cuts of a design that can serve the shape and are worth a try.
template <typename Visit>
void for_each_cut(SkinnyGemmConfig::Design design, const SkinnyGemmShape& shape,
                  const SkinnyGemmDevice& device, const Visit& visit) {
  const bool queue = design == SkinnyGemmConfig::Design::kQueue;
  const auto consider = [&](SkinnyGemmConfig candidate) {
    // Owners of one tile on one XCD: their partial sums meet in its L2.
    const int32_t blocks = schedule_of(shape, candidate).blocks();
    if (candidate.split != 1) candidate.xcds = blocks < device.xcds ? blocks : device.xcds;
    if (check_config(shape, candidate) == nullptr) visit(candidate);
  };
  for (int32_t rows = 8; rows <= 64; rows *= 2) {
    for (int32_t waves = queue ? 8 : 4; waves <= 8; waves *= 2) {
      SkinnyGemmConfig candidate;
      candidate.design = design;
      candidate.producers = queue ? 4 : 0;
      candidate.rows = rows;
      candidate.waves = waves;
      for (int32_t split = 1; split <= 16; ++split) {
        candidate.split = split;
        consider(candidate);
      }
      // Stream-K: as many blocks as run at once.
      candidate.split = 0;
      for (int32_t at_once = 1; at_once <= 4; ++at_once) {
        candidate.blocks = at_once * device.compute_units;
        consider(candidate);
      }
    }
  }
}

// Chooses by modelled time, for the shape's class.
inline SkinnyGemmConfig choose_config(const SkinnyGemmShape& shape,
                                      const SkinnyGemmDevice& device) {
  using Design = SkinnyGemmConfig::Design;
  SkinnyGemmConfig best;
  if (!device.matrix_instructions) {
    best.design = Design::kPortable;
    return best;
  }
  const SkinnyGemmShape judged = class_of(shape);
  float best_time = 0;
  for_each_cut(Design::kStream, judged, device, [&](const SkinnyGemmConfig& candidate) {
    // Where memory bounds several alike, the one whose CUs have most to spare: some of their time
    // counts.
    const SkinnyGemmTime parts = modelled_time(judged, candidate, device);
    const float time = parts.total() + parts.unit / 10;
    if (best_time == 0 || time < best_time) best = candidate, best_time = time;
  });
  return best;
}

// Calls visit(config) for every config that is worth timing on the device: its chooser looks at the
// stream design alone, whose time is modelled.
template <typename Visit>
void for_each_config(const SkinnyGemmShape& shape, const SkinnyGemmDevice& device,
                     const Visit& visit) {
  using Design = SkinnyGemmConfig::Design;
  if (!device.matrix_instructions) return visit(choose_config(shape, device));
  for (const Design design : {Design::kStream, Design::kQueue}) {
    for_each_cut(design, class_of(shape), device, visit);
  }
}

}  // namespace rocm_kernels
