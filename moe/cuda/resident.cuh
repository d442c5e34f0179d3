// A layer of FP8 for so few tokens that a block can keep all rows of a, sm_90 and later: two
// kernels, which quantise what they multiply and write out themselves.
//
//   gate_up   x --> FP8 --. h of a tile of slots x block_n / 2 columns, float32
//   down      h --> FP8 --. for block_n columns of out, the tiles one after the other; the slots'
//                           sums meet in shared memory:  out = sum_j weight * sum, rounded once
//
// Each block quantises for itself what it needs, while the first weights are on their way; what a
// kernel between the products would take (launch, read, write, end) is several times that. As in
// streamed.cuh the copy engine brings boxes of 16 KB of w through stages, and eight warps multiply
// 64 bytes of K each; the sums are added in the same order, and all bits are the same.
//
// Blocks of a cluster share the tiles of a block of columns: the first one's shared memory has the
// place of each slot's sum, whoever makes it, so nothing is added out of order.
#pragma once

#include <cfloat>

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/tma.cuh"
#include "../../common/gpu/cluster.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/quantize.h"
#include "operands.cuh"
#include "resident.h"
#include "streamed_units.cuh"

namespace rocm_kernels {
namespace cuda {

constexpr float kLargest = fp8_max(DType::kFloat8E4M3FN);

struct ResidentProblem {
  GroupedProblem product;
  const int32_t* ids;    // [slots]
  const float* weights;  // [slots]; down
  int32_t slots, experts;
  ResidentShape shape;
  int32_t num_stages;
  int32_t tiles_n;
  int32_t walked;   // gate_up: tiles of rows before the next columns; 0: all
  int32_t cluster;  // down: blocks that share the tiles of a block of columns
  bool aligned;     // whole vectors of a may be loaded
};

// Rows of a, `rows` by their numbers, to FP8 in shared memory, with zeros up to whole stages: the
// bits of moe_quantize_kernel. The multiplying warps' work.
template <typename T, bool kGroups>
__device__ __forceinline__ void quantize_resident(const ResidentProblem& s, unsigned rows,
                                                  uint8_t* memory) {
  constexpr int kCount = 8;                          // values of a lane
  constexpr int kVectors = kCount * sizeof(T) / 16;  // and their vectors
  constexpr int kAtOnce = 4;                         // chunks under way
  static_assert(kCount * 32 == kResidentChunk, "a warp takes a chunk");
  const ResidentShape& shape = s.shape;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunks = shape.chunks(), items = __popc(rows) * chunks, columns = s.product.k;
  float* const scales = reinterpret_cast<float*>(memory + shape.scales_begin());
  float* const amaxes = reinterpret_cast<float*>(memory + shape.amaxes_begin());
  Output output = {};
  output.fp8_max = kLargest;
  output.amax_bound = FLT_MAX;

  const auto row_of = [&](int item) { return set_bit(rows, item / chunks); };
  const auto column_of = [&](int item) { return item % chunks * kResidentChunk + lane * kCount; };
  Vector kept[kAtOnce][kVectors];
  int kept_from = -1;
  const auto load_from = [&](int first) {
    if (kept_from == first) return;
    kept_from = first;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = first + i * kStreamedWarps;
      const bool is_there = item < items && column_of(item) < columns;
      const T* const from = static_cast<const T*>(s.product.a) +
                            (is_there ? row_of(item) * s.product.a_stride + column_of(item) : 0);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        constexpr int kEach = kVectorElements<T>;
        kept[i][v] = s.aligned ? load_if<Touch::kAgain, Vector>(is_there, from + v * kEach)
                               : load_vector<Touch::kAgain, Fit::kRagged>(
                                     from + v * kEach, 0, is_there ? kEach : 0, false);
      }
    }
  };
  const auto values_of = [&](const Vector(&vectors)[kVectors], float (&values)[kCount]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float some[kVectorElements<T>];
      unpack<T>(vectors[v], some);
#pragma unroll
      for (int i = 0; i < kVectorElements<T>; ++i) values[v * kVectorElements<T> + i] = some[i];
    }
  };
  const auto for_each_item = [&](const auto& visit) {
    for (int first = warp; first < items; first += kStreamedWarps * kAtOnce) {
      load_from(first);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = first + i * kStreamedWarps;
        float values[kCount];
        values_of(kept[i], values);
        if (item < items) visit(item, values);
      }
    }
  };

  if constexpr (!kGroups) {
    for_each_item([&](int item, const float (&values)[kCount]) {
      const float amax = reduce_lanes<32>(amax_of(values, 0.0f), MaxMagnitude{});
      if (lane == 0) amaxes[item] = amax;
    });
    named_barrier<1, kStreamedWarps * 32>();
  }
  for_each_item([&](int item, const float (&values)[kCount]) {
    const int row = row_of(item), column = column_of(item);
    float amax = 0.0f;
    if constexpr (kGroups) {
      amax = reduce_group(amax_of(values, 0.0f), 4);  // 16 lanes have 128 columns
    } else {
      for (int chunk = lane; chunk < chunks; chunk += 32) {
        amax = MaxMagnitude{}(amax, amaxes[item - item % chunks + chunk]);
      }
      amax = reduce_lanes<32>(amax, MaxMagnitude{});
    }
    const float scale = scale_of_amax(amax, output);
    if (kGroups ? lane % 16 == 0 : lane == 0) {
      scales[row * shape.row_scales() + (kGroups ? column / static_cast<int>(kScaleBlock) : 0)] =
          scale;
    }
    const float inverse = 1.0f / scale;
    uint32_t codes[kCount / 4];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      codes[i / 4] = fp8x4_from_float<false>(values[i] * inverse, values[i + 1] * inverse,
                                             values[i + 2] * inverse, values[i + 3] * inverse);
    }
    *reinterpret_cast<uint2*>(memory + shape.a_begin() + row * shape.a_pitch() + column) =
        make_uint2(codes[0], codes[1]);
  });
}

// Grid: gate_up: two blocks an SM, or as many as there can be units; down: a cluster a block of
// columns, or two blocks an SM that take them in turn, each alone. Shared memory: num_stages *
// stage_bytes() + other_bytes().
template <typename T, bool kGateUp, bool kBlockScales>
__global__ void __launch_bounds__(kResidentThreads, 2)
    moe_resident_kernel(const __grid_constant__ CUtensorMap w_map,
                        const __grid_constant__ ResidentProblem s) {
#if __CUDA_ARCH__ >= 900
  using Types = GroupedTypes<DType::kFloat8E4M3FN, DType::kFloat8E4M3FN>;
  constexpr int kHalf = 2;  // instructions' rows of w of a warp
  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t full_barriers[kResidentStages], empty_barriers[kResidentStages];
  const uint32_t full = pinned_address(full_barriers), empty = pinned_address(empty_barriers);
  const uint32_t padding = -shared_address(dynamic_shared) & 127;
  const uint32_t stages = pinned_address(dynamic_shared + padding);
  const GroupedProblem& p = s.product;
  const ResidentShape& shape = s.shape;
  const int stage_bytes = shape.stage_bytes(), row_bytes = shape.row_bytes();
  const int block_n = shape.block_n, steps = shape.steps();
  uint8_t* const memory = dynamic_shared + padding + s.num_stages * stage_bytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == kStreamedWarps * 32) {
    prefetch_tensor_map(w_map);
    for (int i = 0; i < s.num_stages; ++i) {
      mbarrier_init(full + i * kMbarrierBytes, 1 + 32);  // the box, the lanes that copy scales
      mbarrier_init(empty + i * kMbarrierBytes, kStreamedWarps);
    }
    fence_mbarrier_init();
    fence_async_proxy();
  }
  __syncwarp();
  // gate_up is the layer's first kernel. What is older than it, ids and weights, down may read
  // without waiting (dependent_launch.h).
  if constexpr (kGateUp) wait_for_previous_kernel();
  allow_next_kernel();
  const bool in_cluster = !kGateUp && s.cluster > 1;
  const bool has_row_scales = !kBlockScales && p.w.scale.kind != ScaleView::Kind::kNone;
  if (in_cluster) cluster_arrive();
  const int rank = in_cluster ? cluster_rank() : 0;
  const FewSlots slots(expert_of_slot(s.ids, lane, s.slots, s.experts), kResidentBlockM);

  // Calls unit(tile of slots, block of columns), and of down the end of each block of columns.
  const auto for_each_unit = [&](const auto& unit, const auto& end_of_columns) {
    if constexpr (kGateUp) {
      for (int i = blockIdx.x; i < slots.tiles * s.tiles_n; i += gridDim.x) {
        const TileOrder::Place place = place_of_unit(i, slots.tiles, s.tiles_n, s.walked);
        unit(place.m, place.n);
      }
    } else {
      for (int n = blockIdx.x / s.cluster; n < s.tiles_n; n += gridDim.x / s.cluster) {
        for (int m = rank; m < slots.tiles; m += s.cluster) unit(m, n);
        end_of_columns(n);
      }
    }
  };

  if (warp == kStreamedWarps) {
    // Copies w. This warp made the barriers, and need not wait for those who use them later.
    named_barrier_arrive<2, kResidentThreads>();
    const uint64_t policy = l2_policy(L2Policy::kEvictFirst);
    PipelineState state{0, 1};
    const auto copy_unit = [&](int m, int n) {
      const int expert = slots.expert_of(slots.slots_of(m));
      const StreamedRows<kGateUp> rows{n * block_n, block_n, p.n, p.interleaved};
      for (int step = 0; step < steps; ++step) {
        const uint32_t barrier = full + state.stage * kMbarrierBytes;
        const uint32_t to = stages + state.stage * stage_bytes;
        mbarrier_wait(empty + state.stage * kMbarrierBytes, state.parity);
        if (lane == 0) {
          mbarrier_arrive_expect(barrier, kStreamedBoxBytes);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            load_box_3d(w_map, step * (row_bytes / 4), rows.box_row(half), expert,
                        to + half * (kStreamedBoxBytes / 2), barrier, policy);
          }
        }
        __syncwarp();
        if constexpr (kBlockScales) {
          if (lane < 8) copy_block_scale(p, rows, expert, step, lane, to + kStreamedBoxBytes);
        } else if (step == 0 && has_row_scales) {
          const ScaleView scale = p.w.scale_of(expert);
          for (int at = lane; at < block_n; at += 32) {
            const int row = rows.w_row(at);
            copy_word(to + kStreamedBoxBytes + at * 4, scale.outer_address(row < 0 ? 0 : row),
                      row >= 0);
          }
        }
        mbarrier_arrive_after_copies(barrier);
        state.advance(s.num_stages);
      }
    };
    for_each_unit(copy_unit, [](int) {});
    if (in_cluster) {
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

  // Quantise and multiply.
  const int tokens = s.slots / p.slots_of_token;
  float own_weight = 0.0f;  // of slot `lane`
  if constexpr (!kGateUp) {
    if (lane < s.slots) own_weight = __ldcg(s.weights + lane);
    wait_for_previous_kernel();
  }
  const unsigned own_rows =
      kGateUp ? ~0u >> (32 - tokens)
              : __ballot_sync(~0u, slots.tile >= 0 && slots.tile % s.cluster == rank);
  quantize_resident<T, kBlockScales>(s, own_rows, memory);
  named_barrier<2, kResidentThreads>();  // a, and the barriers
  if (in_cluster) cluster_wait();        // the others run

  const auto consumers_barrier = [] { named_barrier<1, kStreamedWarps * 32>(); };
  const int group = lane / 4, quad = lane % 4;
  const int slices = row_bytes / kStreamedSliceBytes, row_groups = kStreamedWarps / slices;
  const int slice = warp % slices, row_group = warp / slices;
  const int slice_bytes = row_groups * kHalf * 512;
  const uint32_t partials = pinned_address(memory);
  const float* const scales = reinterpret_cast<const float*>(memory + shape.scales_begin());
  float* const slot_sums = reinterpret_cast<float*>(memory + shape.sums_begin());
  // The column of the unit whose sums this thread ends, of some rows.
  const int columns = kGateUp ? block_n / 2 : block_n;
  const int own_column = threadIdx.x % columns;
  PipelineState state{0, 0};

  const auto multiply_unit = [&](int tile, int n) {
    const unsigned members = slots.slots_of(tile);
    const int expert = slots.expert_of(members), rows = __popc(members);
    const StreamedRows<kGateUp> rows_w{n * block_n, block_n, p.n, p.interleaved};
    // The row of a of row `m` of the tile; beyond its last it is any.
    const auto a_row_of = [&](int m) {
      const int slot = set_bit(members, min(m, rows - 1));
      return kGateUp ? slot / p.slots_of_token : slot;
    };
    // What the end needs: a bias from memory while w comes, factors with its first box.
    constexpr int kOfColumn = kGateUp ? 2 : 1;
    const auto place_of = [&](int i) {
      return kGateUp ? rows_w.place_of(own_column / kMmaN, i, own_column % kMmaN) : own_column;
    };
    float w_factor[kOfColumn], bias[kOfColumn];
#pragma unroll
    for (int i = 0; i < kOfColumn; ++i) {
      const int row = rows_w.w_row(place_of(i));
      w_factor[i] = 1.0f;
      bias[i] = row >= 0 ? p.bias(expert, row) : 0.0f;
    }
    uint32_t w_at[kHalf][2];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = rows_w.place_of(row_group, i, half * 8 + group);
        w_at[i][half] = place * row_bytes + slice * kStreamedSliceBytes + quad * 16;
      }
    }
    uint32_t a_at = partials + shape.a_begin() + a_row_of(group) * shape.a_pitch() +
                    slice * kStreamedSliceBytes + quad * 16;
    uint32_t a_scales_at[2] = {};
    if constexpr (kBlockScales) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        a_scales_at[e] = partials + shape.scales_begin() +
                         (a_row_of(quad * 2 + e) * shape.row_scales() + slice / 2) * 4;
      }
    }

    float sums[kHalf][4] = {};
    for (int step = 0; step < steps; ++step) {
      const uint32_t data = stages + state.stage * stage_bytes;
      mbarrier_wait(full + state.stage * kMbarrierBytes, state.parity);
      if (step == 0 && has_row_scales) {
#pragma unroll
        for (int i = 0; i < kOfColumn; ++i) {
          w_factor[i] = load_shared_float(data + kStreamedBoxBytes + place_of(i) * 4);
        }
      }
      const uint4 a_vector[1] = {load_shared(a_at)};
      WeightVector<Types> vectors[kHalf][2];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) vectors[i][half].load(data + w_at[i][half], 0);
      }
      const auto a = widen_a<Types>(a_vector);
      float factor_a[2] = {};
      if constexpr (kBlockScales) {
#pragma unroll
        for (int e = 0; e < 2; ++e) factor_a[e] = load_shared_float(a_scales_at[e]);
      }
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const auto low = vectors[i][0].fragment(0), high = vectors[i][1].fragment(0);
        if constexpr (kBlockScales) {
          const float factor_w =
              load_shared_float(data + kStreamedBoxBytes + (i * 4 + slice / 2) * 4);
          float apart[4] = {};
          mma<Types>(apart, low, high, a);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sums[i][e] = fmaf(apart[e], factor_w * factor_a[e % 2], sums[i][e]);
          }
        } else {
          mma<Types>(sums[i], low, high, a);
        }
      }
      // The copy engine must not overtake loads that wait in the queue (skinny_gemm.md: a trap).
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + state.stage * kMbarrierBytes);
      state.advance(s.num_stages);
      a_at += row_bytes;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        a_scales_at[e] += row_bytes / static_cast<int>(kScaleBlock) * 4;
      }
    }

    // [slice][row group][instruction][lane]
    consumers_barrier();  // the last unit's have been read
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      store_shared(partials + slice * slice_bytes + ((row_group * kHalf + i) * 32 + lane) * 16,
                   float4{sums[i][0], sums[i][1], sums[i][2], sums[i][3]});
    }
    consumers_barrier();
    for (int m = threadIdx.x / columns; m < rows; m += kStreamedWarps * 32 / columns) {
      const int slot = set_bit(members, m);
      const float a_factor = kBlockScales ? 1.0f : scales[kGateUp ? slot / p.slots_of_token : slot];
      float values[kOfColumn];
#pragma unroll
      for (int i = 0; i < kOfColumn; ++i) {
        // 16 rows of w: an instruction's.
        const int sixteen = kGateUp ? own_column / kMmaN * kHalf + i : own_column / kMmaN;
        const int row = own_column % kMmaN;
        const uint32_t from =
            partials + (sixteen * 32 + row % 8 * 4 + m / 2) * 16 + (row / 8 * 2 + m % 2) * 4;
        float sum = 0.0f;
#pragma unroll 4
        for (int of = 0; of < slices; ++of) sum += load_shared_float(from + of * slice_bytes);
        values[i] = sum * a_factor * w_factor[i] + bias[i];
      }
      if constexpr (kGateUp) {
        const int column = n * columns + own_column;
        if (column < p.n / 2) {
          store_element(p.out, p.out_dtype, slot * p.out_stride + column,
                        gated(p.activation, p.limit, values[0], values[1]));
        }
      } else {
        float& place = slot_sums[slot * block_n + own_column];
        if (in_cluster) {
          rocm_kernels::store_in_cluster(place, values[0], 0);
        } else {
          place = values[0];
        }
      }
    }
  };
  const auto end_columns = [&](int n) {
    if (in_cluster) {
      cluster_arrive();
      cluster_wait();
      if (rank != 0) return;
    } else {
      consumers_barrier();
    }
    const unsigned there = __ballot_sync(~0u, slots.expert >= 0);
    for (int i = threadIdx.x; i < tokens * block_n; i += kStreamedWarps * 32) {
      const int token = i / block_n, column = i % block_n;
      float sum = 0.0f;
      for (int j = 0; j < p.slots_of_token; ++j) {
        const int slot = token * p.slots_of_token + j;
        const float weight = __shfl_sync(~0u, own_weight, slot);
        if (there >> slot & 1) sum = fmaf(weight, slot_sums[slot * block_n + column], sum);
      }
      if (n * block_n + column < p.n) {
        store_element(p.out, p.out_dtype, token * p.out_stride + n * block_n + column, sum);
      }
    }
  };
  for_each_unit(multiply_unit, end_columns);
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
