// The waves that make rows, add up, and wait for the grid; decode_layers.hip has the timeline.
#pragma once

#include "../../blocks/rows/gpu/activation.h"
#include "attend.h"

namespace rocm_kernels::cdna::decode {

#if ROCM_KERNELS_CDNA

// What the helpers share of LDS.
struct Meeting {
  TeamScratch scratch;
  float scale;
};

// The sum of all streamers for row `row` of a tile, in their order.
ROCM_KERNELS_DEVICE float sum_of(const float* sums_lds, int parity, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kStreamers; ++s) sum += sums_lds[(parity * kStreamers + s) * kMmaRows + row];
  return sum;
}

template <typename T>
ROCM_KERNELS_DEVICE float rounded(float value) {
  return to_float(from_float<T>(value));
}

// A row of T to LDS as codes, with its scale: as it is, or the norm of x, or of x + addend where
// there is one. Before the first product others wait for its loads to be under way.
template <typename T, int kVectors>
ROCM_KERNELS_DEVICE void make_row(const StackProblem<T>& p, const Product<T>& product,
                                  const T* norm_weight, const T* addend_row, bool first, int thread,
                                  uint8_t* codes, Meeting& meeting) {
  using Team = RowTeam<kHelperThreads, kVectors>;
  constexpr int kCount = kVectorElements<T>;
  RmsnormParams<T> norm = p.norm;
  norm.output.data = codes;
  norm.output.scales = &meeting.scale;
  const int columns = product.k_blocks * kBlockK;
  TeamThread<Team> here;
  here.thread = thread;
  const auto column_of = [&](int v) { return here.template column<T>(v); };
  const auto load_row = [&](const T* row, Vector(&to)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      to[v] = load_vector<Touch::kAgain, Fit::kWhole>(row, column_of(v), columns, true);
    }
  };
  // All begin with zeros: else those that are not loaded would be kept from turn to turn.
  Vector h[kVectors] = {}, addend[kVectors] = {}, weight[kVectors] = {};
  load_row(product.x, h);
  if (addend_row != nullptr) load_row(addend_row, addend);
  if (product.row == Row::kNorm) load_row(norm_weight, weight);
  if (first) workgroup_barrier();
  if (addend_row != nullptr) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) h[v] = add<T>(h[v], addend[v]);
  }
  int slot = 0;
  float inverse = 1.0f;
  if (product.row == Row::kNorm) {
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) squares += sum_of_squares<T>(h[v], column_of(v), columns);
    const float sum = reduce_team<Team>(squares, Sum{}, meeting.scratch, slot);
    store_norm<T, Team>(h, weight, sum, 0, columns, here, norm, meeting.scratch, slot, inverse);
    return;
  }
  float amax = 0.0f, y[kCount];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    unpack<T>(h[v], y);
    amax = column_of(v) < columns ? amax_of(y, amax) : amax;
  }
  amax = reduce_team<Team>(amax, MaxMagnitude{}, meeting.scratch, slot);
  const float scale = scale_of_amax(amax, norm.output);
  inverse = opaque(1.0f / scale);
  if (here.thread == 0) meeting.scale = scale;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    unpack<T>(h[v], y);
    store_fp8<Fit::kWhole>(y, inverse, 0, column_of(v), columns, norm.output);
  }
}

// The codes of y to LDS, from what all workgroups published; returns their scale.
template <typename T>
ROCM_KERNELS_DEVICE float quantize_y(const StackProblem<T>& p, int thread, int lane,
                                     uint8_t* codes) {
  float found[kMostWorkgroups / kLanes];
#pragma unroll
  for (int i = 0; i < kMostWorkgroups / kLanes; ++i) {
    const int workgroup = i * kLanes + lane;
    found[i] = p.amax[workgroup < static_cast<int>(gridDim.x) ? workgroup : 0];
  }
  constexpr int kAtOnce = 16;
  const Buffer y_row = buffer_at(p.y);
  const int vectors = p.intermediate / 4;
  Words four[kAtOnce];
  const auto load_from = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * kHelperThreads;
      four[i] = load_words<Cache::kKeep>(y_row, row + thread < vectors ? 16 * thread : kOutside,
                                         16 * row);
    }
  };
  load_from(0);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostWorkgroups / kLanes; ++i) amax = fmaxf(amax, found[i]);
  const Output& output = p.norm.output;
  const float scale = scale_of_amax(reduce_lanes<kLanes>(amax, MaxMagnitude{}), output);
  const float inverse = opaque(1.0f / scale);
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int vector = first + i * kHelperThreads + thread;
      float y[4];
      __builtin_memcpy(y, &four[i], sizeof(y));
      uint32_t word[1];
      fp8_codes<Fit::kWhole>(y, inverse, output, word);
      if (vector < vectors) reinterpret_cast<uint32_t*>(codes)[vector] = word[0];
    }
    first += kAtOnce * kHelperThreads;
    if (first >= vectors) return scale;
    load_from(first);
  }
}

// What the sum of a tile's row becomes, `value` rounded: by the first 16 lanes of a wave.
template <typename T>
ROCM_KERNELS_DEVICE void end_row(const StackProblem<T>& p, const Product<T>& product, int row,
                                 int lane, float h, float value, float& amax) {
  if (product.end == End::kGated) {
    // The other half of the 16 lanes has up.
    const float up = __builtin_bit_cast(
        float, __builtin_amdgcn_mov_dpp(__builtin_bit_cast(int, value), 0x128, 0xF, 0xF, true));
    if (lane >= kHalf) return;
    const float y = silu(value) * up;
    amax = fmaxf(amax, fabsf(y));
    publish(p.y + row, y);
  } else {
    publish(product.out + row, from_float<T>(product.end == End::kAdded ? h + value : value));
  }
}

template <typename T, typename C, int kVectors>
ROCM_KERNELS_DEVICE void help(const StackProblem<T>& p, int wave, int lane, uint8_t* codes,
                              const float* sums_lds, Meeting& meeting) {
  int thread = static_cast<int>(threadIdx.x);
  GridBarrier grid(p.grid);
  const auto arrive = [&] {
    if (wave == 0) grid.arrive(lane);
  };
  const auto wait = [&] {
    if (wave == 0) grid.wait(lane);
    workgroup_barrier();
  };
  const bool attends = Turn::first_of(p).attends(p);
  const Seen seen = attends ? Seen::of(p.attention) : Seen{};
  int parity = 0;
#pragma unroll 1
  for (Turn turn = Turn::first_of(p); !turn.is_over(p); turn.next(p)) {
    lane = opaque(lane);  // here and below, lest what is made of it be kept all the while
    const Product<T>& product = p.products[turn.product];
    const Layer<T>& layer = p.layers[turn.layer];
    const ProductWeight<T>& weight = layer.products[turn.product];
    const T* const residual = turn.layer == 0 ? p.residual : p.out;
    const bool first = turn == Turn::first_of(p);
    if (turn.attends(p)) {
      AttendScratch& scratch = *reinterpret_cast<AttendScratch*>(codes);
      if (!first) arrive();
      const auto has_qkv = [&] {
        if (!first) wait();
      };
      const auto asked = [&] {
        if (first) workgroup_barrier();
      };
      attend<C>(p.attention, layer, first ? p.attention.qkv : p.qkv, seen, wave, lane, scratch,
                has_qkv, asked);
      workgroup_barrier();
      add_parts<C>(p.attention, layer, seen, wave, lane, scratch);
      await_published();  // by all helpers: the first one arrives for them
      workgroup_barrier();
    }
    if (!first || attends) arrive(), wait();
    thread = opaque(thread), lane = opaque(lane);
    float scale_row;
    if (product.row == Row::kActivated) {
      scale_row = quantize_y(p, thread, lane, codes);
      workgroup_barrier();
    } else {
      const T* const addend = product.end == End::kGated ? residual : nullptr;
      make_row<T, kVectors>(p, product, weight.norm, addend, first && !attends, thread, codes,
                            meeting);
      workgroup_barrier();
      scale_row = meeting.scale;
    }

    thread = opaque(thread), lane = opaque(lane);
    // A tile's scales and biases are asked for a tile ahead.
    const auto row_of = [&](int tile) {
      const int half = lane % kMmaRows / kHalf;
      return static_cast<int>(tile * product.tile_rows + half * product.half_rows) + lane % kHalf;
    };
    const auto scale_of = [&](int tile) {
      return tile < product.tiles ? weight.scales[row_of(tile) * weight.scale_stride] : 0.0f;
    };
    const auto bias_of = [&](int tile) {
      const bool has = weight.bias != nullptr && tile < product.tiles;
      return has ? to_float(weight.bias[row_of(tile)]) : 0.0f;
    };
    float amax = 0.0f, next_scale = scale_of(blockIdx.x), next_bias = bias_of(blockIdx.x);
    for (int tile = blockIdx.x; tile < product.tiles; tile += gridDim.x) {
      const int row = row_of(tile);
      const float scale = next_scale, bias = next_bias;
      next_scale = scale_of(tile + gridDim.x);
      next_bias = bias_of(tile + gridDim.x);
      float h = 0.0f;
      if (product.end == End::kAdded) h = to_float(p.x[row]) + to_float(residual[row]);
      workgroup_barrier();
      if (thread < kMmaRows) {
        const float value = rounded<T>(sum_of(sums_lds, parity, thread) * scale_row * scale + bias);
        end_row(p, product, row, lane, rounded<T>(h), value, amax);
      }
      parity ^= 1;
    }
    if (product.end == End::kGated && wave == 0) {
      amax = reduce_lanes<kLanes>(amax, MaxMagnitude{});
      if (lane == 0) publish(p.amax + blockIdx.x, amax);
    }
  }
}

#endif

}  // namespace rocm_kernels::cdna::decode
