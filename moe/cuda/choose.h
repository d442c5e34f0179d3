// Which config serves the mixture-of-experts ops on an NVIDIA GPU: by the time that its bytes and
// its rounds of blocks take. Pure functions of the shape and the device; no table of shapes. The
// rates are published ones: nothing here is measured.
#pragma once

#include <algorithm>
#include <cmath>

#include "../config.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

struct MoeDevice {
  int32_t sm_count = 132;
};

constexpr int64_t kL2Bytes = int64_t{32} << 20;  // that tiles may count on

inline Status check_moe_config(const MoeShape& s, const MoeConfig& c) {
  if (c.design == MoeConfig::Design::kPlain) {
    return c == MoeConfig{} ? nullptr : "moe config: the plain design takes its default fields";
  }
  if (c.design == MoeConfig::Design::kStreamed) return "moe config: AMD GPUs alone stream";
  if (s.n == 0 || s.k == 0) return "moe config: only the plain design takes an empty product";
  if (s.w() == DType::kFloat8E4M3FNUZ) {
    return "moe config: only the plain design takes float8_e4m3fnuz";
  }
  if (s.w() == DType::kFloat4E2M1x2 && s.a() != DType::kBFloat16) {
    return "moe config: only the plain design takes float16 with MXFP4";
  }
  if (!s.aligned) return "moe config: rows must start at multiples of 16 bytes";
  if (find_moe_tile(c.block_m, c.block_n) < 0) {
    return "moe config: block_m x block_n must be 128 x 128, 64 x 128, 32 x 64 or 16 x 64";
  }
  const int64_t blocks = (int64_t{s.n} / 2 + kScaleBlock - 1) / kScaleBlock;
  if (c.split_k < 1 || c.split_k > (s.fused ? blocks : 1)) {
    return "moe config: split_k must be at least 1, at most the blocks of 128 of I, and 1 for "
           "grouped_gemm";
  }
  if (c.group_m < 1 || c.xcds != 1) return "moe config: group_m must be at least 1, xcds 1";
  const int64_t columns = std::max(s.n, s.k);
  const int64_t tiles = int64_t{s.rows} * ((columns + c.block_n - 1) / c.block_n) * c.split_k;
  if (tiles >= int64_t{1} << 31) return "moe config: 2^31 tiles or more; take a larger tile";
  return nullptr;
}

// Experts that `rows` rows meet if routing is even.
inline float touched_experts(const MoeShape& s) {
  return s.experts * (1.0f - std::pow(1.0f - 1.0f / s.experts, static_cast<float>(s.rows)));
}

// One product's time in us.
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
  const float w_bytes = s.w() == DType::kFloat4E2M1x2 ? 0.53f : static_cast<float>(size_of(s.w()));
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
  if (!s.fused) return product_time(s, c, device, s.n, s.k, 1);
  return product_time(s, c, device, s.n, s.k, 1) +
         product_time(s, c, device, s.k, s.n / 2, c.split_k);
}

// Calls visit(config) for the configs that can serve the shape and are worth a try.
template <typename Visit>
void for_each_config(const MoeShape& s, const Visit& visit) {
  for (const MoeTile& tile : kMoeTiles) {
    MoeConfig c;
    c.design = MoeConfig::Design::kTiled;
    c.block_m = tile.block_m;
    c.block_n = tile.block_n;
    // Tiles of one expert's rows meet each of its weights together. Where the rows of all experts
    // fit L2, so may all tiles of rows.
    c.order = s.rows * int64_t{s.k} * size_of(s.a()) <= kL2Bytes ? MoeConfig::kColumn
                                                                 : MoeConfig::kGrouped;
    c.group_m =
        std::max(1, static_cast<int32_t>(std::ceil(s.rows / touched_experts(s) / tile.block_m)));
    for (const int32_t split_k : {1, 2, 4, 8}) {
      c.split_k = split_k;
      if (check_moe_config(s, c) == nullptr) visit(c);
    }
  }
  visit(MoeConfig{});
}

inline MoeConfig choose_config(const MoeShape& s, const MoeDevice& device) {
  MoeConfig best;
  float best_time = 0;
  for_each_config(s, [&](const MoeConfig& config) {
    if (config.design == MoeConfig::Design::kPlain) return;
    const float time = modelled_time(s, config, device);
    if (best_time == 0 || time < best_time) best = config, best_time = time;
  });
  return best;
}

}  // namespace cuda
}  // namespace rocm_kernels
