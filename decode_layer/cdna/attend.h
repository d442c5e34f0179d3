// The attention of one token: rotation, the cache's new row, softmax over all keys, by the helpers
// of all workgroups.
//
// A unit is a helper's wave: of its workgroup's KV head it takes a run of keys for all query heads
// of the head's group, and publishes their weighted values with their greatest score and the sum of
// weights. Behind a meeting a workgroup for each query head adds up its units. Lane l has elements
// 2 l and 2 l + 1 of a head of 128.
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

constexpr int kKeysAtOnce = 8;  // of a unit, under way
constexpr int kLeastKeys = 16;  // of a unit: fewer are not worth adding up

struct Pair {
  float first, second;
};

template <typename T>
ROCM_KERNELS_DEVICE Pair pair_of(uint32_t word) {
  float values[2];
  Word<T>::unpack(word, values);
  return {values[0], values[1]};
}

ROCM_KERNELS_DEVICE uint32_t load_word(const void* row, int word) {
  return static_cast<const uint32_t*>(row)[word];
}

// A head as it came, and the halves that turn together.
struct Turning {
  uint32_t own, partner;
};
template <typename T>
ROCM_KERNELS_DEVICE Turning load_turning(const T* head, int lane) {
  return {load_word(head, lane), load_word(head, lane ^ 32)};
}

// Rounded to T, as a word.
template <typename T>
ROCM_KERNELS_DEVICE uint32_t turned(const Turning& head, Pair cosine, Pair sine, int lane) {
  const Pair x = pair_of<T>(head.own), y = pair_of<T>(head.partner);
  const float sign = lane < 32 ? -1.0f : 1.0f;
  const float values[2] = {fmaf(x.first, cosine.first, sign * y.first * sine.first),
                           fmaf(x.second, cosine.second, sign * y.second * sine.second)};
  return Word<T>::pack(values);
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
  const int kv_head = blockIdx.x % a.kv_heads;
  const int unit = blockIdx.x / a.kv_heads * kHelpers + wave;
  const int each = (keys + units - 1) / units;
  const int begin = unit * each, end = begin + each < keys ? begin + each : keys;
  if (unit >= units) return asked();

  const int group = a.heads / a.kv_heads, first_head = kv_head * group;
  Turning queries[kMostGroup];
#pragma unroll
  for (int g = 0; g < kMostGroup; ++g) {
    if (g < group) queries[g] = load_turning(a.qkv + (first_head + g) * kHeadDim, lane);
  }
  const Turning new_key = load_turning(a.qkv + (a.heads + kv_head) * kHeadDim, lane);
  const uint32_t new_value = load_word(a.qkv + (a.heads + a.kv_heads + kv_head) * kHeadDim, lane);
  const Pair cosine = pair_of<T>(load_word(a.cos, lane)), sine = pair_of<T>(load_word(a.sin, lane));
  uint32_t k[kKeysAtOnce], v[kKeysAtOnce];
  const auto load_keys = [&](int from) {
    if (position == 0) return;
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      // The last row that is there stands for those behind it, and for the new one.
      const int row = from + i < position ? from + i : position - 1;
      const int64_t at = row * a.row_stride + kv_head * a.head_stride;
      k[i] = load_word(a.k_cache + at, lane);
      v[i] = load_word(a.v_cache + at, lane);
    }
  };
  load_keys(begin);
  asked();

  const uint32_t turned_key = turned<T>(new_key, cosine, sine, lane);
  if (begin <= position && position < end) {
    const int64_t at = position * a.row_stride + kv_head * a.head_stride;
    reinterpret_cast<uint32_t*>(a.k_cache + at)[lane] = turned_key;
    reinterpret_cast<uint32_t*>(a.v_cache + at)[lane] = new_value;
  }
  Pair q[kMostGroup], sums[kMostGroup];
  float greatest[kMostGroup], total[kMostGroup];
#pragma unroll
  for (int g = 0; g < kMostGroup; ++g) {
    if (g < group) q[g] = pair_of<T>(turned<T>(queries[g], cosine, sine, lane));
    sums[g] = {0.0f, 0.0f};
    greatest[g] = -INFINITY, total[g] = 0.0f;
  }
  for (int key = begin; key < end; key += kKeysAtOnce) {
    uint32_t these_k[kKeysAtOnce], these_v[kKeysAtOnce];
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) these_k[i] = k[i], these_v[i] = v[i];
    load_keys(key + kKeysAtOnce);
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      if (key + i >= end) break;
      const bool is_new = key + i == position;
      const Pair its_k = pair_of<T>(is_new ? turned_key : these_k[i]);
      const Pair its_v = pair_of<T>(is_new ? new_value : these_v[i]);
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) {
        if (g >= group) break;
        const float product = fmaf(q[g].first, its_k.first, q[g].second * its_k.second);
        const float score = reduce_lanes<kLanes>(product, Sum{}) * a.scale_log2;
        const float most = fmaxf(greatest[g], score);
        const float kept = fast_exp2(greatest[g] - most), weight = fast_exp2(score - most);
        greatest[g] = most;
        total[g] = fmaf(total[g], kept, weight);
        sums[g].first = fmaf(sums[g].first, kept, weight * its_v.first);
        sums[g].second = fmaf(sums[g].second, kept, weight * its_v.second);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kMostGroup; ++g) {
    if (g >= group) break;
    float* const partial = partial_of(a, first_head + g, unit);
    publish(partial + 2 * lane, sums[g].first);
    publish(partial + 2 * lane + 1, sums[g].second);
    if (lane == 0) {
      publish(partial + kHeadDim, greatest[g]);
      publish(partial + kHeadDim + 1, total[g]);
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
  Pair sum = {0.0f, 0.0f};
  float total = 0.0f;
  for (int first = 0; first < units; first += kAtOnce) {
    float most[kAtOnce], weights[kAtOnce];
    Pair values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float* const partial = partial_of(a, head, first + i < units ? first + i : units - 1);
      values[i] = {partial[2 * lane], partial[2 * lane + 1]};
      most[i] = partial[kHeadDim], weights[i] = partial[kHeadDim + 1];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float factor = first + i < units ? fast_exp2(most[i] - greatest) : 0.0f;
      sum.first = fmaf(values[i].first, factor, sum.first);
      sum.second = fmaf(values[i].second, factor, sum.second);
      total = fmaf(weights[i], factor, total);
    }
  }
  T* const out = a.attended + head * kHeadDim + 2 * lane;
  publish(out, from_float<T>(sum.first / total));
  publish(out + 1, from_float<T>(sum.second / total));
}

#endif

}  // namespace rocm_kernels::cdna::decode
