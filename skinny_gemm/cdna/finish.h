// The end of a tile: sums of a block's waves, then of the blocks that share the tile, then scales,
// bias, rounding and the store. Every sum is taken in a fixed order.
#pragma once

#include "config.h"
#include "operands.h"
#include "problem.h"

namespace rocm_kernels {

constexpr int kWavesAtOnce = 4;  // the waves that have sums are a multiple of it
constexpr int kSumPad = 4;  // floats; keeps the rows of a tile on different banks (lds_bytes_of())

#if SKINNY_GEMM_CDNA

template <typename T>
ROCM_KERNELS_DEVICE void store_four(void* out, int64_t at, Accumulator sum, int count, bool wide) {
  Vec<T, 4> values;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = sum[i];
    values[i] = from_float<T>(value);
  }
  T* target = static_cast<T*>(out) + at;
  if (wide && count >= 4) {
    store<Touch::kAgain>(target, values);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) target[i] = values[i];
    }
  }
}

// Scales and bias of a tile, one row a thread: asked for before the K loop, whose loads hide
// theirs, and handed to the others through LDS after it. Until then nothing may touch them, or the
// wave would wait before its first weights are under way; hence the raw bits.
struct TileFactors {
  float scale_w, scale_a;
  uint32_t bias_32;
  uint16_t bias_16;

  // Thread t fetches for row t of the tile, then for row t - tile_rows of a.
  ROCM_KERNELS_DEVICE void fetch(const SkinnyGemmProblem& p, int tile_rows, int row_begin) {
    const int thread = static_cast<int>(threadIdx.x);
    const bool of_w = thread < tile_rows;
    const int row = of_w ? row_begin + thread : thread - tile_rows;
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

  // To LDS: [tile rows] scales of w, [tile rows] biases, [m] scales of a.
  ROCM_KERNELS_DEVICE void store(const SkinnyGemmProblem& p, int tile_rows, float* target) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < tile_rows) {
      target[thread] = is_factor(p.scale_w) ? scale_w : 1.0f;
      float bias = __builtin_bit_cast(float, bias_32);
      if (p.bias_dtype == DType::kFloat16) {
        bias = to_float(__builtin_bit_cast(float16, bias_16));
      } else if (p.bias_dtype == DType::kBFloat16) {
        bias = to_float(__builtin_bit_cast(bfloat16, bias_16));
      }
      target[tile_rows + thread] = bias;
    } else if (thread < tile_rows + p.m) {
      target[tile_rows + thread] = is_factor(p.scale_a) ? scale_a : 1.0f;
    }
  }

 private:
  // Block scales are applied inside the K loop.
  static ROCM_KERNELS_DEVICE bool is_factor(const ScaleView& scale) {
    return scale.kind == ScaleView::Kind::kTensor || scale.kind == ScaleView::Kind::kRow;
  }
};

// Ends a tile. `accumulators` are the wave's sums, [row tiles of a][row tiles of w]; waves 0 to
// `adders` - 1 have some. All threads of the block call it; LDS may be written again after a
// barrier.
template <Operands kKind, int kRowTilesA, int kRowsW>
ROCM_KERNELS_DEVICE void finish_tile(
    const SkinnyGemmProblem& p, int wave, int waves, int adders, int interval, int tile,
    const TileFactors& factors, const Accumulator (&accumulators)[kRowTilesA][row_tiles_of(kRowsW)],
    float* lds) {
  constexpr int kPitch = kRowsW + kSumPad;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = waves * kWaveSize;
  const int lane = thread % kWaveSize, group = lane / kTile, column = lane % kTile;
  const int rows_out = p.m;
  const int wave_floats = rows_out * kPitch;

  // 1. Every wave's sums to LDS, [wave][m][row of the tile].
  float* factor_w = lds + adders * wave_floats;
  float* bias = factor_w + kRowsW;
  float* factor_a = bias + kRowsW;
  factors.store(p, kRowsW, factor_w);
  float* own = lds + wave * wave_floats;
  const int rows_kept = wave < adders ? rows_out : 0;
#pragma unroll
  for (int i = 0; i < kRowTilesA; ++i) {
#pragma unroll
    for (int j = 0; j < row_tiles_of(kRowsW); ++j) {
      const Accumulator sum = accumulators[i][j];
      if constexpr (kKind == Operands::kFp8Sparse) {
        // Sparse rows 2r and 2r + 1 are halves of dense row r; the lane has both.
        const int row = 2 * group;
        float* target = own + row * kPitch + j * kTile + column;
        const bool kept = j * kTile + column < kRowsW;
        if (kept && row < rows_kept) target[0] = sum.x + sum.y;
        if (kept && row + 1 < rows_kept) target[kPitch] = sum.z + sum.w;
      } else {
        const int row = i * kTile + column;
        if (row < rows_kept && j * kTile + 4 * group < kRowsW) {
          *reinterpret_cast<Accumulator*>(own + row * kPitch + j * kTile + 4 * group) = sum;
        }
      }
    }
  }
  block_barrier();

  // 2. Sums over the waves, four columns of out an item, left in the first wave's place. From here
  // on an item has one thread, so no barrier is needed between the steps.
  const int items = rows_out * (kRowsW / 4);
  const auto place_of = [&](int item) {
    return reinterpret_cast<Accumulator*>(lds + item / (kRowsW / 4) * kPitch +
                                          item % (kRowsW / 4) * 4);
  };
  const Owners owners = p.schedule.owners_of(tile);
  float* slot = p.partials;
  if (owners.count > 1) slot += static_cast<int64_t>(owners.slot(interval)) * rows_out * kRowsW;
  for (int item = thread; item < items; item += threads) {
    const float* source = reinterpret_cast<const float*>(place_of(item));
    Accumulator sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int adder = 0; adder < adders; adder += kWavesAtOnce) {
      Accumulator part[kWavesAtOnce];
#pragma unroll
      for (int i = 0; i < kWavesAtOnce; ++i) {
        part[i] = *reinterpret_cast<const Accumulator*>(source + (adder + i) * wave_floats);
      }
#pragma unroll
      for (int i = 0; i < kWavesAtOnce; ++i) sum += part[i];
    }
    if (owners.count > 1) {
      publish(slot + 4 * item, sum);
    } else {
      *place_of(item) = sum;
    }
  }

  // 3. Where the tile has several owners, the last one to arrive adds up the slots. Each wave's
  // stores are complete (release, agent scope) before the barrier, and the ticket comes after it.
  if (owners.count > 1) {
    __shared__ bool last;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    block_barrier();
    if (thread == 0) last = arrives_last(p.tickets + tile, p.launch, owners.count);
    block_barrier();
    if (!last) return;
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    for (int item = thread; item < items; item += threads) {
      Accumulator sum = {0.0f, 0.0f, 0.0f, 0.0f};
      constexpr int kAtOnce = 4;  // loads in flight
      for (int first = 0; first < owners.count; first += kAtOnce) {
        Accumulator part[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          // Past the last owner: its slot again, not added.
          const int owner = first + i < owners.count ? first + i : owners.count - 1;
          part[i] =
              collect(p.partials +
                      static_cast<int64_t>(owners.slot(owners.first + owner)) * rows_out * kRowsW +
                      4 * item);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < owners.count) sum += part[i];
        }
      }
      *place_of(item) = sum;
    }
  }

  // 4. Scales, bias, one rounding, the store.
  for (int item = thread; item < items; item += threads) {
    const int row = item / (kRowsW / 4), at = item % (kRowsW / 4) * 4;
    const int column_out = tile * kRowsW + at;
    Accumulator value = *place_of(item) * factor_a[row];
    value *= *reinterpret_cast<const Accumulator*>(factor_w + at);
    value += *reinterpret_cast<const Accumulator*>(bias + at);
    const int64_t position = row * p.out_stride + column_out;
    const int count = p.n - column_out;
    if (p.out_dtype == DType::kFloat32) {
      store_four<float>(p.out, position, value, count, p.wide_stores);
    } else if (p.out_dtype == DType::kFloat16) {
      store_four<float16>(p.out, position, value, count, p.wide_stores);
    } else {
      store_four<bfloat16>(p.out, position, value, count, p.wide_stores);
    }
  }
}

#endif

}  // namespace rocm_kernels
