// A layer's products for few rows an expert in FP8, sm_90a: the pipeline of streamed.cuh, whose
// weights the tensor core takes from shared memory by itself (wgmma).
//
//   sums[n, m] = w[n, :] . a[m, :]     64 rows of w an instruction, 8 to 32 rows of a its columns
//   out[slot of m, n] = sums[n, m], or act(gate, up) of two of them, with scales and biases
//
// clang-format off
//   a stage                                          a block
//   +-----------------------------+                  +--------------------------------------------+
//   | w  64 rows x 128 B          | x 2 chunks of K  | 1 lane         fetch_w    a box a chunk    |
//   | a  block_m rows x 128 B     |                  | 3 warps        fetch_a    every third stage|
//   +-----------------------------+                  | 2 warpgroups   multiply   a unit each, in  |
//                                                    |                end_unit   turn             |
//                                                    +--------------------------------------------+
//
// Timeline of a block. Barriers: full and empty of each stage, known and done of each unit ahead,
// told of each unit taken.
//
//   who       waits for                 does                                    then tells
//   all       the kernel before, in a   sort the ids of all slots: the tiles    each other: all threads, or
//             layer's first kernel                                              2 where slots are few
//   fetch_w   empty[stage]              orders a step's boxes of w              full[stage]: their bytes
//             the kernel before, once   behind a unit's: takes a further one    told[unit]
//   fetch_a   each other: 5             the slots are in order
//             the kernel before
//             told[unit]
//             empty[stage]              gathers a step's rows of a, scales      full[stage]: its copies
//             done[unit]                of a unit's first: slots, factors       known[unit]
//   multiply  the kernel before
//             told[unit]
//             known[unit], its turn
//             full[stage]               multiplies a step, adds it in float32   empty[stage]
//                                       behind the last step                    the other's turn: 3, 4
//   end_unit                            ends its sums and stores them           done[unit]
//
// So one warpgroup ends its unit while the other multiplies.
// clang-format on
//
// Why so. mma.sync takes operands from registers, and FP8 as float16: with eight rows of a the
// conversions and loads were as long as the bytes took, and block scales longer. wgmma reads both
// operands from shared memory in FP8, so multiplying is a tenth of the time, a thread has all of
// K of its sums, and nobody exchanges any. Each chunk of 128 of K is summed apart and added in
// float32, by its scales where there are blocks: the tensor core's own sums of FP8 are short.
//
// The first units of a block are those of its number: their weights are asked for before anything
// is known of the kernel before. Further ones it takes from a counter, which the layer's first
// kernel has cleared: by number some blocks had a unit more than others and some SMs get their
// bytes
// sooner, so the first was done 19 us before the last of 82. A unit's sums do not depend on whose
// it
// is.
//
// Rows of w and gate_up: of 16 rows of the operand 8 are gates, and 8 the ups of the same columns
// of h, so a thread has both.
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/tma.cuh"
#include "../../common/cuda/wgmma.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "pipelines.h"
#include "streamed_units.cuh"

namespace rocm_kernels {
namespace cuda::moe {

struct StreamedWgmmaProblem {
  GroupedProblem product;  // its rows are slots; tiles, tile_count and row_slots are not used
  StreamedSlots slots;
  int32_t num_stages;
  int32_t tiles_n;
  int32_t walked;  // tiles of rows that are walked down before the next columns; 0: all
  bool first;      // of the layer's kernels: the ids may be the previous kernel's
  int32_t* taken;  // units that blocks have taken; 0 when the previous kernel has ended
};

// A unit as the warpgroups need it.
template <int kBlockM>
struct StreamedWgmmaUnit {
  int32_t rows;     // of a
  int32_t first_n;  // of w, counted as a tile has them
  int32_t slots[kBlockM];
  float a_factor[kBlockM];          // of whole rows
  float w_factor[kStreamedWgmmaN];  // in the order in which they lie in a stage
  float bias[kStreamedWgmmaN];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The roles of a block's warps, and what they share.
template <int kBlockM, bool kGateUp, bool kBlockScales>
struct StreamedWgmmaBlock {
  static constexpr StreamedWgmmaStage kStage{kBlockM, kBlockScales};
  static constexpr int kBlockN = kStreamedWgmmaN, kChunks = kStreamedWgmmaChunks,
                       kAhead = streamed_wgmma_ahead(kBlockM);
  static constexpr int kABegin = kStage.kWBytes, kChunkABytes = kBlockM * kChunkBytes;
  static constexpr int kColumnTiles = kBlockM / 8;
  static constexpr int kCopyRegisters = 64, kMultiplyRegisters = 88;  // on average 80
  // Named barriers beside that of all threads: number 2 in the kernel, the warpgroups' turns, the
  // copiers'.
  static constexpr int kFirstTurn = 3, kOrderedBarrier = 5;
  static constexpr int kRun = kPatternLines;  // rows of w: gates, then as many ups
  using Unit = StreamedWgmmaUnit<kBlockM>;
  using Sums = float[kColumnTiles][4];

  const StreamedWgmmaProblem& s;
  const GroupedProblem& p;
  const StreamedUnits& units;
  Unit (&units_ahead)[kAhead];
  int32_t (&taken)[kStreamedWgmmaTaken];
  uint32_t full, empty, known, done, told;  // barriers: of stages, of units ahead, of those taken
  uint32_t stages, scales;                  // shared memory
  int warp, lane;
  int chunks, steps, tiles_m, unit_count;

  // ---- Whose a unit is --------------------------------------------------------------------------

  // The block's unit of that number, from unit_count on none.
  __device__ __forceinline__ int unit_at(int count) const {
    if (count < kStreamedWgmmaOwn) return static_cast<int>(blockIdx.x + count * gridDim.x);
    const int i = count - kStreamedWgmmaOwn;
    mbarrier_wait(told + i % kStreamedWgmmaTaken * kMbarrierBytes, i / kStreamedWgmmaTaken % 2);
    return taken[i % kStreamedWgmmaTaken];
  }
  __device__ __forceinline__ int take_unit() const {
    return static_cast<int>(kStreamedWgmmaOwn * gridDim.x) + atomicAdd(s.taken, 1);
  }
  __device__ __forceinline__ void tell_unit(int count, int unit) const {
    const int i = (count - kStreamedWgmmaOwn) % kStreamedWgmmaTaken;
    taken[i] = unit;
    mbarrier_arrive(told + i * kMbarrierBytes);
  }

  // ---- Who fetches w: a lane --------------------------------------------------------------------

  __device__ __forceinline__ void fetch_w(const CUtensorMap& w_map) const {
    drop_registers<kCopyRegisters>();
    const uint64_t policy = l2_policy(L2Policy::kEvictFirst);
    PipelineState state{0, 1};
    for (int count = 0, unit = blockIdx.x; unit < unit_count; ++count) {
      const TileOrder::Place place = place_of_unit(unit, tiles_m, s.tiles_n, s.walked);
      int next = unit + static_cast<int>(gridDim.x);
      const int expert = units.tile(place.m).expert;
      const int group = place.n * (kBlockN / kRun / (kGateUp ? 2 : 1));
      if (lane == 0) {
        if (count >= kStreamedWgmmaOwn) next = take_unit();  // which takes as long as a step
        for (int step = 0; step < steps; ++step) {
          const uint32_t barrier = full + state.stage * kMbarrierBytes;
          const uint32_t to = stages + state.stage * kStage.bytes();
          mbarrier_wait(empty + state.stage * kMbarrierBytes, state.parity);
          mbarrier_arrive_expect(barrier, kStage.kWBytes);
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            load_group_box(w_map, (step * kChunks + c) * kChunkBytes, group, expert,
                           to + c * kBlockN * kChunkBytes, barrier, policy);
          }
          state.advance(s.num_stages);
        }
        if (count + 1 == kStreamedWgmmaOwn) {
          wait_for_previous_kernel();
          next = take_unit();
        }
        if (count + 1 >= kStreamedWgmmaOwn) tell_unit(count + 1, next);
      }
      unit = __shfl_sync(~0u, next, 0);
    }
  }

  // ---- Who look up units, and fetch a and the scales along K: three warps -----------------------

  // Each takes every third stage; who has a unit's first tells the warpgroups what they must know.
  __device__ __forceinline__ void fetch_a() const {
    drop_registers<kCopyRegisters>();
    const int copier = warp - kStreamedWarps - 1;
    if (!units.are_few()) {
      if (copier == 0) units.order_slots();
      named_barrier<kOrderedBarrier, kStreamedWgmmaCopiers * 32>();
    }
    wait_for_previous_kernel();
    // A lane copies the same vector of a chunk of each fourth row.
    constexpr int kLaneRows = kBlockM / 4, kScaleRows = (kBlockM + 31) / 32;
    const int first_row = lane / 8, vector = lane % 8;
    const auto row_vectors = static_cast<uint32_t>(p.a_stride / 16);
    PipelineState state{copier, 1};
    int first_step = copier;  // of the unit's, that is this warp's
    for (int count = 0, unit = unit_at(0); unit < unit_count; unit = unit_at(++count)) {
      const int step_of_unit = first_step;
      first_step = (first_step - steps % kStreamedWgmmaCopiers + kStreamedWgmmaCopiers) %
                   kStreamedWgmmaCopiers;
      if (step_of_unit >= steps) continue;
      const TileOrder::Place place = place_of_unit(unit, tiles_m, s.tiles_n, s.walked);
      const StreamedTile tile = units.tile(place.m);
      const int first_n = place.n * kBlockN;
      const auto w_row = [&](int i) {
        return w_row_of<kGateUp, kRun>(first_n, i, p.n, p.interleaved);
      };
      const auto a_row_of_slot = [&](int slot) {
        return p.slots_of_token != 0 ? slot / p.slots_of_token : slot;
      };
      const auto a_row = [&](int i) { return a_row_of_slot(units.slot_of(tile, i)); };
      const ScaleView scale_w = p.w.scale_of(tile.expert);
      uint32_t from_a[kLaneRows];  // in vectors
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const int row = first_row + i * 4;
        from_a[i] = row < tile.rows ? a_row(row) * row_vectors + vector : 0;
      }
      // Of a: row lane, and 32 further; of w: the gates' and the ups' in turn.
      const float *scales_a[kScaleRows] = {}, *scales_w = nullptr;
      if constexpr (kBlockScales) {
        if (p.scale_a.is_blocked()) {
#pragma unroll
          for (int i = 0; i < kScaleRows; ++i) {
            if (lane + i * 32 >= tile.rows) continue;
            scales_a[i] = p.scale_a.data + a_row(lane + i * 32) * p.scale_a.row_stride;
          }
        }
        const int row = w_row(lane % 2 * kRun);
        if (scale_w.is_blocked() && lane < 2 * kChunks && row >= 0) {
          scales_w = scale_w.data + row / kScaleBlock * scale_w.row_stride;
        }
      }

      const auto copy_step = [&](int step) {
        const uint32_t to = stages + state.stage * kStage.bytes() + kABegin;
        mbarrier_wait(empty + state.stage * kMbarrierBytes, state.parity);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const int byte = (step * kChunks + c) * kChunkBytes;
          const int bytes = byte + vector * 16 < p.k ? 16 : 0;
          const uint4* const from = static_cast<const uint4*>(p.a) + (bytes > 0 ? byte / 16 : 0);
#pragma unroll
          for (int i = 0; i < kLaneRows; ++i) {
            if (first_row + i * 4 >= tile.rows) continue;
            copy_vector(to + c * kChunkABytes + swizzled(first_row + i * 4, 0, 1, vector),
                        from + from_a[i], bytes);
          }
        }
        if constexpr (kBlockScales) {
          const uint32_t to_scales = scales + state.stage * kStage.scale_bytes();
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            const int block = step * kChunks + c;
#pragma unroll
            for (int i = 0; i < kScaleRows; ++i) {
              if (scales_a[i] == nullptr) continue;
              copy_word(to_scales + (c * (kBlockM + 2) + lane + i * 32) * 4,
                        scales_a[i] + (block < chunks ? block * p.scale_a.block_stride : 0),
                        block < chunks);
            }
          }
          if (scales_w != nullptr) {
            const int c = lane / 2, block = step * kChunks + c;
            copy_word(to_scales + (c * (kBlockM + 2) + kBlockM + lane % 2) * 4,
                      scales_w + (block < chunks ? block * scale_w.block_stride : 0),
                      block < chunks);
          }
        }
        mbarrier_arrive_after_copies(full + state.stage * kMbarrierBytes);
        state.stage += kStreamedWgmmaCopiers;
        if (state.stage >= s.num_stages) state.stage -= s.num_stages, state.parity ^= 1;
      };
      copy_step(step_of_unit);
      if (step_of_unit == 0) {
        const int ahead = count % kAhead;
        Unit& info = units_ahead[ahead];
        mbarrier_wait(done + ahead * kMbarrierBytes, count / kAhead % 2 ^ 1);
        for (int i = lane; i < tile.rows; i += 32) {
          const int slot = units.slot_of(tile, i);
          info.slots[i] = slot;
          copy_factor(info.a_factor[i], p.scale_a, a_row_of_slot(slot));
        }
        for (int i = lane; i < kBlockN; i += 32) {
          const int row = w_row(i);
          copy_factor(info.w_factor[i], scale_w, row);
          info.bias[i] = row >= 0 ? p.bias(tile.expert, row) : 0.0f;
        }
        if (lane == 0) info.rows = tile.rows, info.first_n = first_n;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(known + ahead * kMbarrierBytes);
        mbarrier_arrive_after_copies(known + ahead * kMbarrierBytes);
      }
      for (int step = step_of_unit + kStreamedWgmmaCopiers; step < steps;
           step += kStreamedWgmmaCopiers) {
        copy_step(step);
      }
    }
  }

  // ---- Who multiply, and end units: two warpgroups in turn --------------------------------------

  __device__ __forceinline__ void multiply() const {
    raise_registers<kMultiplyRegisters>();
    const int warpgroup = warp / 4;
    // Of the rows of w of a unit: the thread's first; its second is 8 further.
    const int place = warp % 4 * 16 + lane / 4;
    const uint32_t first_w = wgmma_operand_low(stages);
    const uint32_t first_a = wgmma_operand_low(stages + kABegin);
    wait_for_previous_kernel();

    PipelineState state{0, 0};
    for (int count = 0, unit = unit_at(0); unit < unit_count; unit = unit_at(++count)) {
      if (count % 2 != warpgroup) {
        const int next = state.stage + steps;
        state = {next % s.num_stages, state.parity ^ (next / s.num_stages & 1)};
        continue;
      }
      const int ahead = count % kAhead;
      mbarrier_wait(known + ahead * kMbarrierBytes, count / kAhead % 2);
      const Unit& info = units_ahead[ahead];
      // One warpgroup multiplies while the other ends its unit. None may wait for a stage that will
      // be filled twice before it is its own: barriers tell one round from the next and no more.
      if (count > 0) named_barrier(kFirstTurn + warpgroup, kStreamedWarps * 32);
      float sums[kColumnTiles][4] = {};
      for (int step = 0; step < steps; ++step) {
        mbarrier_wait(full + state.stage * kMbarrierBytes, state.parity);
        fence_async_proxy();  // rows of a came another way than the tensor core reads
        multiply_step(first_w, first_a, state.stage, sums);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + state.stage * kMbarrierBytes);
        state.advance(s.num_stages);
      }

      if (unit_at(count + 1) < unit_count) {
        named_barrier_arrive(kFirstTurn + (warpgroup ^ 1), kStreamedWarps * 32);
      }

      end_unit(info, place, sums);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(done + ahead * kMbarrierBytes);
    }
  }

  // A stage's products: each chunk of K summed apart, then added in float32.
  __device__ __forceinline__ void multiply_step(uint32_t first_w, uint32_t first_a, int stage,
                                                Sums& sums) const {
    const int quad = lane % 4;
    const uint32_t w = first_w + stage * wgmma_offset(kStage.bytes());
    const uint32_t a = first_a + stage * wgmma_offset(kStage.bytes());
    float parts[kChunks][kColumnTiles][4];
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kChunkBytes / kWgmmaKBytes; ++i) {
        wgmma_by_low_words<DType::kFloat8E4M3FN>(
            parts[c], w + wgmma_offset(c * kBlockN * kChunkBytes + i * kWgmmaKBytes),
            a + wgmma_offset(c * kChunkABytes + i * kWgmmaKBytes), i > 0);
      }
      wgmma_commit();
    }
    float of_w[kChunks][2], of_a[kChunks][kColumnTiles][2];
    if constexpr (kBlockScales) {
      const uint32_t from = scales + stage * kStage.scale_bytes();
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t of_chunk = from + c * (kBlockM + 2) * 4;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          of_w[c][e] = load_shared_float(of_chunk + (kBlockM + e) * 4);
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j) {
            of_a[c][j][e] = load_shared_float(of_chunk + (j * 8 + quad * 2 + e) * 4);
          }
        }
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      wgmma_pin(parts[c]);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kBlockScales) {
            sums[j][e] = fmaf(parts[c][j][e], of_w[c][e / 2] * of_a[c][j][e % 2], sums[j][e]);
          } else {
            sums[j][e] += parts[c][j][e];
          }
        }
      }
    }
  }

  // Scales, bias, the activation, and the store. `place`: of the unit's rows of w, the thread's
  // first; its second is kRun further.
  __device__ __forceinline__ void end_unit(const Unit& info, int place, const Sums& sums) const {
    const int quad = lane % 4;
    const int first_n = info.first_n;
    const float factor[2] = {info.w_factor[place], info.w_factor[place + kRun]};
    const float bias[2] = {info.bias[place], info.bias[place + kRun]};
    // Of h, whose columns the rows of w are in pairs; or of out.
    const int column = kGateUp ? first_n / 2 + place / 16 * kRun + lane / 4 : first_n + place;
    const int columns = kGateUp ? p.n / 2 : p.n;
    float* const out = static_cast<float*>(p.out) + column;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int m = j * 8 + quad * 2 + e;
        if (m >= info.rows) continue;
        const float of_a = info.a_factor[m];
        const float first = sums[j][e] * of_a * factor[0] + bias[0];
        const float second = sums[j][2 + e] * of_a * factor[1] + bias[1];
        float* const to = out + info.slots[m] * p.out_stride;
        if constexpr (kGateUp) {
          if (column < columns) *to = gated(p.activation, p.limit, first, second);
        } else {
          if (column < columns) to[0] = first;
          if (column + kRun < columns) to[kRun] = second;
        }
      }
    }
  }
};

#endif

// Grid: kStreamedWgmmaBlocksPerSm blocks an SM, or as many as there can be units. w_map: boxes of
// 64 rows, in groups of 8 (make_groups_map). Rows of both operands start at multiples of 16 bytes
// and are whole numbers of them. Shared memory: num_stages * (stage.bytes() + stage.scale_bytes())
// + stage.other_bytes().
template <int kBlockM, bool kGateUp, bool kBlockScales>
__global__ void __launch_bounds__(kStreamedWgmmaThreads, kStreamedWgmmaBlocksPerSm)
    moe_streamed_wgmma_kernel(const __grid_constant__ CUtensorMap w_map,
                              const __grid_constant__ StreamedWgmmaProblem s) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Block = StreamedWgmmaBlock<kBlockM, kGateUp, kBlockScales>;
  using Unit = typename Block::Unit;
  constexpr StreamedWgmmaStage kStage = Block::kStage;
  constexpr int kAhead = Block::kAhead, kUnitWarps = 4;

  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t full_barriers[kStreamedStages], empty_barriers[kStreamedStages];
  __shared__ uint64_t known_barriers[kAhead], done_barriers[kAhead];
  __shared__ uint64_t told_barriers[kStreamedWgmmaTaken];
  __shared__ int32_t taken[kStreamedWgmmaTaken];
  __shared__ Unit units_ahead[kAhead];
  static_assert(
      sizeof(Unit) * kAhead + 16 * (kStreamedStages + kAhead) + 12 * kStreamedWgmmaTaken <=
          kStage.static_bytes(),
      "");
  static_assert(kBlockM <= kMostTileRows, "");
  const uint32_t full = pinned_address(full_barriers), empty = pinned_address(empty_barriers);
  const uint32_t known = pinned_address(known_barriers), done = pinned_address(done_barriers);
  const uint32_t told = pinned_address(told_barriers);
  const uint32_t padding = -shared_address(dynamic_shared) & (kPatternBytes - 1);
  const uint32_t stages = pinned_address(dynamic_shared + padding);
  const GroupedProblem& p = s.product;
  const uint32_t scales = stages + s.num_stages * kStage.bytes();
  const int scale_bytes = s.num_stages * kStage.scale_bytes();
  uint8_t* const after_stages = dynamic_shared + padding + s.num_stages * kStage.bytes();
  uint8_t* const slot_memory = after_stages + (scale_bytes + 15) / 16 * 16;
  StreamedUnits units(s.slots, slot_memory + (s.slots.count + 31) / 32 * 64, slot_memory);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunks = (p.k + kChunkBytes - 1) / kChunkBytes;
  const int steps = (chunks + Block::kChunks - 1) / Block::kChunks;

  // The ids and the weights are older than the layer's first kernel, which lets the next ones begin
  // only when it has waited for what was before (dependent_launch.h).
  if (s.first) wait_for_previous_kernel();
  allow_next_kernel();
  if (units.are_few()) units.find_tiles();
  if (threadIdx.x == kStreamedWarps * 32) {
    // The boxes of w, or what is stored of a unit, and the lanes that copy.
    init_pipeline(full, empty, s.num_stages, 1 + 32, kUnitWarps);
    init_pipeline(known, done, kAhead, 1 + 32, kUnitWarps);
    for (int i = 0; i < kStreamedWgmmaTaken; ++i) mbarrier_init(told + i * kMbarrierBytes, 1);
    fence_mbarrier_init();
    fence_async_proxy();
  }
  if constexpr (kBlockScales) {
    // Scales that are not blocks count as 1 here and are applied at the end.
    for (int i = threadIdx.x; i < scale_bytes / 4; i += kStreamedWgmmaThreads) {
      reinterpret_cast<float*>(after_stages)[i] = 1.0f;
    }
  }
  units.count_or_meet<kStreamedWgmmaThreads>(warp == kStreamedWarps);
  const int tiles_m = units.tiles(), unit_count = tiles_m * s.tiles_n;

  const Block block{s,    p,      units,  units_ahead, taken, full,   empty, known,   done,
                    told, stages, scales, warp,        lane,  chunks, steps, tiles_m, unit_count};
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
