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

#include <type_traits>
#include <utility>

#include "../../../common/cdna/buffer.h"
#include "../../../common/cdna/sync.h"
#include "mma_line.h"
#include "rows.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// A line of K that loaders are asked for ahead. From `last` on there is none to multiply.
struct LineAhead {
  int index, last;
  uint32_t hide;  // kOutside where there is none, else 0: a load's offset with it fetches nothing

  ROCM_KERNELS_DEVICE LineAhead(int line, int end)
      : index(line), last(end), hide(line < end ? 0 : kOutside) {}
};

// One operand's rows of a tile on their way to LDS, in as many stages of registers as lines are
// under way. kDecode: they are FP8 in memory, 16-bit in LDS. What TileProduct asks of a loader:
//
//   kLoads, kStages                   shares of a line; lines that may be under way
//   load(stage, line, share)          asks for a share of a line
//   store(stage, lds)                 the line of a stage to LDS
//   copy_cut(index, row_bytes, lds)   the line that K ends in
template <int kRows, int kThreads, int kNumStages, bool kDecode, bool kBFloat>
class LineLoader {
 public:
  static constexpr int kStages = kNumStages;
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

  // Asks for share `i` of a line, whose words are zeros where there is none.
  ROCM_KERNELS_DEVICE void load(int stage, const LineAhead& line, int i) {
    const uint32_t chunk = threadIdx.x % 8 * (kMemoryBytes / 8);
    const uint32_t offset = (row_[i] + chunk) | line.hide;
    if constexpr (kDecode) {
      const uint64_t two = __builtin_bit_cast(
          uint64_t,
          __builtin_amdgcn_raw_buffer_load_b64(buffer_, offset, line.index * kMemoryBytes, 0));
      staged_[stage][i] = Words{static_cast<uint32_t>(two), static_cast<uint32_t>(two >> 32), 0, 0};
    } else {
      staged_[stage][i] = load_words<Cache::kKeep>(buffer_, offset, line.index * kMemoryBytes);
    }
  }

  ROCM_KERNELS_DEVICE void store(int stage, uint8_t* lds) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) store(lds, i, staged_[stage][i]);
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
  Words staged_[kStages][kLoads];
};

// FP8 weights of a 16-bit a are decoded on their way to LDS.
template <MmaKind kKind, class Tile>
using LineLoaderW =
    LineLoader<Tile::kShape.block_n, Tile::kShape.threads(), Tile::kShape.lines_ahead,
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
    for_each<kAhead>([&](auto stage) {
      for_each<kSteps>([&](auto step) { load_share<step>(stage, begin + stage, last); });
    });
    for (int first = begin; first < last; first += kAhead) {
      for_each<kAhead>([&](auto stage) {
        const int line = first + stage;
        if (stage > 0 && line >= last) return;
        a_.store(stage, lds);
        w_.store(stage, lds_w);
        workgroup_barrier();
        multiply(lds, line, sums, [&](auto step) { load_share<step>(stage, line + kAhead, last); });
        if (last_of_window(line)) load_scales(line + 1);
        workgroup_barrier();
      });
    }
    if (last < end) {
      a_.copy_cut(whole, k_ * a_bytes(kKind), lds);
      w_.copy_cut(whole, k_ * w_bytes(kKind), lds_w);
      workgroup_barrier();
      multiply(lds, whole, sums, [](auto) {});
      workgroup_barrier();
    }
  }

 private:
  static constexpr int kAhead = kShape.lines_ahead;
  static_assert(kAhead <= LoaderW::kStages, "TileProduct: LoaderW has too few stages");

  // Loads of a line to come, none from `last` on, spread over the products of the current one: all
  // at once they would fill the queue of the memory pipe, and products wait behind them. The
  // scheduler may move neither them nor products: to save registers it would put all loads behind
  // the last product.
  template <int kStep>
  ROCM_KERNELS_DEVICE void load_share(int stage, int line, int last) {
    const LineAhead ahead(line, last);
    constexpr int kLoadsA = decltype(a_)::kLoads;
    constexpr int kLoads = kLoadsA + LoaderW::kLoads;
    // One line ahead it is soon waited for.
    constexpr int kLoadSteps = kAhead == 1 && kSteps > 1 ? kSteps / 2 : kSteps;
    constexpr int kEach = (kLoads + kLoadSteps - 1) / kLoadSteps;
#pragma unroll
    for (int i = kStep * kEach; i < (kStep + 1) * kEach && i < kLoads; ++i) {
      if (i < kLoadsA) {
        a_.load(stage, ahead, i);
      } else {
        w_.load(stage, ahead, i - kLoadsA);
      }
    }
    // With scales nothing may move: a product's own sums are to be scaled before the next ones take
    // registers.
    constexpr int kMovable = kBlockScales ? 0 : 0x86;  // arithmetic but for products, and LDS
    __builtin_amdgcn_sched_barrier(kMovable);
  }

  // Blocks of K whose scales are loaded together.
  static constexpr int kWindow = 2;
  using Window = float __attribute__((ext_vector_type(kWindow)));
  static ROCM_KERNELS_DEVICE Window load_window(const Buffer& scales, uint32_t row, int offset) {
    return __builtin_bit_cast(Window, __builtin_amdgcn_raw_buffer_load_b64(scales, row, offset, 0));
  }
  static constexpr int kBlockLines = static_cast<int>(kScaleBlock) / line_elements(kKind);
  static ROCM_KERNELS_DEVICE int block_of(int line) { return line / kBlockLines; }
  static ROCM_KERNELS_DEVICE bool last_of_window(int line) {
    return kBlockScales && (line + 1) % (kWindow * kBlockLines) == 0;
  }

  // Asks for the scales of the window that a line lies in. A row's scales lie side by side, and
  // another row's on another cache line: two at a time spare half of the lines.
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

  // A line's scales: 1 where there are no blocks, whose windows are zeros from outside.
  struct LineScales {
    float a[kPartsM], w[kPartsN];
  };
  ROCM_KERNELS_DEVICE LineScales scales_of(int line) const {
    int at = block_of(line) - window_begin_;
    asm("" : "+v"(at));  // by lanes: the compiler would jump where all lanes agree
    const auto pick = [&](const Window& window, bool blocks) {
      return (at == 0 ? window[0] : window[1]) + (blocks ? 0.0f : 1.0f);
    };
    LineScales scales;
#pragma unroll
    for (int i = 0; i < kPartsM; ++i) scales.a[i] = pick(window_a_[i], blocks_a_);
#pragma unroll
    for (int j = 0; j < kPartsN; ++j) scales.w[j] = pick(window_w_[j], blocks_w_);
    return scales;
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
  static constexpr int kSteps = kLineFragments / kFragments * kPartsM * kPartsN;

  // A step multiplies two parts, over half a line or all of it; `before_step` is given its number
  // as a constant.
  template <class BeforeStep>
  ROCM_KERNELS_DEVICE void multiply(const uint8_t* lds, int line, Sums& sums,
                                    const BeforeStep& before_step) const {
    Words w[kPartsN][kFragments], a[kFragments];
    [[maybe_unused]] LineScales scales;
    if constexpr (kBlockScales) scales = scales_of(line);
    for_each<kSteps>([&](auto step) {
      constexpr int j = step % kPartsN, i = step / kPartsN % kPartsM;
      constexpr int first = step / (kPartsN * kPartsM) * kFragments;
      before_step(step);
      if constexpr (i == 0) read(lds + w_rows_ + j * kPart * kLine, first, w[j]);
      if constexpr (j == 0) read(lds + a_rows_ + i * kPart * kLine, first, a);
      if constexpr (kBlockScales) {
        sums[j][i] += mma_line<kKind>(w[j], a, PartSums{}) * (scales.a[i] * scales.w[j]);
      } else {
        sums[j][i] = mma_line<kKind>(w[j], a, sums[j][i]);
      }
    });
  }

  // body(0), body(1), ... as constants.
  template <int kCount, class Body>
  static ROCM_KERNELS_DEVICE void for_each(const Body& body) {
    for_each(body, std::make_integer_sequence<int, kCount>());
  }
  template <class Body, int... kNumbers>
  static ROCM_KERNELS_DEVICE void for_each(const Body& body,
                                           std::integer_sequence<int, kNumbers...>) {
    (body(std::integral_constant<int, kNumbers>()), ...);
  }

  LineLoader<kShape.block_m, kShape.threads(), kAhead, false, false> a_;
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
