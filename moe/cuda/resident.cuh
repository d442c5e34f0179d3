// A layer of FP8 for so few tokens that a block can keep all rows of a, sm_90 and later: two
// kernels, which quantise what they multiply and write out themselves.
//
//   gate_up   x --> FP8 --. unit: 8 columns of h, their gates and ups, of a tile of slots
//   down      h --> FP8 --. unit: 16 columns of out, of a tile; the slots' sums meet in shared
//                           memory:  out = sum_j weight * sum, rounded once
//
//   h[slot, i] = act(gate, up),   gate and up = w_gate_up[e, n, :] . q(x[token, :])      [slots, I]
//   out[t, n] = sum_j weight[t, j] * w_down[e, n, :] . q(h[slot, :]),   q: to FP8, scaled   [T, H]
//
// clang-format off
// Timeline of a block. All its warps do the same; each has stages of its own, and a barrier `full`
// for each of them. A step is multiply_step, which asks for a box as soon as one is in registers.
//
//   gate_up                                    down
//   wait for the kernel before                 let the next kernel begin
//   ids; rows of x: load, quantise             ids; begin_boxes: first boxes of w under way
//   begin_boxes, begin_scales                  wait for the kernel before (h)
//   look_up: the first unit                    rows of h: load; begin_scales, look_up; quantise
//   all threads: a is there                    all threads: a is there; the cluster: both run
//   let the next kernel begin
//   a unit:  its steps     full[stage]         the same
//            add_shares    barrier 1 + team, where warps share a unit
//            end_unit      h to memory         sums of slots to the block, or its cluster's first
//                                              all threads, or the cluster: all sums are there
//                                              add_slots: weighted, in order; out
// clang-format on
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
namespace cuda::moe {

// One of the products of 16 elements of K that a lane's vectors feed.
struct ResidentMma : GroupedTypes<DType::kFloat8E4M3FN, DType::kFloat8E4M3FN> {
  static constexpr int kVectorMmas = 1;
};

#if __CUDA_ARCH__ >= 900

// What the warps of a block share, each warp's stream of weights, and what it does with them.
template <bool kGateUp, bool kBlockScales>
struct ResidentBlock {
  using Types = GroupedTypes<DType::kFloat8E4M3FN, DType::kFloat8E4M3FN>;
  static constexpr int kHalf = kResidentBlockN / 2;
  struct Unit {
    int column;        // block of columns
    unsigned members;  // slots
    int expert;
  };

  const CUtensorMap& w_map;
  const ResidentProblem& s;
  uint32_t stages, full;  // the warp's own, and their barriers
  uint32_t shares;        // of units that several warps sum
  const float* scales;    // of rows of a
  float* slot_sums;       // down
  bool in_cluster;
  int rank;

  const GroupedProblem& p = s.product;
  const ResidentShape& shape = s.shape;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int group = lane / 4, quad = lane % 4;
  int steps = shape.steps();
  int tokens = s.slots / p.slots_of_token;
  int clusters = gridDim.x / s.cluster, cluster = blockIdx.x / s.cluster;
  int own_columns = kGateUp ? 0 : (s.columns_n - cluster + clusters - 1) / clusters;
  // A team is the `parts` warps that share a unit; it takes every teams-th one.
  int parts = shape.parts;
  int teams = kResidentWarps / parts, team = warp / parts, part = warp % parts;
  // Places in a stage of the lane's two rows of w: a gate and its up, or of 16 one after the other.
  bool is_pair = kGateUp && p.interleaved;
  int place[2] = {is_pair ? 2 * group : group, is_pair ? 2 * group + 1 : kHalf + group};
  uint64_t policy = l2_policy(L2Policy::kEvictFirst);
  bool has_row_scales = !kBlockScales && p.w.scale.kind != ScaleView::Kind::kNone;

  FewSlots slots = {};
  int own_tiles = 0, units = 0;       // the block's; tiles: down alone
  int next = team, next_step = part;  // of the boxes to copy
  Unit next_unit = {};
  Unit unit = {};  // that comes next, as a lane needs it
  int number = team, unit_rows = 0;
  int a_rows[2];  // of the lane's two sums
  uint32_t a_at;
  float w_factor[2], bias[2];
  int turn = 0;

  // ---- Whose the units are ----------------------------------------------------------------------

  __device__ __forceinline__ Unit unit_of(int number) const {
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
  }
  __device__ __forceinline__ StreamedRows<kGateUp> rows_of(const Unit& of) const {
    return StreamedRows<kGateUp>{of.column * kResidentBlockN, kResidentBlockN, p.n, p.interleaved};
  }
  // The slot of row `m` of the unit, or of its last.
  __device__ __forceinline__ int slot_of(int m) const {
    return set_bit(unit.members, min(m, unit_rows - 1));
  }
  __device__ __forceinline__ int a_row_of(int m) const {
    return kGateUp ? slot_of(m) / p.slots_of_token : slot_of(m);
  }
  __device__ __forceinline__ void look_up() {
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
  }

  // ---- Copies of w: each warp's own stages ------------------------------------------------------

  __device__ __forceinline__ void copy_box(int stage) const {
    const uint32_t barrier = full + stage * kMbarrierBytes;
    if (lane == 0) {
      const int row = next_unit.column * (kGateUp && !p.interleaved ? kHalf : kResidentBlockN);
      mbarrier_arrive_expect(barrier, kResidentBoxBytes);
      load_box_4d(w_map, next_step * kResidentRowBytes, row, 0, next_unit.expert,
                  stages + stage * kResidentStageBytes, barrier, policy);
    }
  }
  __device__ __forceinline__ void copy_scales(int stage) const {
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
  }
  __device__ __forceinline__ void go_on() {
    next_step += parts;
    if (next_step >= steps) {
      next_step = part;
      next += teams;
      if (next < units) next_unit = unit_of(next);
    }
  }
  __device__ __forceinline__ void copy_next(int stage) {
    if (next >= units) return;
    copy_box(stage);
    copy_scales(stage);
    go_on();
  }
  // The first stages in two halves: TMA may fetch boxes before the kernel waits, which
  // copies of scales may not precede (dependent_launch.h).
  __device__ __forceinline__ void begin_at(int of) {
    next = of, next_step = part;
    if (next < units) next_unit = unit_of(next);
  }
  __device__ __forceinline__ void begin_boxes(int lane_expert) {
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
  }
  __device__ __forceinline__ void begin_scales() {
    begin_at(team);
    for (int stage = 0; stage < s.num_stages && next < units; ++stage) copy_scales(stage), go_on();
  }

  // ---- Products, and the ends of units ----------------------------------------------------------

  // A stage's products; the stage is filled again as soon as it is in registers.
  __device__ __forceinline__ void multiply_step(PipelineState& state, int step, float (&sums)[4]) {
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
    // The stage is in registers. TMA must not overtake loads that wait in the queue
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
  }
  // What the warps that share a unit have summed, in the first one's registers.
  __device__ __forceinline__ void add_shares(float (&sums)[4]) {
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
  // h, or the sums of slots to where the block, or its cluster, keeps them.
  __device__ __forceinline__ void end_unit(const float (&sums)[4]) const {
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
            store_in_cluster(sum[half * kHalf], values[half], 0);
          } else {
            sum[half * kHalf] = values[half];
          }
        }
      }
    }
  }
  // down: the sums of a token's slots, weighted and rounded.
  __device__ __forceinline__ void add_slots(float own_weight) const {
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
};

#endif

// Grid: a block an SM; down: clusters that take blocks of columns in turn. w_map: boxes of
// [1, 2, 8, 256]: gates and ups, or 16 rows. Rows of a start at multiples of 16 bytes. Shared
// memory: kResidentWarps * num_stages * kResidentStageBytes + other_bytes().
template <typename T, bool kGateUp, bool kBlockScales>
__global__ void __launch_bounds__(kResidentThreads, 2)
    moe_resident_kernel(const __grid_constant__ CUtensorMap w_map,
                        const __grid_constant__ ResidentProblem s) {
#if __CUDA_ARCH__ >= 900
  using Block = ResidentBlock<kGateUp, kBlockScales>;
  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t barriers[kResidentWarps][kResidentStages];
  const ResidentShape& shape = s.shape;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

  Block block{w_map, s, stages, full, shares, scales, slot_sums, in_cluster, rank};
  float own_weight = 0.0f;  // of slot `lane`
  if constexpr (kGateUp) {
    // The layer's first kernel: what is older than it, ids and weights, down may read without
    // waiting (dependent_launch.h).
    ResidentRows<T, kBlockScales> rows(s, ~0u >> (32 - block.tokens));
    wait_for_previous_kernel();
    const int lane_expert = expert_of_slot(s.ids, lane, s.slots, s.experts);
    rows.load();
    rows.quantize(memory);
    block.begin_boxes(lane_expert);
    block.begin_scales();
    if (block.number < block.units) block.look_up();
    __syncthreads();
    allow_next_kernel();
  } else {
    allow_next_kernel();
    const int lane_expert = expert_of_slot(s.ids, lane, s.slots, s.experts);
    if (lane < s.slots) own_weight = load_older(s.weights + lane);
    block.begin_boxes(lane_expert);
    ResidentRows<T, kBlockScales> rows(
        s, __ballot_sync(~0u, block.slots.tile >= 0 && block.slots.tile % s.cluster == rank));
    wait_for_previous_kernel();
    rows.load();
    block.begin_scales();
    if (block.number < block.units) block.look_up();
    rows.quantize(memory);
    __syncthreads();
    if (in_cluster) cluster_wait();  // the other runs
  }

  PipelineState state{0, 0};
  while (block.number < block.units) {
    float sums[4] = {};
    for (int step = block.part; step < block.steps; step += block.parts) {
      block.multiply_step(state, step, sums);
      block.a_at += block.parts * kResidentRowBytes;
    }
    if (block.parts > 1) block.add_shares(sums);
    block.end_unit(sums);
    block.number += block.teams;
    if (block.number < block.units) block.look_up();
  }
  if constexpr (!kGateUp) block.add_slots(own_weight);
#endif
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
