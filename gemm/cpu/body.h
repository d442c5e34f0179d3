// The kernels of gemm/cpu/gemm.cpp, for one instruction set (see common/cpu/isa.h): no include
// guard. The mapping is told in gemm/cpu/gemm.cpp.

#include "../../blocks/product/cpu/operands.h"

constexpr int kTileVectors = 2;
constexpr int kGroup = kTileVectors * F32Sums::kSumLanes;  // columns of a tile
static_assert(kScaleBlock % kGroup == 0, "no group reaches across two scale blocks");

// A tile takes kTileVectors registers a row, as many for w and one for a: of 32, or of 16.
#if ROCM_KERNELS_CPU_AVX512 || ROCM_KERNELS_CPU_NEON
constexpr int kMaxTileRows = 12;
#else
constexpr int kMaxTileRows = 6;
#endif

#include "../../blocks/product/cpu/product.h"
#include "../../blocks/product/cpu/transpose.h"

static int64_t group_columns() { return kGroup; }

// ---- w, decoded and transposed: [kPanelDepth / kStep][kGroup][kStep]

// The values along K that fill the 32 bits of a lane.
template <class Multiplier>
constexpr int kStep = sizeof(float) / sizeof(typename Multiplier::Value);

// Columns [n, n + columns) of w over `depth` of K from k on; the other columns of the group are 0.
template <class Multiplier, class Element>
void decode_panel(const GemmArgs& args, int64_t n, int columns, int64_t k, int64_t depth,
                  typename Multiplier::Value* panel) {
  constexpr int kParts = Multiplier::kParts, kColumns = Multiplier::kSumLanes;
  for (int first = 0; first < kGroup; first += kColumns) {
    for (int64_t i = 0; i < depth; i += Multiplier::kChunk) {
      typename Multiplier::Operand parts[kParts][kColumns];
      for (int column = 0; column < kColumns; ++column) {
        typename Multiplier::Operand operands[kParts] = {};
        if (first + column < columns) {
          const Element* const p =
              static_cast<const Element*>(args.w) + (n + first + column) * args.w_stride + k + i;
          if (__builtin_expect(i + Multiplier::kChunk <= depth, 1)) {
            __builtin_prefetch(p + kPanelDepth, 0, 2);
            Decode<Multiplier, Element>::chunk(p, operands);
          } else {
            decode_tail<Multiplier>(p, depth - i, operands);
          }
        }
        for (int part = 0; part < kParts; ++part) parts[part][column] = operands[part];
      }
      for (int part = 0; part < kParts; ++part) {
        transpose(parts[part]);
        typename Multiplier::Value* const steps =
            panel + (i + part * Multiplier::kWidth) * kGroup + first * kStep<Multiplier>;
        for (int row = 0; row < kColumns; ++row) {
          Multiplier::store_operand(steps + row * kStep<Multiplier> * kGroup, parts[part][row]);
        }
      }
    }
  }
}

// ---- Tiles

// The next kStep values of a row of a, in every lane.
template <class Multiplier>
ROCM_KERNELS_VECTOR typename Multiplier::Operand broadcast(const typename Multiplier::Value* a) {
#if ROCM_KERNELS_CPU_AVX512
  int32_t bits;
  __builtin_memcpy(&bits, a, sizeof(bits));
  return (typename Multiplier::Operand)_mm512_set1_epi32(bits);
#elif ROCM_KERNELS_CPU_PORTABLE
  return typename Multiplier::Operand{*a, *a, *a, *a};
#else
  return set1(*a);
#endif
}

// totals[row][column] += scales[row] * sum_k(a[row][k] * w[k][column]) over `depth` of K.
template <class Multiplier, int kRows>
void multiply_tile(const typename Multiplier::Value* w, const typename Multiplier::Value* a,
                   int64_t a_stride, int64_t depth, const float* scales, float (*totals)[kGroup]) {
  typename Multiplier::Sum sums[kRows][kTileVectors];
  ROCM_KERNELS_UNROLL
  for (int row = 0; row < kRows; ++row) {
    ROCM_KERNELS_UNROLL
    for (int i = 0; i < kTileVectors; ++i) sums[row][i] = Multiplier::zero();
  }
  for (int64_t k = 0; k < depth; k += kStep<Multiplier>) {
    typename Multiplier::Operand operands[kTileVectors];
    ROCM_KERNELS_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      operands[i] = Multiplier::load_operand(w + k * kGroup + i * Multiplier::kWidth);
    }
    ROCM_KERNELS_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const auto value = broadcast<Multiplier>(a + row * a_stride + k);
      ROCM_KERNELS_UNROLL
      for (int i = 0; i < kTileVectors; ++i) {
        sums[row][i] = Multiplier::dot(sums[row][i], value, operands[i]);
      }
    }
  }
  ROCM_KERNELS_UNROLL
  for (int row = 0; row < kRows; ++row) {
    ROCM_KERNELS_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      float* const total = totals[row] + i * Multiplier::kSumLanes;
      Multiplier::store_sum(
          total, Multiplier::add_scaled(Multiplier::load_sum(total), sums[row][i], scales[row]));
    }
  }
}

// The same for any number of rows up to kRows.
template <class Multiplier, int kRows>
ROCM_KERNELS_VECTOR void multiply_rows(int64_t rows, const typename Multiplier::Value* w,
                                       const typename Multiplier::Value* a, int64_t a_stride,
                                       int64_t depth, const float* scales,
                                       float (*totals)[kGroup]) {
  if (rows == kRows) {
    multiply_tile<Multiplier, kRows>(w, a, a_stride, depth, scales, totals);
  } else if constexpr (kRows > 1) {
    multiply_rows<Multiplier, kRows - 1>(rows, w, a, a_stride, depth, scales, totals);
  }
}

// ---- Rows [begin, end) x `groups` groups of columns from n on

template <class Multiplier, class Element>
void multiply_block(const GemmJob& job, int64_t begin, int64_t end, int64_t n, int64_t groups,
                    float gain) {
  using Value = typename Multiplier::Value;
  const GemmArgs& args = job.args;
  alignas(64) Value panel[kGroup * kPanelDepth];
  alignas(64) float totals[kMaxGroups][kMaxBlockRows][kGroup];
  float scales[kMaxBlockRows];
  const int64_t rows = end - begin;
  const int64_t tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
  for (int64_t group = 0; group < groups; ++group) {
    __builtin_memset(totals[group], 0, rows * sizeof(totals[group][0]));
  }
  for (int64_t k = 0; k < args.k; k += kPanelDepth) {
    const int64_t depth = smaller(kPanelDepth, args.k - k);
    const int64_t stride = round_up(depth, Multiplier::kChunk);
    const Value* const a = packed_panel<Multiplier>(job, k) + begin * stride;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = n + group * kGroup;
      const int columns = static_cast<int>(smaller(kGroup, args.n - first));
      decode_panel<Multiplier, Element>(args, first, columns, k, depth, panel);
      for (int64_t i = 0; i < depth; i += job.step) {
        for (int64_t row = 0; row < rows; ++row) {
          scales[row] = block_scale(args, begin + row, first, k + i);
        }
        const int64_t step = smaller(job.step, stride - i);
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t row = rows * tile / tiles, last = rows * (tile + 1) / tiles;
          multiply_rows<Multiplier, kMaxTileRows>(last - row, panel + i * kGroup,
                                                  a + row * stride + i, stride, step, scales + row,
                                                  totals[group] + row);
        }
      }
    }
  }
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = n + group * kGroup;
    const int columns = static_cast<int>(smaller(kGroup, args.n - first));
    write_columns(args, begin, end, first, columns, gain, totals[group]);
  }
}

// Units: the groups of columns of the first block of rows, then those of the next.
template <class Multiplier, class Element>
void multiply_units(const GemmJob& job, int64_t begin, int64_t end, float gain) {
  const GemmArgs& args = job.args;
  const int64_t groups = (args.n + kGroup - 1) / kGroup;
  while (begin < end) {
    const int64_t block = begin / groups, group = begin % groups;
    const int64_t count = smaller(smaller(kMaxGroups, groups - group), end - begin);
    multiply_block<Multiplier, Element>(job, args.m * block / job.row_blocks,
                                        args.m * (block + 1) / job.row_blocks, group * kGroup,
                                        count, gain);
    begin += count;
  }
}
