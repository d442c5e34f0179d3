// Which config serves the mixture-of-experts ops on an NVIDIA GPU: by the time that its bytes and
// its rounds of blocks take. Pure functions of the shape and the device; no table of shapes. The
// rates are published ones: nothing here is measured.
#pragma once

#include <algorithm>
#include <cmath>

#include "../config.h"
#include "streamed.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

constexpr int64_t kL2Bytes = int64_t{32} << 20;  // that tiles may count on

// The products of a layer: gate_up and down. (grouped_gemm's is the first.)
inline int32_t k_of(const MoeShape& s, int product) { return product == 0 ? s.k : s.n / 2; }
inline int32_t n_of(const MoeShape& s, int product) { return product == 0 ? s.n : s.k; }
inline StreamedStage streamed_stage(const MoeShape& s, const MoeConfig& c, int product) {
  return streamed_stage(c, s.a(), s.w(), k_of(s, product), s.blocks >> product & 1);
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
  for (int product = 0; product < 2; ++product) {
    const int32_t k = k_of(s, product);
    if (k * size_of(s.a()) % 16 != 0 || w_row_bytes(s.w(), k) % 16 != 0) {
      return "moe config: streamed rows must be whole numbers of 16 bytes";
    }
    if (streamed_stages(streamed_stage(s, c, product), s.rows, device) < 2) {
      return "moe config: an SM has too little shared memory to stream by this tile";
    }
  }
  if ((s.blocks & 1) != 0 && !s.interleaved &&
      s.n / 2 % (streamed_stage(s, c, 0).block_n / 2) != 0) {
    return "moe config: streamed with block scales, I must be a multiple of half of block_n";
  }
  return nullptr;
}

inline Status check_warpgroup(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability != 90) return "moe config: the warpgroup design is sm_90a's";
  if (s.a() != s.w()) return "moe config: the warpgroup design takes two operands of one type";
  if (!is_moe_warpgroup_tile(c.block_m, c.block_n)) {
    return "moe config: warpgroup tiles are 256 x 128, 128 x 128, 64 x 256 and 32 x 256";
  }
  if (c.split_k != 1) {
    return "moe config: the warpgroup design does not divide K; split_k must be 1";
  }
  // What the tensor core's own sums lack shows in an output that is not rounded more than they are
  // (gemm.md has the errors). A layer rounds h, and out.
  if (!s.fused && s.out() != DType::kBFloat16 && (is_fp8(s.w()) || s.out() == DType::kFloat32)) {
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
  if (!s.aligned) return "moe config: rows must start at multiples of 16 bytes";
  if (c.group_m < 1 || c.xcds != 1) return "moe config: group_m must be at least 1, xcds 1";
  if (c.design == MoeConfig::Design::kStreamed) return check_streamed(s, c, device);
  if (c.design == MoeConfig::Design::kWarpgroup) return check_warpgroup(s, c, device);
  if (find_moe_tile(c.block_m, c.block_n) < 0) {
    return "moe config: block_m x block_n must be 128 x 128, 64 x 128, 32 x 64 or 16 x 64";
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

// Tiles that an expert of `rows` rows on average has: the last is half full on average, and one
// there is.
inline float tiles_of_expert(float rows, int32_t block_m) {
  return std::max(1.0f, rows / block_m + 0.5f);
}

inline float bytes_of_w(const MoeShape& s) {
  return s.w() == DType::kFloat4E2M1x2 ? 0.53f : static_cast<float>(size_of(s.w()));
}

// One streamed product's time in us: the SM with the most units takes in its bytes, or multiplies
// them; and what no byte hides.
inline float streamed_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                           int product) {
  constexpr float kTerabytes = 4.3f;   // a second, sustained
  constexpr float kOutsideUs = 2.5f;   // launch, first bytes, last sums
  constexpr float kSliceCycles = 150;  // of a scheduler: to widen 64 bytes of 32 rows of w
  constexpr float kRowsCycles = 120;   // and to multiply them with 8 rows of a
  constexpr float kCyclesPerUs = 1755;
  const StreamedStage stage = streamed_stage(s, c, product);
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float touched = touched_experts(s);
  const float each = s.rows / touched;
  const float tiles_m = touched * tiles_of_expert(each, c.block_m);
  const float units = tiles_m * std::ceil(static_cast<float>(n) / stage.block_n);
  const float busiest = std::ceil(units / device.sm_count);
  const float unit_bytes = stage.block_n * k * bytes_of_w(s);
  const float load = busiest * unit_bytes * device.sm_count / (kTerabytes * 1e6f);
  const float slices =
      busiest * std::ceil(1.0f * w_row_bytes(s.w(), k) / stage.row_bytes()) * kStreamedWarps;
  const float rows = std::ceil(std::min<float>(each, c.block_m) / 8);
  const float multiply = slices / 4 * (kSliceCycles + kRowsCycles * rows) / kCyclesPerUs;
  return std::max(load, multiply) + kOutsideUs;
}

// One product's time in us by the warpgroup kernel: the SM with the most tiles multiplies, or takes
// them in from L2 or memory.
inline float warpgroup_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                            int product) {
  constexpr float kTerabytes = 4.2f;         // a second, sustained
  constexpr float kL2BytesPerUs = 55e3f;     // that an SM gets
  constexpr float kMacsPerUs = 4.5e6f;       // of FP8, of an SM; of 16-bit operands half as many
  constexpr float kOutsideUs = 3.0f;         // launch, first bytes, last tile's end
  constexpr float kStoreBytesPerUs = 15e3f;  // of a tile's end
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float bytes = static_cast<float>(size_of(s.a()));
  const float touched = touched_experts(s), cluster = static_cast<float>(warpgroup_cluster(c));
  const float tiles_m = touched * tiles_of_expert(s.rows / touched, c.block_m);
  const float tiles = tiles_m * std::ceil(n / (c.block_n * cluster)) * cluster;
  const float busiest = std::ceil(tiles / device.sm_count);
  const float area = static_cast<float>(c.block_m) * c.block_n;
  const float multiply = busiest * area * k * bytes / kMacsPerUs;
  const float load = busiest * (c.block_m / cluster + c.block_n) * k * bytes / kL2BytesPerUs;
  const float out_bytes = s.fused && product == 0 ? 2.0f : 4.0f;  // of each of w's rows
  const float rows = std::min<float>(s.rows / touched, c.block_m);
  const float store = busiest * rows * c.block_n * out_bytes / kStoreBytesPerUs;
  const float memory =
      (touched * n * k * bytes + 1.0f * s.rows * k * bytes + out_bytes * s.rows * n) /
      (kTerabytes * 1e6f);
  return std::max({multiply, load, memory}) + store + kOutsideUs;
}

// One tiled product's time in us.
inline float product_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device, int32_t n,
                          int32_t k, int32_t split_k) {
  constexpr float kLaunchUs = 1.5f;
  constexpr float kMemoryUs = 0.9f;          // a load from memory, under load
  constexpr float kTerabytes = 4.0f;         // a second, sustained
  constexpr float kMacsPerUs = 1.2e6f;       // of mma.sync, of an SM
  constexpr float kSharedBytes = 200 << 10;  // an SM
  constexpr float kThreads = 1024;           // that registers allow
  const MoeTile& tile = kMoeTiles[find_moe_tile(c.block_m, c.block_n)];
  const float a_bytes = static_cast<float>(size_of(s.a()));
  const float w_bytes = bytes_of_w(s);
  const float touched = touched_experts(s);
  const float tiles_m = touched * std::ceil(s.rows / touched / c.block_m);
  const float blocks = tiles_m * std::ceil(static_cast<float>(n) / c.block_n) * split_k;
  const float stage = static_cast<float>(tile.stage_bytes(moe_step_bytes_a(s.a(), s.w())));
  const float busiest = std::ceil(blocks / device.sm_count);
  const float at_once = std::min({busiest, std::floor(kSharedBytes / (stage * tile.num_stages)),
                                  std::floor(kThreads / tile.threads())});
  // A block takes in its bytes at the rate that its SM's stages under way allow.
  const float taken = static_cast<float>(k) / split_k * (c.block_n * w_bytes + c.block_m * a_bytes);
  const float in_flight = at_once * std::min(taken, stage * (tile.num_stages - 1));
  const float load = busiest * taken * kMemoryUs / in_flight;
  // Reading and widening a fragment of w weighs as much as 8 rows of a.
  const float multiply =
      busiest * (c.block_m + 8) * c.block_n * (static_cast<float>(k) / split_k) / kMacsPerUs;
  const float bytes = touched * n * k * w_bytes + 1.0f * s.rows * k * a_bytes +
                      4.0f * s.rows * n * split_k * (split_k > 1 ? 2 : 1);
  // They hide each other but for an eighth.
  const float memory = bytes / (kTerabytes * 1e6f);
  const float longest = std::max({load, multiply, memory});
  return longest + (load + multiply + memory - longest) / 8 + kLaunchUs + kMemoryUs;
}

inline float modelled_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  constexpr float kRouteUs = 4.0f;  // before the first product, unless it routes itself
  if (c.design == MoeConfig::Design::kStreamed) {
    return streamed_time(s, c, device, 0) + streamed_time(s, c, device, 1);
  }
  if (c.design == MoeConfig::Design::kWarpgroup) {
    if (!s.fused) return warpgroup_time(s, c, device, 0);
    const float sorted = 2.0f * s.rows * s.k * size_of(s.a()) / 4e6f;
    return kRouteUs + sorted + warpgroup_time(s, c, device, 0) + warpgroup_time(s, c, device, 1);
  }
  if (!s.fused) return product_time(s, c, device, s.n, s.k, 1);
  return kRouteUs + product_time(s, c, device, s.n, s.k, 1) +
         product_time(s, c, device, s.k, s.n / 2, c.split_k);
}

// Calls visit(config) for the configs that can serve the shape and are worth a try.
template <typename Visit>
void for_each_config(const MoeShape& s, const MoeDevice& device, const Visit& visit) {
  const auto consider = [&](MoeConfig::Design design, int32_t block_m, int32_t block_n) {
    MoeConfig c;
    c.design = design;
    c.block_m = block_m;
    c.block_n = block_n;
    // Tiles of one expert's rows meet each of its weights together. Where the rows of all experts
    // fit L2, so may all tiles of rows.
    c.order = s.rows * int64_t{s.k} * size_of(s.a()) <= kL2Bytes ? MoeConfig::kColumn
                                                                 : MoeConfig::kGrouped;
    c.group_m = std::max(1, static_cast<int32_t>(std::ceil(s.rows / touched_experts(s) / block_m)));
    for (const int32_t split_k : {1, 2, 4, 8}) {
      c.split_k = split_k;
      if (check_moe_config(s, c, device) == nullptr) visit(c);
    }
  };
  for (const int32_t block_m : {8, 16, 32}) {
    for (const int32_t block_n : {32, 64}) {
      consider(MoeConfig::Design::kStreamed, block_m, block_n);
    }
  }
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
    const float time = modelled_time(s, config, device);
    if (best_time == 0 || time < best_time) best = config, best_time = time;
  });
  return best;
}

}  // namespace cuda
}  // namespace rocm_kernels
