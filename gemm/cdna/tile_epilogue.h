// The end of a tile of the AMD gemm, whose sums lie in the registers of the waves that own them:
// the sums of the workgroups that share the tile, then scales, bias, one rounding, and the store.
// Every sum is taken in a fixed order.
#pragma once

#include "../../common/cdna/partial_sums.h"
#include "../../common/cdna/sync.h"
#include "mma_line.h"
#include "store.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

template <int kTile>
class TileEpilogue {
 public:
  static constexpr GemmTile kShape = kGemmTiles[kTile];
  static constexpr int kPartsM = kShape.wave_m() / kPart, kPartsN = kShape.wave_n() / kPart;
  using Sums = PartSums[kPartsN][kPartsM];

  ROCM_KERNELS_DEVICE TileEpilogue(const GemmProblem& p, int wave, int lane, uint8_t* lds)
      : p_(p), wave_(wave), lane_(lane), factors_(*reinterpret_cast<Factors*>(lds)) {}

  // All threads of the workgroup call it, after a barrier; LDS may be written again after another.
  // `sums`: over this worker's part of the tile's K.
  ROCM_KERNELS_DEVICE void finish(int tile, int worker, Sums& sums) {
    const Contributors contributors = p_.schedule.contributors_of(tile);
    if (contributors.count > 1) {
      publish_sums(contributors, worker, sums);
      if (!is_last(contributors, tile)) return;
      add_contributors(contributors, sums);
    }
    const TileOrder::Place place = p_.order.place_of(tile);
    factors_.fetch(p_, place);
    workgroup_barrier();
    store_tile(place, sums);
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
  static_assert(sizeof(Factors) <= kShape.lds_bytes(), "the factors lie where the lines were");

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
  ROCM_KERNELS_DEVICE void publish_sums(const Contributors& contributors, int worker,
                                        const Sums& sums) const {
    for_each_quad([&](int j, int i, int quad) {
      publish(slot(contributors, worker, j, i, quad), quad_of(sums[j][i], quad));
    });
  }

  // 2. The last to arrive adds up all slots in the order of k, its own among them: the bits do not
  // depend on who that is. Nobody waits, so not all workgroups need be resident at once.
  ROCM_KERNELS_DEVICE bool is_last(const Contributors& contributors, int tile) const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    workgroup_barrier();
    if (threadIdx.x == 0) {
      factors_.is_last = arrives_last(p_.tickets + tile, p_.launch, contributors.count);
    }
    workgroup_barrier();
    return factors_.is_last != 0;
  }
  ROCM_KERNELS_DEVICE void add_contributors(const Contributors& contributors, Sums& sums) const {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
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
  ROCM_KERNELS_DEVICE void store_tile(TileOrder::Place place, const Sums& sums) const {
    const int row_m = wave_ % kShape.waves_m * kShape.wave_m() + lane_ % kPart;
    const int row_n = wave_ / kShape.waves_m * kShape.wave_n() + lane_ / kPart * 4;
    for_each_quad([&](int j, int i, int quad) {
      const int at_n = row_n + j * kPart + quad * 8, at_m = row_m + i * kPart;
      const int n = place.n * kShape.block_n + at_n, m = place.m * kShape.block_m + at_m;
      if (m >= p_.m || n >= p_.n) return;
      Accumulator value = quad_of(sums[j][i], quad) * factors_.scale_a[at_m];
      value *= *reinterpret_cast<const Accumulator*>(factors_.scale_w + at_n);
      value += *reinterpret_cast<const Accumulator*>(factors_.bias + at_n);
      store_four(p_, m * p_.out_stride + n, value, p_.n - n);
    });
  }

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
  const int wave_, lane_;
  Factors& factors_;
};

#endif

}  // namespace rocm_kernels::cdna
