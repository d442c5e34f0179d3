// The Sink (blocks/product/sink.h) of grouped products on the warpgroup kernel: scales and bias,
// the activation, perhaps h's quantisation, and the stores. sm_90a.
//
// clang-format off
//   value = sum * scale_a * scale_w + bias
//   gate_up   h[row, i] = act(gate value, up value), as it is or as FP8 by groups    [rows, I]
//   down      out[place of row, n] = value, float32                                  [slots, H]
//   grouped   out[row, n] = value                                                    [rows, N]
//
// finish() picks one of four functions:
//   finish_groups   h as FP8: a row's greatest goes to the cluster's other block, and its own comes
//                   (a barrier for each warp); then the scale, the codes, 16 bytes a lane
//   finish_h        h as it is, by elements or pairs
//   stage_rows      rows of float32 by way of shared memory and TMA; end() waits for it
//   finish_rows     rows by elements or pairs
// clang-format on
//
// gate_up: a thread has the gate and the up of its columns (grouped_tiles.cuh). Where a is the
// 64-row operand two blocks of a cluster, which share rows of a, have 128 columns of h: if these
// have a scale of their own, the blocks tell each other each row's greatest magnitude, and h leaves
// as FP8.
#pragma once

#include "../../blocks/product/cuda/problem.cuh"
#include "../../blocks/product/sink.h"
#include "../../blocks/rows/gpu/quantize.h"
#include "../gpu/problem.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda::moe {

struct GroupedTilesProblem {
  GroupedProblem product;
  int32_t tiles_n = 0;  // in pairs where a cluster takes two
  int32_t walked = 0;   // tiles of rows before the next columns; 0: all; not by groups
  int32_t chunks = 0;   // of K
  int32_t workers = 1;

  // What the kernel asks of any problem; see WarpgroupProblem.
  int32_t num_stages = 0;
  int32_t narrow_stages = 0;
  int32_t cluster = 1;
  bool share_rows = true;  // a
  int32_t rows_box = 0, columns_box = 0;
  int32_t warp_staging = 0;     // bytes; 0: threads store
  bool even_exponents = false;  // MXFP4's rows of scales begin at even bytes
  L2Policy rows_policy = L2Policy::kNoHint, columns_policy = L2Policy::kNoHint;
  ScaleView scale_a;
};

template <class Tile, bool kGateUp>
class GroupedSink {
 public:
  static constexpr int kTileM = Tile::kSwapAb ? Tile::kColumns : Tile::kRows;  // rows of a
  static constexpr int kBoxRows = 128;                                         // of w
  // Rows whose sums go to places of their own; those of h lie as they are.
  static constexpr int kPlaces = kGateUp ? 0 : kTileM;
  __device__ __forceinline__ static int warp_staging(const GroupedTilesProblem& p) {
    return p.warp_staging;
  }
  // Whether h can leave as FP8 (ends_in_groups() of MoeConfig).
  static constexpr bool kEndsInGroups = kGateUp && is_fp8(Tile::kType) && !Tile::kSwapAb;

  // What the cluster's other block has found in this one's rows: of two tiles, for a warp may be
  // one ahead of the other block's.
  struct Exchange {
    uint64_t barriers[2][kMathGroups * 4];
    float greatest[2][kTileM];
    int finished[kMathGroups * 4];  // tiles of each warp; a register more would be spilled
  };
  struct Nothing {};
  using Shared = std::conditional_t<kEndsInGroups, Exchange, Nothing>;
  __device__ __forceinline__ static void init(Shared& shared) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kEndsInGroups) {
      for (int warp = 0; warp < kMathGroups * 4; ++warp) {
        mbarrier_init(shared_address(&shared.barriers[0][warp]), 1);
        mbarrier_init(shared_address(&shared.barriers[1][warp]), 1);
        shared.finished[warp] = 0;
      }
    }
#endif
  }

  __device__ __forceinline__ GroupedSink(const GroupedTilesProblem& all, int rank, Shared& shared)
      : all_(all), p_(all.product), rank_(rank), shared_(shared) {}

  // Sums of a short K go out by TMA, for its tiles are mostly their ends; else each
  // thread stores what it has. What a path knows when it is
  // compiled (the activation, how it stores) is told apart here, once a tile: asked at each element
  // it was 36 instructions of an element's 40.
  __device__ __forceinline__ void finish(const UnitPart& part,
                                         const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
    const UnitInfo& unit = part.unit;
    const int32_t* const places = part.places;
    const int group = part.group, thread = part.thread;
    if constexpr (kGateUp) {
      with_activation(p_.activation, [&](auto activation) {
        constexpr GatedActivation kActivation = decltype(activation)::value;
        if constexpr (kEndsInGroups) {
          if (p_.out_scales != nullptr) {
            return finish_groups<kActivation>(unit, group, thread, sums);
          }
        }
        if (p_.wide_stores) {
          finish_h<kActivation, true>(unit, group, thread, sums);
        } else {
          finish_h<kActivation, false>(unit, group, thread, sums);
        }
      });
    } else if (p_.out_dtype != DType::kFloat32) {
      if (p_.wide_stores) {
        finish_rows<uint16_t, true>(unit, places, group, thread, sums);
      } else {
        finish_rows<uint16_t, false>(unit, places, group, thread, sums);
      }
    } else if (all_.warp_staging > 0) {
      if constexpr (!Tile::kSwapAb) stage_rows(unit, places, group, thread, part.staging, sums);
    } else if (p_.wide_stores) {
      finish_rows<float, true>(unit, places, group, thread, sums);
    } else {
      finish_rows<float, false>(unit, places, group, thread, sums);
    }
  }
  // TMA has stored all rows of this warp.
  __device__ __forceinline__ void end() const {
#if __CUDA_ARCH__ >= 900
    if (all_.warp_staging > 0) wait_for_stores();
#endif
  }

 private:
  static constexpr int kStagedColumns = kMoeStagedColumns;
  // h is what down multiplies, or float32 that will be quantised.
  using HElement = std::conditional_t<is_fp8(Tile::kType), float, uint16_t>;

  // Elements `at` of out and the next, whichever of the two lie before `left`. kWide: both or none.
  template <class Element, bool kWide>
  __device__ __forceinline__ void store_pair_of_row(Element* at, int left, float low,
                                                    float high) const {
    if constexpr (!kWide) {
      if (left >= 1) store_one(at, low);
      if (left >= 2) store_one(at + 1, high);
    } else if constexpr (sizeof(Element) == 4) {
      if (left >= 2) *reinterpret_cast<float2*>(at) = make_float2(low, high);
    } else {
      if (left >= 2) *reinterpret_cast<uint32_t*>(at) = pack_pair(p_.out_dtype, low, high);
    }
  }
  __device__ __forceinline__ void store_one(float* at, float value) const { *at = value; }
  __device__ __forceinline__ void store_one(uint16_t* at, float value) const {
    store_element(at, p_.out_dtype, 0, value);
  }

  template <GatedActivation kActivation, bool kWide>
  __device__ __forceinline__ void finish_h(
      const UnitInfo& unit, int group, int thread,
      const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) const {
    constexpr int kUp = kBoxRows / 2;  // from a gate to its up
    const int lane = thread % 32, quad = lane % 4;
    const int warp_row = thread / 32 * 16 + lane / 4;  // of a wave
    const int columns = p_.n / 2;
    HElement* const out = static_cast<HElement*>(p_.out);
    if constexpr (Tile::kSwapAb) {
      const int place = group * kBoxRows + warp_row;  // of the gate
      const int column = unit.first_row / 2 + group * kUp + warp_row;
      float factor[2][2], bias[2][2];  // [8 rows further][gate, up]
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        factor[i / 2][i % 2] = unit.row_factor[place + i / 2 * 8 + i % 2 * kUp];
        bias[i / 2][i % 2] = unit.bias[place + i / 2 * 8 + i % 2 * kUp];
      }
#pragma unroll
      for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int m = tile * 8 + quad * 2 + e, row = unit.first_column + m;
          if (row >= unit.end_column) continue;
          const float of_a = unit.column_factor[m];
          HElement* const at = out + row * p_.out_stride + column;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float gate = sums[0][tile][half * 2 + e] * of_a * factor[half][0] + bias[half][0];
            const float up = sums[1][tile][half * 2 + e] * of_a * factor[half][1] + bias[half][1];
            if (column + half * 8 < columns) {
              store_one(at + half * 8, gated(kActivation, p_.limit, gate, up));
            }
          }
        }
      }
    } else {
      HElement* starts[kRowsOfThread];
      bool is_there[kRowsOfThread];
      const int first = unit.first_column / 2 + quad * 2;
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        const int row = row_of_thread(unit, group, thread, i);
        is_there[i] = row < unit.end_row;
        starts[i] = out + row * p_.out_stride + first;
      }
      for_each_pair_of_h<kActivation>(
          unit, group, thread, sums, [&](int i, int tile, float low, float high) {
            if (!is_there[i]) return;
            store_pair_of_row<HElement, kWide>(starts[i] + tile * 8, columns - first - tile * 8,
                                               low, high);
          });
    }
  }

  static constexpr float kLargestFp8 = fp8_max(DType::kFloat8E4M3FN);
  // The rows of a tile of which a thread has columns, where a is the 64-row operand.
  static constexpr int kRowsOfThread = Tile::kWaves * 2;
  __device__ __forceinline__ static int place_of_thread(int group, int thread, int i) {
    return (group * Tile::kWaves + i / 2) * kWgmmaRows + thread / 32 * 16 + thread % 32 / 4 +
           i % 2 * 8;
  }
  __device__ __forceinline__ static int row_of_thread(const UnitInfo& unit, int group, int thread,
                                                      int i) {
    return unit.first_row + place_of_thread(group, thread, i);
  }

  // Calls use(i, tile, low, high) with what h has in the thread's row i, in columns 8 * tile + 2 *
  // (lane % 4) of the tile's and the next.
  template <GatedActivation kActivation, class Use>
  __device__ __forceinline__ void for_each_pair_of_h(
      const UnitInfo& unit, int group, int thread,
      const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4], const Use& use) const {
    constexpr int kUp = kBoxRows / 2;  // from a gate to its up
    float of_a[kRowsOfThread];
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      of_a[i] = unit.row_factor[place_of_thread(group, thread, i)];
    }
#pragma unroll
    for (int tile = 0; tile < Tile::kColumnTiles / 2; ++tile) {
      const int place = tile * 8 + thread % 4 * 2;
      float factor[2][2], bias[2][2];  // [gate, up][neighbour]
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        factor[i / 2][i % 2] = unit.column_factor[place + i / 2 * kUp + i % 2];
        bias[i / 2][i % 2] = unit.bias[place + i / 2 * kUp + i % 2];
      }
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        const int wave = i / 2, half = i % 2;
        float h[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float gate = sums[wave][tile][half * 2 + e] * of_a[i] * factor[0][e] + bias[0][e];
          const float up =
              sums[wave][tile + kUp / 8][half * 2 + e] * of_a[i] * factor[1][e] + bias[1][e];
          h[e] = gated(kActivation, p_.limit, gate, up);
        }
        use(i, tile, h[0], h[1]);
      }
    }
  }

  // h as FP8, with one scale for each 128 columns of a row: 64 are this block's, 64 the other's of
  // the cluster. Rows of h are multiples of 16 columns.
  template <GatedActivation kActivation>
  __device__ __forceinline__ void finish_groups(
      const UnitInfo& unit, int group, int thread,
      const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
#if __CUDA_ARCH__ >= 900
    constexpr int kTiles = Tile::kColumnTiles / 2;
    const int lane = thread % 32, quad = lane % 4, warp = group * 4 + thread / 32;
    const int columns = p_.n / 2, first = unit.first_column / 2;
    float h[kRowsOfThread][kTiles][2], greatest[kRowsOfThread] = {};
    for_each_pair_of_h<kActivation>(
        unit, group, thread, sums, [&](int i, int tile, float low, float high) {
          // Columns beyond h: their factors and biases are 0, but swigluoai makes no 0 of them.
          const bool is_there = first + tile * 8 < columns;
          h[i][tile][0] = is_there ? low : 0.0f;
          h[i][tile][1] = is_there ? high : 0.0f;
          greatest[i] = fmaxf(greatest[i], fmaxf(fabsf(h[i][tile][0]), fabsf(h[i][tile][1])));
        });

    const int finished = shared_.finished[warp];
    const int buffer = finished % 2, parity = finished / 2 % 2;
    const uint32_t barrier = shared_address(&shared_.barriers[buffer][warp]);
    __syncwarp();
    if (lane == 0) {
      shared_.finished[warp] = finished + 1;
      mbarrier_arrive_expect(barrier, kRowsOfThread * 8 * sizeof(float));
    }
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      greatest[i] = fmaxf(greatest[i], __shfl_xor_sync(~0u, greatest[i], 1));
      greatest[i] = fmaxf(greatest[i], __shfl_xor_sync(~0u, greatest[i], 2));
      if (quad == 0) {
        store_async_in_cluster(
            shared_address(&shared_.greatest[buffer][place_of_thread(group, thread, i)]),
            greatest[i], barrier, rank_ ^ 1);
      }
    }
    mbarrier_wait_for_cluster(barrier, parity);

#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = row_of_thread(unit, group, thread, i);
      const float amax =
          fmaxf(greatest[i], shared_.greatest[buffer][place_of_thread(group, thread, i)]);
      const float scale = p_.scale_rounding(fmaxf(fminf(amax, FLT_MAX) / kLargestFp8, kMinScale));
      const float inverse = 1.0f / scale;
      uint32_t codes[4];  // of tiles 2 j and 2 j + 1
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        codes[j] =
            fp8x4_from_float<false>(h[i][2 * j][0] * inverse, h[i][2 * j][1] * inverse,
                                    h[i][2 * j + 1][0] * inverse, h[i][2 * j + 1][1] * inverse);
      }
      // Each of the row's four lanes gets two tiles whole: 16 columns.
      transpose_of_quad(codes, quad);
      if (row >= unit.end_row) continue;
      const int column = first + quad * 16;
      if (column < columns) {
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p_.out) + row * p_.out_stride + column) =
            make_uint4(
                __byte_perm(codes[0], codes[1], 0x5410), __byte_perm(codes[2], codes[3], 0x5410),
                __byte_perm(codes[0], codes[1], 0x7632), __byte_perm(codes[2], codes[3], 0x7632));
      }
      if (quad == 0 && rank_ == 0) {
        const int groups = (columns + static_cast<int>(kScaleBlock) - 1) / kScaleBlock;
        p_.out_scales[static_cast<int64_t>(row) * groups + first / kScaleBlock] = scale;
      }
    }
#endif
  }

  // Lane i of four neighbours, and word j of its own, change places.
  __device__ __forceinline__ static void transpose_of_quad(uint32_t (&words)[4], int quad) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool is_upper = quad & distance;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & distance) continue;
        const uint32_t sent = is_upper ? words[j] : words[j + distance];
        const uint32_t received = __shfl_xor_sync(~0u, sent, distance);
        words[j] = is_upper ? received : words[j];
        words[j + distance] = is_upper ? words[j + distance] : received;
      }
    }
  }

  // Rows of float32 by way of the warp's staging: 16 rows x kStagedColumns at a time, each row then
  // one copy of whole lines. Stored from registers, 8 rows x 32 bytes an instruction, the queue of
  // stores was what a tile's end waited for: 4.7 us a tile of 128 x 128 on an H200.
  // store(wave, first tile of columns, values of 8 tiles) is called with what lanes hold of a step.
  class StagedRows {
   public:
    // `start`: where row `lane` of the 16 begins in out, its `left` first columns; lanes below 16.
    __device__ __forceinline__ StagedRows(uint8_t* staging, int thread, int& step)
        : staging_(staging), lane_(thread % 32), step_(step) {}

    __device__ __forceinline__ void store(float* start, int left,
                                          const float (&values)[kStagedColumns / 8][4]) {
#if __CUDA_ARCH__ >= 900
      uint8_t* const buffer = staging_ + step_ % kBuffers * kMoeStagedBytes;
      ++step_;
      if (lane_ < 16) wait_for_reads_of_stores<kBuffers - 1>();
      __syncwarp();
      float2* const at =
          reinterpret_cast<float2*>(buffer + lane_ / 4 * kMoeStagedPitch) + lane_ % 4;
#pragma unroll
      for (int i = 0; i < kStagedColumns / 8; ++i) {
        at[i * 4] = make_float2(values[i][0], values[i][1]);
        at[i * 4 + kMoeStagedPitch] = make_float2(values[i][2], values[i][3]);  // 8 rows further
      }
      fence_async_proxy();
      __syncwarp();
      if (lane_ < 16) {
        const int columns = min(left, kStagedColumns);
        if (start != nullptr && columns > 0) {
          store_bulk(start, shared_address(buffer + lane_ * kMoeStagedPitch), columns * 4);
        }
        commit_stores();
      }
#endif
    }

   private:
    static constexpr int kBuffers = moe_staging_buffers(Tile::kWaves);
    uint8_t* const staging_;
    const int lane_;
    int& step_;
  };

  __device__ __forceinline__ void stage_rows(
      const UnitInfo& unit, const int32_t* places, int group, int thread, uint8_t* staging,
      const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
    const int lane = thread % 32, quad = lane % 4, warp_row = thread / 32 * 16;
    StagedRows rows(staging, thread, staged_);
#pragma unroll
    for (int wave = 0; wave < Tile::kWaves; ++wave) {
      const int first_m = (group * Tile::kWaves + wave) * kWgmmaRows + warp_row;
      const int32_t place = lane < 16 ? places[first_m + lane] : -1;
      float* const start =
          place >= 0 ? static_cast<float*>(p_.out) + place * p_.out_stride + unit.first_column
                     : nullptr;
#pragma unroll
      for (int step = 0; step < Tile::kColumns / kStagedColumns; ++step) {
        float values[kStagedColumns / 8][4];
#pragma unroll
        for (int tile = 0; tile < kStagedColumns / 8; ++tile) {
          const int column = step * kStagedColumns + tile * 8 + quad * 2;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            values[tile][j] = sums[wave][step * (kStagedColumns / 8) + tile][j] *
                                  unit.row_factor[first_m + lane / 4 + j / 2 * 8] *
                                  unit.column_factor[column + j % 2] +
                              unit.bias[column + j % 2];
          }
        }
        const int further = step * kStagedColumns;
        rows.store(start == nullptr ? nullptr : start + further,
                   unit.end_column - unit.first_column - further, values);
      }
    }
  }

  template <class Element, bool kWide>
  __device__ __forceinline__ void finish_rows(
      const UnitInfo& unit, const int32_t* places, int group, int thread,
      const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) const {
    const int lane = thread % 32, quad = lane % 4;
    const int warp_row = group * Tile::kWaves * kWgmmaRows + thread / 32 * 16 + lane / 4;
    Element* const out = static_cast<Element*>(p_.out);
    if constexpr (Tile::kSwapAb) {
      constexpr int kPlaces = Tile::kWaves * 2;
      const int n = unit.first_row + warp_row;
      float factor[kPlaces], bias[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        factor[i] = unit.row_factor[warp_row + i / 2 * kWgmmaRows + i % 2 * 8];
        bias[i] = unit.bias[warp_row + i / 2 * kWgmmaRows + i % 2 * 8];
      }
      Element* starts[Tile::kColumnTiles][2];
#pragma unroll
      for (int i = 0; i < Tile::kColumnTiles * 2; ++i) {
        const int32_t place = places[i / 2 * 8 + quad * 2 + i % 2];
        starts[i / 2][i % 2] = place >= 0 ? out + place * p_.out_stride + n : nullptr;
      }
#pragma unroll
      for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (starts[tile][e] == nullptr) continue;
          const float of_a = unit.column_factor[tile * 8 + quad * 2 + e];
#pragma unroll
          for (int i = 0; i < kPlaces; ++i) {
            const int further = i / 2 * kWgmmaRows + i % 2 * 8;
            if (n + further >= unit.end_row) continue;
            store_one(starts[tile][e] + further,
                      sums[i / 2][tile][i % 2 * 2 + e] * of_a * factor[i] + bias[i]);
          }
        }
      }
    } else {
      constexpr int kPlaces = Tile::kWaves * 2;
      const int n = unit.first_column + quad * 2;
      float of_a[kPlaces];
      Element* starts[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        const int m = warp_row + i / 2 * kWgmmaRows + i % 2 * 8;
        of_a[i] = unit.row_factor[m];
        starts[i] = places[m] >= 0 ? out + places[m] * p_.out_stride + n : nullptr;
      }
#pragma unroll
      for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
        const int place = tile * 8 + quad * 2;
        const float factor[2] = {unit.column_factor[place], unit.column_factor[place + 1]};
        const float bias[2] = {unit.bias[place], unit.bias[place + 1]};
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          if (starts[i] == nullptr) continue;
          const float (&sum)[4] = sums[i / 2][tile];
          store_pair_of_row<Element, kWide>(starts[i] + tile * 8, unit.end_column - n - tile * 8,
                                            sum[i % 2 * 2] * of_a[i] * factor[0] + bias[0],
                                            sum[i % 2 * 2 + 1] * of_a[i] * factor[1] + bias[1]);
        }
      }
    }
  }

  const GroupedTilesProblem& all_;
  const GroupedProblem& p_;
  const int rank_;
  Shared& shared_;
  int staged_ = 0;  // steps that went through this warp's staging
};

}  // namespace cuda::moe
}  // namespace rocm_kernels
