// A config of the CUDA skinny_gemm: which kernel, and how the work is divided. As a struct, as
// text, and what it asks of a block. No CUDA header: tests include it too.
#pragma once

#include <algorithm>

#include "../../blocks/product/config_fields.h"
#include "../../blocks/product/cuda/shape.h"
#include "../../gemm/gemm.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda::skinny {

struct SkinnyGemmConfig {
  using Design = skinny::Design;
  int32_t block_n = 0;     // rows of w that a block owns, kWarpgroup: a cluster of blocks
  int32_t k_chunks = 1;    // K of a stage, in chunks of 128 bytes of w: 1, 2, 4 or 8
  int32_t m_groups = 1;    // kTmaPipeline: sets of warps that share block_m
  int32_t num_stages = 0;  // boxes of w in flight
  int32_t prefetch = 0;    // boxes of w brought to L2 before the previous kernel is done
  int32_t block_m = 0;     // rows of a that a block holds sums for
  int32_t split_k = 1;     // kWarpgroup: blocks of a cluster, each for its part of K
  int32_t warpgroups = 0;  // kWarpgroup: of a block, without the producers
  int32_t n_groups = 1;    // kWarpgroup: 64-row parts of block_n; warpgroups of a part share K
  Design design = Design::kRegisterPipeline;

  static constexpr const char* kDesigns[] = {"skinny_warpgroup", "tma_pipeline",
                                             "register_pipeline"};
  static constexpr ConfigField<SkinnyGemmConfig> kFields[] = {
      {"block_m", &SkinnyGemmConfig::block_m},   {"block_n", &SkinnyGemmConfig::block_n},
      {"k_chunks", &SkinnyGemmConfig::k_chunks}, {"num_stages", &SkinnyGemmConfig::num_stages},
      {"prefetch", &SkinnyGemmConfig::prefetch}, {"m_groups", &SkinnyGemmConfig::m_groups},
      {"split_k", &SkinnyGemmConfig::split_k},   {"warpgroups", &SkinnyGemmConfig::warpgroups},
      {"n_groups", &SkinnyGemmConfig::n_groups},
  };
  static constexpr Status kMustRead =
      "gemm config: it must read like 'tma_pipeline block_m=8 block_n=32 k_chunks=4 "
      "num_stages=6 prefetch=2 m_groups=1 split_k=1 warpgroups=0 n_groups=1'";
};

constexpr bool is_tile_of(const SkinnyTile& tile, const SkinnyGemmConfig& config) {
  if (tile.design != config.design) return false;
  if (config.design == Design::kRegisterPipeline) {
    return tile.m == config.block_m && tile.n == config.block_n;
  }
  if (config.design == Design::kTmaPipeline) return tile.m == config.block_m / config.m_groups;
  return tile.m == config.block_m && tile.n == config.warpgroups * kWarpgroupN;
}

// ---- What a config asks of a block: kTmaPipeline and kWarpgroup --------------------------------

constexpr int kProducers = 2;  // warps that issue copies, one for each operand
constexpr int kMaxStages = 8;
constexpr int kPrefetch = 2;           // boxes; more of them delay the kernel that is still running
constexpr int kStaticBytes = 3 << 10;  // of shared memory: barriers, scales, bias

// kTmaPipeline. A stage's K is divided into slices; a warp multiplies one of each stage.
constexpr int kSliceBytes = 64;
constexpr int kSlicesPerChunk = kChunkBytes / kSliceBytes;
// Four warps for each scheduler hide the way from shared memory to the sums; with two, and twice
// the work each, 13312 x 16384 at 32 rows of a takes 69 us instead of 55.
constexpr int kMaxConsumers = 16;
constexpr int kMaxTmaBlockN = kWarpN * kMaxConsumers / kSlicesPerChunk;
constexpr int kTwoChunksN = 128;  // rows of w whose box may hold two chunks of each

ROCM_KERNELS_HOST_DEVICE constexpr int tma_consumers(const SkinnyGemmConfig& config) {
  return (config.block_n + kWarpN - 1) / kWarpN * config.m_groups * config.k_chunks *
         kSlicesPerChunk;
}

// Partial sums lie as [slice][row of w][row of a]; the stride of a row of w is 8 modulo 16 words,
// so that the eight rows of an mma fall on different banks.
ROCM_KERNELS_HOST_DEVICE constexpr int partial_stride(int block_m) {
  return block_m == 8 ? 8 : block_m + 8;
}

// Shared memory that a launch asks for: the stages, then the partial sums. A warp's last rows may
// lie past its box; their loads must stay within the allocation. `a_chunks`: of a, for each of w.
ROCM_KERNELS_HOST_DEVICE constexpr int64_t tma_shared_bytes(const SkinnyGemmConfig& config,
                                                            int a_chunks) {
  const int64_t stage = box_bytes(config.block_n, config.k_chunks) +
                        int64_t{kChunkBytes} * config.block_m * config.k_chunks * a_chunks;
  const int64_t partials = int64_t{4} * config.k_chunks * kSlicesPerChunk * config.block_n *
                           partial_stride(config.block_m);
  const int64_t overrun = int64_t{kWarpN} * config.k_chunks * kChunkBytes;
  return kPatternBytes + config.num_stages * stage + (partials > overrun ? partials : overrun);
}

// kTmaPipeline whose blocks quantise rows of a (quantized_rows.cuh). All of a block's warps but the
// producers do: as many as may multiply.
constexpr int kQuantizers = kMaxConsumers;
constexpr int kQuantizedVector = 8;  // elements that a thread takes at once
constexpr int kQuantizedHeld = 4;    // vectors of a row that it holds
constexpr int64_t kMostQuantized = kQuantizers * 32 * kQuantizedVector * kQuantizedHeld;  // K

// Bytes of a row's codes: whole boxes.
ROCM_KERNELS_HOST_DEVICE constexpr int quantized_row_bytes(const SkinnyGemmConfig& config,
                                                           int64_t k) {
  const int box = config.k_chunks * kChunkBytes;
  return static_cast<int>((k + box - 1) / box) * box;
}
// The codes lie behind what tma_shared_bytes(config, 0) counts, without what it adds for alignment.
constexpr int64_t quantizing_shared_bytes(const SkinnyGemmConfig& config, int64_t m, int64_t k) {
  return tma_shared_bytes(config, 0) + m * quantized_row_bytes(config, k);
}

// kTmaPipeline whose outputs are gated (gated_outputs.cuh): a block has `half` rows of gate, then,
// from a whole swizzle pattern on, as many of up.
ROCM_KERNELS_HOST_DEVICE constexpr int first_up_row(int block_n) {
  return (block_n + kPatternLines - 1) / (2 * kPatternLines) * kPatternLines;
}
constexpr int gated_block_n(int half) {
  return (half + kPatternLines - 1) / kPatternLines * kPatternLines + half;
}

// kWarpgroup.
constexpr int kMaxWarpgroups = 4;
constexpr int kMaxWarpgroupBlockN = kMaxWarpgroups * kWarpgroupN;
constexpr int kWarpRows = 16;  // rows of w, of a warpgroup's 64, whose sums a warp holds

// Rows in a box of a: whole swizzle patterns.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_box_m(int64_t m) {
  return static_cast<int>((m + kPatternLines - 1) / kPatternLines * kPatternLines);
}

// Rows in a box of w. Two chunks lie one after the other, each of whole swizzle patterns; rows
// beyond the cluster's own are its neighbour's, and their sums are dropped.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_box_n(const SkinnyGemmConfig& config) {
  return config.k_chunks == 1
             ? config.block_n
             : (config.block_n + kPatternLines - 1) / kPatternLines * kPatternLines;
}

// Groups of 16 rows of w that a block of the cluster finishes.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_share(const SkinnyGemmConfig& config) {
  return ((config.block_n + kWarpRows - 1) / kWarpRows + config.split_k - 1) / config.split_k;
}

// Bytes of the sums that a block gets from those of its cluster, its own too.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_exchange_bytes(const SkinnyGemmConfig& config,
                                                                int64_t m) {
  return config.split_k == 1 ? 0
                             : 4 * config.split_k * (config.warpgroups / config.n_groups) *
                                   warpgroup_share(config) * kWarpRows * warpgroup_box_m(m);
}

// Bytes of the stages; later, of the sums of warpgroups that share K. The operands' last lines may
// lie past their boxes; their loads must stay within.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_stage_bytes(const SkinnyGemmConfig& config,
                                                             int64_t m) {
  const int box_m = warpgroup_box_m(m);
  const int box_n = warpgroup_box_n(config);
  const int w_bytes = box_bytes(box_n, config.k_chunks);
  const int w_overrun = (config.n_groups * kWarpgroupN - box_n) * kChunkBytes;
  const int a_overrun = (64 - box_m) * kChunkBytes - w_bytes;
  const int stages = config.num_stages * (box_m * config.k_chunks * kChunkBytes + w_bytes) +
                     (w_overrun > a_overrun ? w_overrun
                      : a_overrun > 0       ? a_overrun
                                            : 0);
  const int sums =
      config.split_k > 1 || config.n_groups == config.warpgroups
          ? 0
          : config.warpgroups / config.n_groups * (config.block_n + kWarpRows) * box_m * 4;
  return (stages > sums ? stages : sums) / 16 * 16 + 16;
}

// Shared memory that a launch asks for: the above, and the sums that the cluster's blocks exchange.
// At least half of an SM's 228 KB: else two blocks start on an SM that the previous kernel leaves,
// while others idle (2304 x 16384, 32 rows of a: 16.8 us against 13.0).
constexpr int64_t warpgroup_shared_bytes(const SkinnyGemmConfig& config, int64_t m) {
  constexpr int64_t kHalf = 114 << 10;
  return std::max(kHalf, kPatternBytes + int64_t{warpgroup_stage_bytes(config, m)} +
                             warpgroup_exchange_bytes(config, m));
}

// ---- Outputs that are sent (sent_outputs.cuh) ---------------------------------------------------

constexpr int kSentVector = 8;  // outputs that are sent together

// Outputs from one row of a to the next where a block collects them: whole vectors, and other banks
// for each row.
ROCM_KERNELS_HOST_DEVICE constexpr int sent_pitch(int columns) { return columns + kSentVector; }

// kWarpgroup: shared memory in which a block collects its outputs, behind all the rest.
// kTmaPipeline collects where the stages were, which are larger.
constexpr int64_t sent_bytes(const SkinnyGemmConfig& config, int64_t m) {
  return config.design == Design::kWarpgroup
             ? 2 * m * sent_pitch(warpgroup_share(config) * kWarpRows)
             : 0;
}

// The config by which a product sends that would else be stored by this one. No vector is two
// blocks'. How K is divided does not change, nor do the outputs' bits.
constexpr SkinnyGemmConfig config_to_send(SkinnyGemmConfig config) {
  config.block_n = (config.block_n + kSentVector - 1) / kSentVector * kSentVector;
  return config;
}

// Whether a product that this config serves can be sent: FP8 operands, 16-bit outputs, in whole
// vectors, by the pipelines of large weights.
inline bool sends(const GemmArgs& args, const SkinnyGemmConfig& config, const GemmDevice& device) {
  if (config.design == Design::kRegisterPipeline || !is_fp8(args.a_dtype) ||
      args.out_dtype == DType::kFloat32 || args.n % kSentVector != 0) {
    return false;
  }
  const SkinnyGemmConfig sent = config_to_send(config);
  const int64_t shared_bytes =
      sent.design == Design::kTmaPipeline
          ? tma_shared_bytes(sent, 1)
          : warpgroup_shared_bytes(sent, args.m) + sent_bytes(sent, args.m);
  return kStaticBytes + shared_bytes <= device.shared_bytes_per_block;
}

// ---- What a config asks of the operands ---------------------------------------------------------

// What the kernels ask of the operands besides their types.
struct Alignment {
  bool vectors = false;  // both operands' rows start, and K ends, at multiples of 16 bytes
  bool chunks = false;   // and a row of w is a whole number of 128-byte chunks
};

inline Alignment alignment_of(const GemmArgs& args) {
  const int64_t a_bytes = args.k * size_of(args.a_dtype);
  const int64_t w_bytes = args.k * size_of(args.w_dtype);
  Alignment alignment;
  alignment.vectors = has_aligned_rows(args) && a_bytes % 16 == 0 && w_bytes % 16 == 0;
  // TMA counts 128-byte chunks and takes no rows that overlap.
  alignment.chunks = w_bytes % kChunkBytes == 0 && (args.m == 1 || args.a_stride >= args.k) &&
                     (args.n == 1 || args.w_stride >= args.k);
  return alignment;
}

// Whether these kernels serve the product at all.
inline bool serves(const GemmArgs& args) {
  return args.m <= kSkinnyGemmMaxRows && args.k > 0 && args.a_dtype != DType::kFloat8E4M3FNUZ &&
         args.w_dtype != DType::kFloat8E4M3FNUZ && alignment_of(args).vectors;
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
