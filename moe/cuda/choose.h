// Which config serves the mixture-of-experts ops on an NVIDIA GPU: by the time that its bytes and
// its rounds of blocks take. Pure functions of the shape and the device; no table of shapes.
//
// The constants of the model were fitted to layers timed on an H200 (docs/h200_moe_configs.md, by
// benchmarks/moe_configs.py). The memory's rate is the device's own (common/cuda/memory_rates.h).
#pragma once

#include <algorithm>
#include <cmath>

#include "../config.h"
#include "resident.h"
#include "streamed.h"
#include "streamed_wgmma.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

constexpr int64_t kL2Bytes = int64_t{32} << 20;  // that tiles may count on
// Of them, for an expert's rows while its weights go by. Measured up to 18 MB.
constexpr int64_t kRowsInL2Bytes = int64_t{16} << 20;

// The products of a layer: gate_up and down. (grouped_gemm's is the first.)
inline int32_t k_of(const MoeShape& s, int product) { return product == 0 ? s.k : s.n / 2; }
inline int32_t n_of(const MoeShape& s, int product) { return product == 0 ? s.n : s.k; }
inline int32_t longest_k(const MoeShape& s) {
  return s.fused ? std::max(k_of(s, 0), k_of(s, 1)) : s.k;
}
inline StreamedStage streamed_stage(const MoeShape& s, const MoeConfig& c, int product) {
  return streamed_stage(c, s.a(), s.w(), k_of(s, product), s.blocks >> product & 1);
}

inline ResidentShape resident_shape(const MoeShape& s, const MoeDevice& device, int product) {
  const ResidentSplit split =
      resident_split(product == 1, most_row_tiles(s.rows, s.experts, kResidentBlockM),
                     n_of(s, product) / kResidentBlockN, k_of(s, product), device.sm_count);
  return resident_shape(product == 1, s.tokens, s.rows, k_of(s, product), s.blocks >> product & 1,
                        split);
}

// By what the rows of w that share a block's scales ask for.
inline Status check_halves(const MoeShape& s, int32_t block_n) {
  if ((s.blocks & 1) != 0 && !s.interleaved && s.n / 2 % (block_n / 2) != 0) {
    return "moe config: with block scales, I must be a multiple of half of block_n";
  }
  return nullptr;
}

inline Status check_streamed(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability < 90) return "moe config: the streamed design needs sm_90 or later";
  if (!s.fused) return "moe config: the streamed design serves fused_moe alone";
  if ((c.block_m != 8 && c.block_m != 16 && c.block_m != kStreamedMaxM) ||
      (c.block_n != 32 && c.block_n != kStreamedMaxN)) {
    return "moe config: streamed tiles are 8, 16 or 32 x 32 or 64";
  }
  if (c.split_k != 1) return "moe config: the streamed design does not divide K; split_k must be 1";
  if (s.rows > kStreamedMaxSlots) return "moe config: more than 4096 slots are not streamed";
  if (s.experts > kFewExperts) return "moe config: more than 512 experts are not streamed";
  for (int product = 0; product < 2; ++product) {
    const int32_t k = k_of(s, product);
    if (k * size_of(s.a()) % 16 != 0 || w_row_bytes(s.w(), k) % 16 != 0) {
      return "moe config: streamed rows must be whole numbers of 16 bytes";
    }
    if (streamed_stages(streamed_stage(s, c, product), s.rows, device) < 2) {
      return "moe config: an SM has too little shared memory to stream by this tile";
    }
  }
  return check_halves(s, streamed_stage(s, c, 0).block_n);
}

inline Status check_streamed_wgmma(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability != 90) return "moe config: the streamed_wgmma design is sm_90a's";
  if (!s.fused) return "moe config: the streamed_wgmma design serves fused_moe alone";
  if (s.a() != DType::kFloat8E4M3FN || s.w() != DType::kFloat8E4M3FN) {
    return "moe config: the streamed_wgmma design multiplies FP8 alone";
  }
  if ((c.block_m != 8 && c.block_m != 16 && c.block_m != kStreamedMaxM) ||
      c.block_n != kStreamedWgmmaN) {
    return "moe config: streamed_wgmma tiles are 8, 16 or 32 x 64";
  }
  if (c.split_k != 1) {
    return "moe config: the streamed_wgmma design does not divide K; split_k must be 1";
  }
  if (s.rows > kStreamedMaxSlots) return "moe config: more than 4096 slots are not streamed";
  if (s.experts > kFewExperts) return "moe config: more than 512 experts are not streamed";
  for (int product = 0; product < 2; ++product) {
    if (k_of(s, product) % 16 != 0) {
      return "moe config: streamed rows must be whole numbers of 16 bytes";
    }
    const StreamedWgmmaStage stage = {c.block_m, (s.blocks >> product & 1) != 0};
    if (streamed_wgmma_stages(stage, s.rows, device) < kStreamedWgmmaLeastStages) {
      return "moe config: an SM has too little shared memory to stream by this tile";
    }
  }
  return check_halves(s, c.block_n);
}

inline Status check_resident(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability < 90) return "moe config: the resident design needs sm_90 or later";
  if (!s.fused) return "moe config: the resident design serves fused_moe alone";
  if (s.a() != DType::kFloat8E4M3FN) return "moe config: the resident design quantises to FP8";
  if (c.block_m != kResidentBlockM || c.block_n != kResidentBlockN) {
    return "moe config: resident tiles are 8 x 16";
  }
  if (c.split_k != 1) return "moe config: the resident design does not divide K; split_k must be 1";
  if (!s.x_aligned) return "moe config: resident rows of x must start at multiples of 16 bytes";
  if (s.rows > kResidentSlots) return "moe config: more than 32 slots are not resident";
  for (int product = 0; product < 2; ++product) {
    if (k_of(s, product) % 16 != 0) {
      return "moe config: resident rows must be whole numbers of 16 bytes";
    }
    if (resident_stages(resident_shape(s, device, product), device) < kResidentLeastStages) {
      return "moe config: rows of this length leave too little shared memory to be resident";
    }
  }
  return nullptr;
}

inline Status check_warpgroup(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability != 90) return "moe config: the warpgroup design is sm_90a's";
  if (!is_moe_warpgroup_tile(c.block_m, c.block_n) ||
      !fits_registers({c.block_m, c.block_n}, s.blocks != 0, s.a() != s.w())) {
    return "moe config: warpgroup tiles are 256 x 128, but for block scales with 16-bit inputs, "
           "128 x 128, 64 x 256 and 32 x 256";
  }
  if (c.split_k != 1) {
    return "moe config: the warpgroup design does not divide K; split_k must be 1";
  }
  // What the tensor core's own sums lack shows in an output that is not rounded more than they are
  // (gemm.md has the errors). A layer rounds h, and out.
  if (!s.fused && s.out() != DType::kBFloat16 && (is_fp8(s.a()) || s.out() == DType::kFloat32)) {
    return "moe config: the warpgroup design's sums are too coarse for this output";
  }
  if (s.fused && (s.blocks & 1) != 0 && !s.interleaved && s.n / 2 % 64 != 0) {
    return "moe config: warpgroup tiles of block scales take an I that is a multiple of 64";
  }
  return nullptr;
}

inline Status check_moe_config(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (c.design == MoeConfig::Design::kPlain) {
    return c == MoeConfig{} ? nullptr : "moe config: the plain design takes its default fields";
  }
  if (s.n == 0 || s.k == 0) return "moe config: only the plain design takes an empty product";
  if (s.w() == DType::kFloat8E4M3FNUZ) {
    return "moe config: only the plain design takes float8_e4m3fnuz";
  }
  if (s.w() == DType::kFloat4E2M1x2 && s.a() != DType::kBFloat16) {
    return "moe config: only the plain design takes float16 with MXFP4";
  }
  if (!s.aligned) return "moe config: rows must start at multiples of 16 bytes, and not overlap";
  if (c.group_m < 1 || c.xcds != 1) return "moe config: group_m must be at least 1, xcds 1";
  if (c.walks_experts() && c.design != MoeConfig::Design::kWarpgroup) {
    return "moe config: order=expert is the warpgroup design's";
  }
  if (c.design == MoeConfig::Design::kStreamed) return check_streamed(s, c, device);
  if (c.design == MoeConfig::Design::kStreamedWgmma) return check_streamed_wgmma(s, c, device);
  if (c.design == MoeConfig::Design::kResident) return check_resident(s, c, device);
  if (c.design == MoeConfig::Design::kWarpgroup) return check_warpgroup(s, c, device);
  const int tile = find_moe_tile(c.block_m, c.block_n);
  if (tile < 0) {
    return "moe config: block_m x block_n must be 128 x 128, 64 x 128, 32 x 64 or 16 x 64";
  }
  if (kMoeTiles[tile].shared_bytes(moe_step_bytes_a(s.a(), s.w())) >
      device.shared_bytes_per_block) {
    return "moe config: a block of this GPU has too little shared memory for this tile";
  }
  const int64_t blocks = (int64_t{s.n} / 2 + kScaleBlock - 1) / kScaleBlock;
  if (c.split_k < 1 || c.split_k > (s.fused ? blocks : 1)) {
    return "moe config: split_k must be at least 1, at most the blocks of 128 of I, and 1 for "
           "grouped_gemm";
  }
  const int64_t columns = std::max(s.n, s.k);
  const int64_t tiles = int64_t{s.rows} * ((columns + c.block_n - 1) / c.block_n) * c.split_k;
  if (tiles >= int64_t{1} << 31) return "moe config: 2^31 tiles or more; take a larger tile";
  return nullptr;
}

// Experts that `rows` rows meet if routing is even.
inline float touched_experts(const MoeShape& s) {
  return s.experts * (1.0f - std::pow(1.0f - 1.0f / s.experts, static_cast<float>(s.rows)));
}

// How many tiles an expert has that gets `rows` rows on average. Its last tile is half full on
// average, which adds half a tile; no expert that has rows has less than one.
inline float tiles_of_expert(float rows, int32_t block_m) {
  return std::max(1.0f, rows / block_m + 0.5f);
}

inline float bytes_of_w(const MoeShape& s) {
  return s.w() == DType::kFloat4E2M1x2 ? 0.53f : static_cast<float>(size_of(s.w()));
}

// The time of pieces of work that run at once. The longest hides the others, but not quite one that
// takes nearly as long.
inline float joined(float a, float b, float c = 0, float d = 0) {
  const auto fourth = [](float x) { return x * x * x * x; };
  return std::pow(fourth(a) + fourth(b) + fourth(c) + fourth(d), 0.25f);
}

// Bytes that the memory delivers in a microsecond, if it reaches `share` of its rate.
inline float memory_rate(const MoeDevice& device, float share) {
  return share * static_cast<float>(device.memory.bytes_per_us);
}

// What one product's operands cost to multiply.
struct MultiplyRates {
  float slice_cycles;    // streamed: of a scheduler, to widen 64 bytes of 32 rows of w
  float rows_cycles;     // and to multiply them with 8 rows of a
  float warpgroup_rate;  // multiply-adds an us of an SM, times bytes of an element
  float mma_rate;        // of mma.sync, an us of an SM
  float widen_rate;      // elements of w that become wider, an us of an SM; 0: none do
};
inline MultiplyRates rates_of(const MoeShape& s, int product) {
  if (s.w() == DType::kFloat4E2M1x2) return {600, 480, 3.6e6f, 0.19e6f, 21.6e3f};
  if (size_of(s.w()) == 2) return {10, 190, 5.83e6f, 0.39e6f, 0};
  const bool blocks = s.blocks >> product & 1;
  if (size_of(s.a()) == 2) {
    if (blocks) return {170, 390, 3.45e6f, 0.255e6f, 24.8e3f};
    return {150, 240, 4.05e6f, 0.43e6f, 29.9e3f};
  }
  if (blocks) return {170, 300, 3.86e6f, 0.255e6f, 0};
  return {150, 180, 4.32e6f, 0.43e6f, 0};
}

// One streamed product's time in us: the SM with the most units takes in its bytes, or multiplies
// them; and what no byte hides.
inline float streamed_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                           int product) {
  constexpr float kMemory = 1.058f;   // of its rate, as if all SMs had as much as the busiest
  constexpr float kOutsideUs = 5.8f;  // launch, first bytes, last sums; quantising, or the combine
  constexpr float kUnitUs = 0.28f;
  constexpr float kAloneFactor = 1.28f;  // for what one block an SM waits, which two would hide
  constexpr float kCyclesPerUs = 1755;
  const StreamedStage stage = streamed_stage(s, c, product);
  const MultiplyRates rates = rates_of(s, product);
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float touched = touched_experts(s);
  const float each = s.rows / touched;
  const float tiles_m = touched * tiles_of_expert(each, c.block_m);
  const float units = tiles_m * std::ceil(static_cast<float>(n) / stage.block_n);
  // By whole rounds of two blocks an SM.
  const float busiest = 2 * std::ceil(units / (2 * device.sm_count));
  const float unit_bytes = stage.block_n * k * bytes_of_w(s);
  const float load = busiest * unit_bytes * device.sm_count / memory_rate(device, kMemory);
  const float slices =
      busiest * std::ceil(1.0f * w_row_bytes(s.w(), k) / stage.row_bytes()) * kStreamedWarps;
  const float rows = std::ceil(std::min<float>(each, c.block_m) / 8);
  float multiply = slices / 4 * (rates.slice_cycles + rates.rows_cycles * rows) / kCyclesPerUs;
  if (streamed_blocks_per_sm(c.block_m) == 1) multiply *= kAloneFactor;
  return joined(load, multiply) + busiest * kUnitUs + kOutsideUs;
}

// The same of a product streamed to wgmma: its bytes, or the steps of the SM with the most units;
// and what its sums take to memory, and back.
inline float streamed_wgmma_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                                 int product) {
  constexpr float kMemory = 0.909f;
  constexpr float kStepUs = 0.27f;  // of a stage; and, with 8 rows of a, their square
  constexpr float kBlockRowsUs = 0.019f, kRowsSquareUs = 0.022f;
  constexpr float kStoreBytesPerUs = 1.38e6f;
  constexpr float kOutsideUs = 6.2f, kOutsideRowsUs = 1.2f;  // and for each 8 rows of a tile
  constexpr int32_t kStepBytes = kStreamedWgmmaChunks * kChunkBytes;
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float touched = touched_experts(s), each = s.rows / touched;
  const float tiles = tiles_of_expert(each, c.block_m), eights = each / tiles / 8;
  const float units = touched * tiles * std::ceil(static_cast<float>(n) / kStreamedWgmmaN);
  const float load = touched * n * k / memory_rate(device, kMemory);
  const bool blocks = s.blocks >> product & 1;
  const float step =
      kStepUs + (blocks ? kBlockRowsUs * eights : 0.0f) + kRowsSquareUs * eights * eights;
  const float steps =
      std::ceil(units / device.sm_count) * std::ceil(static_cast<float>(k) / kStepBytes) * step;
  const float store = s.rows * (product == 0 ? 2.0f : 8.0f) * n / kStoreBytesPerUs;
  return joined(load, steps) + store + kOutsideUs + kOutsideRowsUs * (c.block_m / 8.0f);
}

// What a resident layer gains beside a streamed one, us: measured with one to four tokens. The more
// tiles there are, the worse its units divide among the warps of a block.
inline float resident_gain(const MoeShape& s, bool beside_wgmma) {
  const float more = static_cast<float>(s.tokens - 1);
  if (beside_wgmma) return 5.0f - 10.0f * more;
  return s.blocks == 0 ? 8.0f - 10.5f * more : 12.5f - 7.0f * more;
}

// Whether FP8 can be streamed to wgmma, by the smallest of its tiles.
inline bool streams_to_wgmma(const MoeShape& s, const MoeDevice& device) {
  MoeConfig config;
  config.design = MoeConfig::Design::kStreamedWgmma;
  config.block_m = 8;
  config.block_n = kStreamedWgmmaN;
  return check_moe_config(s, config, device) == nullptr;
}

// One product's time in us by the warpgroup kernel: the SM with the most tiles multiplies, or takes
// them in from L2 or memory.
inline float warpgroup_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                            int product) {
  constexpr float kMemory = 0.925f;
  constexpr float kL2BytesPerUs = 69e3f;  // that an SM gets
  constexpr float kOutsideUs = 8.1f;      // launch, first bytes, last tile's end, and quantising h
  constexpr float kEndUs = 0.78f;         // of a tile
  constexpr float kStoreBytesPerUs = 46.7e3f;
  constexpr float kStagedBytesPerUs = 68.6e3f, kStagedAloneBytesPerUs = 26.3e3f;  // in one buffer
  constexpr float kColumnBytesPerUs = 22.4e3f;  // where w is the 64-row operand
  // Of 256 rows: their sums have no second set of registers, but weights are widened once for all.
  constexpr float kTallRate = 0.93f, kTallWidenedRate = 1.27f;
  // Of a warpgroup's products, what is spared where an expert's last tile has no rows for it.
  constexpr float kSpared = 0.69f;
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float bytes = static_cast<float>(size_of(s.a())), w_bytes = bytes_of_w(s);
  const float touched = touched_experts(s), cluster = static_cast<float>(warpgroup_cluster(c));
  const float tiles_m = touched * tiles_of_expert(s.rows / touched, c.block_m);
  const float tiles = tiles_m * std::ceil(n / (c.block_n * cluster)) * cluster;
  const float busiest = std::ceil(tiles / device.sm_count);
  const float area = static_cast<float>(c.block_m) * c.block_n;
  const MultiplyRates rates = rates_of(s, product);
  const bool rows_are_w = c.block_n > c.block_m, tall = c.block_m == 256;
  const float halves = touched * tiles_of_expert(s.rows / touched, c.block_m / 2);
  const float multiplied =
      rows_are_w ? 1.0f : 1.0f - kSpared * (1.0f - halves / (2 * tiles_m));  // of the tiles' area
  const float rate = rates.warpgroup_rate * (!tall                  ? 1.0f
                                             : rates.widen_rate > 0 ? kTallWidenedRate
                                                                    : kTallRate);
  const float multiply = busiest * multiplied * area * k * bytes / rate;
  const float widen =
      rates.widen_rate > 0 ? busiest * c.block_n * static_cast<float>(k) / rates.widen_rate : 0;
  const float load =
      busiest * (c.block_m / cluster * bytes + c.block_n * w_bytes) * k / kL2BytesPerUs;
  const float out_bytes = s.fused && product == 0 ? 2.0f : 4.0f;  // of each of w's rows
  const float rows = std::min<float>(s.rows / touched, c.block_m);
  const bool staged = warp_staging_bytes(c, k * size_of(s.a()), s.fused && product == 1) > 0;
  const float store = busiest * rows * c.block_n * out_bytes /
                      (staged       ? tall ? kStagedAloneBytesPerUs : kStagedBytesPerUs
                       : rows_are_w ? kColumnBytesPerUs
                                    : kStoreBytesPerUs);
  const float memory =
      (touched * n * k * w_bytes + 1.0f * s.rows * k * bytes + out_bytes * s.rows * n) /
      memory_rate(device, kMemory);
  return joined(multiply, load, memory, widen) + store + busiest * kEndUs + kOutsideUs;
}

// One tiled product's time in us.
inline float tiled_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                        int product) {
  constexpr float kOutsideUs = 14.0f;
  constexpr float kMemory = 0.366f;
  constexpr float kLargeTileFactor = 1.38f;  // 128 rows of a, in registers that are too few
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float split_k = product == 1 ? static_cast<float>(c.split_k) : 1.0f;
  const float touched = touched_experts(s);
  const float tiles_m = touched * std::ceil(s.rows / touched / c.block_m);
  const float blocks = tiles_m * std::ceil(static_cast<float>(n) / c.block_n) * split_k;
  const float busiest = std::ceil(blocks / device.sm_count);
  // Reading and widening a fragment of w weighs as much as 8 rows of a.
  const float multiply = busiest * (c.block_m + 8) * c.block_n * (k / split_k) /
                         rates_of(s, product).mma_rate *
                         (c.block_m == 128 ? kLargeTileFactor : 1.0f);
  const float bytes = touched * n * k * bytes_of_w(s) + 1.0f * s.rows * k * size_of(s.a()) +
                      4.0f * s.rows * n * split_k * (split_k > 1 ? 2 : 1);
  return joined(multiply, bytes / memory_rate(device, kMemory)) + kOutsideUs;
}

inline float modelled_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  const auto of_products = [&](auto time) {
    return time(s, c, device, 0) + (s.fused ? time(s, c, device, 1) : 0.0f);
  };
  switch (c.design) {
    case MoeConfig::Design::kResident: {
      MoeConfig streamed = c;
      const bool by_wgmma = streams_to_wgmma(s, device);
      streamed.design = by_wgmma ? MoeConfig::Design::kStreamedWgmma : MoeConfig::Design::kStreamed;
      streamed.block_n = by_wgmma ? kStreamedWgmmaN : 32;
      return modelled_time(s, streamed, device) - resident_gain(s, by_wgmma);
    }
    case MoeConfig::Design::kStreamed:
      return of_products(streamed_time);
    case MoeConfig::Design::kStreamedWgmma:
      return of_products(streamed_wgmma_time);
    case MoeConfig::Design::kWarpgroup: {
      if (!s.fused) return of_products(warpgroup_time);
      constexpr float kRouteUs = 9.0f, kSortBytesPerUs = 2.4e6f;
      const float sorted = 2.0f * s.rows * s.k * size_of(s.a());
      // The pass over h, which tiles with whole groups of its columns spare.
      constexpr float kPassElementsPerUs = 0.55e6f;
      const bool spared = c.ends_in_groups() && is_fp8(s.a()) && (s.blocks & 2) != 0;
      const float pass = spared ? 0.5f * s.rows * s.n / kPassElementsPerUs : 0.0f;
      return kRouteUs + sorted / kSortBytesPerUs - pass + of_products(warpgroup_time);
    }
    default:
      return of_products(tiled_time);
  }
}

// Calls visit(config) for the configs that can serve the shape and are worth a try.
template <typename Visit>
void for_each_config(const MoeShape& s, const MoeDevice& device, const Visit& visit) {
  const auto consider = [&](MoeConfig::Design design, int32_t block_m, int32_t block_n) {
    MoeConfig c;
    c.design = design;
    c.block_m = block_m;
    c.block_n = block_n;
    // Tiles of one expert's rows meet each of its weights together.
    if (design == MoeConfig::Design::kWarpgroup) {
      const int64_t tile_bytes = int64_t{block_m} * longest_k(s) * size_of(s.a());
      c.order = MoeConfig::kExpert;
      c.group_m = static_cast<int32_t>(std::max<int64_t>(1, kRowsInL2Bytes / tile_bytes));
    } else {
      // Where the rows of all experts fit L2, so may all tiles of rows.
      c.order = s.rows * int64_t{s.k} * size_of(s.a()) <= kL2Bytes ? MoeConfig::kColumn
                                                                   : MoeConfig::kGrouped;
      c.group_m =
          std::max(1, static_cast<int32_t>(std::ceil(s.rows / touched_experts(s) / block_m)));
    }
    for (const int32_t split_k : {1, 2, 4, 8}) {
      c.split_k = split_k;
      if (check_moe_config(s, c, device) == nullptr) visit(c);
    }
  };
  for (const int32_t block_m : {8, 16, 32}) {
    for (const int32_t block_n : {32, 64}) {
      consider(MoeConfig::Design::kStreamed, block_m, block_n);
    }
    consider(MoeConfig::Design::kStreamedWgmma, block_m, kStreamedWgmmaN);
  }
  consider(MoeConfig::Design::kResident, kResidentBlockM, kResidentBlockN);
  for (const MoeWarpgroupTile& tile : kMoeWarpgroupTiles) {
    consider(MoeConfig::Design::kWarpgroup, tile.block_m, tile.block_n);
  }
  for (const MoeTile& tile : kMoeTiles) {
    consider(MoeConfig::Design::kTiled, tile.block_m, tile.block_n);
  }
  visit(MoeConfig{});
}

inline MoeConfig choose_config(const MoeShape& s, const MoeDevice& device) {
  MoeConfig best;
  float best_time = 0;
  for_each_config(s, device, [&](const MoeConfig& config) {
    if (config.design == MoeConfig::Design::kPlain) return;
    // Measured: never behind.
    if (config.design == MoeConfig::Design::kStreamed && streams_to_wgmma(s, device)) return;
    const float time = modelled_time(s, config, device);
    if (best_time == 0 || time < best_time) best = config, best_time = time;
  });
  return best;
}

}  // namespace cuda
}  // namespace rocm_kernels
