// The tiles of grouped products for gemm's warpgroup kernel (gemm/cuda/warpgroup.cuh), which asks
// this class where a tile lies and what its end is. sm_90a.
//
//   a: rows in the order of experts, as routing.h has them         tile: rows of one expert
//   w: one map of all experts, [K bytes, rows, 2, E] or [K bytes, rows, 1, E]
//
// gate_up: each 128 rows of w of a tile are the gates of 64 columns of h, then their ups. As
// columns they are the halves of a tile of 128; as rows, the two waves of a warpgroup. So each
// thread has the gate and the up of its columns.
#pragma once

#include "../../gemm/cuda/warpgroup.cuh"
#include "../../gemm/schedule.h"
#include "../gpu/problem.h"

namespace rocm_kernels {
namespace cuda {

struct GroupedTilesProblem {
  GroupedProblem product;
  int32_t tiles_n = 0;  // in pairs where a cluster takes two
  int32_t walked = 0;   // tiles of rows before the next columns; 0: all
  int32_t chunks = 0;   // of K
  int32_t workers = 1;

  // What the kernel asks of any problem; see WarpgroupProblem.
  int32_t num_stages = 0;
  int32_t cluster = 1;
  bool share_rows = true;  // a
  L2Policy rows_policy = L2Policy::kEvictNormal, columns_policy = L2Policy::kEvictNormal;
  bool wide_scale_a = false, wide_scale_w = false;
  ScaleView scale_a;
};

struct GroupedPlace : TilePlace {
  int32_t expert;
};

template <class Tile, bool kGateUp>
class GroupedTiles {
 public:
  using Problem = GroupedTilesProblem;
  using Place = GroupedPlace;
  static constexpr bool kCountedOnDevice = true;
  static constexpr int kTileM = Tile::kSwapped ? Tile::kColumns : Tile::kRows;  // rows of a
  static constexpr int kTileN = Tile::kSwapped ? Tile::kRows : Tile::kColumns;  // rows of w
  static constexpr int kBoxRows = 128;                                          // of w
  static_assert(kTileN % kBoxRows == 0 && Tile::kPaired == kGateUp, "");

  __device__ __forceinline__ GroupedTiles(const Problem& all, int rank)
      : all_(all), p_(all.product), rank_(rank) {}

  // After wait_for_previous_kernel().
  __device__ __forceinline__ TileSchedule schedule() {
    tiles_m_ = *p_.tile_count;
    const int tiles = tiles_m_ * all_.tiles_n;
    return TileSchedule::make(tiles, all_.chunks, tiles, 1, all_.workers);
  }

  __device__ __forceinline__ Place place_of(int tile) const {
    const int height = all_.walked == 0 || all_.walked > tiles_m_ ? tiles_m_ : all_.walked;
    const TileOrder::Place place = TileOrder{tiles_m_, all_.tiles_n, height}.place_of(tile);
    const RowTile rows = p_.tiles[place.m];
    const int first_n = (place.n * all_.cluster + rank_) * kTileN;
    Place found;
    found.first_row = Tile::kSwapped ? first_n : rows.begin;
    found.first_column = Tile::kSwapped ? rows.begin : first_n;
    found.end_row = Tile::kSwapped ? p_.n : rows.end;
    found.end_column = Tile::kSwapped ? rows.end : p_.n;
    found.expert = rows.expert;
    return found;
  }

  __device__ __forceinline__ void load(const CUtensorMap& map, bool is_w, const Place& place, int x,
                                       int row, uint32_t to, uint32_t barrier,
                                       uint64_t policy) const {
#if __CUDA_ARCH__ >= 900
    if (!is_w) return load_box_2d(map, x, row, to, barrier, policy);
#pragma unroll
    for (int i = 0; i < kTileN / kBoxRows; ++i) {
      const int first = kGateUp ? row / 2 + i * (kBoxRows / 2) : row + i * kBoxRows;
      load_box_4d(map, x, first, 0, place.expert, to + i * kBoxRows * kChunkBytes, barrier, policy);
    }
#endif
  }

  __device__ __forceinline__ ScaleView scale_w(const Place& place) const {
    return p_.w.scale_of(place.expert);
  }
  __device__ __forceinline__ int w_row_of_group(const Place& place, int group, int size) const {
    return w_row(place, group * size);
  }
  __device__ __forceinline__ float a_factor(const Place& place, int i) const {
    const int row = (Tile::kSwapped ? place.first_column : place.first_row) + i;
    return row < (Tile::kSwapped ? place.end_column : place.end_row) ? p_.scale_a.outer(row) : 0.0f;
  }
  __device__ __forceinline__ float w_factor(const Place& place, int i) const {
    const int row = w_row(place, i);
    return row >= 0 ? scale_w(place).outer(row) : 0.0f;
  }
  __device__ __forceinline__ float bias(const Place& place, int i) const {
    const int row = w_row(place, i);
    return row >= 0 ? p_.bias(place.expert, row) : 0.0f;
  }

  // Each thread stores what it has: eight neighbours of a row are a whole sector of memory.
  __device__ __forceinline__ void finish(
      const UnitInfo& unit, int group, int thread, uint8_t*, int&,
      const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) const {
    if constexpr (kGateUp) {
      // The activation is a constant of each path: told apart at each element it would be most of
      // the code.
      using Activation = GatedActivation;
      const auto finish_by = [&](auto activation) {
        finish_h<decltype(activation)::value>(unit, group, thread, sums);
      };
      switch (p_.activation) {
        case Activation::kSilu:
          return finish_by(std::integral_constant<Activation, Activation::kSilu>());
        case Activation::kGelu:
          return finish_by(std::integral_constant<Activation, Activation::kGelu>());
        case Activation::kGeluTanh:
          return finish_by(std::integral_constant<Activation, Activation::kGeluTanh>());
        case Activation::kSwigluOai:
          return finish_by(std::integral_constant<Activation, Activation::kSwigluOai>());
      }
    } else {
      finish_rows(unit, group, thread, sums);
    }
  }

 private:
  // Row of w that is row i of the tile's; -1 for none.
  __device__ __forceinline__ int w_row(const Place& place, int i) const {
    const int first = Tile::kSwapped ? place.first_row : place.first_column;
    if constexpr (!kGateUp) return first + i < p_.n ? first + i : -1;
    const int up = i / (kBoxRows / 2) % 2;
    const int column = first / 2 + i / kBoxRows * (kBoxRows / 2) + i % (kBoxRows / 2);
    if (column >= p_.n / 2) return -1;
    return p_.interleaved ? 2 * column + up : up * (p_.n / 2) + column;
  }

  __device__ __forceinline__ void store_pair_of_row(int64_t at, int left, float low,
                                                    float high) const {
    if (p_.wide_stores && left >= 2) {
      if (p_.out_dtype == DType::kFloat32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p_.out) + at) = make_float2(low, high);
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p_.out) + at) =
            pack_pair(p_.out_dtype, low, high);
      }
      return;
    }
    if (left >= 1) store_element(p_.out, p_.out_dtype, at, low);
    if (left >= 2) store_element(p_.out, p_.out_dtype, at + 1, high);
  }

  template <GatedActivation kActivation>
  __device__ __forceinline__ void finish_h(
      const UnitInfo& unit, int group, int thread,
      const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) const {
    constexpr int kUp = kBoxRows / 2;  // from a gate to its up
    const int lane = thread % 32, quad = lane % 4;
    const int warp_row = thread / 32 * 16 + lane / 4;  // of a wave
    const int columns = p_.n / 2;
    if constexpr (Tile::kSwapped) {
      const int place = group * kBoxRows + warp_row;  // of the gate
      const int column = unit.first_row / 2 + group * kUp + warp_row;
#pragma unroll
      for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int m = tile * 8 + quad * 2 + j % 2, down = j / 2 * 8;
          const int row = unit.first_column + m;
          if (row >= unit.end_column || column + down >= columns) continue;
          const float of_a = unit.column_factor[m];
          const float gate =
              sums[0][tile][j] * of_a * unit.row_factor[place + down] + unit.bias[place + down];
          const float up = sums[1][tile][j] * of_a * unit.row_factor[place + down + kUp] +
                           unit.bias[place + down + kUp];
          store_element(p_.out, p_.out_dtype, row * p_.out_stride + column + down,
                        gated(kActivation, p_.limit, gate, up));
        }
      }
    } else {
#pragma unroll
      for (int wave = 0; wave < Tile::kWaves; ++wave) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int m = (group * Tile::kWaves + wave) * kWgmmaRows + warp_row + half * 8;
          const int row = unit.first_row + m;
          if (row >= unit.end_row) continue;
          const float of_a = unit.row_factor[m];
#pragma unroll
          for (int tile = 0; tile < Tile::kColumnTiles / 2; ++tile) {
            const int place = tile * 8 + quad * 2, column = unit.first_column / 2 + place;
            float h[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float gate =
                  sums[wave][tile][half * 2 + e] * of_a * unit.column_factor[place + e] +
                  unit.bias[place + e];
              const float up = sums[wave][tile + kUp / 8][half * 2 + e] * of_a *
                                   unit.column_factor[place + e + kUp] +
                               unit.bias[place + e + kUp];
              h[e] = gated(kActivation, p_.limit, gate, up);
            }
            store_pair_of_row(row * p_.out_stride + column, columns - column, h[0], h[1]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void finish_rows(
      const UnitInfo& unit, int group, int thread,
      const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) const {
    const int lane = thread % 32, quad = lane % 4;
    const int warp_row = group * Tile::kWaves * kWgmmaRows + thread / 32 * 16 + lane / 4;
    if constexpr (Tile::kSwapped) {
#pragma unroll
      for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int m = tile * 8 + quad * 2 + e, row = unit.first_column + m;
          if (row >= unit.end_column) continue;
          const int64_t start = p_.out_row(row, 0);
          const float of_a = unit.column_factor[m];
#pragma unroll
          for (int wave = 0; wave < Tile::kWaves; ++wave) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int place = warp_row + wave * kWgmmaRows + half * 8;
              const int n = unit.first_row + place;
              if (n >= unit.end_row) continue;
              store_element(p_.out, p_.out_dtype, start + n,
                            sums[wave][tile][half * 2 + e] * of_a * unit.row_factor[place] +
                                unit.bias[place]);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int wave = 0; wave < Tile::kWaves; ++wave) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int m = warp_row + wave * kWgmmaRows + half * 8, row = unit.first_row + m;
          if (row >= unit.end_row) continue;
          const int64_t start = p_.out_row(row, 0);
          const float of_a = unit.row_factor[m];
#pragma unroll
          for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
            const int place = tile * 8 + quad * 2, n = unit.first_column + place;
            const auto value = [&](int e) {
              return sums[wave][tile][half * 2 + e] * of_a * unit.column_factor[place + e] +
                     unit.bias[place + e];
            };
            store_pair_of_row(start + n, unit.end_column - n, value(0), value(1));
          }
        }
      }
    }
  }

  const Problem& all_;
  const GroupedProblem& p_;
  const int rank_;
  int tiles_m_ = 0;
};

}  // namespace cuda
}  // namespace rocm_kernels
