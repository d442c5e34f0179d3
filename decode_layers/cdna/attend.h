// The attention of one token: rotation, the cache's new row, softmax over all keys, by the helpers
// of all workgroups.
//
// Workgroups share the keys of a unit, or of four query heads of it where it has more. A unit is a
// KV head of 128, or two neighbours of 64, of which each has its query heads. A helper's wave takes
// a run of keys, four at a time, 16 lanes a key with eight elements each.
// So the weighted values of a workgroup are in 16 parts, with their greatest score and sum of
// weights each. Those meet in LDS, where a wave adds up a head and publishes it. Which one of a
// head's workgroups comes last adds up theirs: no meeting of the grid, which would cost more.
//
//   s[key]   = (rotated q) . (rotated k[key]) * scale * k_scale
//              q is rounded to T, k to the cache's type; not before, where heads have norms
//   attended = sum(exp(s - greatest) * v) / sum(exp(s - greatest)) * v_scale
//
// A cache holds T, or FP8 codes of this GPU's dialect: of k and v divided by the scales of their
// head.
#pragma once

#include <type_traits>

#include "../../blocks/product/cdna/partial_sums.h"
#include "rotation.h"

namespace rocm_kernels::cdna::decode {

#if ROCM_KERNELS_CDNA

// What is published is complete in memory, past this die's L2, once the wave has waited for it.
template <typename Raw, typename V>
ROCM_KERNELS_DEVICE void publish_as(V* to, V value) {
  __hip_atomic_store(reinterpret_cast<Raw*>(to), __builtin_bit_cast(Raw, value), __ATOMIC_RELAXED,
                     __HIP_MEMORY_SCOPE_AGENT);
}
ROCM_KERNELS_DEVICE void publish(float* to, float value) { publish_as<uint32_t>(to, value); }
ROCM_KERNELS_DEVICE void publish(FloatPair* to, FloatPair value) {
  publish_as<uint64_t>(to, value);
}
template <typename T>
ROCM_KERNELS_DEVICE void publish(T* to, T value) {
  publish_as<uint16_t>(to, value);
}

constexpr int kRows = kLanes / 16;          // keys that a wave takes at once
constexpr int kSteps = 2;                   // of so many keys, under way
constexpr int kLeastKeys = kSteps * kRows;  // of a wave: fewer are not worth adding up

// Eight elements of a row of a cache, of T.
template <typename C>
struct Cached {
  using Eight = Vector;

  static ROCM_KERNELS_DEVICE Eight of(const float (&values)[kCount], float) {
    return pack<C>(values);
  }
  static ROCM_KERNELS_DEVICE void read(const Eight& eight, float (&values)[kCount]) {
    unpack<C>(opaque(eight), values);  // not kept as floats
  }
};

// Of FP8 codes.
struct EightCodes {
  uint32_t word[2];
};
template <>
struct Cached<uint8_t> {
  using Eight = EightCodes;

  static ROCM_KERNELS_DEVICE Eight of(const float (&values)[kCount], float inverse_scale) {
    Eight eight;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const float* const four = values + 4 * w;
      eight.word[w] =
          fp8x4_from_float<kPreferredFnuz>(four[0] * inverse_scale, four[1] * inverse_scale,
                                           four[2] * inverse_scale, four[3] * inverse_scale);
    }
    return eight;
  }
  static ROCM_KERNELS_DEVICE void read(const Eight& eight, float (&values)[kCount]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      float four[4];
      fp8x4_to_float<kPreferredFnuz>(opaque(eight.word[w]), four);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * w + i] = four[i];
    }
  }
};

struct Greatest {
  ROCM_KERNELS_DEVICE float operator()(float x, float y) const { return fmaxf(x, y); }
};

// Of what has `greatest`, to what has `most`, which may be no key yet.
ROCM_KERNELS_DEVICE float factor_to(float most, float greatest) {
  return fast_exp2(greatest - (most == -INFINITY ? 0.0f : most));
}

// The keys that are seen, and where the new one goes: all layers have the same.
struct Seen {
  template <typename T>
  static ROCM_KERNELS_DEVICE Seen of(const Attention<T>& a) {
    const auto read = [](const int32_t* from) { return __builtin_amdgcn_readfirstlane(*from); };
    Seen seen{read(a.position), 0, 0};
    seen.end = min(seen.position + 1, a.rows);
    if (a.keys != nullptr) seen.end = min(seen.end, read(a.keys));
    if (a.first_key != nullptr) seen.begin = read(a.first_key);
    if (a.window_left >= 0) seen.begin = max(seen.begin, seen.end - 1 - a.window_left);
    return seen;
  }
  ROCM_KERNELS_DEVICE int count() const { return end - begin; }

  int position, begin, end;
};

// What of the attention is this workgroup's.
template <typename T>
class Share {
 public:
  ROCM_KERNELS_DEVICE Share(const Attention<T>& a, int keys) {
    const int kinds = a.units * a.parts, kind = static_cast<int>(blockIdx.x) % kinds;
    of_kv_head = a.heads / a.kv_heads;
    unit = kind / a.parts, part = kind % a.parts;
    kv_head = a.head_dim == kUnitDim ? unit : 2 * unit;
    group = min(of_kv_head - part * kUnitHeads, kUnitHeads);
    index = static_cast<int>(blockIdx.x) / kinds;
    constexpr int kLeast = kHelpers * kLeastKeys;
    count = min((keys + kLeast - 1) / kLeast, a.splits);
  }
  // Of the keys, for a wave.
  ROCM_KERNELS_DEVICE bool has_keys() const { return index < count; }

  // Query head `head` of one of the unit's KV heads.
  ROCM_KERNELS_DEVICE int query(int half, int head) const {
    return (kv_head + half) * of_kv_head + part * kUnitHeads + head;
  }
  // And where parts of it, with those of the other KV head, are kept.
  ROCM_KERNELS_DEVICE int slot(int head) const {
    return unit * of_kv_head + part * kUnitHeads + head;
  }

  int unit, kv_head, part;  // kv_head: the unit's first
  int of_kv_head, group;    // query heads of each, and of the part
  int index, count;         // among the workgroups that share their keys
};

// Of a KV head's keys or values.
template <typename C>
ROCM_KERNELS_DEVICE float scale_of(const float* scales, int stride, int kv_head) {
  if constexpr (!std::is_same_v<C, uint8_t>) return 1.0f;
  return scales == nullptr ? 1.0f : scales[kv_head * stride];
}

// A query head of a workgroup, or of both KV heads one, published.
template <typename T>
ROCM_KERNELS_DEVICE FloatPair* partial_of(const Attention<T>& a, int slot, int index) {
  return reinterpret_cast<FloatPair*>(a.partials) +
         (slot * a.splits + index) * (kPartialFloats / 2);
}

// The parts of a workgroup to LDS. Until has_qkv() nothing but the cache is read; asked() is called
// once all first loads are under way.
template <typename C, typename T, typename HasQkv, typename Asked>
ROCM_KERNELS_DEVICE void attend(const Attention<T>& a, const Layer<T>& layer, const T* qkv,
                                const Seen& seen, int wave, int lane, AttendScratch& scratch,
                                const HasQkv& has_qkv, const Asked& asked) {
  const int position = seen.position, keys = seen.count();
  const Share<T> share(a, keys);
  if (!share.has_keys()) {
    has_qkv();
    return asked();
  }
  const int waves = kHelpers * share.count;
  const int each = (keys + waves - 1) / waves;
  const int begin = seen.begin + (share.index * kHelpers + wave) * each;
  const int end = min(begin + each, seen.end);

  const int row = lane / 16;
  const Rotation<T> rotation(a, lane);
  const auto eight_of = [&](const T* head) {
    return load<Touch::kAgain, Vector>(head + rotation.dim());
  };
  const int kv_head = share.kv_head + rotation.head();
  const bool has_norms = layer.q_norm != nullptr;
  Vector q_norm = {}, k_norm = {};
  if (has_norms) q_norm = eight_of(layer.q_norm), k_norm = eight_of(layer.k_norm);
  C* const k_cache = static_cast<C*>(layer.k_cache);
  C* const v_cache = static_cast<C*>(layer.v_cache);
  using Eight = typename Cached<C>::Eight;
  const float k_scale = scale_of<C>(layer.k_scale, a.k_scale_stride, kv_head);
  const float v_scale = scale_of<C>(layer.v_scale, a.v_scale_stride, kv_head);
  const int place_in_row = share.unit * a.unit_stride + rotation.place();
  Eight k[kSteps], v[kSteps];
  const int last = min(position, seen.end) - 1;  // of the rows that are there and seen
  const auto load_row = [&](const C* cache, int key) {
    if (last < seen.begin) return Eight{};  // no row is; a weight of 0 must meet a number
    // The last one stands for those behind it, and for the new one.
    const int64_t at = int64_t{min(key, last)} * a.row_stride;
    return load<Touch::kAgain, Eight>(cache + at + place_in_row);
  };
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    k[step] = load_row(k_cache, begin + step * kRows + row);
    v[step] = load_row(v_cache, begin + step * kRows + row);
  }
  has_qkv();
  Vector q[kUnitHeads];  // the last one again where there are fewer
#pragma unroll
  for (int g = 0; g < kUnitHeads; ++g) {
    q[g] = eight_of(qkv + share.query(rotation.head(), min(g, share.group - 1)) * a.head_dim);
  }
  const Vector given_key = eight_of(qkv + (a.heads + kv_head) * a.head_dim);
  const Vector given_value = eight_of(qkv + (a.heads + a.kv_heads + kv_head) * a.head_dim);
  asked();

  float rotated[kCount];
  rotation.rotate(given_key, has_norms, k_norm, rotated);
  const Eight new_key = Cached<C>::of(rotated, 1.0f / k_scale);
  unpack<T>(given_value, rotated);
  const Eight new_value = Cached<C>::of(rotated, 1.0f / v_scale);
  const float scale_log2 = a.scale_log2 * k_scale;
  const bool has_room = static_cast<uint32_t>(position) < static_cast<uint32_t>(a.rows);
  if (share.index == 0 && wave == 0 && row == 0 && share.part == 0 && has_room) {
    const int64_t at = int64_t{position} * a.row_stride + place_in_row;
    store<Touch::kAgain>(k_cache + at, new_key);
    store<Touch::kAgain>(v_cache + at, new_value);
  }
#pragma unroll
  for (int g = 0; g < kUnitHeads; ++g) {
    rotation.rotate(q[g], has_norms, q_norm, rotated);
    q[g] = opaque(pack<T>(rotated));  // here and below, lest registers run out
    __builtin_amdgcn_sched_barrier(0);
  }
  float sums[kUnitHeads][kCount] = {}, greatest[kUnitHeads], total[kUnitHeads] = {};
#pragma unroll
  for (float& most : greatest) most = -INFINITY;
  for (int first = begin; first < end; first += kSteps * kRows) {
    float weights[kUnitHeads][kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float its_k[kCount], its_q[kCount];
      const int key = first + step * kRows + row;
      Cached<C>::read(key == position ? new_key : k[step], its_k);
      k[step] = load_row(k_cache, key + kSteps * kRows);
#pragma unroll
      for (int g = 0; g < kUnitHeads; ++g) {
        unpack<T>(opaque(q[g]), its_q);
        float product = its_q[0] * its_k[0];
#pragma unroll
        for (int i = 1; i < kCount; ++i) product = fmaf(its_q[i], its_k[i], product);
        product = rotation.sum_of_head(product) * scale_log2;
        weights[g][step] = key < end ? product : -INFINITY;
      }
      __builtin_amdgcn_sched_barrier(0);
    }
#pragma unroll
    for (int g = 0; g < kUnitHeads; ++g) {
      float most = greatest[g];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) most = fmaxf(most, weights[g][step]);
      const float kept = factor_to(most, greatest[g]);
      greatest[g] = most;
      total[g] *= kept;
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[g][i] *= kept;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        weights[g][step] = factor_to(most, weights[g][step]);
        total[g] += weights[g][step];
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float its_v[kCount];
      const int key = first + step * kRows + row;
      Cached<C>::read(key == position ? new_value : v[step], its_v);
      v[step] = load_row(v_cache, key + kSteps * kRows);
#pragma unroll
      for (int g = 0; g < kUnitHeads; ++g) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          sums[g][i] = fmaf(weights[g][step], its_v[i], sums[g][i]);
        }
      }
      __builtin_amdgcn_sched_barrier(0);
    }
  }
  const int place = opaque(lane);  // anew, lest what is made of it be kept
  const int part = wave * kRows + place / 16;
#pragma unroll
  for (int g = 0; g < kUnitHeads; ++g) {
    auto* const values =
        reinterpret_cast<Accumulator*>(scratch.values[g][part] + kCount * (place % 16));
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      values[i / 4] = Accumulator{sums[g][i], sums[g][i + 1], sums[g][i + 2], sums[g][i + 3]};
    }
  }
  if (place % 8 != 0) return;
#pragma unroll
  for (int g = 0; g < kUnitHeads; ++g) {
    scratch.weights[g][place % 16 / 8][part] = FloatPair{greatest[g], total[g]};
  }
}

// Behind a barrier: a wave adds up a head of its workgroup, and if it is the head's last, the
// head's workgroups.
template <typename C, typename T>
ROCM_KERNELS_DEVICE void add_parts(const Attention<T>& a, const Layer<T>& layer, const Seen& seen,
                                   int wave, int lane, const AttendScratch& scratch) {
  const Share<T> share(a, seen.count());
  if (!share.has_keys() || wave >= share.group) return;
  const int slot = share.slot(wave), half = lane / 32;  // a lane has two elements
  FloatPair sum = {};
  {
    const FloatPair part = scratch.weights[wave][half][lane % kAttendParts];
    const float most = reduce_lanes<kAttendParts>(part[0], Greatest{});
    const float factor = factor_to(most, part[0]);
    const float total = reduce_lanes<kAttendParts>(part[1] * factor, Sum{});
#pragma unroll
    for (int i = 0; i < kAttendParts; ++i) {
      const int bits = __builtin_bit_cast(int, factor);
      const int first = __builtin_amdgcn_readlane(bits, i);
      const int second = __builtin_amdgcn_readlane(bits, 32 + i);
      const float its = __builtin_bit_cast(float, half == 0 ? first : second);
      sum += its * reinterpret_cast<const FloatPair*>(scratch.values[wave][i])[lane];
    }
    FloatPair* const partial = partial_of(a, slot, share.index);
    publish(partial + lane, sum);
    if (lane % 32 == 0) publish(partial + kUnitDim / 2 + half, FloatPair{most, total});
  }
  int before = 0;
  await_published();
  if (lane == 0) {
    before = static_cast<int>(
        __hip_atomic_fetch_add(a.arrived + slot, 1, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT));
  }
  if (__builtin_amdgcn_readfirstlane(before) + 1 != share.count) return;
  // For the next layer, which a meeting is before.
  if (lane == 0) {
    __hip_atomic_store(a.arrived + slot, 0, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }

  constexpr int kAtOnce = 20;
  float greatest = -INFINITY, total = 0.0f;
  sum = FloatPair{};
  for (int first = 0; first < share.count; first += kAtOnce) {
    FloatPair values[kAtOnce], weights[kAtOnce];  // these: the greatest score, the sum
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const FloatPair* const partial = partial_of(a, slot, min(first + i, share.count - 1));
      values[i] = partial[lane];
      weights[i] = partial[kUnitDim / 2 + half];
    }
    float most = greatest;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, weights[i][0]);
    const float kept = factor_to(most, greatest);
    greatest = most;
    sum *= kept, total *= kept;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float factor = first + i < share.count ? factor_to(most, weights[i][0]) : 0.0f;
      sum += factor * values[i];
      total = fmaf(weights[i][1], factor, total);
    }
  }
  const int its_half = 2 * lane >= a.head_dim, dim = 2 * lane & (a.head_dim - 1);
  T* const out = a.attended + share.query(its_half, wave) * a.head_dim + dim;
  const float v_scale = scale_of<C>(layer.v_scale, a.v_scale_stride, share.kv_head + its_half);
  publish(out, from_float<T>(sum[0] / total * v_scale));
  publish(out + 1, from_float<T>(sum[1] / total * v_scale));
}

#endif

}  // namespace rocm_kernels::cdna::decode
