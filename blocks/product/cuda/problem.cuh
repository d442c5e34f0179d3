// The warpgroup kernel's arguments, the sizes that it is compiled for, and what its warps pass each
// other for a unit of work.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../../../common/cuda/async_copy.cuh"
#include "../../../common/cuda/mbarrier.cuh"
#include "../../../common/cuda/shared_memory.cuh"
#include "../../../common/cuda/tma.cuh"
#include "../../../common/cuda/wgmma.cuh"
#include "../../../common/gpu/cluster.h"
#include "../../../common/gpu/dependent_launch.h"
#include "../args.h"
#include "schedule.h"
#include "shape.h"

namespace rocm_kernels {
namespace cuda {

struct WarpgroupProblem {
  TileSchedule schedule;
  int32_t tiles_r = 0;  // of the product, in pairs where a cluster takes two
  int32_t tiles_c = 0;
  int32_t group_m = 1;  // tiles of rows that consecutive tiles go through before the next columns
  int32_t rows = 0, columns = 0;
  int32_t num_stages = 0;
  int32_t narrow_stages = 0;  // of weights that are widened
  int32_t cluster = 1;
  bool share_rows = false;  // the blocks of a cluster share the rows operand, else the columns
  int32_t rows_box = 0, columns_box = 0;  // rows that one copy brings; two of what is shared
  L2Policy rows_policy = L2Policy::kNoHint, columns_policy = L2Policy::kNoHint;
  bool wide_stores = false;  // rows of out are aligned vectors of 16 bytes, of 16-bit elements

  // Boxes of kStagedRows x staged_columns(), of bytes, or of elements if it adds; see
  // dense_sink.cuh.
  CUtensorMap out_map = {};
  bool adds = false;  // to what out holds, rounded once more; with wide_stores
  void* out = nullptr;
  int64_t out_stride = 0;
  DType out_dtype = DType::kBFloat16, bias_dtype = DType::kBFloat16;
  const void* bias = nullptr;
  ScaleView scale_a, scale_w;

  uint64_t* flags = nullptr;  // [shared tile][rank][warpgroup][owner of steps][contributor]
  float* partials = nullptr;  // [slot][rank][warpgroup][step][4][thread] float4
  uint64_t launch = 0;        // names this launch in the flags, never 0
};

// What one instance of the kernel is compiled for.
template <DType kElementType, bool kSwapsAb, int kWaveCount, int kColumnCount, bool kBlocks,
          int kChainLength, bool kPairedRows = false, DType kWeightType = kElementType>
struct WarpgroupTile {
  static constexpr DType kType = kElementType;  // of a, and of what is multiplied
  static constexpr DType kWType = kWeightType;
  static constexpr bool kWidened = kWType != kType;  // w on its way: widen.cuh
  static constexpr bool kSwapAb = kSwapsAb;          // w is the 64-row operand: rows are w's
  static constexpr int kWaves = kWaveCount;          // of 64 rows, in a warpgroup
  static constexpr int kColumns = kColumnCount;
  static constexpr bool kBlockScales = kBlocks;
  // Each 128 rows of w of a tile are 64 that belong to 64 others: gates and ups of experts.
  static constexpr bool kPaired = kPairedRows;
  static constexpr int kChain =
      kChainLength;  // instructions that add up in the tensor core; 0: all
  static constexpr int kGroupRows = kWaves * kWgmmaRows;  // of a warpgroup
  static constexpr int kRows = kGroupRows * kMathGroups;
  // Sets of registers for products: a second one where the sums leave room, less of which is needed
  // for the longer code of two sums a chunk, and by 128 tokens whose block scales are columns'. A
  // third kind of warps leaves none.
  static constexpr bool kFewRegisters = kChain == 2 || (kBlocks && kSwapAb);
  static constexpr int kParts =
      !kWidened && (kWaves + 2) * kColumns <= (kFewRegisters ? 352 : 384) ? 2 : 1;
  static constexpr int kStageBytes = (kRows + kColumns) * kChunkBytes;
  static constexpr int kTileRowsOfW = kSwapAb ? kRows : kColumns;
  // Two warpgroups widen where the sums leave them registers: FP8 in turns, a stage each. MXFP4
  // together, for a row's scales are then looked up by one thread and not by two.
  static constexpr int kSums = kWaves * kColumns / 2 + (kChain == 0 ? 0 : kColumns / 2);
  static constexpr int kWidenGroups = !kWidened ? 0 : kSums <= 96 ? 2 : 1;
  static constexpr int kWidenTurns = is_fp8(kWType) ? kWidenGroups : 1;
  static constexpr int kWidenWarps = kWidenGroups * (kWidenThreads / 32);
  static constexpr int kThreads = kWarpgroupThreads + kWidenGroups * kWidenThreads;
  // Of a thread that multiplies, fetches, widens: together no more than an SM's 65536.
  static constexpr int kMathRegisters = !kWidened ? 232 : kWidenGroups == 1 ? 192 : 144;
  static constexpr int kFetchRegisters = !kWidened ? 40 : kWidenGroups == 1 ? 56 : 48;
  static constexpr int kWidenRegisters = 72;
  static constexpr int kWRowBytes = kWidened ? narrow_row_bytes(kType, kWType) : kChunkBytes;
  static constexpr int kNarrowBytes = kWidened ? kTileRowsOfW * kWRowBytes : 0;  // of a stage
  static constexpr int kWarpScaleBytes =
      kBlockScales ? warp_scale_bytes(kRows, kColumns, kSwapAb, kPaired) : 0;
  static constexpr int kChunksOfBlock =
      kScaleBlock * static_cast<int>(size_of(kType)) / kChunkBytes;
  static constexpr int kColumnTiles = kColumns / 8;
  // A step of a Sink: the columns that a warp finishes together.
  static constexpr int kStepTiles = kColumnTiles < 4 ? kColumnTiles : 4;
  static constexpr int kColumnSteps = kColumnTiles / kStepTiles;
  static constexpr int kSteps = kWaves * kColumnSteps;
  // Boxes of outputs, the steps of one, and those that a warp can have on their way.
  static constexpr int kBoxSteps = staged_columns(kColumns) / 32;
  static constexpr int kStagedBoxes =
      staged_boxes(kRows, kColumns, is_fp8(kType), kWarpScaleBytes, kWidened);
  // What the launcher takes an instance of FP8 operands for; it asks for two sums of a chunk where
  // out is float16.
  static constexpr bool kOutIsKnown = is_fp8(kType);
  static constexpr DType kKnownOut = kChain == 2 ? DType::kFloat16 : DType::kBFloat16;
  static constexpr int kWarpStaging =
      warp_staging_bytes(kRows, kColumns, kSwapAb, is_fp8(kType), kWarpScaleBytes, kWidened);
  // Columns that surely lie in one block of 128 of w.
  static constexpr int kScaleGroup = kSwapAb ? kColumns : columns_of_block(kColumns, kPaired);
  static constexpr int kScaleGroups = kColumns / kScaleGroup;
  // Of w, as rows or as columns: rows that share a block, such groups in a tile, and of these the
  // ones that a thread multiplies.
  static constexpr int kWGroup = !kSwapAb ? kScaleGroup : kPaired ? 64 : 128;
  static constexpr int kWGroups = kSwapAb ? kRows / kWGroup : kScaleGroups;
  static constexpr int kWScales = !kSwapAb ? kScaleGroups : kPaired ? kWaves : 1;
  static_assert(!kPaired || (kSwapAb ? kWaves == 2 : kColumns == 128), "");
  static_assert(kColumns % kScaleGroup == 0 && kColumnTiles % kStepTiles == 0, "");
};

// Bits of out[m, n] and whatever else 16-bit outputs need.
__device__ __forceinline__ uint32_t pack_pair(DType dtype, float low, float high) {
  if (dtype == DType::kFloat16) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float load_bias(const void* bias, DType dtype, int64_t n) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(bias)[n];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(bias)[n]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[n]);
}

// body(0), body(1), ... as constants, so that sums stay in registers.
template <int kCount, int kFirst = 0, class Body>
__device__ __forceinline__ void for_each_step(const Body& body) {
  if constexpr (kFirst < kCount) {
    body(std::integral_constant<int, kFirst>());
    for_each_step<kCount, kFirst + 1>(body);
  }
}

// Where a tile lies: consecutive tiles go down `group_m` tiles of rows, then to the next columns.
__device__ __forceinline__ int2 place_of_tile(const WarpgroupProblem& p, int tile) {
  const int per_group = p.group_m * p.tiles_c;
  const int group = tile / per_group;
  const int first = group * p.group_m;
  const int height = min(p.group_m, p.tiles_r - first);
  const int rest = tile - group * per_group;
  return make_int2(first + rest % height, rest / height);
}

constexpr int kBiases = kMaxRows > kMaxColumns ? kMaxRows : kMaxColumns;

// A unit as the multiplying warps need it, put in shared memory by the warp that looks it up: what
// they keep in registers beside the sums is spilled.
struct UnitInfo {
  int32_t chunks;  // of K; 0: no more units
  int32_t first_chunk;
  int32_t first_row, first_column;
  int32_t own_row, own_column, end_row, end_column;
  int32_t contributor, contributors;
  int32_t shared_tile;                         // counts the tiles that several workers share
  int32_t first_slot, other_slots, slot_step;  // of the contributors' partial sums
  int32_t last;                                // of this worker
  int32_t zero;                                // 0, which the compiler does not know
  const float* w_scales[kMaxScaleGroups];      // of groups of rows of w: where their blocks' are
  alignas(16) float row_factor[kMaxRows], column_factor[kMaxColumns];
  float bias[kBiases];  // of n, be it rows or columns; 0 where there is none

  __device__ int slot(int of) const { return of == 0 ? first_slot : other_slots + of * slot_step; }
};

// A warpgroup's part of a unit, whose sums a Sink takes.
struct UnitPart {
  const UnitInfo& unit;
  const int32_t* places;  // [Sink::kPlaces]: the row of out for each row of a of the tile, -1: none
  int group, thread;      // the warpgroup, and the thread in it
  uint8_t* staging;       // the warp's own shared memory, Sink::warp_staging() bytes
  int& shared_word;       // the warpgroup's
};

}  // namespace cuda
}  // namespace rocm_kernels
