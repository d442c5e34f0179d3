// The Sink (../sink.h) of a tile whose K the waves of a workgroup divided: their sums are added,
// then those of the workgroups that share the tile; then scales, bias, rounding and the store.
// Every sum is taken in a fixed order.
#pragma once

#include "../../../common/cdna/mfma_sparse.h"
#include "../../../common/cdna/sync.h"
#include "../sink.h"
#include "partial_sums.h"
#include "problem.h"
#include "sink_lds.h"
#include "store.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// Scales and bias of a tile, one row a thread: asked for before the K loop, whose loads hide
// theirs, and handed to the others through LDS after it. Until then nothing may touch them, or the
// wave would wait before its first weights are under way; hence the raw bits.
struct TileFactors {
  float scale_w, scale_a;
  uint32_t bias_32;
  uint16_t bias_16;

  // Thread t fetches for row t of the tile's rows of w, then for row t - block_n of those of a.
  ROCM_KERNELS_DEVICE void fetch(const GemmProblem& p, int block_n, int m_begin, int n_begin) {
    const int thread = static_cast<int>(threadIdx.x);
    const bool of_w = thread < block_n;
    const int row = of_w ? n_begin + thread : m_begin + thread - block_n;
    const bool in_w = of_w && row < p.n, in_a = !of_w && row < p.m;
    const auto load = [&](const ScaleView& scale, bool wanted) {
      const auto offset = static_cast<uint32_t>(row * scale.row_stride * 4);
      return load_float(buffer_at(scale.data),
                        !wanted || !is_factor(scale)          ? kOutside
                        : scale.kind == ScaleView::Kind::kRow ? offset
                                                              : 0,
                        0);
    };
    scale_w = load(p.scale_w, in_w);
    scale_a = load(p.scale_a, in_a);
    const Buffer bias = buffer_at(p.bias);
    const bool wide = p.bias_dtype == DType::kFloat32;
    bias_32 = __builtin_amdgcn_raw_buffer_load_b32(
        bias, in_w && p.bias != nullptr && wide ? 4u * row : kOutside, 0, 0);
    bias_16 = __builtin_amdgcn_raw_buffer_load_b16(
        bias, in_w && p.bias != nullptr && !wide ? 2u * row : kOutside, 0, 0);
  }

  // To LDS: [block_n] scales of w, [block_n] biases, [rows] scales of a.
  ROCM_KERNELS_DEVICE void store(const GemmProblem& p, int block_n, int rows, float* target) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < block_n) {
      target[thread] = is_factor(p.scale_w) ? scale_w : 1.0f;
      float bias = __builtin_bit_cast(float, bias_32);
      if (p.bias_dtype == DType::kFloat16) {
        bias = to_float(__builtin_bit_cast(float16, bias_16));
      } else if (p.bias_dtype == DType::kBFloat16) {
        bias = to_float(__builtin_bit_cast(bfloat16, bias_16));
      }
      target[block_n + thread] = bias;
    } else if (thread < block_n + rows) {
      target[block_n + thread] = is_factor(p.scale_a) ? scale_a : 1.0f;
    }
  }

 private:
  // Block scales are applied inside the K loop.
  static ROCM_KERNELS_DEVICE bool is_factor(const ScaleView& scale) {
    return scale.kind == ScaleView::Kind::kTensor || scale.kind == ScaleView::Kind::kRow;
  }
};

// One output tile of a workgroup, from the sums of its waves to memory.
//
// `rows` rows of out from m_begin, kBlockN columns from n_begin. An item is four neighbouring
// columns of one row, and has one thread from step 2 on: no barrier is needed between the steps.
// `adders` waves have sums, the first ones.
template <MmaKind kKind, int kBlockM, int kBlockN>
class WavesSink {
 public:
  using Sums = Accumulator[mma_tiles_of(kBlockM)][mma_tiles_of(kBlockN)];

  // `wave`, `worker`: the caller's own. `factors`: fetched for the same rows.
  ROCM_KERNELS_DEVICE WavesSink(const GemmProblem& p, int tile, int worker, int wave, int waves,
                                int adders, int m_begin, int n_begin, int rows,
                                const TileFactors& factors, float* lds)
      : p_(p),
        factors_(factors),
        tile_(tile),
        worker_(worker),
        wave_(wave),
        thread_(static_cast<int>(threadIdx.x)),
        threads_(waves * kWaveSize),
        adders_(adders),
        m_begin_(m_begin),
        n_begin_(n_begin),
        rows_(rows),
        wave_floats_(rows * kPitch),
        items_(rows * (kBlockN / 4)),
        lds_(lds),
        factor_w_(lds + adders * wave_floats_),
        bias_(factor_w_ + kBlockN),
        factor_a_(bias_ + kBlockN) {}

  ROCM_KERNELS_DEVICE void finish(const Sums& sums) {
    factors_.store(p_, kBlockN, rows_, factor_w_);
    store_sums(sums);
    workgroup_barrier();
    const Contributors contributors = p_.schedule.contributors_of(tile_);
    add_waves(contributors);
    if (contributors.count > 1) {
      if (!is_last(contributors)) return;
      add_workgroups(contributors);
    }
    store_tile();
  }

 private:
  static constexpr int kPitch = kBlockN + kSumPad;

  ROCM_KERNELS_DEVICE Accumulator* place_of(int item) const {
    return reinterpret_cast<Accumulator*>(lds_ + item / (kBlockN / 4) * kPitch +
                                          item % (kBlockN / 4) * 4);
  }
  ROCM_KERNELS_DEVICE float* slot(const Contributors& contributors, int worker) const {
    return p_.partials + static_cast<int64_t>(contributors.slot(worker)) * rows_ * kBlockN;
  }

  // 1. Every wave's sums to LDS, [wave][row of out][column of the tile].
  ROCM_KERNELS_DEVICE void store_sums(const Sums& sums) const {
    float* own = lds_ + wave_ * wave_floats_;
    const int lane = thread_ % kWaveSize;
    const int rows = wave_ < adders_ ? rows_ : 0;
#pragma unroll
    for (int i = 0; i < mma_tiles_of(kBlockM); ++i) {
#pragma unroll
      for (int j = 0; j < mma_tiles_of(kBlockN); ++j) {
        Mma<kKind>::template store_sums<kPitch>(own, i, j, rows, kBlockN, lane, sums[i][j]);
      }
    }
  }

  // 2. Sums over the waves: to this workgroup's slot where the tile has several contributors, else
  // to the first wave's place.
  ROCM_KERNELS_DEVICE void add_waves(const Contributors& contributors) const {
    const bool shared = contributors.count > 1;
    float* target = p_.partials;
    if (shared) target = slot(contributors, worker_);
    for (int item = thread_; item < items_; item += threads_) {
      const float* source = reinterpret_cast<const float*>(place_of(item));
      Accumulator sum = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int adder = 0; adder < adders_; adder += kWavesAtOnce) {
        Accumulator part[kWavesAtOnce];
#pragma unroll
        for (int i = 0; i < kWavesAtOnce; ++i) {
          part[i] = *reinterpret_cast<const Accumulator*>(source + (adder + i) * wave_floats_);
        }
#pragma unroll
        for (int i = 0; i < kWavesAtOnce; ++i) sum += part[i];
      }
      if (shared) {
        publish(target + 4 * item, sum);
      } else {
        *place_of(item) = sum;
      }
    }
  }

  // 3. The last contributor to arrive adds up the slots.
  ROCM_KERNELS_DEVICE bool is_last(const Contributors& contributors) const {
    __shared__ bool last;
    await_published();
    workgroup_barrier();
    if (thread_ == 0) last = arrives_last(p_.tickets + tile_, p_.launch, contributors.count);
    workgroup_barrier();
    return last;
  }
  ROCM_KERNELS_DEVICE void add_workgroups(const Contributors& contributors) const {
    for (int item = thread_; item < items_; item += threads_) {
      Accumulator sum = {0.0f, 0.0f, 0.0f, 0.0f};
      constexpr int kAtOnce = 4;  // loads in flight
      for (int first = 0; first < contributors.count; first += kAtOnce) {
        Accumulator part[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          // Past the last contributor: its slot again, not added.
          const int number = first + i < contributors.count ? first + i : contributors.count - 1;
          part[i] = collect(slot(contributors, contributors.first + number) + 4 * item);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < contributors.count) sum += part[i];
        }
      }
      *place_of(item) = sum;
    }
  }

  // 4. Scales, bias, one rounding, the store.
  ROCM_KERNELS_DEVICE void store_tile() const {
    for (int item = thread_; item < items_; item += threads_) {
      const int row = item / (kBlockN / 4), at = item % (kBlockN / 4) * 4;
      const int column = n_begin_ + at;
      Accumulator value = *place_of(item) * factor_a_[row];
      value *= *reinterpret_cast<const Accumulator*>(factor_w_ + at);
      value += *reinterpret_cast<const Accumulator*>(bias_ + at);
      const int64_t position = (m_begin_ + row) * p_.out_stride + column;
      const int count = p_.n - column;
      store_four(p_, position, value, count);
    }
  }

  const GemmProblem& p_;
  const TileFactors& factors_;
  const int tile_, worker_, wave_;
  const int thread_, threads_, adders_, m_begin_, n_begin_, rows_, wave_floats_, items_;
  float *const lds_, *const factor_w_, *const bias_, *const factor_a_;
};

#endif

}  // namespace rocm_kernels::cdna
