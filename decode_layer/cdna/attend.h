// The attention of one token: rotation, the cache's new row, softmax over all keys, by the helpers
// of all workgroups.
//
// A unit is a helper's wave: of its workgroup's KV head it takes a run of keys for all query heads
// of the head's group, four keys at a time, 16 lanes a key with eight elements each. It publishes
// the weighted values with their greatest score and the sum of weights. Behind a meeting a
// workgroup for each query head adds up its units.
//
//   s[key]   = (rotated q) . (rotated k[key]) * scale              both rounded to T
//   attended = sum(exp(s - greatest) * v) / sum(exp(s - greatest))
#pragma once

#include "../../blocks/product/cdna/partial_sums.h"
#include "problem.h"

namespace rocm_kernels::cdna::decode {

#if ROCM_KERNELS_CDNA

// What is published is complete in memory, past this die's L2, once the wave has waited for it.
ROCM_KERNELS_DEVICE void publish(float* to, float value) {
  __hip_atomic_store(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <typename T>
ROCM_KERNELS_DEVICE void publish(T* to, T value) {
  __hip_atomic_store(reinterpret_cast<uint16_t*>(to), __builtin_bit_cast(uint16_t, value),
                     __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

constexpr int kRows = kLanes / 16;  // keys that a wave takes at once
constexpr int kSteps = 2;           // of so many keys, under way
constexpr int kLeastKeys = 16;      // of a unit: fewer are not worth adding up
constexpr int kCount = 8;           // elements of a lane

// The elements of a lane, and those that they turn with.
struct Turning {
  Vector own, partner;
};
template <typename T>
ROCM_KERNELS_DEVICE Turning load_turning(const T* head, int column) {
  return {load<Touch::kAgain, Vector>(head + kCount * column),
          load<Touch::kAgain, Vector>(head + kCount * (column ^ 8))};
}

// Rounded to T.
template <typename T>
ROCM_KERNELS_DEVICE Vector turned(const Turning& head, const Vector& cosines, const Vector& sines,
                                  int column) {
  float x[kCount], y[kCount], cosine[kCount], sine[kCount];
  unpack<T>(head.own, x);
  unpack<T>(head.partner, y);
  unpack<T>(cosines, cosine);
  unpack<T>(sines, sine);
  const float sign = column < 8 ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = fmaf(x[i], cosine[i], sign * y[i] * sine[i]);
  return pack<T>(x);
}

// What lane ^ 32 has.
ROCM_KERNELS_DEVICE float across_halves(float value, int lane) {
  return __builtin_bit_cast(
      float, __builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, __builtin_bit_cast(int, value)));
}

// Units of a KV head that have keys: as many as its workgroups allow, and each has some.
template <typename T>
ROCM_KERNELS_DEVICE int units_of(const Attention<T>& a, int keys) {
  const int wanted = (keys + kHelpers * kLeastKeys - 1) / (kHelpers * kLeastKeys);
  return kHelpers * (wanted < a.splits ? wanted : a.splits);
}

template <typename T>
ROCM_KERNELS_DEVICE float* partial_of(const Attention<T>& a, int head, int unit) {
  return a.partials + (head * a.splits * kHelpers + unit) * kPartialFloats;
}

// Publishes what a unit has; `asked()` is called once its first loads are under way.
template <typename T, typename Asked>
ROCM_KERNELS_DEVICE void attend(const Attention<T>& a, int wave, int lane, const Asked& asked) {
  const int position = __builtin_amdgcn_readfirstlane(*a.position);
  const int keys = position + 1, units = units_of(a, keys);
  const int kind = blockIdx.x % (a.kv_heads * a.parts);
  const int kv_head = kind / a.parts, part = kind % a.parts;
  const int unit = blockIdx.x / (a.kv_heads * a.parts) * kHelpers + wave;
  const int each = (keys + units - 1) / units;
  const int begin = unit * each, end = begin + each < keys ? begin + each : keys;
  if (unit >= units) return asked();

  const int all = a.heads / a.kv_heads, first_of_all = part * kUnitHeads;
  const int group = all - first_of_all < kUnitHeads ? all - first_of_all : kUnitHeads;
  const int first_head = kv_head * all + first_of_all;
  const int row = lane / 16, column = lane % 16;
  Turning queries[kUnitHeads];
#pragma unroll
  for (int g = 0; g < kUnitHeads; ++g) {
    if (g < group) queries[g] = load_turning(a.qkv + (first_head + g) * kHeadDim, column);
  }
  const Turning new_key = load_turning(a.qkv + (a.heads + kv_head) * kHeadDim, column);
  const auto eight_of = [&](const T* head) {
    return load<Touch::kAgain, Vector>(head + kCount * column);
  };
  const Vector new_value = eight_of(a.qkv + (a.heads + a.kv_heads + kv_head) * kHeadDim);
  const Vector cosines = eight_of(a.cos), sines = eight_of(a.sin);
  Vector k[kSteps], v[kSteps];
  const auto load_keys = [&](int step, int key) {
    if (position == 0) {  // there is no row; a weight of 0 must meet a number
      k[step] = v[step] = Vector{};
      return;
    }
    // The last row that is there stands for those behind it, and for the new one.
    const int64_t at =
        (key < position ? key : position - 1) * a.row_stride + kv_head * a.head_stride;
    k[step] = eight_of(a.k_cache + at);
    v[step] = eight_of(a.v_cache + at);
  };
#pragma unroll
  for (int step = 0; step < kSteps; ++step) load_keys(step, begin + step * kRows + row);
  asked();

  const Vector turned_key = turned<T>(new_key, cosines, sines, column);
  if (begin <= position && position < end && row == 0 && part == 0) {
    const int64_t at = position * a.row_stride + kv_head * a.head_stride + kCount * column;
    store<Touch::kAgain>(a.k_cache + at, turned_key);
    store<Touch::kAgain>(a.v_cache + at, new_value);
  }
  Vector q[kUnitHeads];
  float sums[kUnitHeads][kCount], greatest[kUnitHeads], total[kUnitHeads];
#pragma unroll
  for (int g = 0; g < kUnitHeads; ++g) {
    if (g < group) q[g] = turned<T>(queries[g], cosines, sines, column);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[g][i] = 0.0f;
    greatest[g] = -INFINITY, total[g] = 0.0f;
  }
  for (int first = begin; first < end; first += kSteps * kRows) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int key = first + step * kRows + row;
      float its_k[kCount], its_v[kCount];
      unpack<T>(key == position ? turned_key : k[step], its_k);
      unpack<T>(key == position ? new_value : v[step], its_v);
      load_keys(step, key + kSteps * kRows);
#pragma unroll
      for (int g = 0; g < kUnitHeads; ++g) {
        if (g >= group) break;
        float its_q[kCount], product = 0.0f;
        unpack<T>(q[g], its_q);
#pragma unroll
        for (int i = 0; i < kCount; ++i) product = fmaf(its_q[i], its_k[i], product);
        const float score = reduce_lanes<16>(product, Sum{}) * a.scale_log2;
        const float most = fmaxf(greatest[g], key < end ? score : -INFINITY);
        const float base = most == -INFINITY ? 0.0f : most;  // no key yet
        const float kept = fast_exp2(greatest[g] - base);
        const float weight = key < end ? fast_exp2(score - base) : 0.0f;
        greatest[g] = most;
        total[g] = fmaf(total[g], kept, weight);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          sums[g][i] = fmaf(sums[g][i], kept, weight * its_v[i]);
        }
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kUnitHeads; ++g) {
    if (g >= group) break;
    // The four rows of lanes to one.
    float most = fmaxf(greatest[g], other_half<16>(greatest[g]));
    most = fmaxf(most, across_halves(most, lane));
    const float factor = most == -INFINITY ? 0.0f : fast_exp2(greatest[g] - most);
    const auto sum_of_rows = [&](float value) {
      value *= factor;
      value += other_half<16>(value);
      return value + across_halves(value, lane);
    };
    float* const partial = partial_of(a, first_head + g, unit);
    float mine[2] = {0.0f, 0.0f};  // each row publishes two of the eight
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float sum = sum_of_rows(sums[g][i]);
      mine[i % 2] = row == i / 2 ? sum : mine[i % 2];
    }
    publish(partial + kCount * column + 2 * row, mine[0]);
    publish(partial + kCount * column + 2 * row + 1, mine[1]);
    const float weights = sum_of_rows(total[g]);
    if (lane == 0) {
      publish(partial + kHeadDim, most);
      publish(partial + kHeadDim + 1, weights);
    }
  }
}

struct Greatest {
  ROCM_KERNELS_DEVICE float operator()(float x, float y) const { return fmaxf(x, y); }
};

// Behind the meeting: head `blockIdx.x` from its units, two elements a lane, by one wave.
template <typename T>
ROCM_KERNELS_DEVICE void add_units(const Attention<T>& a, int lane) {
  const int head = blockIdx.x;
  if (head >= a.heads) return;
  const int units = units_of(a, __builtin_amdgcn_readfirstlane(*a.position) + 1);
  float greatest = -INFINITY;
  for (int unit = lane; unit < units; unit += kLanes) {
    greatest = fmaxf(greatest, partial_of(a, head, unit)[kHeadDim]);
  }
  greatest = reduce_lanes<kLanes>(greatest, Greatest{});
  constexpr int kAtOnce = 16;
  float sum[2] = {0.0f, 0.0f};
  float total = 0.0f;
  for (int first = 0; first < units; first += kAtOnce) {
    Vec<float, 2> values[kAtOnce], weights[kAtOnce];  // these: the greatest score, the sum
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float* const partial = partial_of(a, head, first + i < units ? first + i : units - 1);
      values[i] = load<Touch::kAgain, Vec<float, 2>>(partial + 2 * lane);
      weights[i] = load<Touch::kAgain, Vec<float, 2>>(partial + kHeadDim);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float factor = first + i < units ? fast_exp2(weights[i][0] - greatest) : 0.0f;
      sum[0] = fmaf(values[i][0], factor, sum[0]);
      sum[1] = fmaf(values[i][1], factor, sum[1]);
      total = fmaf(weights[i][1], factor, total);
    }
  }
  T* const out = a.attended + head * kHeadDim + 2 * lane;
  publish(out, from_float<T>(sum[0] / total));
  publish(out + 1, from_float<T>(sum[1] / total));
}

#endif

}  // namespace rocm_kernels::cdna::decode
