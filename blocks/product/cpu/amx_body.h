// The kernels of blocks/product/cpu/amx.cpp: no include guard (see common/cpu/isa.h). The mapping
// is told in blocks/product/cpu/amx.h.

#include "operands.h"

constexpr int kGroup = kAmxColumns;
static_assert(kScaleBlock % kGroup == 0, "no group reaches across two scale blocks");

#include "output.h"
#include "transpose.h"

using Value = BF16Multiplier::Value;
constexpr int kTileRows = kAmxMaxTileRows;
constexpr int kTileDepth = BF16Multiplier::kWidth;   // of K
constexpr int kTileValues = kTileRows * kTileDepth;  // of w
constexpr int kHalves = kGroup / kTileRows;          // tiles of w side by side
static_assert(kAmxChunk == BF16Multiplier::kChunk, "a chunk is what is decoded at once");
constexpr int64_t kMaxTiles = kAmxMaxBlockRows / kTileRows;  // of rows of a, in a block
constexpr int64_t kMaxGroups = 8;  // of columns, that a block's panel of a is used for in turn

// Sums of a tile: 16 rows of w x up to 16 rows of a.
typedef float Totals[kTileRows][kTileRows];

// ---- Tile registers: 0 to 3 sums, 4 and 5 w, 6 and 7 a

// GCC does not know that a tile load reads memory: what was stored before must be stored by then.
ROCM_KERNELS_VECTOR void finish_stores() { __asm__ volatile("" ::: "memory"); }

// What LDTILECFG reads. A thread's registers are its own, and other libraries configure them too:
// each part of the work begins by this and ends by releasing them.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

static void configure_tiles(int64_t tile_rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    const bool is_w = i == 4 || i == 5;
    config.rows[i] = kTileRows;
    config.row_bytes[i] = static_cast<uint16_t>(is_w ? 64 : 4 * tile_rows);
  }
  finish_stores();
  _tile_loadconfig(&config);
}

template <int kTiles>
ROCM_KERNELS_VECTOR void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// sums += w . a over kTileDepth of K; w: two tiles `w_next` values apart, a: one or two likewise.
template <int kTiles>
ROCM_KERNELS_VECTOR void multiply_tiles(const Value* w, int64_t w_next, const Value* a,
                                        int64_t a_next, int64_t a_row_bytes) {
  _tile_loadd(6, a, a_row_bytes);
  _tile_loadd(4, w, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, w + w_next, 64);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (kTiles == 2) {
    _tile_loadd(7, a + a_next, a_row_bytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <int kTiles>
ROCM_KERNELS_VECTOR void store_sums(Totals* totals) {
  _tile_stored(0, totals[0], 64);
  _tile_stored(1, totals[1], 64);
  if constexpr (kTiles == 2) {
    _tile_stored(2, totals[2], 64);
    _tile_stored(3, totals[3], 64);
  }
}

// ---- a: panel by panel of K, tile by tile of rows, each [depth / 2][tile_rows][2]

ROCM_KERNELS_VECTOR int64_t padded_depth(const AmxJob& job, int64_t k) {
  return round_up(smaller(job.panel_depth, job.args.k - k), kAmxChunk);
}

// All panels but the last are whole, so those before k take tiles * tile_rows * k values.
ROCM_KERNELS_VECTOR Value* packed_tile(const AmxJob& job, int64_t k, int64_t tile) {
  return static_cast<Value*>(job.args.workspace) +
         job.tile_rows * (job.tiles * k + tile * padded_depth(job, k));
}

template <class Element>
void pack_tiles(const AmxJob& job, int64_t begin, int64_t end) {
  const GemmArgs& args = job.args;
  const __mmask16 lanes = static_cast<__mmask16>((1 << job.tile_rows) - 1);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t tile = unit % job.tiles, k = unit / job.tiles * job.panel_depth;
    const int64_t depth = smaller(job.panel_depth, args.k - k);
    const int64_t m = tile * job.tile_rows, rows = smaller(job.tile_rows, args.m - m);
    Value* packed = packed_tile(job, k, tile);
    for (int64_t i = 0; i < depth; i += kAmxChunk) {
      __m512i parts[BF16Multiplier::kParts][kTileRows];
      for (int64_t row = 0; row < kTileRows; ++row) {
        __m512i operands[BF16Multiplier::kParts] = {};
        const Element* const p = static_cast<const Element*>(args.a) +
                                 (m + smaller(row, rows - 1)) * args.a_stride + k + i;
        if (row < rows && i + kAmxChunk <= depth) {
          Decode<BF16Multiplier, Element>::chunk(p, operands);
        } else if (row < rows) {
          decode_tail<BF16Multiplier>(p, depth - i, operands);
        }
        for (int part = 0; part < BF16Multiplier::kParts; ++part) parts[part][row] = operands[part];
      }
      for (auto& pairs : parts) {
        transpose(pairs);
        for (int pair = 0; pair < kTileRows; ++pair, packed += 2 * job.tile_rows) {
          _mm512_mask_storeu_epi32(packed, lanes, pairs[pair]);
        }
      }
    }
  }
}

// ---- w: a panel [2 halves][depth / kTileDepth] of tiles

template <class Element>
struct Panel {
  const Element* w;  // its first row
  int64_t stride;
  int64_t columns;
  int64_t depth;
  int64_t ahead;  // elements from here to the panel that this thread decodes next
};

// A chunk of one half, both of its tiles. Columns beyond the panel's own repeat the last: their
// sums are written nowhere.
template <class Element>
ROCM_KERNELS_VECTOR void decode_chunk(const Panel<Element>& panel, int64_t i, int half,
                                      Value* out) {
  constexpr int kLineElements = 64 / sizeof(Element);
  for (int row = 0; row < kTileRows; ++row) {
    const int64_t column = smaller(half * kTileRows + row, panel.columns - 1);
    const Element* const p = panel.w + column * panel.stride + i;
    __m512i operands[BF16Multiplier::kParts];
    if (__builtin_expect(i + kAmxChunk <= panel.depth, 1)) {
      ROCM_KERNELS_UNROLL
      for (int line = 0; line < kAmxChunk; line += kLineElements) {
        __builtin_prefetch(p + panel.ahead + line, 0, 2);
      }
      Decode<BF16Multiplier, Element>::chunk(p, operands);
    } else {
      decode_tail<BF16Multiplier>(p, panel.depth - i, operands);
    }
    Value* const to = out + row * kTileDepth;
    _mm512_store_si512(to, operands[0]);
    _mm512_store_si512(to + kTileValues, operands[1]);
  }
}

// ---- 32 columns x one or two tiles of rows

// totals[tile][half] += scale_a[tile][row of a] * scale_w * sums, which go through memory.
template <int kTiles, bool kScaled>
ROCM_KERNELS_VECTOR void add_sums(Totals* sums, const float (*scale_a)[kTileRows], float scale_w,
                                  Totals* totals) {
  store_sums<kTiles>(sums);
  for (int tile = 0; tile < kTiles; ++tile) {
    const F32 scale = kScaled ? load(scale_a[tile]) * set1(scale_w) : set1(1.0f);
    for (int half = 0; half < kHalves; ++half) {
      ROCM_KERNELS_UNROLL
      for (int row = 0; row < kTileRows; ++row) {
        float* const total = totals[tile * kHalves + half][row];
        const F32 sum = load(sums[tile * kHalves + half][row]);
        store(total, kScaled ? fma(sum, scale, load(total)) : load(total) + sum);
      }
    }
  }
}

// The factors that rows of a bring to partial sums: [block of a panel][tile][row].
typedef float BlockScales[kMaxTiles][kTileRows];

static void load_block_scales(const AmxJob& job, int64_t tile, int64_t tiles, int64_t k,
                              BlockScales* scale_a) {
  const GemmArgs& args = job.args;
  for (int64_t i = 0; i < job.panel_depth && k + i < args.k; i += kScaleBlock) {
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t m = (tile + t) * job.tile_rows, rows = smaller(job.tile_rows, args.m - m);
      for (int64_t row = 0; row < rows; ++row) {
        scale_a[i / kScaleBlock][t][row] = args.scale_a.block(m + row, (k + i) / kScaleBlock);
      }
    }
  }
}

// totals[tile][half] += w . a over a panel, for tiles of rows from `tile` of the block on. kDecode:
// the panel of w is decoded on the way.
template <class Element, int kTiles, bool kDecode>
void multiply_panel(const AmxJob& job, const Panel<Element>& panel, Value* w, const Value* a,
                    int64_t n, int64_t k, int64_t tile, const BlockScales* scale_a, Totals* sums,
                    Totals* totals) {
  const int64_t depth = round_up(panel.depth, kAmxChunk), half_values = depth * kTileRows;
  const int64_t a_row_bytes = 4 * job.tile_rows, a_next = depth * job.tile_rows;
  if (kDecode) {
    decode_chunk(panel, 0, 0, w);
    decode_chunk(panel, 0, 1, w + half_values);
  }
  for (int64_t begin = 0; begin < depth; begin += job.step) {
    const int64_t end = smaller(begin + job.step, depth);
    clear_sums<kTiles>();
    for (int64_t i = begin; i < end; i += kAmxChunk) {
      // Half by half between the products the next chunk is decoded, which is stored by its turn.
      const int64_t next = i + kAmxChunk;
      ROCM_KERNELS_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        if (kDecode && next < depth) {
          decode_chunk(panel, next, half, w + next * kTileRows + half * half_values);
        }
        if (kDecode) finish_stores();
        const int64_t j = i + half * kTileDepth;
        multiply_tiles<kTiles>(w + j * kTileRows, half_values, a + j * job.tile_rows, a_next,
                               a_row_bytes);
      }
    }
    if (is_block_scaled(job.args)) {
      const float scale_w = job.args.scale_w.block(n / kScaleBlock, (k + begin) / kScaleBlock);
      add_sums<kTiles, true>(sums, scale_a[begin / kScaleBlock] + tile, scale_w, totals);
    } else if (k > 0) {
      add_sums<kTiles, false>(sums, nullptr, 1.0f, totals);
    } else {
      store_sums<kTiles>(totals);
    }
  }
}

// ---- A block of rows x `groups` groups of columns from n on

// Rows of `tiles` tiles of totals, transposed.
void write_tiles(const AmxJob& job, int64_t tile, int64_t tiles, int64_t n, int columns,
                 const Totals* totals) {
  constexpr int64_t kTilesAtOnce = 4;
  alignas(64) float sums[kTilesAtOnce * kTileRows][kGroup];
  for (int64_t first = 0; first < tiles; first += kTilesAtOnce) {
    const int64_t last = smaller(first + kTilesAtOnce, tiles);
    for (int64_t i = first; i < last; ++i) {
      for (int half = 0; half < kHalves; ++half) {
        F32 rows[kTileRows];
        for (int row = 0; row < kTileRows; ++row) rows[row] = load(totals[i * kHalves + half][row]);
        transpose(rows);
        for (int row = 0; row < job.tile_rows; ++row) {
          store(sums[(i - first) * job.tile_rows + row] + half * kTileRows, rows[row]);
        }
      }
    }
    const int64_t begin = (tile + first) * job.tile_rows;
    const int64_t end = smaller((tile + last) * job.tile_rows, job.args.m);
    write_columns(job.args, begin, end, n, columns, 1.0f, sums);
  }
}

template <class Element>
void multiply_block(const AmxJob& job, int64_t tile, int64_t tiles, int64_t n, int64_t groups) {
  const GemmArgs& args = job.args;
  alignas(64) Value w[kGroup * kAmxMaxPanelDepth];
  alignas(64) Totals sums[2 * kHalves] = {};
  alignas(64) BlockScales scale_a[kAmxMaxPanelDepth / kScaleBlock] = {};
  alignas(64) Totals totals[kMaxGroups][kMaxTiles * kHalves];
  const int64_t used = tiles * kHalves * sizeof(Totals);
  // Tiles that are stored leave lanes beyond tile_rows alone.
  if (is_block_scaled(args) || job.tile_rows < kTileRows || args.k == 0) {
    for (int64_t group = 0; group < groups; ++group) __builtin_memset(totals[group], 0, used);
  }
  for (int64_t k = 0; k < args.k; k += job.panel_depth) {
    if (is_block_scaled(args)) load_block_scales(job, tile, tiles, k, scale_a);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = n + group * kGroup;
      // The next panel is the next group's, then the first group's further along K, and after the
      // last of K that of the columns behind the groups.
      const bool next_group = group + 1 < groups, next_k = k + job.panel_depth < args.k;
      const int64_t ahead_n = next_group || !next_k ? kGroup : -group * kGroup;
      const int64_t ahead_k = next_group ? 0 : next_k ? job.panel_depth : -k;
      const Panel<Element> panel = {static_cast<const Element*>(args.w) + first * args.w_stride + k,
                                    args.w_stride, smaller(kGroup, args.n - first),
                                    smaller(job.panel_depth, args.k - k),
                                    ahead_n * args.w_stride + ahead_k};
      for (int64_t i = 0; i < tiles; i += 2) {
        const Value* const a = packed_tile(job, k, tile + i);
        Totals* const to = totals[group] + i * kHalves;
        if (i + 1 == tiles) {
          if (i == 0) {
            multiply_panel<Element, 1, true>(job, panel, w, a, first, k, i, scale_a, sums, to);
          } else {
            multiply_panel<Element, 1, false>(job, panel, w, a, first, k, i, scale_a, sums, to);
          }
        } else if (i == 0) {
          multiply_panel<Element, 2, true>(job, panel, w, a, first, k, i, scale_a, sums, to);
        } else {
          multiply_panel<Element, 2, false>(job, panel, w, a, first, k, i, scale_a, sums, to);
        }
      }
    }
  }
  finish_stores();
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = n + group * kGroup;
    const int columns = static_cast<int>(smaller(kGroup, args.n - first));
    write_tiles(job, tile, tiles, first, columns, totals[group]);
  }
}

template <class Element>
void multiply_units(const AmxJob& job, int64_t begin, int64_t end) {
  // Few rows of a stay in the second level cache whole; so w is read along K, its own order.
  const int64_t at_once = job.args.m * job.args.k * 2 > (1 << 20) ? kMaxGroups : 1;
  while (begin < end) {
    const int64_t block = begin / job.groups(), group = begin % job.groups();
    const int64_t groups = smaller(smaller(at_once, job.groups() - group), end - begin);
    const int64_t tile = job.tiles * block / job.row_blocks;
    const int64_t last = job.tiles * (block + 1) / job.row_blocks;
    multiply_block<Element>(job, tile, last - tile, group * kGroup, groups);
    begin += groups;
  }
}

// ---- From dtypes to types

static void pack(const AmxJob& job, int64_t begin, int64_t end) {
  const bool fp8_order = job.args.w_dtype != DType::kBFloat16;
  switch (job.args.a_dtype) {
    case DType::kBFloat16:
      return fp8_order ? pack_tiles<BFloat16InFp8Order>(job, begin, end)
                       : pack_tiles<BFloat16>(job, begin, end);
    case DType::kFloat8E4M3FNUZ:
      return pack_tiles<Fp8<true>>(job, begin, end);
    default:
      return pack_tiles<Fp8<false>>(job, begin, end);
  }
}

static void multiply(const AmxJob& job, int64_t begin, int64_t end) {
  configure_tiles(job.tile_rows);
  switch (job.args.w_dtype) {
    case DType::kBFloat16:
      multiply_units<BFloat16>(job, begin, end);
      break;
    case DType::kFloat8E4M3FNUZ:
      multiply_units<Fp8<true>>(job, begin, end);
      break;
    default:
      multiply_units<Fp8<false>>(job, begin, end);
  }
  _tile_release();
}
