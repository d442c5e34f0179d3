// The end of the decode kernel (decode.h): the sums of a workgroup's waves meet in LDS, those of
// the parts of the keys in memory, where the last workgroup to arrive adds them up in their order.
#pragma once

#include "../../blocks/product/cdna/partial_sums.h"
#include "../../common/cdna/sync.h"
#include "fragments.h"

namespace rocm_kernels::cdna {

struct DecodeGrid {
  Window window;
  int heads_per_kv;
  int row_blocks;
  int parts;
  uint32_t page_magic;
  float* partials;  // [item][part][rows][kD + 4]
  uint64_t* tickets;
  uint64_t launch;
};

template <typename T, bool kIsFp8, int kTileNumber>
struct DecodeShape : HeadShape<T, kIsFp8, kDecodeTiles[kTileNumber].head_dim> {
  static constexpr int kRows = kDecodeTiles[kTileNumber].rows, kRowTiles = kRows / 16;
  static constexpr int kWaves = kDecodeTiles[kTileNumber].waves;  // a SIMD
  // Whether registers hold the next step's keys and values beside those that are multiplied.
  static constexpr bool kAhead = kDecodeTiles[kTileNumber].head_dim <= 256;
};

#if ROCM_KERNELS_CDNA

// The waves' sums of 16 rows by 64 columns.
struct DecodeLds {
  float sums[kDecodeWaves][16][kSumsPitch];
  float maxima[kDecodeWaves][16], totals[kDecodeWaves][16];
};

// The rows of a workgroup: of one sequence and KV head, for a part of the keys.
template <class Shape>
struct DecodeOutputs {
  static constexpr int kD = Shape::kD, kColumns = Shape::kColumns, kRowTiles = Shape::kRowTiles;
  static constexpr int kSums = kD / 16, kPitch = kD + 4;

  const AttentionArgs& args;
  const DecodeGrid& grid;
  const Sequence& s;
  int b, head, first_row, here;  // sequence, KV head, rows
  int part, parts;               // parts that have a step of keys
  DecodeLds& lds;
  float* slots;  // of the parts' sums, in memory
  float v_descale;

  ROCM_KERNELS_DEVICE int query_of(int row) const { return (first_row + row) / grid.heads_per_kv; }
  ROCM_KERNELS_DEVICE int head_of(int row) const {
    return head * grid.heads_per_kv + (first_row + row) % grid.heads_per_kv;
  }
  ROCM_KERNELS_DEVICE float* slot_of(int its_part, int row) const {
    return slots + (its_part * Shape::kRows + row) * kPitch;
  }

  // Four neighbouring columns of a row.
  ROCM_KERNELS_DEVICE void finish(int row, int column, float most, float total,
                                  Accumulator value) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (column + n < args.head_dim_v) {
        finish_element<typename Shape::Q>(args, b, s.q_begin, query_of(row), head_of(row),
                                          column + n, most, total, value[n], v_descale);
      }
    }
  }

  // Adds up the waves' sums, 16 rows by 64 columns at a time; a thread has four of a row. They are
  // the outputs where the keys have one part; else they go to the part's slot.
  ROCM_KERNELS_DEVICE void meet_waves(const RowState (&rows)[kRowTiles],
                                      const Accumulator (&out)[kRowTiles][kSums], int wave,
                                      int lane) const {
    const int group = lane / 16, i = lane % 16;
    const int thread = static_cast<int>(threadIdx.x), own_row = thread / 16, own_quad = thread % 16;
    auto& sums = lds.sums;
    auto& maxima = lds.maxima;
    auto& totals = lds.totals;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float total = rows[n].total(lane);
#pragma unroll
      for (int at = 0; at < kSums; at += 4) {
        // Accumulators at .. at + 3: four neighbouring columns in each register.
        workgroup_barrier();
        if (at == 0 && group == 0) {
          maxima[wave][i] = rows[n].maximum;
          totals[wave][i] = total;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          *reinterpret_cast<Accumulator*>(&sums[wave][i][4 * (4 * group + r)]) =
              Accumulator{out[n][at][r], out[n][at + 1][r], out[n][at + 2][r], out[n][at + 3][r]};
        }
        workgroup_barrier();
        const int row = 16 * n + own_row;
        if (row >= here) continue;
        float most = -kInfinity, all = 0;
#pragma unroll
        for (int w = 0; w < kDecodeWaves; ++w) most = fmaxf(most, maxima[w][own_row]);
        const float from = fmaxf(most, -3e38f);
        Accumulator value = {};
#pragma unroll
        for (int w = 0; w < kDecodeWaves; ++w) {
          const float by = fast_exp2(maxima[w][own_row] - from);
          all += by * totals[w][own_row];
          value += by * *reinterpret_cast<const Accumulator*>(&sums[w][own_row][4 * own_quad]);
        }
        const int column = at / kColumns * 16 * kColumns + own_quad * kColumns + at % kColumns;
        if (parts == 1) {
          finish(row, column, most, all, value);
        } else {
          publish(slot_of(part, row) + column, value);
          if (column == 0) publish(slot_of(part, row) + kD, Accumulator{most, all, 0, 0});
        }
      }
    }
  }

  // Adds up the parts' sums.
  ROCM_KERNELS_DEVICE void meet_parts() const {
    const int thread = static_cast<int>(threadIdx.x);
    float* const part_maxima = &lds.sums[0][0][0];  // [here][parts]
    float* const part_totals = part_maxima + here * parts;
    for (int at = thread; at < here * parts; at += kDecodeWaves * 64) {
      const Accumulator its = collect(slot_of(at % parts, at / parts) + kD);
      part_maxima[at] = its[0];
      part_totals[at] = its[1];
    }
    workgroup_barrier();
#pragma unroll 1
    for (int at = thread; at < here * (kD / 4); at += kDecodeWaves * 64) {
      const int row = at / (kD / 4), column = at % (kD / 4) * 4;
      float most = -kInfinity, total = 0;
      for (int other = 0; other < parts; ++other) {
        most = fmaxf(most, part_maxima[row * parts + other]);
      }
      const float from = fmaxf(most, -3e38f);
      Accumulator value = {};
      // Those of `kAtOnce` parts are on their way together.
      const auto add_parts = [&](int first, auto at_once) {
        constexpr int kAtOnce = decltype(at_once)::value;
        Accumulator its[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          // Past the last part: its slot again, not added.
          its[n] = collect(slot_of(min(first + n, parts - 1), row) + column);
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (first + n < parts) {
            const float by = fast_exp2(part_maxima[row * parts + first + n] - from);
            total += by * part_totals[row * parts + first + n];
            value += by * its[n];
          }
        }
        return first + kAtOnce;
      };
#pragma unroll 1
      for (int first = 0; first < parts;) {
        const int count = parts_at_once(parts - first);
        first = count == 16  ? add_parts(first, std::integral_constant<int, 16>())
                : count == 8 ? add_parts(first, std::integral_constant<int, 8>())
                             : add_parts(first, std::integral_constant<int, 4>());
      }
      finish(row, column, most, total, value);
    }
  }
};

#endif

}  // namespace rocm_kernels::cdna
