// A layer of FP8 for so few tokens that a block can keep all rows of a, sm_90 and later: two
// kernels, which quantise what they multiply and write out themselves.
//
//   gate_up   x --> FP8 --. unit: 8 columns of h, their gates and ups, of a tile of slots
//   down      h --> FP8 --. unit: 16 columns of out, of a tile; the slots' sums meet in shared
//                           memory:  out = sum_j weight * sum, rounded once
//
// Why so. A layer of one token is some 10 us of bytes. What counts beside them is how soon the
// first are asked for, that all SMs read as many, and that no thread waits for another:
//   - Each warp streams units of its own (16 rows of w, 256 bytes of each at a time) through stages
//     of its own, and adds up all of K by itself: nobody is awaited between a's quantising and the
//     end. Only where a block has fewer units than warps do some share one's K (`parts`).
//   - A block an SM, of half its memory: down's blocks ask for their weights while gate_up's end.
//   - a is quantised before weights are asked for. What is asked for behind 100 KB of weights an
//     SM, be it a load or the code that comes next, waits 3 us for them.
//
// Two blocks of a cluster share the tiles of down's columns where that divides better; the first
// one's shared memory has the place of each slot's sum, so nothing is added out of order.
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/tma.cuh"
#include "../../common/gpu/cluster.h"
#include "../../common/gpu/dependent_launch.h"
#include "operands.cuh"
#include "resident_rows.cuh"
#include "streamed_units.cuh"

namespace rocm_kernels {
namespace cuda {

// One of the products of 16 elements of K that a lane's vectors feed.
struct ResidentMma : GroupedTypes<DType::kFloat8E4M3FN, DType::kFloat8E4M3FN> {
  static constexpr int kVectorMmas = 1;
};

// Grid: a block an SM; down: clusters that take blocks of columns in turn. w_map: boxes of
// [1, 2, 8, 256]: gates and ups, or 16 rows. Rows of a start at multiples of 16 bytes. Shared
// memory: kResidentWarps * num_stages * kResidentStageBytes + other_bytes().
template <typename T, bool kGateUp, bool kBlockScales>
__global__ void __launch_bounds__(kResidentThreads, 2)
    moe_resident_kernel(const __grid_constant__ CUtensorMap w_map,
                        const __grid_constant__ ResidentProblem s) {
#if __CUDA_ARCH__ >= 900
  using Types = GroupedTypes<DType::kFloat8E4M3FN, DType::kFloat8E4M3FN>;
  constexpr int kHalf = kResidentBlockN / 2;
  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t barriers[kResidentWarps][kResidentStages];
  const GroupedProblem& p = s.product;
  const ResidentShape& shape = s.shape;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = shape.steps(), parts = shape.parts;
  const int all_stages_bytes = kResidentWarps * s.num_stages * kResidentStageBytes;
  const uint32_t padding = -shared_address(dynamic_shared) & 127;
  const uint32_t all_stages = pinned_address(dynamic_shared + padding);
  const uint32_t stages = all_stages + warp * s.num_stages * kResidentStageBytes;
  const uint32_t shares = all_stages + all_stages_bytes;
  const uint32_t full = pinned_address(barriers[warp]);
  uint8_t* const memory = dynamic_shared + padding + all_stages_bytes;
  const float* const scales = reinterpret_cast<const float*>(memory + shape.scales_begin());
  float* const slot_sums = reinterpret_cast<float*>(memory + shape.sums_begin());

  // A warp's stages are its own, and so are their barriers: a stage is empty when the warp says so.
  if (lane == 0) {
    prefetch_tensor_map(w_map);
    for (int i = 0; i < s.num_stages; ++i) {
      mbarrier_init(full + i * kMbarrierBytes, 1 + 32);  // the box, the lanes that copy scales
    }
    fence_mbarrier_init();
    fence_async_proxy();
  }
  __syncwarp();
  const bool in_cluster = !kGateUp && s.cluster > 1;
  if (in_cluster) cluster_arrive();
  const int rank = in_cluster ? cluster_rank() : 0;

  // ---- Whose the units are ----------------------------------------------------------------------
  const int tokens = s.slots / p.slots_of_token;
  const int clusters = gridDim.x / s.cluster, cluster = blockIdx.x / s.cluster;
  const int own_columns = kGateUp ? 0 : (s.columns_n - cluster + clusters - 1) / clusters;
  FewSlots slots = {};
  int own_tiles = 0, units = 0;  // the block's; tiles: down alone
  struct Unit {
    int column;        // block of columns
    unsigned members;  // slots
    int expert;
  };
  const auto unit_of = [&](int number) {
    Unit unit;
    int tile;
    if constexpr (kGateUp) {
      number = blockIdx.x + number * gridDim.x;
      tile = number / s.columns_n;
      unit.column = number - tile * s.columns_n;
    } else {
      const int column = number / own_tiles;
      tile = (number - column * own_tiles) * s.cluster + rank;
      unit.column = cluster + column * clusters;
    }
    unit.members = slots.slots_of(tile);
    unit.expert = slots.expert_of(unit.members);
    return unit;
  };
  const auto rows_of = [&](const Unit& unit) {
    return StreamedRows<kGateUp>{unit.column * kResidentBlockN, kResidentBlockN, p.n,
                                 p.interleaved};
  };
  // A team is the `parts` warps that share a unit; it takes every teams-th one.
  const int teams = kResidentWarps / parts, team = warp / parts, part = warp % parts;

  // ---- Copies of w ------------------------------------------------------------------------------
  const uint64_t policy = l2_policy(L2Policy::kEvictFirst);
  const bool has_row_scales = !kBlockScales && p.w.scale.kind != ScaleView::Kind::kNone;
  int next = team, next_step = part;
  Unit next_unit = {};
  const auto copy_box = [&](int stage) {
    const uint32_t barrier = full + stage * kMbarrierBytes;
    if (lane == 0) {
      const int row = next_unit.column * (kGateUp && !p.interleaved ? kHalf : kResidentBlockN);
      mbarrier_arrive_expect(barrier, kResidentBoxBytes);
      load_box_4d(w_map, next_step * kResidentRowBytes, row, 0, next_unit.expert,
                  stages + stage * kResidentStageBytes, barrier, policy);
    }
  };
  const auto copy_scales = [&](int stage) {
    const uint32_t barrier = full + stage * kMbarrierBytes;
    const uint32_t to = stages + stage * kResidentStageBytes;
    const StreamedRows<kGateUp> rows = rows_of(next_unit);
    const ScaleView scale = p.w.scale_of(next_unit.expert);
    if constexpr (kBlockScales) {
      if (lane < 4) {
        // [half of the rows][block of K]
        const int block = next_step * 2 + lane % 2;
        const int64_t row = rows.w_row(lane / 2 * (p.interleaved ? 1 : kHalf)) / kScaleBlock;
        const bool is_there = block * static_cast<int>(kScaleBlock) < p.k;
        copy_word(to + kResidentBoxBytes + lane * 4,
                  scale.data + (is_there ? row * scale.row_stride + block * scale.block_stride : 0),
                  is_there);
      }
    } else if (has_row_scales && next_step == 0 && lane < kResidentBlockN) {
      copy_word(to + kResidentBoxBytes + lane * 4, scale.outer_address(rows.w_row(lane)), true);
    }
    mbarrier_arrive_after_copies(barrier);
  };
  const auto go_on = [&] {
    next_step += parts;
    if (next_step >= steps) {
      next_step = part;
      next += teams;
      if (next < units) next_unit = unit_of(next);
    }
  };
  const auto copy_next = [&](int stage) {
    if (next >= units) return;
    copy_box(stage);
    copy_scales(stage);
    go_on();
  };
  // The first stages in two halves: the copy engine may fetch boxes before the kernel waits, which
  // copies of scales may not precede (dependent_launch.h).
  const auto begin_at = [&](int unit) {
    next = unit, next_step = part;
    if (next < units) next_unit = unit_of(next);
  };
  const auto begin_boxes = [&](int lane_expert) {
    slots = FewSlots(lane_expert, kResidentBlockM);
    if constexpr (kGateUp) {
      const int blocks = gridDim.x, block = blockIdx.x;
      units = (slots.tiles * s.columns_n - block + blocks - 1) / blocks;
    } else {
      own_tiles = (slots.tiles - rank + s.cluster - 1) / s.cluster;
      units = own_tiles * own_columns;
    }
    begin_at(team);
    for (int stage = 0; stage < s.num_stages && next < units; ++stage) copy_box(stage), go_on();
  };
  const auto begin_scales = [&] {
    begin_at(team);
    for (int stage = 0; stage < s.num_stages && next < units; ++stage) copy_scales(stage), go_on();
  };

  // ---- The unit that comes next, as a lane needs it ---------------------------------------------
  const int group = lane / 4, quad = lane % 4;
  // Places in a stage of the lane's two rows of w: a gate and its up, or of 16 one after the other.
  const bool is_pair = kGateUp && p.interleaved;
  const int place[2] = {is_pair ? 2 * group : group, is_pair ? 2 * group + 1 : kHalf + group};
  Unit unit = {};
  int number = team, unit_rows = 0;
  int a_rows[2];  // of the lane's two sums
  uint32_t a_at;
  float w_factor[2], bias[2];
  // The slot of row `m` of the unit, or of its last.
  const auto slot_of = [&](int m) { return set_bit(unit.members, min(m, unit_rows - 1)); };
  const auto a_row_of = [&](int m) { return kGateUp ? slot_of(m) / p.slots_of_token : slot_of(m); };
  const auto look_up = [&] {
    unit = unit_of(number);
    unit_rows = __popc(unit.members);
    const StreamedRows<kGateUp> rows = rows_of(unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a_rows[half] = a_row_of(quad * 2 + half);
      w_factor[half] = 1.0f;
      bias[half] = p.bias(unit.expert, rows.w_row(place[half]));
    }
    a_at = shares + shape.a_begin() + a_row_of(group) * shape.a_pitch() + part * kResidentRowBytes +
           quad * 16;
  };

  // ---- a ----------------------------------------------------------------------------------------
  float own_weight = 0.0f;  // of slot `lane`
  if constexpr (kGateUp) {
    // The layer's first kernel: what is older than it, ids and weights, down may read without
    // waiting (dependent_launch.h).
    ResidentRows<T, kBlockScales> rows(s, ~0u >> (32 - tokens));
    wait_for_previous_kernel();
    const int lane_expert = expert_of_slot(s.ids, lane, s.slots, s.experts);
    rows.load();
    rows.quantize(memory);
    begin_boxes(lane_expert);
    begin_scales();
    if (number < units) look_up();
    __syncthreads();
    allow_next_kernel();
  } else {
    allow_next_kernel();
    const int lane_expert = expert_of_slot(s.ids, lane, s.slots, s.experts);
    if (lane < s.slots) own_weight = load_older(s.weights + lane);
    begin_boxes(lane_expert);
    ResidentRows<T, kBlockScales> rows(
        s, __ballot_sync(~0u, slots.tile >= 0 && slots.tile % s.cluster == rank));
    wait_for_previous_kernel();
    rows.load();
    begin_scales();
    if (number < units) look_up();
    rows.quantize(memory);
    __syncthreads();
    if (in_cluster) cluster_wait();  // the other runs
  }

  // ---- The units --------------------------------------------------------------------------------
  PipelineState state{0, 0};
  int turn = 0;
  while (number < units) {
    float sums[4] = {};
    for (int step = part; step < steps; step += parts) {
      const uint32_t data = stages + state.stage * kResidentStageBytes;
      mbarrier_wait(full + state.stage * kMbarrierBytes, state.parity);
      const uint32_t factors = data + kResidentBoxBytes;

      uint4 w[2][4];
      float block_factor[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int slice = 0; slice < 4; ++slice) {
          w[half][slice] =
              load_shared(data + place[half] * kResidentRowBytes + slice * 64 + quad * 16);
        }
        if (has_row_scales && step == 0) {
          w_factor[half] = load_shared_float(factors + place[half] * 4);
        }
        if constexpr (kBlockScales) {
#pragma unroll
          for (int block = 0; block < 2; ++block) {
            block_factor[half][block] = load_shared_float(factors + (half * 2 + block) * 4);
          }
        }
      }
      // The stage is in registers. The copy engine must not overtake loads that wait in the queue
      // (skinny_gemm.md: a trap).
      fence_async_proxy();
      __syncwarp();
      copy_next(state.stage);
      state.advance(s.num_stages);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        Fragment<4> low[2], high[2], a[2];
#pragma unroll
        for (int slice = 0; slice < 2; ++slice) {
          const uint4 a_vector[1] = {load_shared(a_at + block * 128 + slice * 64)};
          low[slice] = widen_w<Types>(w[0][block * 2 + slice]);
          high[slice] = widen_w<Types>(w[1][block * 2 + slice]);
          a[slice] = widen_a<Types>(a_vector);
        }
        // Two sums, in turn: a product waits for the one that it adds to.
        float apart[2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int slice = 0; slice < 2; ++slice) {
            const auto one = [&](const Fragment<4>& of) {
              return Fragment<1>{{{of.pair[i][0], of.pair[i][1]}}};
            };
            mma<ResidentMma>(apart[slice], one(low[slice]), one(high[slice]), one(a[slice]));
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float sum = apart[0][e] + apart[1][e];
          if constexpr (kBlockScales) {
            const float a_factor = scales[a_rows[e % 2] * shape.row_scales() + step * 2 + block];
            sums[e] = fmaf(sum, block_factor[e / 2][block] * a_factor, sums[e]);
          } else {
            sums[e] += sum;
          }
        }
      }
      a_at += parts * kResidentRowBytes;
    }

    if (parts > 1) {
      // Of two units in turn: the first warp reads one's shares while the others write the next's.
      const auto share_of = [&](int of) {
        return shares + ((turn * kResidentWarps + of) * 32 + lane) * 16;
      };
      if (part > 0) store_shared(share_of(warp), float4{sums[0], sums[1], sums[2], sums[3]});
      named_barrier(1 + team, parts * 32);
      for (int of = warp + 1; part == 0 && of < warp + parts; ++of) {
        const uint4 share = load_shared(share_of(of));
        sums[0] += __uint_as_float(share.x), sums[1] += __uint_as_float(share.y);
        sums[2] += __uint_as_float(share.z), sums[3] += __uint_as_float(share.w);
      }
      turn ^= 1;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (part > 0 || quad * 2 + m >= unit_rows) continue;
      const int slot = slot_of(quad * 2 + m);
      const float a_factor = kBlockScales ? 1.0f : scales[a_rows[m]];
      float values[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        values[half] = sums[half * 2 + m] * a_factor * w_factor[half] + bias[half];
      }
      if constexpr (kGateUp) {
        store_element(p.out, p.out_dtype, slot * p.out_stride + unit.column * kHalf + group,
                      gated(p.activation, p.limit, values[0], values[1]));
      } else {
        float* const sum =
            slot_sums + (number / own_tiles * s.slots + slot) * kResidentBlockN + group;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (in_cluster) {
            rocm_kernels::store_in_cluster(sum[half * kHalf], values[half], 0);
          } else {
            sum[half * kHalf] = values[half];
          }
        }
      }
    }
    number += teams;
    if (number < units) look_up();
  }

  // ---- down: the sums of slots ------------------------------------------------------------------
  if constexpr (!kGateUp) {
    const unsigned there = __ballot_sync(~0u, slots.expert >= 0);
    const int each = tokens * kResidentBlockN, count = own_columns * each;
    if (in_cluster) {
      cluster_arrive();
      cluster_wait();
      if (rank != 0) return;
    } else {
      __syncthreads();
    }
    for (int begin = 0; begin < count; begin += kResidentThreads) {
      const int i = begin + threadIdx.x, own_column = i / each;
      const int token = i % each / kResidentBlockN, column = i % kResidentBlockN;
      float sum = 0.0f;
#pragma unroll 4
      for (int j = 0; j < p.slots_of_token; ++j) {
        const int slot = token * p.slots_of_token + j;
        const float weight = __shfl_sync(~0u, own_weight, slot);
        const float value =
            i < count ? slot_sums[(own_column * s.slots + slot) * kResidentBlockN + column] : 0.0f;
        if (there >> slot & 1) sum = fmaf(weight, value, sum);
      }
      if (i < count) {
        const int out_column = (cluster + own_column * clusters) * kResidentBlockN + column;
        store_element(p.out, p.out_dtype, token * p.out_stride + out_column, sum);
      }
    }
  }
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
