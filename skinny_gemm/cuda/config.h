// Which CUDA kernel serves a product, and how it is cut: one pure function of the sizes, the types
// and the device. Measurements named here are of an H200 (docs/h200.md).
#pragma once

#include <algorithm>
#include <cstdio>

#include "../../common/core/fp8.h"
#include "../skinny_gemm.h"

namespace rocm_kernels {
namespace cuda {

struct DeviceFacts {
  int sm_count = 0;
  int compute_capability = 0;          // 90 for sm_90
  int64_t shared_bytes_per_block = 0;  // most that a block can ask for
  // Clusters of 1, 2 and 4 blocks, each block with an SM of its own, that the device holds at once.
  int clusters[3] = {};
};

// What the tensor-core kernels ask of the operands besides their types.
struct GemmAlignment {
  bool vectors = false;  // both operands' rows start, and K ends, at multiples of 16 bytes
  bool chunks = false;   // and a row of w is a whole number of 128-byte chunks
};

// The ring kernel's units (ring.cuh).
constexpr int kProducers = 2;     // warps that send for boxes, one for each operand
constexpr int kChunkBytes = 128;  // the widest swizzle; a stage holds 1, 2, 4 or 8 chunks of a row
constexpr int kSliceBytes = 64;   // K bytes of a stage that one warp multiplies
constexpr int kSlicesPerChunk = kChunkBytes / kSliceBytes;
constexpr int kRowTiles = 2;  // mma tiles of 16 rows that one warp multiplies
constexpr int kWarpRows = kRowTiles * 16;
// Four warps for each scheduler hide the way from shared memory to the sums; with two, and twice
// the work each, 13312 x 16384 at 32 tokens takes 69 us instead of 55.
constexpr int kMaxConsumers = 16;
constexpr int kMaxRingRows = kWarpRows * kMaxConsumers / kSlicesPerChunk;
constexpr int kMaxStages = 8;
constexpr int kRingAlignment = 1024;   // the swizzle pattern repeats every 8 lines of 128 bytes
constexpr int kStaticBytes = 3 << 10;  // barriers, scales, bias
constexpr int kPrefetch = 2;           // boxes; more of them delay the kernel that is still running

// How the ring kernel cuts a product.
struct RingShape {
  int rows = 0;          // rows of w a block owns
  int chunks = 1;        // 128-byte chunks of a row in a stage
  int token_groups = 1;  // sets of warps, each for its own tokens
  int stages = 0;        // boxes of w in flight
  int prefetch = 0;      // boxes of w sent for before the previous kernel is done
};

// The warpgroup kernel's units (warpgroup.cuh).
constexpr int kMaxWarpgroups = 4;  // of consumers in a block
constexpr int kGroupRows = 64;     // rows of w that a warpgroup multiplies
constexpr int kSliceRows = 16;     // of them, rows whose sums a warp holds
constexpr int kMaxGroupRows = kMaxWarpgroups * kGroupRows;

// How the warpgroup kernel cuts a product.
struct WarpgroupShape {
  int rows = 0;        // rows of w a cluster owns; even
  int cluster = 1;     // blocks that share them, each for its part of K
  int groups = 4;      // warpgroups of a block: 4, or 2 in a cluster
  int row_groups = 1;  // 64-row parts of the rows: 1, 2 or 4; warpgroups of a part deal K
  int chunks = 1;      // 128-byte chunks of a row in a stage: 1 or 2
  int stages = 0;      // boxes of w in flight
  int prefetch = 0;    // boxes of w sent for before the previous kernel is done
};

struct GemmConfig {
  enum class Kernel : int32_t {
    kWarpgroup,  // warpgroup instructions: sm_90 alone
    kRing,       // copy engine and shared memory: sm_90 and later
    kStream,     // straight to registers
    kPlain,      // any alignment, any dialect
  };
  Kernel kernel = Kernel::kPlain;
  int token_tiles = 1;       // groups of 8 tokens that a warp multiplies: 1, 2 or 4
  int stream_row_tiles = 1;  // kStream: groups of 16 rows of w that a block owns: 1 or 2
  RingShape ring;
  WarpgroupShape warpgroup;
};

constexpr int ring_consumers(const RingShape& ring) {
  return (ring.rows + kWarpRows - 1) / kWarpRows * ring.token_groups * ring.chunks *
         kSlicesPerChunk;
}

// Bytes of a stage's box of w: whole swizzle patterns.
ROCM_KERNELS_HOST_DEVICE constexpr int ring_w_bytes(int rows, int chunks) {
  return (rows * chunks + 7) / 8 * 8 * kChunkBytes;
}

// Partial sums lie as [slice][row][token slot]; a row's stride is 8 modulo 16 words, so that the
// eight rows of an mma fall on different banks.
ROCM_KERNELS_HOST_DEVICE constexpr int partial_stride(int tokens) {
  return tokens == 8 ? 8 : tokens + 8;
}

// Writes the config in words; returns snprintf's count.
inline int describe(const GemmConfig& c, char* text, size_t size) {
  if (c.kernel == GemmConfig::Kernel::kPlain) return std::snprintf(text, size, "plain");
  if (c.kernel == GemmConfig::Kernel::kStream) {
    return std::snprintf(text, size, "stream token_tiles=%d row_tiles=%d", c.token_tiles,
                         c.stream_row_tiles);
  }
  if (c.kernel == GemmConfig::Kernel::kWarpgroup) {
    const WarpgroupShape& shape = c.warpgroup;
    return std::snprintf(text, size, "warpgroup rows=%d cluster=%d groups=%d chunks=%d stages=%d",
                         shape.rows, shape.cluster, shape.groups, shape.chunks, shape.stages);
  }
  return std::snprintf(
      text, size, "ring token_tiles=%d rows=%d chunks=%d token_groups=%d stages=%d", c.token_tiles,
      c.ring.rows, c.ring.chunks, c.ring.token_groups, c.ring.stages);
}

// Shared memory that a launch asks for: the stages, then the partial sums. A warp's last rows may
// lie past its box; their loads must stay within the allocation.
constexpr int64_t ring_shared_bytes(const RingShape& ring, int tokens, int a_chunks_per_chunk) {
  const int64_t stage = ring_w_bytes(ring.rows, ring.chunks) +
                        int64_t{kChunkBytes} * tokens * ring.chunks * a_chunks_per_chunk;
  const int64_t partials =
      int64_t{4} * ring.chunks * kSlicesPerChunk * ring.rows * partial_stride(tokens);
  const int64_t overrun = int64_t{kWarpRows} * ring.chunks * kChunkBytes;
  return kRingAlignment + ring.stages * stage + (partials > overrun ? partials : overrun);
}

// The ring for rows split over `waves` blocks an SM, one after another; no stages if none fits.
inline RingShape cut_ring(const GemmArgs& args, const DeviceFacts& device, int token_tiles,
                          int waves) {
  constexpr int kMinRows = 4;           // smaller boxes cost more to issue than to read
  constexpr int kInFlight = 100 << 10;  // half of it starves an SM; twice makes the last box late
  const int64_t blocks = static_cast<int64_t>(device.sm_count) * waves;
  const int64_t row_bytes = args.k * size_of(args.w_dtype);
  const int a_chunks = is_fp8(args.w_dtype) && !is_fp8(args.a_dtype) ? 2 : 1;

  RingShape ring;
  ring.token_groups = args.m <= 32 ? 1 : 2;
  ring.rows = static_cast<int>(std::max<int64_t>(kMinRows, (args.n + blocks - 1) / blocks));
  if (ring.rows > kMaxRingRows) return ring;

  // The widest box within 16 KB, but two chunks up to 128 rows: longer pieces of a row are kinder
  // to the memory (101 rows: 50 us with two chunks, 51 with one).
  ring.chunks = ring.rows > 128 ? 1 : ring.rows > 64 ? 2 : 8;
  while (ring.rows <= 64 && ring.chunks > 1 && ring_w_bytes(ring.rows, ring.chunks) > (16 << 10)) {
    ring.chunks /= 2;
  }
  // Short rows: at least eight boxes, or the multiplication of the last begins late (2048 x 2048 in
  // 16 bits: 5.3 us with four boxes, 4.4 with eight).
  if (ring.chunks == 8 && row_bytes < 8 * 8 * kChunkBytes) ring.chunks = 4;
  for (; ring.chunks > 0; ring.chunks /= 2) {
    if (ring.chunks * kChunkBytes > row_bytes || ring_consumers(ring) > kMaxConsumers) continue;
    const int box = ring.rows * ring.chunks * kChunkBytes;
    for (ring.stages = std::clamp((kInFlight + box / 2) / box, 3, kMaxStages); ring.stages > 1;
         --ring.stages) {
      const int tokens = token_tiles * ring.token_groups * 8;
      if (kStaticBytes + ring_shared_bytes(ring, tokens, a_chunks) <=
          device.shared_bytes_per_block) {
        ring.prefetch = kPrefetch;
        return ring;
      }
    }
  }
  ring.stages = 0;
  return ring;
}

// Tokens in a box of a: whole swizzle patterns.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_tokens(int64_t m) {
  return static_cast<int>((m + 7) / 8 * 8);
}

// Rows in a box of w. Two chunks lie one after the other, each of whole swizzle patterns; rows
// beyond the cluster's own are its neighbour's, and their sums are dropped.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_box_rows(const WarpgroupShape& shape) {
  return shape.chunks == 1 ? shape.rows : (shape.rows + 7) / 8 * 8;
}

// Slices of rows that a block of the cluster finishes.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_share(const WarpgroupShape& shape) {
  return ((shape.rows + kSliceRows - 1) / kSliceRows + shape.cluster - 1) / shape.cluster;
}

// Bytes of the stages; later, of the sums of warpgroups that deal K. The operands' last lines may
// lie past their boxes; their loads must stay within.
ROCM_KERNELS_HOST_DEVICE constexpr int warpgroup_ring_bytes(const WarpgroupShape& shape,
                                                            int64_t m) {
  const int tokens = warpgroup_tokens(m);
  const int box_rows = warpgroup_box_rows(shape);
  const int w_bytes = ring_w_bytes(box_rows, shape.chunks);
  const int w_overrun = (shape.row_groups * kGroupRows - box_rows) * kChunkBytes;
  const int a_overrun = (64 - tokens) * kChunkBytes - w_bytes;
  const int ring = shape.stages * (tokens * shape.chunks * kChunkBytes + w_bytes) +
                   (w_overrun > a_overrun ? w_overrun
                    : a_overrun > 0       ? a_overrun
                                          : 0);
  const int sums = shape.cluster > 1 || shape.row_groups == shape.groups
                       ? 0
                       : shape.groups / shape.row_groups * (shape.rows + kSliceRows) * tokens * 4;
  return (ring > sums ? ring : sums) / 16 * 16 + 16;
}

// Shared memory that a launch asks for: the above, and the sums that the cluster's blocks exchange.
// At least half of an SM's 228 KB: else two blocks start on an SM that the previous kernel leaves,
// while others idle (2304 x 16384, 32 tokens: 16.8 us against 13.0).
constexpr int64_t warpgroup_shared_bytes(const WarpgroupShape& shape, int64_t m) {
  constexpr int64_t kHalf = 114 << 10;
  const int64_t exchange = shape.cluster == 1
                               ? 0
                               : int64_t{4} * shape.cluster * (shape.groups / shape.row_groups) *
                                     warpgroup_share(shape) * kSliceRows * warpgroup_tokens(m);
  return std::max(kHalf, kRingAlignment + warpgroup_ring_bytes(shape, m) + exchange);
}

// No stages if the device holds no cluster that is wanted, or too little shared memory.
inline WarpgroupShape cut_warpgroup(const GemmArgs& args, const DeviceFacts& device) {
  // Below this many rows the tokens outweigh the weights: 64 tokens take 14.2 us with 78 rows and
  // clusters of four, 26.9 with 18 rows (2304 x 16384). More blocks in a cluster gain nothing, and
  // leave SMs idle.
  constexpr int kEnoughRows = 40;
  // Fewer starve an SM; more make the last boxes late.
  constexpr int kInFlight = 70 << 10;

  WarpgroupShape shape;
  int64_t rows = 0;
  for (int i = 0; i < 3 && rows < kEnoughRows && device.clusters[i] > 0; ++i) {
    shape.cluster = 1 << i;
    // In a cluster the sums of two warpgroups are less to exchange than those of four: 8.1 us
    // against 8.4 (4096 x 4096, 64 tokens).
    shape.groups = shape.cluster == 1 ? kMaxWarpgroups : 2;
    const int64_t all = int64_t{device.clusters[i]} * shape.groups * kGroupRows;
    const int64_t waves = (args.n + all - 1) / all;
    rows = (args.n + device.clusters[i] * waves - 1) / (device.clusters[i] * waves);
  }
  if (rows == 0) return shape;
  shape.rows = static_cast<int>((std::max<int64_t>(rows, kSliceRows) + 1) / 2 * 2);
  shape.row_groups = shape.rows <= kGroupRows ? 1 : shape.rows <= 2 * kGroupRows ? 2 : 4;
  // Two chunks of K to a box while it stays within 32 KB: fewer boxes, and longer pieces of a row.
  shape.chunks = shape.rows <= 128 && args.k >= 4 * kChunkBytes * shape.cluster ? 2 : 1;
  shape.prefetch = kPrefetch;
  const int k_groups = shape.groups / shape.row_groups;
  const int step = k_groups > shape.chunks ? k_groups / shape.chunks : 1;
  const int box = ring_w_bytes(warpgroup_box_rows(shape), shape.chunks);
  for (int stages = std::clamp((kInFlight + box / 2) / box, 3, 6); stages > 1; --stages) {
    shape.stages = (stages + step - 1) / step * step;
    if (shape.stages <= kMaxStages &&
        kStaticBytes + warpgroup_shared_bytes(shape, args.m) <= device.shared_bytes_per_block) {
      return shape;
    }
  }
  shape.stages = 0;
  return shape;
}

inline GemmConfig choose_gemm_config(const GemmArgs& args, const GemmAlignment& alignment,
                                     const DeviceFacts& device) {
  GemmConfig config;
  const bool fnuz =
      args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ;
  if (fnuz || args.k == 0 || !alignment.vectors) return config;

  config.kernel = GemmConfig::Kernel::kStream;
  config.token_tiles = args.m <= 8 ? 1 : args.m <= 16 ? 2 : 4;
  // One block fits an SM; rows for a second one are better taken by the first (4096 x 128 in 16
  // bits: 2.0 us against 3.4).
  config.stream_row_tiles = args.n > int64_t{16} * device.sm_count ? 2 : 1;

  // Up to 2 MB of weights are read before a ring is full: 128 x 128 in 16 bits takes 1.7 us
  // streamed, 2.8 through the ring.
  const bool small = args.n * args.k * size_of(args.w_dtype) <= (2 << 20);
  const bool block_scales =
      args.scale_a.kind == ScaleView::Kind::kBlock || args.scale_w.kind == ScaleView::Kind::kBlock;
  if (device.compute_capability < 90 || !alignment.chunks || small ||
      (block_scales && !is_fp8(args.w_dtype))) {
    return config;
  }
  // mma.sync widens and multiplies in registers: up to 16 tokens that hides behind the weights.
  if (device.compute_capability == 90 && args.m > 16 && is_fp8(args.a_dtype) && !block_scales &&
      args.out_dtype != DType::kFloat32) {
    config.warpgroup = cut_warpgroup(args, device);
    if (config.warpgroup.stages > 0) {
      config.kernel = GemmConfig::Kernel::kWarpgroup;
      return config;
    }
  }
  const int64_t rows_a_wave = int64_t{device.sm_count} * kMaxRingRows / (args.m <= 32 ? 1 : 2);
  const int waves = static_cast<int>((args.n + rows_a_wave - 1) / rows_a_wave);
  for (const int times : {waves, waves + 1, 2 * waves, 4 * waves}) {
    config.ring = cut_ring(args, device, config.token_tiles, times);
    if (config.ring.stages > 0) {
      config.kernel = GemmConfig::Kernel::kRing;
      break;
    }
  }
  return config;
}

}  // namespace cuda
}  // namespace rocm_kernels
