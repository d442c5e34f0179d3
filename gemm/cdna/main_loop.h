// The main loop of the AMD gemm: a tile's sums over a range of K.
//
//   memory --(16 B a lane)--> registers --> LDS, one line of every row --> matrix instructions
//
// The next line is on its way from memory to registers while the current one is multiplied from
// LDS; a barrier on each side of the store to LDS keeps them apart. One buffer is enough: either
// two workgroups share the compute unit, or a tile has so much to multiply (4,096 cycles a line for
// 256 x 256) that the store, 512 cycles, weighs little.
//
// The rows of a tile are given by their operands (rows.h): gemm's lie one after the other, those of
// a grouped product are gathered.
//
// LDS holds a line of each row in 8 chunks of 16 bytes; row r keeps chunk c at place c ^ (r % 8).
// Eight lanes then write one row, or read one chunk of eight rows, without meeting on a bank.
#pragma once

#include "../../common/cdna/buffer.h"
#include "../../common/cdna/sync.h"
#include "mma_line.h"
#include "rows.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// One operand's rows of a tile on their way to LDS. kDecode: they are FP8 in memory, 16-bit in LDS.
template <int kRows, int kThreads, bool kDecode, bool kBFloat>
class LineLoader {
 public:
  static constexpr int kRowsAtOnce = kThreads / 8;
  static constexpr int kLoads = kRows / kRowsAtOnce;
  static_assert(kRows % kRowsAtOnce == 0, "LineLoader: the workgroup must cover whole rows");
  static constexpr int kMemoryBytes = kDecode ? kLine / 2 : kLine;  // a line in memory

  template <class Rows>
  explicit ROCM_KERNELS_DEVICE LineLoader(const Rows& rows) : buffer_(buffer_at(rows.base())) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) row_[i] = rows.offset(i * kRowsAtOnce + thread / 8);
    const int row = thread / 8, chunk = thread % 8;
    place_ = row * kLine + (chunk ^ row % 8) * 16;
  }

  // Asks for line `index`.
  ROCM_KERNELS_DEVICE void load(int index) {
    const uint32_t chunk = threadIdx.x % 8 * (kMemoryBytes / 8);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if constexpr (kDecode) {
        const uint64_t two =
            __builtin_bit_cast(uint64_t, __builtin_amdgcn_raw_buffer_load_b64(
                                             buffer_, row_[i] + chunk, index * kMemoryBytes, 0));
        staged_[i] = Words{static_cast<uint32_t>(two), static_cast<uint32_t>(two >> 32), 0, 0};
      } else {
        staged_[i] = load_words<Cache::kKeep>(buffer_, row_[i] + chunk, index * kMemoryBytes);
      }
    }
  }

  ROCM_KERNELS_DEVICE void store(uint8_t* lds) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) store(lds, i, staged_[i]);
  }

  // The line that K cuts, straight to LDS: zeros beyond K. It comes once, so it need not be quick.
  ROCM_KERNELS_DEVICE void copy_cut(int index, int row_bytes, uint8_t* lds) const {
    const int chunk = static_cast<int>(threadIdx.x % 8) * (kMemoryBytes / 8);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      store(lds, i, load_tail(buffer_, row_[i], index * kMemoryBytes + chunk, row_bytes));
    }
  }

 private:
  ROCM_KERNELS_DEVICE void store(uint8_t* lds, int i, Words words) const {
    if constexpr (kDecode) {
      words = __builtin_shufflevector(detail::decode<kBFloat>(words.x),
                                      detail::decode<kBFloat>(words.y), 0, 1, 2, 3);
    }
    *reinterpret_cast<Words*>(lds + place_ + i * kRowsAtOnce * kLine) = words;
  }

  Buffer buffer_;
  int place_;
  uint32_t row_[kLoads];  // bytes to the rows that the thread loads
  Words staged_[kLoads];
};

// FP8 weights of a 16-bit a are decoded on their way to LDS.
template <MmaKind kKind, class Tile>
using LineLoaderW = LineLoader<Tile::kShape.block_n, Tile::kShape.threads(),
                               (w_bytes(kKind) < a_bytes(kKind)), kKind == MmaKind::kBFloat16Fp8>;

// The tile of one workgroup: sums over lines [begin, end) of K, left in the waves' registers.
// Tile::kShape says which tile; LoaderW brings the lines of w.
template <MmaKind kKind, class Tile, bool kBlockScales, class LoaderW = LineLoaderW<kKind, Tile>>
class TileProduct {
 public:
  static constexpr GemmTile kShape = Tile::kShape;
  static constexpr int kPartsM = kShape.wave_m() / kPart;
  static constexpr int kPartsN = kShape.wave_n() / kPart;
  using Sums = PartSums[kPartsN][kPartsM];

  // RowsA, RowsW: see rows.h.
  template <class RowsA, class RowsW>
  ROCM_KERNELS_DEVICE TileProduct(const RowsA& a, const RowsW& w, int k, int wave, int lane)
      : a_(a), w_(w), k_(k) {
    const int row_m = wave % kShape.waves_m * (kPartsM * kPart);
    const int row_n = wave / kShape.waves_m * (kPartsN * kPart);
    const int row = lane % kPart, half = lane / kPart;
    fragment_ = row * kLine + (half ^ row % 8) * 16;
    a_rows_ = row_m * kLine;
    w_rows_ = (kShape.block_m + row_n) * kLine;
    if constexpr (kBlockScales) {
      // Rows outside read another one's scale, and are dropped.
      scales_a_ = buffer_at(a.scales());
      scales_w_ = buffer_at(w.scales());
#pragma unroll
      for (int i = 0; i < kPartsM; ++i) scale_a_row_[i] = a.scale_offset(row_m + i * kPart + row);
#pragma unroll
      for (int j = 0; j < kPartsN; ++j) scale_w_row_[j] = w.scale_offset(row_n + j * kPart);
      blocks_a_ = a.scale.is_blocked();
      blocks_w_ = w.scale.is_blocked();
      scale_a_step_ = static_cast<uint32_t>(a.scale.block_stride * 4);
      scale_w_step_ = static_cast<uint32_t>(w.scale.block_stride * 4);
    }
  }

  // Adds the lines [begin, end) of K to the wave's sums.
  ROCM_KERNELS_DEVICE void run(int begin, int end, uint8_t* lds, Sums& sums) {
    uint8_t* const lds_w = lds + kShape.block_m * kLine;
    const int whole = k_ / line_elements(kKind);
    const int last = end < whole ? end : whole;
    load_scales(begin);
    if (begin < last) load(begin);
    for (int line = begin; line < last; ++line) {
      a_.store(lds);
      w_.store(lds_w);
      workgroup_barrier();
      // Past the end: the last line again, which nobody stores. No branch, no wait for it.
      load(line + 1 < last ? line + 1 : line);
      multiply(lds, line, sums);
      if (last_of_window(line)) load_scales(line + 1);
      workgroup_barrier();
    }
    if (last < end) {
      a_.copy_cut(whole, k_ * a_bytes(kKind), lds);
      w_.copy_cut(whole, k_ * w_bytes(kKind), lds_w);
      workgroup_barrier();
      multiply(lds, whole, sums);
      workgroup_barrier();
    }
  }

 private:
  ROCM_KERNELS_DEVICE void load(int line) {
    a_.load(line);
    w_.load(line);
  }

  // Blocks of K whose scales are loaded together. gfx950's matrix instructions take operands of
  // eight registers in a row, which leaves fewer for scales.
#if defined(__gfx950__)
  static constexpr int kWindow = 2;
  using Window = float __attribute__((ext_vector_type(2)));
  static ROCM_KERNELS_DEVICE Window load_window(const Buffer& scales, uint32_t row, int offset) {
    return __builtin_bit_cast(Window, __builtin_amdgcn_raw_buffer_load_b64(scales, row, offset, 0));
  }
#else
  static constexpr int kWindow = 4;
  using Window = float __attribute__((ext_vector_type(4)));
  static ROCM_KERNELS_DEVICE Window load_window(const Buffer& scales, uint32_t row, int offset) {
    return __builtin_bit_cast(Window, load_words<Cache::kKeep>(scales, row, offset));
  }
#endif
  static constexpr int kBlockLines = static_cast<int>(kScaleBlock) / line_elements(kKind);
  static ROCM_KERNELS_DEVICE int block_of(int line) { return line / kBlockLines; }
  static ROCM_KERNELS_DEVICE bool last_of_window(int line) {
    return kBlockScales && (line + 1) % (kWindow * kBlockLines) == 0;
  }

  // Asks for the scales of the window that a line lies in. A row's scales lie side by side, and
  // another row's on another cache line: four at a time spare three quarters of the lines.
  ROCM_KERNELS_DEVICE void load_scales(int line) {
    if constexpr (kBlockScales) {
      // The last window begins earlier, so that it ends with the row.
      const int blocks = (k_ + static_cast<int>(kScaleBlock) - 1) / static_cast<int>(kScaleBlock);
      const int last = blocks > kWindow ? blocks - kWindow : 0;
      const int block = block_of(line) / kWindow * kWindow;
      window_begin_ = block < last ? block : last;
      const bool together = scale_a_step_ == 4 && blocks >= kWindow;
      const auto step_of = [&](int e) {
        return window_begin_ + e < blocks ? window_begin_ + e : blocks - 1;
      };
#pragma unroll
      for (int i = 0; i < kPartsM; ++i) {
        const uint32_t row = blocks_a_ ? scale_a_row_[i] : kOutside;
        if (together) {
          window_a_[i] = load_window(scales_a_, row, window_begin_ * 4);
        } else {
#pragma unroll
          for (int e = 0; e < kWindow; ++e) {
            window_a_[i][e] = load_float(scales_a_, row, step_of(e) * scale_a_step_);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kPartsN; ++j) {
        const uint32_t row = blocks_w_ ? scale_w_row_[j] : kOutside;
#pragma unroll
        for (int e = 0; e < kWindow; ++e) {
          window_w_[j][e] = load_float(scales_w_, row, step_of(e) * scale_w_step_);
        }
      }
    }
  }

  static ROCM_KERNELS_DEVICE float pick(const Window& window, int at) {
    const bool even = at % 2 == 0;
    const float low = even ? window[0] : window[1];
    if constexpr (kWindow == 2) return low;
    const float high = even ? window[kWindow - 2] : window[kWindow - 1];
    return at < 2 ? low : high;
  }

  // Fragments [first, first + kCount) of a part's line.
  template <int kCount>
  ROCM_KERNELS_DEVICE void read(const uint8_t* rows, int first, Words (&fragments)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      fragments[i] = *reinterpret_cast<const Words*>(
          rows + (fragment_ ^ (first + i) * 32));  // chunk 2 * (first + i) + half
    }
  }

  // Half a line at a time where sums go on over K: the operands' registers are then half as many.
  static constexpr int kFragments = kBlockScales ? kLineFragments : kLineFragments / 2;

  ROCM_KERNELS_DEVICE void multiply(const uint8_t* lds, int line, Sums& sums) const {
#pragma unroll
    for (int first = 0; first < kLineFragments; first += kFragments) {
      Words w[kPartsN][kFragments];
#pragma unroll
      for (int j = 0; j < kPartsN; ++j) read(lds + w_rows_ + j * kPart * kLine, first, w[j]);
#pragma unroll
      for (int i = 0; i < kPartsM; ++i) {
        Words a[kFragments];
        read(lds + a_rows_ + i * kPart * kLine, first, a);
#pragma unroll
        for (int j = 0; j < kPartsN; ++j) {
          if constexpr (kBlockScales) {
            const int at = block_of(line) - window_begin_;
            const float scale = (blocks_a_ ? pick(window_a_[i], at) : 1.0f) *
                                (blocks_w_ ? pick(window_w_[j], at) : 1.0f);
            sums[j][i] += mma_line<kKind>(w[j], a, PartSums{}) * scale;
          } else {
            sums[j][i] = mma_line<kKind>(w[j], a, sums[j][i]);
          }
        }
      }
    }
  }

  LineLoader<kShape.block_m, kShape.threads(), false, false> a_;
  LoaderW w_;
  int k_;
  int fragment_;         // bytes to the lane's first fragment of a part
  int a_rows_, w_rows_;  // bytes to the wave's rows in LDS
  Buffer scales_a_, scales_w_;
  Window window_a_[kPartsM], window_w_[kPartsN];
  uint32_t scale_a_row_[kPartsM], scale_w_row_[kPartsN];
  uint32_t scale_a_step_, scale_w_step_;
  int window_begin_;  // first block of K of the windows
  bool blocks_a_, blocks_w_;
};

#endif

}  // namespace rocm_kernels::cdna
