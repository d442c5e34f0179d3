// A layer's products for few rows an expert, sm_90 and later: TMA streams each
// expert's rows of w once, through stages in shared memory, into mma.sync. skinny_gemm's pipeline
// (skinny_gemm/cuda/tma_pipeline.cuh) over units of all experts.
//
//   sums[slot, n] = sum_k a[row of slot, k] * w[expert of slot, n, k]
//   out[slot, n] = sums[slot, n], or act(gate, up) of two of them, with scales and biases
//
// clang-format off
//   units: tiles of slots x block_n rows of w      a block: units b, b + blocks, ... without a pause
//   +----------+----------+----                    +-----------------------------------------------+
//   | expert 3 | expert 3 | ...                    | 1 lane     fetch_w    boxes of block_n rows   |
//   +----------+----------+----                    | 1 warp     fetch_a    the tile's rows, scales |
//   | expert 7 | expert 7 | ...        ->          | 8 warps    multiply   32 rows of w x 64 B of K|
//   +----------+----------+----                    |            its Sink   ends a unit            |
//                                                  +-----------------------------------------------+
//
// Timeline of a block. Barriers: full and empty of each stage, known and done of each unit ahead.
//
//   who       waits for                 does                                    then tells
//   all       the kernel before, in a   sort the ids of all slots: the tiles    each other: all threads, or
//             layer's first kernel                                              2 where slots are few
//   fetch_w   empty[stage]              orders a step's box of w                full[stage]: its bytes
//   fetch_a   the kernel before
//             done[unit]                looks up a unit: slots, factors, bias   known[unit]
//             empty[stage]              gathers a step's rows of a, scales      full[stage]: its copies
//   multiply  the kernel before
//             known[unit]
//             full[stage]               multiplies a step into registers        empty[stage]
//   its Sink  each other: 1             leaves its sums in shared memory        each other: 1
//                                       adds some in order, ends, stores them   done[unit]
//
// While units end, the stages fill with the next one's weights.
// clang-format on
//
// Why so. An SM's share of 4.4 TB/s needs some 100 KB on its way all the time, from the first unit
// to the last: so blocks stay, and the stages are filled with the next unit's weights while this
// one's sums are added. A block has half of an SM, so that two hide each other's barriers, and the
// blocks of the next kernel fill their stages while the last of this one end. Nothing that is
// needed to read weights comes from a kernel just before: each block sorts the ids itself.
//
// Rows of w and gate_up: a warp has the gates and the ups of the same 16 columns of h as its two
// instructions' rows, so a lane has both.
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/tma.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "operands.cuh"
#include "streamed_sink.cuh"

namespace rocm_kernels {
namespace cuda::moe {

// Where 16-byte vector `vector` of a row of `bytes` lies: how much of it there is.
__device__ __forceinline__ int vector_bytes(int64_t left) {
  return left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
}

#if __CUDA_ARCH__ >= 900

// The roles of a block's warps, and what they share.
template <class Types, int kBlockM, bool kGateUp, bool kBlockScales>
struct StreamedBlock {
  using Rows = StreamedRows<kGateUp>;
  using Sink = StreamedSink<kBlockM, kGateUp>;
  using Sums = typename Sink::Sums;
  static constexpr bool kMx = Types::kPacked > 1;
  // The tensor cores truncate what float32 would round: but for short sums of FP8, those of a slice
  // are added apart (skinny_gemm has the errors).
  static constexpr bool kSumApart = kBlockScales || !Types::kFp8A;
  static constexpr int kMTiles = Sink::kMTiles, kHalf = Sink::kHalf;
  static constexpr int kSliceABytes =
      kStreamedSliceBytes / Types::kWBytes * Types::kPacked * Types::kABytes;

  const StreamedProblem& s;
  const GroupedProblem& p;
  const StreamedStage& shape;
  const StreamedUnits& units;
  StreamedUnit (&units_ahead)[kStreamedAhead];
  uint32_t full, empty, known, done;  // barriers: of stages, of units ahead
  uint32_t stages, partials;          // shared memory
  int warp, lane;
  int stage_bytes, row_bytes, steps, tiles_m, unit_count;

  // ---- Who fetches w: a lane --------------------------------------------------------------------

  __device__ __forceinline__ void fetch_w(const CUtensorMap& w_map) const {
    const uint64_t policy = l2_policy(L2Policy::kEvictFirst);
    PipelineState state{0, 1};
    for (int unit = blockIdx.x; unit < unit_count; unit += gridDim.x) {
      const TileOrder::Place place = place_of_unit(unit, tiles_m, s.tiles_n, s.walked);
      const int expert = units.tile(place.m).expert;
      const Rows rows{place.n * shape.block_n, shape.block_n, p.n, p.interleaved};
      if (lane == 0) {
        for (int step = 0; step < steps; ++step) {
          const uint32_t barrier = full + state.stage * kMbarrierBytes;
          const uint32_t to = stages + state.stage * stage_bytes;
          mbarrier_wait(empty + state.stage * kMbarrierBytes, state.parity);
          mbarrier_arrive_expect(barrier, kStreamedBoxBytes);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            load_box_3d(w_map, step * (row_bytes / 4), rows.box_row(half), expert,
                        to + half * (kStreamedBoxBytes / 2), barrier, policy);
          }
          state.advance(s.num_stages);
        }
      }
      __syncwarp();
    }
  }

  // ---- Who looks up units, and fetches a: a warp ------------------------------------------------

  __device__ __forceinline__ void fetch_a() const {
    if (!units.are_few()) units.order_slots();
    wait_for_previous_kernel();
    const int a_bytes = p.k * Types::kABytes;
    const int row_vectors = shape.a_row_bytes() / 16;
    const int shift = 31 - __clz(row_vectors);
    PipelineState state{0, 1};
    for (int unit = blockIdx.x, count = 0; unit < unit_count; unit += gridDim.x, ++count) {
      const int ahead = count % kStreamedAhead;
      StreamedUnit& info = units_ahead[ahead];
      const TileOrder::Place place = place_of_unit(unit, tiles_m, s.tiles_n, s.walked);
      const StreamedTile tile = units.tile(place.m);
      const Rows rows_w{place.n * shape.block_n, shape.block_n, p.n, p.interleaved};
      mbarrier_wait(done + ahead * kMbarrierBytes, count / kStreamedAhead % 2 ^ 1);
      int a_row = 0;
      if (lane < tile.rows) {
        const int slot = units.slot_of(tile, lane);
        info.slots[lane] = slot;
        a_row = p.slots_of_token != 0 ? slot / p.slots_of_token : slot;
        info.a_rows[lane] = a_row;
      }
      const ScaleView scale_w = p.w.scale_of(tile.expert);
      __syncwarp();

      const auto copy_step = [&](int step) {
        const uint32_t to = stages + state.stage * stage_bytes;
        mbarrier_wait(empty + state.stage * kMbarrierBytes, state.parity);
#pragma unroll 4
        for (int i = lane; i < tile.rows << shift; i += 32) {
          const int row = i >> shift, vector = i & (row_vectors - 1);
          const int64_t byte = step * int64_t{shape.a_row_bytes()} + vector * 16;
          const auto* const from =
              static_cast<const uint8_t*>(p.a) + info.a_rows[row] * p.a_stride * Types::kABytes;
          const int bytes = vector_bytes(a_bytes - byte);
          copy_vector(to + shape.a_begin() + row * shape.a_pitch() + vector * 16,
                      bytes > 0 ? from + byte : from, bytes);
        }
        copy_scales(info, tile, rows_w, scale_w, step, to + shape.scales_begin());
        mbarrier_arrive_after_copies(full + state.stage * kMbarrierBytes);
        state.advance(s.num_stages);
      };
      copy_step(0);
      if (lane < tile.rows) copy_factor(info.a_factor[lane], p.scale_a, a_row);
      for (int at = lane; at < shape.block_n; at += 32) {
        const int row = rows_w.w_row(at);
        copy_factor(info.w_factor[at], scale_w, row);
        info.bias[at] = row >= 0 ? p.bias(tile.expert, row) : 0.0f;
      }
      if (lane == 0) {
        info.rows = tile.rows;
        info.first_n = rows_w.first_n;
        info.expert = tile.expert;
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(known + ahead * kMbarrierBytes);
      mbarrier_arrive_after_copies(known + ahead * kMbarrierBytes);
      for (int step = 1; step < steps; ++step) copy_step(step);
    }
  }

  // The scales that change along K, of a step.
  __device__ __forceinline__ void copy_scales(const StreamedUnit& info, const StreamedTile& tile,
                                              const Rows& rows_w, const ScaleView& scale_w,
                                              int step, uint32_t to) const {
    if constexpr (kBlockScales) {
      // [row of a, or the two of w][block of the stage]
      const int blocks = row_bytes / static_cast<int>(kScaleBlock);
      const int all_blocks =
          (p.k + static_cast<int>(kScaleBlock) - 1) / static_cast<int>(kScaleBlock);
      const int block = step * blocks + lane % 4;
      const bool is_block = lane % 4 < blocks && block < all_blocks;
      if (p.scale_a.is_blocked()) {
        for (int row = lane / 4; row < tile.rows; row += 8) {
          const float* const from = p.scale_a.data + info.a_rows[row] * p.scale_a.row_stride;
          copy_word(to + (row * 4 + lane % 4) * 4,
                    is_block ? from + block * p.scale_a.block_stride : from, is_block);
        }
      }
      if (scale_w.is_blocked() && lane < 8) {
        copy_block_scale(p, rows_w, tile.expert, step, lane, to + shape.block_m * 16);
      }
    } else if constexpr (kMx) {
      const int mx_bytes = p.k / static_cast<int>(kMxScaleBlock);
      const auto first = reinterpret_cast<uintptr_t>(p.w.mx_scales) +
                         static_cast<uintptr_t>(tile.expert * p.w.mx_expert_stride);
      for (int at = lane; at < shape.block_n; at += 32) {
        const int row = rows_w.w_row(at);
        const uintptr_t begin =
            first + static_cast<uintptr_t>((row < 0 ? 0 : row) * p.w.mx_row_stride);
        const int64_t end = row < 0 ? 0 : static_cast<int64_t>(begin) + mx_bytes;
        uintptr_t from = (begin + step * (row_bytes / 16)) & ~uintptr_t{15};
        for (int byte = 0; byte < shape.mx_row_bytes(); byte += 16, from += 16) {
          const int bytes = vector_bytes(end - static_cast<int64_t>(from));
          copy_vector(to + at * shape.mx_row_bytes() + byte,
                      reinterpret_cast<const void*>(bytes > 0 ? from : begin & ~uintptr_t{15}),
                      bytes);
        }
      }
    }
  }

  // ---- Who multiplies: the other warps ----------------------------------------------------------

  __device__ __forceinline__ void multiply() const {
    const int group = lane / 4, quad = lane % 4;
    const StreamedShare share(row_bytes, warp);
    const Sink sink(p, shape, share, partials, warp, lane);
    const int slice = share.slice, row_group = share.row_group;
    wait_for_previous_kernel();

    const int a_at = shape.a_begin() + group * shape.a_pitch() + slice * kSliceABytes;
    PipelineState state{0, 0};
    for (int unit = blockIdx.x, count = 0; unit < unit_count; unit += gridDim.x, ++count) {
      const int ahead = count % kStreamedAhead;
      mbarrier_wait(known + ahead * kMbarrierBytes, count / kStreamedAhead % 2);
      const StreamedUnit& info = units_ahead[ahead];
      const int rows = info.rows;
      const Rows rows_w{info.first_n, shape.block_n, p.n, p.interleaved};
      uint32_t w_at[kHalf][2], exponents_at[kHalf][2];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int place = rows_w.place_of(row_group, i, half * 8 + group);
          w_at[i][half] = place * row_bytes + slice * kStreamedSliceBytes + quad * 16;
          if constexpr (kMx) {
            const int row = rows_w.w_row(place);
            const auto begin = reinterpret_cast<uintptr_t>(p.w.mx_scales) +
                               static_cast<uintptr_t>(info.expert * p.w.mx_expert_stride +
                                                      (row < 0 ? 0 : row) * p.w.mx_row_stride);
            exponents_at[i][half] = shape.scales_begin() + place * shape.mx_row_bytes() +
                                    static_cast<uint32_t>(begin & 15) + slice * 4 + quad;
          }
        }
      }

      float sums[kHalf][kMTiles][4] = {};
      for (int step = 0; step < steps; ++step) {
        const uint32_t data = stages + state.stage * stage_bytes;
        mbarrier_wait(full + state.stage * kMbarrierBytes, state.parity);
        multiply_step(data, step, rows, slice, a_at, w_at, exponents_at, sums);
        // TMA must not overtake loads that wait in the queue (skinny_gemm.md: a trap).
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + state.stage * kMbarrierBytes);
        state.advance(s.num_stages);
      }

      sink.finish(info, rows_w, rows, count, sums);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(done + ahead * kMbarrierBytes);
    }
  }

  // A stage's products of the warp's 32 rows of w and its slice of K.
  __device__ __forceinline__ void multiply_step(uint32_t data, int step, int rows, int slice,
                                                int a_at, const uint32_t (&w_at)[kHalf][2],
                                                const uint32_t (&exponents_at)[kHalf][2],
                                                Sums& sums) const {
    const int quad = lane % 4;
    WeightVector<Types> vectors[kHalf][2];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t exponent = 0;
        if constexpr (kMx) {
          // Beyond K the codes are zeros, and their exponents anything.
          const int k = step * row_bytes * 2 + slice * 128 + quad * 32;
          exponent = k < p.k ? load_shared_byte(data + exponents_at[i][half]) : 127;
        }
        vectors[i][half].load(data + w_at[i][half], exponent);
      }
    }
    float factor_w[kHalf] = {};
    if constexpr (kBlockScales) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        factor_w[i] = load_shared_float(data + shape.scales_begin() +
                                        ((shape.block_m + i) * 4 + slice / 2) * 4);
      }
    }
#pragma unroll
    for (int part = 0; part < Types::kParts; ++part) {
      Fragment<Types::kVectorMmas> w[kHalf][2];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) w[i][half] = vectors[i][half].fragment(part);
      }
#pragma unroll
      for (int j = 0; j < kMTiles; ++j) {
        if (j * kMmaM >= rows) continue;
        uint4 a_vectors[Types::kAVectors];
#pragma unroll
        for (int v = 0; v < Types::kAVectors; ++v) {
          const int vector = (quad * Types::kParts + part) * Types::kAVectors + v;
          a_vectors[v] = load_shared(data + a_at + j * kMmaM * shape.a_pitch() + vector * 16);
        }
        const auto a = widen_a<Types>(a_vectors);
        float factor_a[2] = {1.0f, 1.0f};
        if constexpr (kBlockScales) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            factor_a[e] = load_shared_float(data + shape.scales_begin() +
                                            ((j * kMmaM + quad * 2 + e) * 4 + slice / 2) * 4);
          }
        }
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          if constexpr (kSumApart) {
            float apart[4] = {};
            mma<Types>(apart, w[i][0], w[i][1], a);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float factor = kBlockScales ? factor_w[i] * factor_a[e % 2] : 1.0f;
              sums[i][j][e] = fmaf(apart[e], factor, sums[i][j][e]);
            }
          } else {
            mma<Types>(sums[i][j], w[i][0], w[i][1], a);
          }
        }
      }
    }
  }
};

#endif

// Grid: streamed_blocks_per_sm() blocks an SM, or as many as there can be units. w_map: boxes of
// [1, block_n / 2, row_bytes]. Rows of both operands start at multiples of 16 bytes and are whole
// numbers of them. Shared memory: 128 + num_stages * stage.bytes() + stage.other_bytes().
template <class Types, int kBlockM, bool kGateUp, bool kBlockScales>
__global__ void __launch_bounds__(kStreamedThreads, streamed_blocks_per_sm(kBlockM))
    moe_streamed_kernel(const __grid_constant__ CUtensorMap w_map,
                        const __grid_constant__ StreamedProblem s) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t full_barriers[kStreamedStages], empty_barriers[kStreamedStages];
  __shared__ uint64_t known_barriers[kStreamedAhead], done_barriers[kStreamedAhead];
  __shared__ StreamedUnit units_ahead[kStreamedAhead];
  const uint32_t full = pinned_address(full_barriers), empty = pinned_address(empty_barriers);
  const uint32_t known = pinned_address(known_barriers), done = pinned_address(done_barriers);
  const uint32_t padding = -shared_address(dynamic_shared) & 127;
  const uint32_t stages = pinned_address(dynamic_shared + padding);
  const GroupedProblem& p = s.product;
  const StreamedStage& shape = s.stage;
  const int stage_bytes = shape.bytes();
  const uint32_t partials = stages + s.num_stages * stage_bytes;
  uint8_t* const after_stages = dynamic_shared + padding + s.num_stages * stage_bytes;
  // The slots' experts lie where sums do later: after_stages holds kStreamedMaxSlots of them.
  StreamedUnits units(s.slots, after_stages + shape.sum_bytes(), after_stages);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_bytes = shape.row_bytes();
  const int k_bytes = p.k / Types::kPacked * Types::kWBytes;
  const int steps = (k_bytes + row_bytes - 1) / row_bytes;

  // The ids and the weights are older than the layer's first kernel, which lets the next ones begin
  // only when it has waited for what was before (dependent_launch.h).
  if (s.first) wait_for_previous_kernel();
  allow_next_kernel();
  if (units.are_few()) units.find_tiles();
  if (threadIdx.x == kStreamedWarps * 32) {
    // The box of w, or what is stored of a unit, and the lanes that copy.
    init_pipeline(full, empty, s.num_stages, 1 + 32, kStreamedWarps);
    init_pipeline(known, done, kStreamedAhead, 1 + 32, kStreamedWarps);
    fence_mbarrier_init();
    fence_async_proxy();
  }
  if constexpr (kBlockScales) {
    // Scales that are not blocks count as 1 here and are applied at the end.
    const int count = (shape.block_m + 2) * 4;
    for (int i = threadIdx.x; i < s.num_stages * count; i += kStreamedThreads) {
      reinterpret_cast<float*>(dynamic_shared + padding + i / count * stage_bytes +
                               shape.scales_begin())[i % count] = 1.0f;
    }
  }
  units.count_or_meet<kStreamedThreads>(warp == kStreamedWarps);
  const int tiles_m = units.tiles(), unit_count = tiles_m * s.tiles_n;

  const StreamedBlock<Types, kBlockM, kGateUp, kBlockScales> block{
      s,      p,        shape, units, units_ahead, full,      empty, known,   done,
      stages, partials, warp,  lane,  stage_bytes, row_bytes, steps, tiles_m, unit_count};
  if (warp == kStreamedWarps) {
    block.fetch_w(w_map);
  } else if (warp > kStreamedWarps) {
    block.fetch_a();
  } else {
    block.multiply();
  }
#endif
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
