// Every config that NVIDIA's choices take or offer, on every generation of GPUs: a block of it must
// find its shared memory. By the sizes that the launchers go by; no GPU, no CUDA header.
//
// Prints a line for each config that does not fit, then "offers N, misfits M".
#include <cstdio>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "attention/cuda/choose.h"
#include "gemm/cuda/choose.h"
#include "moe/cuda/choose.h"

using namespace rocm_kernels;

struct Gpu {
  int compute_capability, sm_count, sm_kilobytes, block_kilobytes;
};
constexpr int64_t kReserved = 1 << 10;  // by the runtime, of each block

static int offers = 0, misfits = 0;

constexpr Gpu kGpus[] = {{80, 108, 164, 163}, {86, 84, 100, 99},    {89, 142, 100, 99},
                         {90, 132, 228, 227}, {100, 148, 228, 227}, {120, 188, 100, 99}};
constexpr DType kFp8 = DType::kFloat8E4M3FN, kBf16 = DType::kBFloat16, kHalf = DType::kFloat16;

// `blocks`: that an SM is to have at once.
template <typename Config>
void expect_fit(const Gpu& gpu, const Config& config, int64_t bytes, int blocks = 1) {
  ++offers;
  if (bytes <= int64_t{gpu.block_kilobytes} << 10 &&
      (bytes + kReserved) * blocks <= int64_t{gpu.sm_kilobytes} << 10) {
    return;
  }
  ++misfits;
  char text[kConfigTextBytes] = "?";
  write_config(config, text);
  std::printf("sm_%d: %lld bytes: %s\n", gpu.compute_capability, static_cast<long long>(bytes),
              text);
}

// Calls visit(args) for products of many kinds and sizes.
template <typename Visit>
void for_each_product(const Visit& visit) {
  struct Types {
    DType a, w;
  };
  for (const Types& types : {Types{kBf16, kBf16}, Types{kHalf, kHalf}, Types{kBf16, kFp8},
                             Types{kHalf, kFp8}, Types{kFp8, kFp8}}) {
    for (const bool blocks : {false, true}) {
      if (blocks && types.w != kFp8) continue;
      for (const int64_t m : {1, 8, 16, 17, 33, 64, 128, 1000, 8192}) {
        for (const int64_t n : {16, 128, 2304, 4096, 13312, 28672}) {
          for (const int64_t k : {64, 128, 2048, 4096, 16384}) {
            GemmArgs args;
            args.m = m, args.n = n, args.k = k;
            args.a_stride = args.w_stride = k, args.out_stride = n;
            args.a_dtype = types.a, args.w_dtype = types.w;
            if (blocks) args.scale_w.kind = ScaleView::Kind::kBlock;
            visit(args);
          }
        }
      }
    }
  }
}

static std::set<std::string> designs;  // of moe and attention, met on the GPU at hand

static void check_moe(const Gpu& gpu, const MoeShape& s) {
  cuda::moe::MoeDevice device;
  device.sm_count = gpu.sm_count;
  device.compute_capability = gpu.compute_capability;
  device.shared_bytes_per_sm = gpu.sm_kilobytes << 10;
  device.shared_bytes_per_block = gpu.block_kilobytes << 10;
  const auto check = [&](const cuda::moe::MoeConfig& c) {
    using Design = cuda::moe::MoeConfig::Design;
    designs.insert(cuda::moe::MoeConfig::kDesigns[static_cast<size_t>(c.design)]);
    for (int product = 0; product < (s.fused ? 2 : 1); ++product) {
      const bool blocks = (s.blocks >> product & 1) != 0;
      if (c.design == Design::kTiled) {
        const cuda::moe::MoeTile& tile =
            cuda::moe::kMoeTiles[cuda::moe::find_moe_tile(c.block_m, c.block_n)];
        expect_fit(gpu, c, tile.shared_bytes(cuda::moe::moe_step_bytes_a(s.a(), s.w())));
      } else if (c.design == Design::kStreamed) {
        const cuda::moe::StreamedStage stage = cuda::moe::streamed_stage(s, c, product);
        const int stages = cuda::moe::streamed_stages(stage, s.rows, device);
        expect_fit(gpu, c,
                   cuda::moe::kStreamedStaticBytes +
                       cuda::moe::streamed_shared_bytes(stage, stages, s.rows),
                   cuda::moe::streamed_blocks_per_sm(c.block_m));
      } else if (c.design == Design::kStreamedWgmma) {
        const cuda::moe::StreamedWgmmaStage stage = {c.block_m, blocks};
        const int stages = cuda::moe::streamed_wgmma_stages(stage, s.rows, device);
        expect_fit(
            gpu, c,
            stage.static_bytes() + cuda::moe::streamed_wgmma_shared_bytes(stage, stages, s.rows),
            cuda::moe::kStreamedWgmmaBlocksPerSm);
      } else if (c.design == Design::kResident) {
        const cuda::moe::ResidentShape shape = cuda::moe::resident_shape(s, device, product);
        const int stages = cuda::moe::resident_stages(shape, device);
        expect_fit(gpu, c, 512 + cuda::moe::resident_shared_bytes(shape, stages), 2);
      }
    }
  };
  check(cuda::moe::choose_config(s, device));
  cuda::moe::for_each_config(s, device, check);
}

static void check_all_moe(const Gpu& gpu) {
  const std::pair<DType, DType> types[] = {{kBf16, kBf16}, {kHalf, kHalf},
                                           {kBf16, kFp8},  {kHalf, kFp8},
                                           {kFp8, kFp8},   {kBf16, DType::kFloat4E2M1x2}};
  const std::pair<int, int> layers[] = {{2048, 768},   {7168, 2048}, {2880, 2880},
                                        {4096, 14336}, {128, 128},   {64, 32}};
  for (const auto& [a, w] : types) {
    for (const auto& [hidden, intermediate] : layers) {
      for (const int experts : {8, 128, 512}) {
        for (const int tokens : {1, 4, 16, 128, 1024, 16384}) {
          for (const int blocks : {0, 3}) {
            if (blocks != 0 && w != kFp8) continue;
            for (const bool fused : {true, false}) {
              MoeShape s = {};
              s.fused = fused;
              s.tokens = fused ? tokens : 0;
              s.rows = fused ? tokens * 4 : tokens;
              s.experts = experts;
              s.n = 2 * intermediate, s.k = hidden;
              s.aligned = s.x_aligned = s.compact = 1;
              s.a_type = static_cast<int32_t>(a), s.w_type = static_cast<int32_t>(w);
              s.out_type = static_cast<int32_t>(kBf16);
              s.blocks = fused ? blocks : blocks & 1;
              check_moe(gpu, s);
            }
          }
        }
      }
    }
  }
}

static void check_fit(const Gpu& gpu, const GemmArgs& args, const cuda::GemmConfig& c,
                      const cuda::GemmDevice& device) {
  using Design = cuda::GemmConfig::Design;
  if (c.design == Design::kMma) expect_fit(gpu, c, cuda::mma_shared_bytes(args));
  if (c.design != Design::kWarpgroup) return;
  const int64_t narrow = cuda::narrow_stages_of(args, c, device) * int64_t{c.block_n} *
                         cuda::narrow_row_bytes(args.a_dtype, args.w_dtype);
  expect_fit(gpu, c, cuda::kStaticBytes + cuda::warpgroup_shared_bytes(args, c) + narrow);
}

static void check_fit(const Gpu& gpu, const GemmArgs& args, const cuda::skinny::SkinnyGemmConfig& c,
                      const cuda::GemmDevice&) {
  using namespace cuda::skinny;
  if (c.design == Design::kTmaPipeline) {
    const int a_chunks = is_fp8(args.w_dtype) && !is_fp8(args.a_dtype) ? 2 : 1;
    expect_fit(gpu, c, cuda::skinny::kStaticBytes + tma_shared_bytes(c, a_chunks));
  } else if (c.design == Design::kWarpgroup) {
    expect_fit(gpu, c,
               cuda::skinny::kStaticBytes + cuda::skinny::warpgroup_shared_bytes(c, args.m));
  }
}

static void check_products(const Gpu& gpu) {
  cuda::GemmDevice device;
  device.sm_count = gpu.sm_count;
  device.compute_capability = gpu.compute_capability;
  device.shared_bytes_per_block = gpu.block_kilobytes << 10;
  for (int i = 0; i < 3; ++i) device.clusters[i] = gpu.sm_count >> i;
  for_each_product([&](const GemmArgs& args) {
    const auto check = [&](const cuda::Config& config) {
      std::visit([&](const auto& family) { check_fit(gpu, args, family, device); }, config);
    };
    check(cuda::choose_config(args, device));
    cuda::for_each_config(args, device, check);
  });
}

// Rows of w of a block, and the chunks of its boxes, on both cards: one row of an FP8 a.
static void tell_boxes() {
  cuda::GemmDevice device;
  device.sm_count = 132;
  device.compute_capability = 90;
  device.shared_bytes_per_block = 227 << 10;
  for (const auto& [n, k] : {std::pair(57344, 8192), {28672, 4096}, {4096, 4096}}) {
    for (const bool h100 : {true, false}) {
      device.memory = h100 ? cuda::h100_memory() : cuda::MemoryRates{};
      GemmArgs args;
      args.m = 1;
      args.n = n;
      args.k = args.a_stride = args.w_stride = k;
      args.out_stride = n;
      const auto config = cuda::skinny::choose_config(args, device);
      std::printf("boxes %s %d: block_n=%d k_chunks=%d\n", h100 ? "h100" : "h200", n,
                  config.block_n, config.k_chunks);
    }
  }
}

static void check_attention(const Gpu& gpu) {
  cuda::AttentionDevice device;
  device.sm_count = gpu.sm_count;
  device.compute_capability = gpu.compute_capability;
  device.shared_bytes_per_block = gpu.block_kilobytes << 10;
  device.most_cluster = gpu.compute_capability < 90 ? 1 : gpu.compute_capability < 120 ? 16 : 8;
  const std::pair<int, int> sizes[] = {{64, 64},   {80, 80},   {128, 128}, {192, 128},
                                       {192, 192}, {256, 256}, {512, 512}};
  for (const auto& [head_dim, head_dim_v] : sizes) {
    for (const DType kv : {kBf16, kFp8}) {
      for (const int queries : {1, 8, 100, 4096}) {
        for (const int batch : {1, 64}) {
          AttentionArgs args;
          args.batch = batch, args.heads = 32, args.kv_heads = 8;
          args.head_dim = head_dim, args.head_dim_v = head_dim_v;
          args.max_seqlen_q = queries, args.total_q = int64_t{queries} * batch;
          args.max_seqlen_k = 8192, args.kv_dtype = kv;
          const auto check = [&](const cuda::AttentionConfig& c) {
            using Design = cuda::AttentionConfig::Design;
            designs.insert(cuda::AttentionConfig::kDesigns[static_cast<size_t>(c.design)]);
            if (c.design == Design::kDecode) {
              expect_fit(gpu, c, cuda::decode_shared_bytes(args, c, device));
              if (c.cluster > device.most_cluster) {
                ++misfits;
                std::printf("sm_%d: a cluster of %d\n", gpu.compute_capability, c.cluster);
              }
            } else if (c.design == Design::kPrefill) {
              expect_fit(gpu, c, cuda::prefill_tile(args).most_shared_bytes(c.rows));
            } else if (c.design == Design::kGathered) {
              const AttentionArgs gathered = cuda::gathered_args(args, nullptr);
              expect_fit(gpu, c, cuda::prefill_tile(gathered).most_shared_bytes(c.rows));
            }
          };
          const cuda::AttentionConfig chosen = cuda::choose_config(args, device);
          check(chosen);
          cuda::for_each_config(args, device, check);
          // A row a warp takes many times as long.
          const int most = kv == kFp8 || gpu.block_kilobytes > 128 ? 256 : 192;
          if (chosen.design == cuda::AttentionConfig::Design::kPlain && head_dim <= most) {
            ++misfits;
            std::printf("sm_%d: plain: %d queries, heads of %d, %s\n", gpu.compute_capability,
                        queries, head_dim, kv == kFp8 ? "FP8" : "16 bits");
          }
        }
      }
    }
  }
}

// A decode step of one sequence of 8,192 keys: with few KV heads, and heads that are long.
static void tell_few_heads() {
  cuda::AttentionDevice device;
  device.sm_count = 132;
  device.compute_capability = 90;
  device.shared_bytes_per_block = 227 << 10;
  device.most_cluster = 16;
  for (const auto& [heads, kv_heads, size] :
       {std::tuple(32, 8, 128), {8, 1, 128}, {4, 1, 256}, {8, 1, 512}, {16, 8, 256}}) {
    AttentionArgs args;
    args.batch = args.max_seqlen_q = args.total_q = 1;
    args.heads = heads, args.kv_heads = kv_heads;
    args.head_dim = args.head_dim_v = size;
    args.max_seqlen_k = 8192, args.kv_dtype = kBf16;
    const cuda::AttentionConfig c = cuda::choose_config(args, device);
    std::printf("heads %d/%d of %d: %s cluster=%d outer=%d\n", heads, kv_heads, size,
                cuda::AttentionConfig::kDesigns[static_cast<size_t>(c.design)], c.cluster, c.outer);
  }
}

// A prompt of 16,384 tokens: what serves it by the size of its heads.
static void tell_long_prompts() {
  cuda::AttentionDevice device;
  device.sm_count = 132;
  device.compute_capability = 90;
  device.shared_bytes_per_block = 227 << 10;
  device.most_cluster = 16;
  for (const int size : {64, 128, 512}) {
    AttentionArgs args;
    args.batch = 1, args.heads = 64, args.kv_heads = 8;
    args.head_dim = args.head_dim_v = size;
    args.max_seqlen_q = args.max_seqlen_k = args.total_q = 16384, args.kv_dtype = kBf16;
    const cuda::AttentionConfig c = cuda::choose_config(args, device);
    std::printf("prompt of heads of %d: %s rows=%d\n", size,
                cuda::AttentionConfig::kDesigns[static_cast<size_t>(c.design)], c.rows);
  }
}

// Queries of keys in FP8: what serves them, and what does where the call has room for 131,072 keys.
static void tell_fp8_prompts() {
  cuda::AttentionDevice device;
  device.sm_count = 132;
  device.compute_capability = 90;
  device.shared_bytes_per_block = 227 << 10;
  device.most_cluster = 16;
  for (const auto& [queries, keys, size] :
       {std::tuple(2048, 2048, 128), {2048, 2048, 64}, {2048, 131072, 128}, {4, 8192, 128}}) {
    AttentionArgs args;
    args.batch = 1, args.heads = 32, args.kv_heads = size == 64 ? 32 : 8;
    args.head_dim = args.head_dim_v = size;
    args.max_seqlen_q = args.total_q = queries, args.max_seqlen_k = keys, args.kv_dtype = kFp8;
    const cuda::AttentionConfig c = cuda::choose_config(args, device);
    args.max_seqlen_k = 131072;
    const cuda::AttentionConfig roomy = cuda::within_most_gathered(args, c);
    std::printf("%d queries in FP8 of %d: %s rows=%d, %s rows=%d\n", queries, size,
                cuda::AttentionConfig::kDesigns[static_cast<size_t>(c.design)], c.rows,
                cuda::AttentionConfig::kDesigns[static_cast<size_t>(roomy.design)], roomy.rows);
  }
}

// Decode blocks of 132 multiprocessors: how many, of which clusters, have room for a second beside
// them.
static void tell_room() {
  cuda::AttentionDevice device;
  device.sm_count = 132;
  device.compute_capability = 90;
  device.shared_bytes_per_block = 227 << 10;
  device.most_cluster = 16;
  for (const auto& [batch, cluster, outer] :
       {std::tuple(8, 1, 1), {8, 2, 1}, {8, 1, 2}, {8, 4, 1}, {4, 4, 1}, {9, 1, 1}, {17, 1, 1}}) {
    AttentionArgs args;
    args.batch = batch, args.max_seqlen_q = args.total_q = 1;
    args.heads = 32, args.kv_heads = 8;
    args.head_dim = args.head_dim_v = 128;
    args.max_seqlen_k = 8192, args.kv_dtype = kBf16;
    cuda::AttentionConfig c;
    c.design = cuda::AttentionConfig::Design::kDecode;
    c.cluster = cluster, c.outer = outer;
    const int64_t bytes = cuda::decode_shared_bytes(args, c, device) + kReserved;
    std::printf("room %d of %d: %d\n", static_cast<int>(cuda::decode_blocks(args, c)), cluster,
                2 * bytes <= 228 << 10);
  }
}

// The tiles that layers of FP8 in blocks take on an H200, by tokens.
static void tell_expert_tiles() {
  cuda::moe::MoeDevice device;
  device.sm_count = 132;
  device.compute_capability = 90;
  device.shared_bytes_per_sm = 228 << 10;
  device.shared_bytes_per_block = 227 << 10;
  for (const int experts : {128, 256}) {
    for (const int tokens : {8, 16, 32, 64, 128}) {
      MoeShape s = {};
      s.fused = s.aligned = s.x_aligned = s.compact = 1;
      s.tokens = tokens, s.rows = 8 * tokens, s.experts = experts;
      s.n = 1536, s.k = 2048, s.blocks = 3;
      s.a_type = s.w_type = static_cast<int32_t>(kFp8), s.out_type = static_cast<int32_t>(kBf16);
      const cuda::moe::MoeConfig c = cuda::moe::choose_config(s, device);
      std::printf("experts %d of %d: %s %d\n", tokens, experts,
                  cuda::moe::MoeConfig::kDesigns[static_cast<size_t>(c.design)], c.block_m);
    }
  }
}

int main() {
  for (const Gpu& gpu : kGpus) {
    designs.clear();
    check_all_moe(gpu);
    check_products(gpu);
    check_attention(gpu);
    std::printf("sm_%d:", gpu.compute_capability);
    for (const std::string& design : designs) std::printf(" %s", design.c_str());
    std::printf("\n");
  }
  tell_boxes();
  tell_few_heads();
  tell_long_prompts();
  tell_fp8_prompts();
  tell_room();
  tell_expert_tiles();
  std::printf("offers %d, misfits %d\n", offers, misfits);
}
