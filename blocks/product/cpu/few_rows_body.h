// The product of few rows, for one instruction set (see common/cpu/isa.h): no include guard. The
// mapping is told in few_rows.h, whose constants it takes.

#include "operands.h"
#include "product.h"

constexpr int kMaxTileRows = 6;
constexpr int kMaxBlockTileRows = 3;  // totals stay in registers across the blocks of a panel

// ---- Few rows: w is decoded in registers and multiplied with every row of a at once

// sums[column][row] += a[row] . w[column] over `depth` of K. Elements `ahead` of w are fetched.
template <class Multiplier, class Element, int kColumns, int kRows>
ROCM_KERNELS_VECTOR void add_products(typename Multiplier::Sum (&sums)[kColumns][kRows],
                                      const Element* const w[], int64_t ahead,
                                      const typename Multiplier::Value* a, int64_t a_stride,
                                      int64_t depth) {
  constexpr int kParts = Multiplier::kParts;
  for (int64_t k = 0; k < depth; k += Multiplier::kChunk) {
    typename Multiplier::Operand operands[kColumns][kParts];
    ROCM_KERNELS_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      const Element* const p = w[column] + k;
      if (__builtin_expect(k + Multiplier::kChunk <= depth, 1)) {
        __builtin_prefetch(p + ahead);
        Decode<Multiplier, Element>::chunk(p, operands[column]);
      } else {
        decode_tail<Multiplier>(p, depth - k, operands[column]);
      }
    }
    ROCM_KERNELS_UNROLL
    for (int row = 0; row < kRows; ++row) {
      ROCM_KERNELS_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const auto operand =
            Multiplier::load_operand(a + row * a_stride + k + part * Multiplier::kWidth);
        ROCM_KERNELS_UNROLL
        for (int column = 0; column < kColumns; ++column) {
          sums[column][row] = Multiplier::dot(sums[column][row], operand, operands[column][part]);
        }
      }
    }
  }
}

template <class Multiplier, class Element, int kColumns, int kRows>
void multiply_direct(const GemmJob& job, int64_t n, int slot, float sums[][kGroup]) {
  using Sum = typename Multiplier::Sum;
  const GemmArgs& args = job.args;
  Sum totals[kColumns][kRows];
  ROCM_KERNELS_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    ROCM_KERNELS_UNROLL
    for (int row = 0; row < kRows; ++row) totals[column][row] = Multiplier::zero();
  }
  // After the last panel come the next columns; where they are short, those after them.
  const int64_t rounds = args.k < kPanelDepth ? kPanelDepth / (args.k + 1) + 1 : 1;
  const int64_t next_columns = rounds * kColumns * args.w_stride;
  for (int64_t panel = 0; panel < args.k; panel += kPanelDepth) {
    const int64_t depth = smaller(kPanelDepth, args.k - panel);
    const int64_t ahead = panel + kPanelDepth < args.k ? kPanelDepth : next_columns - panel;
    const typename Multiplier::Value* const a = packed_panel<Multiplier>(job, panel);
    Sum scaled[kColumns][kRows];
    ROCM_KERNELS_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      ROCM_KERNELS_UNROLL
      for (int row = 0; row < kRows; ++row) scaled[column][row] = Multiplier::zero();
    }
    for (int64_t k = 0; k < depth; k += job.step) {
      const Element* w[kColumns];
      Sum partial[kColumns][kRows];
      ROCM_KERNELS_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        w[column] = static_cast<const Element*>(args.w) + (n + column) * args.w_stride + panel + k;
        ROCM_KERNELS_UNROLL
        for (int row = 0; row < kRows; ++row) partial[column][row] = Multiplier::zero();
      }
      add_products<Multiplier, Element>(partial, w, ahead, a + k,
                                        round_up(depth, Multiplier::kChunk),
                                        smaller(job.step, depth - k));
      ROCM_KERNELS_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const float scale = block_scale(args, row, n, panel + k);
        ROCM_KERNELS_UNROLL
        for (int column = 0; column < kColumns; ++column) {
          scaled[column][row] =
              Multiplier::add_scaled(scaled[column][row], partial[column][row], scale);
        }
      }
    }
    ROCM_KERNELS_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      ROCM_KERNELS_UNROLL
      for (int row = 0; row < kRows; ++row) {
        totals[column][row] = totals[column][row] + scaled[column][row];
      }
    }
  }
  ROCM_KERNELS_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    ROCM_KERNELS_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sums[row][slot + column] = Multiplier::total(totals[column][row]);
    }
  }
}

template <class Multiplier, class Element, int kRows>
void direct_columns(const GemmJob& job, int64_t n, int columns, float sums[][kGroup]) {
  constexpr int kColumns = Multiplier::direct_columns(kRows);
  int i = 0;
  for (; i + kColumns <= columns; i += kColumns) {
    multiply_direct<Multiplier, Element, kColumns, kRows>(job, n + i, i, sums);
  }
  if (kColumns > 1) {
    for (; i < columns; ++i) {
      multiply_direct<Multiplier, Element, 1, kRows>(job, n + i, i, sums);
    }
  }
}

// ---- More rows: a panel of w is decoded into the cache, then multiplied tile by tile

// Fetches the panel of w that comes next, a few lines at a time, while this one is multiplied.
struct PanelPrefetch {
  const char* row;
  int64_t row_bytes, stride_bytes, rows;
  int64_t position = 0;

  ROCM_KERNELS_VECTOR void fetch(int64_t lines) {
    while (lines > 0 && rows > 0) {
      for (; lines > 0 && position < row_bytes; --lines, position += 64) {
        __builtin_prefetch(row + position, 0, 2);
      }
      if (position < row_bytes) return;
      position = 0;
      row += stride_bytes;
      --rows;
    }
  }
};

template <class Element>
ROCM_KERNELS_VECTOR PanelPrefetch prefetch_of(const GemmArgs& args, int64_t n, int64_t columns,
                                              int64_t k) {
  const Element* const first = static_cast<const Element*>(args.w) + n * args.w_stride + k;
  constexpr int64_t kSize = sizeof(Element);
  return {reinterpret_cast<const char*>(first), smaller(kPanelDepth, args.k - k) * kSize,
          args.w_stride * kSize, columns};
}

// totals[row][column] += a[row] . w[column] over one panel, for the tile's rows and columns; with
// kBlocks, each block of K times scales[block * kFewRows + row].
template <class Multiplier, int kRows, bool kBlocks>
void multiply_tile(const typename Multiplier::Value* w, const typename Multiplier::Value* a,
                   int64_t stride, const float* scales, float* totals) {
  constexpr int kColumns = Multiplier::kTileColumns;
  typename Multiplier::Sum sums[kRows][kColumns], scaled[kRows][kColumns];
  ROCM_KERNELS_UNROLL
  for (int row = 0; row < kRows; ++row) {
    ROCM_KERNELS_UNROLL
    for (int column = 0; column < kColumns; ++column) scaled[row][column] = Multiplier::zero();
  }
  const int64_t step = kBlocks ? kScaleBlock : stride;
  for (int64_t begin = 0; begin < stride; begin += step) {
    const int64_t end = smaller(begin + step, stride);
    ROCM_KERNELS_UNROLL
    for (int row = 0; row < kRows; ++row) {
      ROCM_KERNELS_UNROLL
      for (int column = 0; column < kColumns; ++column) sums[row][column] = Multiplier::zero();
    }
    for (int64_t k = begin; k < end; k += Multiplier::kWidth) {
      typename Multiplier::Operand operands[kColumns];
      ROCM_KERNELS_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        operands[column] = Multiplier::load_operand(w + column * stride + k);
      }
      ROCM_KERNELS_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const auto operand = Multiplier::load_operand(a + row * stride + k);
        ROCM_KERNELS_UNROLL
        for (int column = 0; column < kColumns; ++column) {
          sums[row][column] = Multiplier::dot(sums[row][column], operand, operands[column]);
        }
      }
    }
    if (!kBlocks) break;
    ROCM_KERNELS_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float scale = scales[begin / kScaleBlock * kFewRows + row];
      ROCM_KERNELS_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        scaled[row][column] = Multiplier::add_scaled(scaled[row][column], sums[row][column], scale);
      }
    }
  }
  ROCM_KERNELS_UNROLL
  for (int row = 0; row < kRows; ++row) {
    ROCM_KERNELS_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      float* const total = totals + (row * kColumns + column) * Multiplier::kSumLanes;
      const auto& added = kBlocks ? scaled[row][column] : sums[row][column];
      Multiplier::store_sum(total, Multiplier::load_sum(total) + added);
    }
  }
}

template <class Multiplier>
ROCM_KERNELS_VECTOR void multiply_tile(int64_t rows, bool blocks,
                                       const typename Multiplier::Value* w,
                                       const typename Multiplier::Value* a, int64_t stride,
                                       const float* scales, float* totals) {
  static_assert(kMaxTileRows == 6 && kMaxBlockTileRows == 3, "the cases below end there");
  if (blocks) {
    if (rows == 3) return multiply_tile<Multiplier, 3, true>(w, a, stride, scales, totals);
    if (rows == 2) return multiply_tile<Multiplier, 2, true>(w, a, stride, scales, totals);
    return multiply_tile<Multiplier, 1, true>(w, a, stride, scales, totals);
  }
  // Tiles are of nearly equal size, so they have 3 rows at least: panels are for 5 rows or more.
  if (rows == 6) return multiply_tile<Multiplier, 6, false>(w, a, stride, scales, totals);
  if (rows == 5) return multiply_tile<Multiplier, 5, false>(w, a, stride, scales, totals);
  if (rows == 4) return multiply_tile<Multiplier, 4, false>(w, a, stride, scales, totals);
  return multiply_tile<Multiplier, 3, false>(w, a, stride, scales, totals);
}

template <class Multiplier, class Element>
ROCM_KERNELS_VECTOR void decode_panel(const GemmArgs& args, int64_t n, int columns, int64_t k,
                                      int64_t depth, typename Multiplier::Value* panel) {
  const int64_t stride = round_up(depth, Multiplier::kChunk);
  for (int column = 0; column < columns; ++column) {
    const Element* const row =
        static_cast<const Element*>(args.w) + (n + column) * args.w_stride + k;
    typename Multiplier::Operand operands[Multiplier::kParts];
    for (int64_t i = 0; i < depth; i += Multiplier::kChunk) {
      if (__builtin_expect(i + Multiplier::kChunk <= depth, 1)) {
        Decode<Multiplier, Element>::chunk(row + i, operands);
      } else {
        decode_tail<Multiplier>(row + i, depth - i, operands);
      }
      for (int part = 0; part < Multiplier::kParts; ++part) {
        Multiplier::store_operand(panel + column * stride + i + part * Multiplier::kWidth,
                                  operands[part]);
      }
    }
  }
}

template <class Multiplier, class Element>
void panel_columns(const GemmJob& job, int64_t n, int columns, int64_t columns_after,
                   float sums[][kGroup]) {
  using Value = typename Multiplier::Value;
  const GemmArgs& args = job.args;
  constexpr int kColumns = Multiplier::kTileColumns;
  alignas(64) Value panel[kGroup * kPanelDepth];
  alignas(64) float totals[kGroup * kFewRows * Multiplier::kSumLanes];  // [tile][row][column][lane]
  float block_scales[kPanelDepth / kScaleBlock][kFewRows];

  const int64_t tile_size = args.m * kColumns * Multiplier::kSumLanes;
  const int tiles = (columns + kColumns - 1) / kColumns;
  const bool blocks = job.step == kScaleBlock;
  const int64_t max_rows = blocks ? kMaxBlockTileRows : kMaxTileRows;
  const int row_blocks = static_cast<int>((args.m + max_rows - 1) / max_rows);
  __builtin_memset(totals, 0, tiles * tile_size * sizeof(float));
  if (columns < tiles * kColumns) __builtin_memset(panel, 0, sizeof(panel));

  for (int64_t k = 0; k < args.k; k += kPanelDepth) {
    const int64_t depth = smaller(kPanelDepth, args.k - k);
    const int64_t stride = round_up(depth, Multiplier::kChunk);
    decode_panel<Multiplier, Element>(args, n, columns, k, depth, panel);

    const bool last = k + kPanelDepth >= args.k;
    PanelPrefetch next =
        last ? prefetch_of<Element>(args, n + columns, smaller(columns_after, kGroup), 0)
             : prefetch_of<Element>(args, n, columns, k + kPanelDepth);
    const int64_t lines_a_tile =
        next.rows * ((next.row_bytes + 63) / 64) / (row_blocks * tiles) + 1;

    for (int64_t m = 0; m < args.m; ++m) {
      for (int64_t i = 0; i < depth; i += kScaleBlock) {
        block_scales[i / kScaleBlock][m] = block_scale(args, m, n, k + i);
      }
    }

    const Value* const a = packed_panel<Multiplier>(job, k);
    for (int block = 0; block < row_blocks; ++block) {
      const int64_t m = args.m * block / row_blocks;
      const int64_t rows = args.m * (block + 1) / row_blocks - m;
      for (int tile = 0; tile < tiles; ++tile) {
        next.fetch(lines_a_tile);
        const Value* const tile_w = panel + tile * kColumns * stride;
        float* const tile_totals = totals + tile * tile_size + m * kColumns * Multiplier::kSumLanes;
        multiply_tile<Multiplier>(rows, blocks, tile_w, a + m * stride, stride, &block_scales[0][m],
                                  tile_totals);
      }
    }
  }
  for (int column = 0; column < columns; ++column) {
    const float* const total =
        totals + column / kColumns * tile_size + column % kColumns * Multiplier::kSumLanes;
    for (int64_t m = 0; m < args.m; ++m) {
      sums[m][column] =
          Multiplier::total(Multiplier::load_sum(total + m * kColumns * Multiplier::kSumLanes));
    }
  }
}

// ---- Units [begin, end) of kUnit columns of out

template <class Multiplier, class Element>
void multiply_units(const GemmJob& job, int64_t begin, int64_t end, float gain) {
  const GemmArgs& args = job.args;
  const int64_t last = smaller(end * kUnit, args.n);
  alignas(64) float sums[kFewRows][kGroup];
  for (int64_t n = begin * kUnit; n < last;) {
    // Groups end at multiples of kGroup, so none reaches across two scale blocks.
    const int64_t next = smaller(last, n / kGroup * kGroup + kGroup);
    const int columns = static_cast<int>(next - n);
    switch (args.m) {
      case 1:
        direct_columns<Multiplier, Element, 1>(job, n, columns, sums);
        break;
      case 2:
        direct_columns<Multiplier, Element, 2>(job, n, columns, sums);
        break;
      case 3:
        direct_columns<Multiplier, Element, 3>(job, n, columns, sums);
        break;
      case 4:
        direct_columns<Multiplier, Element, 4>(job, n, columns, sums);
        break;
      default:
        panel_columns<Multiplier, Element>(job, n, columns, last - next, sums);
    }
    write_columns(args, 0, args.m, n, columns, gain, sums);
    n = next;
  }
}
