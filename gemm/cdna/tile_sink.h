// The Sink (blocks/product/sink.h) of a tile of the AMD gemm, whose sums lie in the registers of
// the waves that own them: the sums of the workgroups that share the tile, then scales, bias, one
// rounding, and the store. Every sum is taken in a fixed order.
#pragma once

#include "../../blocks/product/cdna/mma_line.h"
#include "../../blocks/product/cdna/partial_sums.h"
#include "../../blocks/product/cdna/store.h"
#include "../../blocks/product/sink.h"
#include "../../common/cdna/sync.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

template <int kTile>
class TileSink {
 public:
  static constexpr GemmTile kShape = kGemmTiles[kTile];
  static constexpr int kPartsM = kShape.wave_m() / kPart, kPartsN = kShape.wave_n() / kPart;
  using Sums = PartSums[kPartsN][kPartsM];

  ROCM_KERNELS_DEVICE TileSink(const GemmProblem& p, int tile, int worker, int wave, int lane,
                               uint8_t* lds)
      : p_(p),
        tile_(tile),
        worker_(worker),
        wave_(wave),
        lane_(lane),
        factors_(*reinterpret_cast<Factors*>(lds)),
        staging_(lds + kFactorBytes + wave * kStagingBytes) {}

  // `sums`: over this worker's part of the tile's K.
  ROCM_KERNELS_DEVICE void finish(Sums& sums) {
    const Contributors contributors = p_.schedule.contributors_of(tile_);
    if (contributors.count > 1) {
      publish_sums(contributors, sums);
      if (!is_last(contributors)) return;
      add_contributors(contributors, sums);
    }
    const TileOrder::Place place = p_.order.place_of(tile_);
    factors_.fetch(p_, place);
    workgroup_barrier();
    if (!p_.vector_rows) {
      store_tile(place, sums);
    } else if (p_.out_dtype == DType::kFloat16) {
      store_rows<float16>(place, sums);
    } else {
      store_rows<bfloat16>(place, sums);
    }
  }

 private:
  static constexpr int kQuads = kPartSums / 4;  // runs of four neighbours of a row of out

  // In LDS: what rows and columns are multiplied by, and the bias.
  struct Factors {
    float scale_w[kShape.block_n];
    float bias[kShape.block_n];
    float scale_a[kShape.block_m];
    int32_t is_last;

    ROCM_KERNELS_DEVICE void fetch(const GemmProblem& p, TileOrder::Place place) {
      for (int i = threadIdx.x; i < kShape.block_n; i += kShape.threads()) {
        const int n = place.n * kShape.block_n + i;
        scale_w[i] = n < p.n ? p.scale_w.outer(n) : 0.0f;
        bias[i] = n < p.n && p.bias != nullptr ? load_element(p.bias, p.bias_dtype, n) : 0.0f;
      }
      for (int i = threadIdx.x; i < kShape.block_m; i += kShape.threads()) {
        const int m = place.m * kShape.block_m + i;
        scale_a[i] = m < p.m ? p.scale_a.outer(m) : 0.0f;
      }
    }
  };
  static constexpr int kFactorBytes = (sizeof(Factors) + 15) / 16 * 16;

  // Behind them a wave's own place: a part's rows of 16-bit outputs, all columns of the wave.
  static constexpr int kRowVectors = kShape.wave_n() / 8;       // of 16 bytes
  static constexpr int kStagingPitch = (kRowVectors + 1) * 16;  // one more: fewer banks meet
  static constexpr int kStagingBytes = kPart * kStagingPitch;
  static_assert(kFactorBytes + kShape.waves() * kStagingBytes <= kShape.lds_bytes(),
                "they lie where the lines were");

  static ROCM_KERNELS_DEVICE Accumulator quad_of(const PartSums& sums, int quad) {
    return {sums[4 * quad], sums[4 * quad + 1], sums[4 * quad + 2], sums[4 * quad + 3]};
  }

  // A slot of the workspace: [wave][part][quad][lane] of four sums.
  ROCM_KERNELS_DEVICE float* slot(const Contributors& contributors, int worker, int j, int i,
                                  int quad) const {
    const int row = ((wave_ * kPartsN + j) * kPartsM + i) * kQuads + quad;
    return p_.partials +
           static_cast<int64_t>(contributors.slot(worker)) * (kShape.block_m * kShape.block_n) +
           (row * kWaveSize + lane_) * 4;
  }

  // 1. Where a tile has several contributors, each leaves its sums in its slot.
  ROCM_KERNELS_DEVICE void publish_sums(const Contributors& contributors, const Sums& sums) const {
    for_each_quad([&](int j, int i, int quad) {
      publish(slot(contributors, worker_, j, i, quad), quad_of(sums[j][i], quad));
    });
  }

  // 2. The last to arrive adds up all slots in the order of k, its own among them: the bits do not
  // depend on who that is. Nobody waits, so not all workgroups need be resident at once.
  ROCM_KERNELS_DEVICE bool is_last(const Contributors& contributors) const {
    await_published();
    workgroup_barrier();
    if (threadIdx.x == 0) {
      factors_.is_last = arrives_last(p_.tickets + tile_, p_.launch, contributors.count);
    }
    workgroup_barrier();
    return factors_.is_last != 0;
  }
  ROCM_KERNELS_DEVICE void add_contributors(const Contributors& contributors, Sums& sums) const {
#pragma unroll
    for (int j = 0; j < kPartsN; ++j) {
#pragma unroll
      for (int i = 0; i < kPartsM; ++i) sums[j][i] = PartSums{};
    }
    for (int number = 0; number < contributors.count; ++number) {
      for_each_quad([&](int j, int i, int quad) {
        const Accumulator sum =
            collect(slot(contributors, contributors.first + number, j, i, quad));
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[j][i][4 * quad + e] += sum[e];
      });
    }
  }

  // 3. Scales, bias, one rounding, the store.
  //
  // 16-bit rows go by way of LDS, so that neighbouring lanes store neighbouring vectors and L2 is
  // given whole lines. As they lie in registers a line would come in 16 pieces, and a line that L2
  // cannot keep until it is whole goes to memory several times.
  template <typename T>
  ROCM_KERNELS_DEVICE void store_rows(TileOrder::Place place, const Sums& sums) const {
    constexpr int kRowsAtOnce = kWaveSize / kRowVectors;
    const int row = lane_ % kPart, first_row = lane_ / kRowVectors;
    const int first_m = place.m * kShape.block_m + row_m(), n_in_wave = lane_ % kRowVectors * 8;
    const int n = place.n * kShape.block_n + row_n() + n_in_wave;
#pragma unroll
    for (int i = 0; i < kPartsM; ++i) {
#pragma unroll
      for (int j = 0; j < kPartsN; ++j) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          const int at = j * kPart + quad * 8 + lane_ / kPart * 4;
          const Accumulator value =
              finished(sums[j][i], quad, row_m() + i * kPart + row, row_n() + at);
          Vec<T, 4> four;
#pragma unroll
          for (int e = 0; e < 4; ++e) four[e] = from_float<T>(static_cast<float>(value[e]));
          *reinterpret_cast<Vec<T, 4>*>(staging_ + row * kStagingPitch + at * 2) = four;
        }
      }
      __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
#pragma unroll
      for (int r = 0; r < kPart; r += kRowsAtOnce) {
        auto vector = *reinterpret_cast<const Vec<T, 8>*>(
            staging_ + (first_row + r) * kStagingPitch + n_in_wave * 2);
        const int m = first_m + i * kPart + first_row + r;
        if (m < p_.m && n < p_.n) {
          T* const at = static_cast<T*>(p_.out) + m * p_.out_stride + n;
          if (p_.adds) vector = sum_of(*reinterpret_cast<const Vec<T, 8>*>(at), vector);
          store<Touch::kAgain>(at, vector);
        }
      }
      __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    }
  }

  template <typename T>
  static ROCM_KERNELS_DEVICE Vec<T, 8> sum_of(Vec<T, 8> x, Vec<T, 8> y) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const T x_i = x[i], y_i = y[i];
      x[i] = from_float<T>(to_float(x_i) + to_float(y_i));
    }
    return x;
  }

  // Any other type and alignment, a lane's own four neighbours at a time.
  ROCM_KERNELS_DEVICE void store_tile(TileOrder::Place place, const Sums& sums) const {
    const int first_m = row_m() + lane_ % kPart, first_n = row_n() + lane_ / kPart * 4;
    for_each_quad([&](int j, int i, int quad) {
      const int at_n = first_n + j * kPart + quad * 8, at_m = first_m + i * kPart;
      const int n = place.n * kShape.block_n + at_n, m = place.m * kShape.block_m + at_m;
      if (m >= p_.m || n >= p_.n) return;
      const Accumulator value = finished(sums[j][i], quad, at_m, at_n);
      store_four(p_, m * p_.out_stride + n, value, p_.n - n);
    });
  }

  // Four sums with the factors of this row and these columns of the tile.
  ROCM_KERNELS_DEVICE Accumulator finished(const PartSums& sums, int quad, int at_m,
                                           int at_n) const {
    Accumulator value = quad_of(sums, quad) * factors_.scale_a[at_m];
    value *= *reinterpret_cast<const Accumulator*>(factors_.scale_w + at_n);
    value += *reinterpret_cast<const Accumulator*>(factors_.bias + at_n);
    return value;
  }

  // The wave's first row and column of the tile.
  ROCM_KERNELS_DEVICE int row_m() const { return wave_ % kShape.waves_m * kShape.wave_m(); }
  ROCM_KERNELS_DEVICE int row_n() const { return wave_ / kShape.waves_m * kShape.wave_n(); }

  template <typename Body>
  static ROCM_KERNELS_DEVICE void for_each_quad(const Body& body) {
#pragma unroll
    for (int j = 0; j < kPartsN; ++j) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int i = 0; i < kPartsM; ++i) body(j, i, quad);
      }
    }
  }

  static ROCM_KERNELS_DEVICE float load_element(const void* data, DType dtype, int i) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
    if (dtype == DType::kFloat16) return to_float(static_cast<const float16*>(data)[i]);
    return to_float(static_cast<const bfloat16*>(data)[i]);
  }

  const GemmProblem& p_;
  const int tile_, worker_, wave_, lane_;
  Factors& factors_;
  uint8_t* const staging_;
};

#endif

}  // namespace rocm_kernels::cdna
