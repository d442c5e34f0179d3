// Grouped products of few rows an expert: weights stream from memory into registers, each once for
// all rows of its expert that a tile holds. skinny_gemm's register pipeline over gathered rows.
//
// A workgroup has up to kBlockM rows of one expert and kBlockN rows of w: as many columns, or the
// gates and the ups of half as many columns of h. Its waves divide its part of K among them; their
// sums meet in LDS, in the order of k.
//
//   sums[row, n] = sum_k a[row of x, or of h, k] * w[expert, n, k]       of one tile
//   out = what StreamedSink makes of them: h = act(gate, up), or a slot's sums of a part of K
//
// clang-format off
// Timeline of a workgroup. Its waves do the same with K blocks of their own; | is a barrier of all.
//
//   ask for the arguments; whose the tile's rows are, by the ids or by the list       (streamed_tile.h)
//   ask for the first K blocks of w and a                                             (stream_k_blocks)
//   the first wave: ask for factors and biases                                        (StreamedFactors)
//   each K block: wait for it, through the wave's own LDS, multiply, ask for another
//   sums to LDS; the first wave: factors to LDS | add the waves' in order, scale, activate, store
// clang-format on
//
// A product of few rows is over in microseconds, and a load takes one of them: so little is loaded
// in turn. The tile comes from its number (streamed_tile.h), what the sums are multiplied by is
// asked for before the first weight, and one barrier stands between the last weight and the stores.
#pragma once

#include "../../blocks/product/cdna/store.h"
#include "../../blocks/product/sink.h"
#include "../../common/cdna/arguments.h"
#include "../../common/cdna/sync.h"
#include "mxfp4.h"
#include "streamed_tile.h"
#include "tiles.h"

namespace rocm_kernels::cdna::moe {

#if ROCM_KERNELS_CDNA

// gated() of four neighbours.
ROCM_KERNELS_DEVICE Accumulator gated_four(GatedActivation activation, float limit,
                                           Accumulator gate, Accumulator up) {
  return with_activation(activation, [&](auto known) {
    Accumulator value;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float one = gate[e], other = up[e];
      value[e] = gated(known, limit, one, other);
    }
    return value;
  });
}

// What a lane's row is multiplied by, asked for without a branch or a wait. `row`: -1 for none.
class RowScale {
 public:
  ROCM_KERNELS_DEVICE void fetch(const ScaleView& scale, int row) {
    exists_ = scale.kind == ScaleView::Kind::kTensor || scale.kind == ScaleView::Kind::kRow;
    const uint32_t stride =
        scale.kind == ScaleView::Kind::kRow ? static_cast<uint32_t>(scale.row_stride) * 4 : 0;
    loaded_ = load_float(buffer_at(scale.data), exists_ && row >= 0 ? row * stride : kOutside, 0);
  }
  ROCM_KERNELS_DEVICE float value() const { return exists_ ? loaded_ : 1.0f; }

 private:
  bool exists_ = false;
  float loaded_ = 0.0f;
};

// What rows of w and of a are multiplied by, and the biases: the first wave's lane r has those of
// row r.
template <int kBlockN>
class StreamedFactors {
 public:
  // Asks for them, where they are needed. Nothing here waits for them. `part`: of K.
  template <class RowsW>
  ROCM_KERNELS_DEVICE void fetch(const GroupedProblem& p, const StreamedTile& tile,
                                 const RowsW& rows_w, int part, int lane) {
    scale_w_.fetch(rows_w.scale, lane < kBlockN ? rows_w.w_row(lane) : -1);
    scale_a_.fetch(tile.scales_of_a(p), lane < tile.rows ? tile.a_row - tile.first_row() : -1);
    const int row = lane < kBlockN && part == 0 ? rows_w.w_row(lane) : -1;
    if (p.w.bias == nullptr || row < 0) return;
    const int64_t at = tile.expert * p.w.bias_expert_stride + row;
    if (p.w.bias_dtype == DType::kFloat32) {
      bias_ = static_cast<const uint32_t*>(p.w.bias)[at];
    } else {
      bias_ = static_cast<const uint16_t*>(p.w.bias)[at];
    }
  }

  // To LDS: [kBlockN] of w, [block_m] of a, [kBlockN] biases.
  ROCM_KERNELS_DEVICE void store(DType bias_dtype, int block_m, int lane, float* scale_w,
                                 float* scale_a, float* bias) const {
    if (lane < kBlockN) scale_w[lane] = scale_w_.value();
    if (lane < block_m) scale_a[lane] = scale_a_.value();
    if (lane < kBlockN) bias[lane] = bias_of(bias_dtype);
  }

 private:
  ROCM_KERNELS_DEVICE float bias_of(DType dtype) const {
    if (dtype == DType::kFloat32) return __builtin_bit_cast(float, bias_);
    const auto bits = static_cast<uint16_t>(bias_);
    return dtype == DType::kBFloat16 ? __builtin_bit_cast(float, bias_ << 16)
                                     : static_cast<float>(__builtin_bit_cast(_Float16, bits));
  }

  RowScale scale_w_, scale_a_;
  uint32_t bias_ = 0;  // as it is stored
};

// The Sink (blocks/product/sink.h): the waves' sums, from registers to where they belong. An item
// is four neighbouring columns of a row.
template <MmaKind kKind, int kBlockM, int kBlockN, bool kGateUp>
class StreamedSink {
 public:
  static constexpr int kPitch = kBlockN + kSumPad;
  static constexpr int kColumns = kGateUp ? kBlockN / 2 : kBlockN;
  using Sums = Accumulator[mma_tiles_of(kBlockM)][mma_tiles_of(kBlockN)];

  // `part`: of K. LDS: a place of streamed_place_bytes() for each wave's sums, then the factors.
  ROCM_KERNELS_DEVICE StreamedSink(const GroupedProblem& p, const StreamedTile& tile, int n_begin,
                                   int part, int waves, int wave, int lane,
                                   const StreamedFactors<kBlockN>& factors, uint8_t* lds)
      : p_(p),
        tile_(tile),
        factors_(factors),
        n_begin_(n_begin),
        part_(part),
        waves_(waves),
        wave_(wave),
        lane_(lane),
        lds_(lds) {}

  ROCM_KERNELS_DEVICE void finish(const Sums& sums) const {
    constexpr int kPlaceFloats = streamed_place_bytes(kKind, kBlockM, kBlockN) / 4;
    auto* const places = reinterpret_cast<float*>(lds_);
    float* const scale_w = places + waves_ * kPlaceFloats;
    float* const scale_a = scale_w + kBlockN;
    float* const bias = scale_a + kBlockM;
    if (wave_ == 0) factors_.store(p_.w.bias_dtype, kBlockM, lane_, scale_w, scale_a, bias);
#pragma unroll
    for (int i = 0; i < mma_tiles_of(kBlockM); ++i) {
#pragma unroll
      for (int j = 0; j < mma_tiles_of(kBlockN); ++j) {
        Mma<kKind>::template store_sums<kPitch>(places + wave_ * kPlaceFloats, i, j, tile_.rows,
                                                kBlockN, lane_, sums[i][j]);
      }
    }
    workgroup_barrier();
    const int items = tile_.rows * (kColumns / 4);
    for (int first = 0; first < items; first += waves_ * kWaveSize) {
      const int item = first + wave_ * kWaveSize + lane_;
      const int row = item / (kColumns / 4), at = item % (kColumns / 4) * 4;
      const int out_row = of_lane(tile_.out_row, row);  // by all lanes
      const int column = (kGateUp ? n_begin_ / 2 : n_begin_) + at;
      const int columns = kGateUp ? p_.n / 2 : p_.n;
      if (item >= items || column >= columns) continue;
      Accumulator value[kGateUp ? 2 : 1] = {};
      const float* const own = places + row * kPitch + at;
      if (waves_ == kStreamedWaves) {
        add_waves<kStreamedWaves>(own, value);
      } else if (waves_ == 2) {
        add_waves<2>(own, value);
      } else {
        add_waves<1>(own, value);
      }
      for (int up = 0; up < (kGateUp ? 2 : 1); ++up) {
        value[up] *= scale_a[row];
        value[up] *= *reinterpret_cast<const Accumulator*>(scale_w + up * kColumns + at);
        value[up] += *reinterpret_cast<const Accumulator*>(bias + up * kColumns + at);
      }
      if constexpr (kGateUp) value[0] = gated_four(p_.activation, p_.limit, value[0], value[1]);
      const int64_t place = part_ * p_.slots + out_row;
      store_four(p_.out, p_.out_dtype, place * p_.out_stride + column, value[0], columns - column,
                 p_.wide_stores);
    }
  }

 private:
  // The sums of an item, and those of its ups: all are on their way before the first is added.
  template <int kWaves, int kValues>
  static ROCM_KERNELS_DEVICE void add_waves(const float* own, Accumulator (&value)[kValues]) {
    constexpr int kPlaceFloats = streamed_place_bytes(kKind, kBlockM, kBlockN) / 4;
    Accumulator sums[kValues][kWaves];
#pragma unroll
    for (int up = 0; up < kValues; ++up) {
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        sums[up][wave] =
            *reinterpret_cast<const Accumulator*>(own + wave * kPlaceFloats + up * kColumns);
      }
    }
#pragma unroll
    for (int up = 0; up < kValues; ++up) {
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) value[up] += sums[up][wave];
    }
  }

  const GroupedProblem& p_;
  const StreamedTile& tile_;
  const StreamedFactors<kBlockN>& factors_;
  const int n_begin_, part_, waves_, wave_, lane_;
  uint8_t* const lds_;
};

template <MmaKind kKind, int kBlockM, int kBlockN, bool kBlockScales, bool kFp4>
struct StreamedLoader {
  using Type = TileLoader<kKind, kBlockM, kBlockN, kBlockScales>;
};
template <MmaKind kKind, int kBlockM, int kBlockN>
struct StreamedLoader<kKind, kBlockM, kBlockN, false, true> {
  using Type = Mxfp4TileLoader<kBlockM, kBlockN>;
};

#endif

// LDS: streamed_lds_bytes(). kFp4: w is MXFP4, a bfloat16.
template <MmaKind kKind, int kBlockM, int kBlockN, bool kBlockScales, bool kFp4, bool kGateUp>
__global__ void __launch_bounds__(kStreamedWaves * 64)
    moe_streamed([[maybe_unused]] const GroupedProblem p,
                 [[maybe_unused]] const StreamedWork work) {
#if ROCM_KERNELS_CDNA
  using Loader = typename StreamedLoader<kKind, kBlockM, kBlockN, kBlockScales, kFp4>::Type;
  using Sink = StreamedSink<kKind, kBlockM, kBlockN, kGateUp>;
  static_assert(kIsSinkOf<Sink, typename Loader::Sums&>, "");
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  int n, part;
  ask_for_arguments(p, work);
  const StreamedTile tile = StreamedTile::of<kGateUp, kBlockM>(p, work, lane, n, part);
  if (tile.expert < 0) return;
  const int n_begin = n * kBlockN;

  const ExpertRows<kGateUp, kBlockN / 2> rows_w(p, tile.expert, n_begin, kFp4 ? 1 : w_bytes(kKind));
  StreamedFactors<kBlockN> factors;
  typename Loader::Sums sums = {};
  {
    Loader loader(TileRowsOfA(p, tile, a_bytes(kKind)), rows_w, p.k, lane);
    constexpr int kKBlock = streamed_k_block(kFp4);
    const int k_blocks = (p.k + kKBlock - 1) / kKBlock;
    const int begin = work.parts.begin_of(part);
    const int blocks = work.parts.begin_of(part + 1) - begin;
    const EvenSplit waves = {work.waves, blocks >> work.log2_waves, blocks & (work.waves - 1)};
    stream_k_blocks<streamed_stages(kKind, kBlockM)>(
        loader, begin + waves.begin_of(wave), begin + waves.begin_of(wave + 1), k_blocks,
        lds + wave * streamed_place_bytes(kKind, kBlockM, kBlockN), sums, [&] {
          if (wave == 0) factors.fetch(p, tile, rows_w, part, lane);
        });
  }
  Sink(reread_problem<GroupedProblem>(), tile, n_begin, part, work.waves, wave, lane, factors, lds)
      .finish(sums);
#endif
}

}  // namespace rocm_kernels::cdna::moe
