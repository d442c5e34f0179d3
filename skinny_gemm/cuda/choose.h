// Which kernel for few rows serves a product, and how the work is divided: one pure function of the
// sizes, the types, the alignment and the device. Measurements named here are of an H200
// (docs/kernels/skinny_gemm.md). No CUDA header.
#pragma once

#include "time_model.h"

namespace rocm_kernels {
namespace cuda::skinny {

// The TMA pipeline with N divided over `waves` blocks an SM, one after another; no stages if none
// fits.
inline SkinnyGemmConfig choose_tma_pipeline(const GemmArgs& args, const GemmDevice& device,
                                            int waves) {
  const int64_t blocks = static_cast<int64_t>(device.sm_count) * waves;
  const int64_t row_bytes = args.k * size_of(args.w_dtype);
  const int a_chunks = is_fp8(args.w_dtype) && !is_fp8(args.a_dtype) ? 2 : 1;

  SkinnyGemmConfig config;
  config.design = Design::kTmaPipeline;
  config.m_groups = args.m <= 32 ? 1 : 2;
  config.block_m = tile_m(config.design, args.m) * config.m_groups;
  config.block_n =
      static_cast<int>(std::max<int64_t>(kTmaMinBlockN, (args.n + blocks - 1) / blocks));
  if (config.block_n > kMaxTmaBlockN) return config;

  // The widest box within 16 KB, but two chunks up to 128 rows: longer pieces of a row are kinder
  // to the memory (101 rows: 50 us with two chunks, 51 with one).
  config.k_chunks = config.block_n > kTwoChunksN ? 1 : config.block_n > 64 ? 2 : 8;
  while (config.block_n <= 64 && config.k_chunks > 1 &&
         box_bytes(config.block_n, config.k_chunks) > (16 << 10)) {
    config.k_chunks /= 2;
  }
  // Short rows: at least eight boxes, or the multiplication of the last begins late (2048 x 2048 in
  // 16 bits: 5.3 us with four boxes, 4.4 with eight).
  if (config.k_chunks == 8 && row_bytes < 8 * 8 * kChunkBytes) config.k_chunks = 4;
  for (; config.k_chunks > 0; config.k_chunks /= 2) {
    if (config.k_chunks * kChunkBytes > row_bytes || tma_consumers(config) > kMaxConsumers) {
      continue;
    }
    const int box = config.block_n * config.k_chunks * kChunkBytes;
    for (config.num_stages = std::clamp((kTmaInFlight + box / 2) / box, 3, kMaxStages);
         config.num_stages > 1; --config.num_stages) {
      if (kStaticBytes + tma_shared_bytes(config, a_chunks) <= device.shared_bytes_per_block) {
        config.prefetch = kPrefetch;
        return config;
      }
    }
  }
  config.num_stages = 0;
  return config;
}

// No stages if the device holds no cluster that is wanted, or too little shared memory.
inline SkinnyGemmConfig choose_warpgroup(const GemmArgs& args, const GemmDevice& device) {
  SkinnyGemmConfig config;
  config.design = Design::kWarpgroup;
  config.block_m = tile_m(config.design, args.m);
  int64_t rows = 0;
  for (int i = 0; i < 3 && rows < kEnoughRows && device.clusters[i] > 0; ++i) {
    config.split_k = 1 << i;
    // In a cluster the sums of two warpgroups are less to exchange than those of four: 8.1 us
    // against 8.4 (4096 x 4096, 64 rows of a).
    config.warpgroups = config.split_k == 1 ? kMaxWarpgroups : 2;
    const int64_t all = int64_t{device.clusters[i]} * config.warpgroups * kWarpgroupN;
    const int64_t waves = (args.n + all - 1) / all;
    rows = (args.n + device.clusters[i] * waves - 1) / (device.clusters[i] * waves);
  }
  if (rows == 0) return config;
  config.block_n = static_cast<int>((std::max<int64_t>(rows, kWarpRows) + 1) / 2 * 2);  // even
  config.n_groups = config.block_n <= kWarpgroupN ? 1 : config.block_n <= 2 * kWarpgroupN ? 2 : 4;
  // Two chunks of K to a box while it stays within 32 KB: fewer boxes, and longer pieces of a row.
  config.k_chunks = config.block_n <= 128 && args.k >= 4 * kChunkBytes * config.split_k ? 2 : 1;
  config.prefetch = kPrefetch;
  const int k_groups = config.warpgroups / config.n_groups;
  const int step = k_groups > config.k_chunks ? k_groups / config.k_chunks : 1;
  const int box = box_bytes(warpgroup_box_n(config), config.k_chunks);
  for (int stages = std::clamp((kWarpgroupInFlight + box / 2) / box, 3, 6); stages > 1; --stages) {
    config.num_stages = (stages + step - 1) / step * step;
    if (config.num_stages <= kMaxStages &&
        kStaticBytes + warpgroup_shared_bytes(config, args.m) <= device.shared_bytes_per_block) {
      return config;
    }
  }
  config.num_stages = 0;
  return config;
}

// Whether a block may begin where another has ended: while it does, the other SMs take in more than
// their shares of what memory gives. On an H100, whose share is 25 GB/s, boxes of two chunks are
// then worth twice the blocks (57344 x 8192: 155 us for 164); an H200's is 37, and several blocks
// an SM have lost there.
inline bool blocks_may_follow(const GemmDevice& device) {
  return device.memory.bytes_per_us / device.sm_count < 0.9 * kSmBytesPerUs;
}

// For what is served.
inline SkinnyGemmConfig choose_config(const GemmArgs& args, const GemmDevice& device) {
  SkinnyGemmConfig config;
  config.design = Design::kRegisterPipeline;
  config.block_m = tile_m(config.design, args.m);
  // One block fits an SM; rows for a second one are better taken by the first (4096 x 128 in 16
  // bits: 2.0 us against 3.4).
  config.block_n = args.n > int64_t{16} * device.sm_count ? 32 : 16;

  const bool small = args.n * args.k * size_of(args.w_dtype) <= kSmallBytes;
  const bool block_scaled = is_block_scaled(args);
  if (device.compute_capability < 90 || !alignment_of(args).chunks || small ||
      (block_scaled && !is_fp8(args.w_dtype))) {
    return config;
  }
  // mma.sync widens and multiplies in registers: up to 16 rows of a that hides behind the weights.
  if (device.compute_capability == 90 && args.m > 16 && is_fp8(args.a_dtype) && !block_scaled &&
      args.out_dtype != DType::kFloat32) {
    const SkinnyGemmConfig warpgroup = choose_warpgroup(args, device);
    if (warpgroup.num_stages > 0) return warpgroup;
  }
  const int64_t rows_a_wave =
      int64_t{device.sm_count} *
      (args.m > 32 || blocks_may_follow(device) ? kTwoChunksN : kMaxTmaBlockN);
  const int waves = static_cast<int>((args.n + rows_a_wave - 1) / rows_a_wave);
  for (const int times : {waves, waves + 1, 2 * waves, 4 * waves}) {
    const SkinnyGemmConfig tma = choose_tma_pipeline(args, device, times);
    if (tma.num_stages > 0) return tma;
  }
  return config;
}

// Of a product that quantises its rows or gates its outputs; no stages where it does neither.
static_assert(kJoinedRows <= 8, "joined.cu has kernels of eight rows");
inline SkinnyGemmConfig choose_joined(const JoinedGemmArgs& args, const GemmDevice& device) {
  SkinnyGemmConfig config;
  GemmArgs product = args;
  product.a_dtype = DType::kFloat8E4M3FN;
  if (args.quantizes()) product.a = nullptr, product.a_stride = args.k;
  const bool whole_rows = reinterpret_cast<uintptr_t>(args.a) % 16 == 0 &&
                          (args.m == 1 || args.a_stride * size_of(args.a_dtype) % 16 == 0);
  if (args.m > kJoinedRows || !whole_rows || (args.quantizes() && args.gates()) ||
      args.w_dtype != DType::kFloat8E4M3FN || is_block_scaled(args) ||
      (args.quantizes() && args.k > kMostQuantized) || !serves(product)) {
    return config;
  }
  config = choose_config(product, device);
  if (config.design != Design::kTmaPipeline) return SkinnyGemmConfig();
  if (args.gates()) {
    if (args.n % 2 != 0) return SkinnyGemmConfig();
    const int64_t blocks = (args.n + config.block_n - 1) / config.block_n;
    config.block_n = gated_block_n(static_cast<int>((args.n / 2 + blocks - 1) / blocks));
    if (config.block_n > kMaxTmaBlockN) return SkinnyGemmConfig();
    while (tma_consumers(config) > kMaxConsumers) config.k_chunks /= 2;
  }
  for (; config.num_stages > 1; --config.num_stages) {
    const int64_t bytes = args.quantizes() ? quantizing_shared_bytes(config, args.m, args.k)
                                           : tma_shared_bytes(config, 1);
    if (kStaticBytes + bytes <= device.shared_bytes_per_block) return config;
  }
  return SkinnyGemmConfig();
}

// A product has one config of these kernels.
template <class Visit>
void for_each_config(const GemmArgs& args, const GemmDevice& device, const Visit& visit) {
  visit(choose_config(args, device));
}

inline Status check_config(const GemmArgs& args, const SkinnyGemmConfig& config,
                           const GemmDevice& device) {
  if (!serves(args)) {
    return "gemm config: the designs for few rows take 1 to 64, no e4m3fnuz, a K beyond 0 and rows "
           "at multiples of 16 bytes";
  }
  if (equal_configs(config, choose_config(args, device))) return nullptr;
  return "gemm config: these sizes and addresses have one config of the designs for few rows, "
         "which "
         "gemm_configs lists";
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
