// The router on GPUs: a wave a token, its experts in runs over the lanes. See ../topk.h for the
// maths. One source of each family includes it.
//
// Everything is in registers, but for more than 512 experts. The k greatest are found one after the
// other: each lane offers its greatest that is not taken yet, as an integer of the same order; the
// greatest of a wave's integers is one instruction on NVIDIA, and the first lane that has it has
// the lowest id, because runs are in the order of lanes. So a round is some 20 dependent
// instructions, and nothing is sorted.
//
// Timeline of a wave.
//
//   the kernel before; logits --> scores, and choices as integers
//   groups: choices to LDS | the two greatest of each --> LDS | those of groups that lose become 0
//   softmax: the greatest, over the wave; sum of exponentials, over the wave
//   k times: the greatest that is left, over the wave; lane j keeps the j-th
//   lane j: weight j, id j to memory
//
// | is a barrier of the block, though a wave reads its own LDS alone.
#pragma once

#include <cmath>
#include <type_traits>

#include "../../common/gpu/barrier.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/element.h"
#include "../../common/gpu/lanes.h"
#include "../../common/gpu/launch.h"
#include "../../common/gpu/math.h"
#include "../../common/gpu/reduce.h"
#include "../topk.h"

namespace rocm_kernels {

namespace detail {

// exp(v) for v <= 0, or NaN, to about a unit in the last place: what rounding v * log2(e) loses is
// added again.
ROCM_KERNELS_DEVICE float exp_of_negative(float v) {
  constexpr float kLog2E = 1.44269504f, kLog2ELow = 1.92596303e-8f, kLn2 = 0.693147181f;
  if (v < -104.0f) return 0.0f;
  const float power = v * kLog2E;
  const float lost = fmaf(v, kLog2E, -power) + v * kLog2ELow;
  const float whole = fast_exp2(power);
  return fmaf(whole, lost * kLn2, whole);
}

ROCM_KERNELS_DEVICE float sigmoid(float v) {
  const float part = exp_of_negative(v < 0.0f ? v : -v);
  const float inverse = fast_reciprocal(1.0f + part);
  return v < 0.0f ? part * inverse : inverse;
}

// Integers in the order of floats, of which none is 0; NaN is -infinity, and the zeros are equal.
ROCM_KERNELS_DEVICE uint32_t in_order(float value) {
  const float one_zero = value != value ? -INFINITY : value + 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &one_zero, sizeof(bits));
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
ROCM_KERNELS_DEVICE float from_order(uint32_t ordered) {
  const uint32_t bits = ordered >> 31 != 0 ? ordered & 0x7FFFFFFFu : ~ordered;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// What the bits of a logit, in 16 or all of 32, stand for.
ROCM_KERNELS_DEVICE float logit_of(uint32_t bits, DType dtype) {
  float value;
  if (dtype == DType::kFloat16) {
    const uint16_t half = static_cast<uint16_t>(bits);
    float16 narrow;
    __builtin_memcpy(&narrow, &half, sizeof(narrow));
    return to_float(narrow);
  }
  bits = dtype == DType::kBFloat16 ? bits << 16 : bits;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// A lane's own numbers.
template <typename T, int kCount>
struct InRegisters {
  T values[kCount];
  ROCM_KERNELS_DEVICE T& operator[](int i) { return values[i]; }
};
template <typename T>
struct InLds {
  T* values;
  ROCM_KERNELS_DEVICE T& operator[](int i) { return values[i * kWaveSize]; }
};

}  // namespace detail

// Grid: ceil(T / kWaves) blocks of kWaves waves. Lane l has experts l * n to (l + 1) * n - 1, n =
// ceil(E / kWaveSize). kExperts: at most.
template <int kExperts, int kWaves>
__global__ void __launch_bounds__(kWaves * 64) topk_kernel(const TopkArgs p) {
  static_assert(kMaxTopk <= 32, "topk_kernel: a wave has a lane for each slot");
  constexpr int kOfLane = (kExperts + kWaveSize - 1) / kWaveSize;
  constexpr bool kMany = kExperts > kFewExperts;
  constexpr int kAtOnce = kOfLane < 16 ? kOfLane : 16;  // loads under way
  constexpr int kUnroll = kMany ? kAtOnce : kOfLane;
  constexpr uint32_t kTaken = 0;
  const int wave = static_cast<int>(threadIdx.x) / kWaveSize;
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWaves + wave;
  const bool softmax = p.scoring == Scoring::kSoftmax;
  const int of_lane = (p.experts + kWaveSize - 1) / kWaveSize;
  const int first = lane * of_lane;
  const int own = token < p.tokens ? min(p.experts - first, of_lane) : 0;  // may be below 0
  begin_after_previous_kernel();

  // 1. Scores, which weights are made of, and what ids are chosen by. Beyond a lane's experts, and
  // the tokens, it loads what is there, so that no load is behind a branch.
  std::conditional_t<kMany, detail::InLds<float>, detail::InRegisters<float, kOfLane>> scores;
  std::conditional_t<kMany, detail::InLds<uint32_t>, detail::InRegisters<uint32_t, kOfLane>>
      choices;
  if constexpr (kMany) {
    static_assert(kWaves == 1, "topk_kernel: LDS for the numbers of one token");
    __shared__ float many_scores[kExperts];
    __shared__ uint32_t many_choices[kExperts];
    scores.values = many_scores + lane;
    choices.values = many_choices + lane;
  }
  const int64_t row = (token < p.tokens ? token : p.tokens - 1) * p.logits_stride;
  const int last = p.experts - 1;
#pragma unroll kMany ? 1 : kOfLane
  for (int begin = 0; begin < kOfLane; begin += kAtOnce) {
    uint32_t raw[kAtOnce];
    float bias[kAtOnce] = {};
    if (p.logits_dtype == DType::kFloat32) {
      const auto* logits = static_cast<const uint32_t*>(p.logits) + row;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) raw[i] = logits[min(first + begin + i, last)];
    } else {
      const auto* logits = static_cast<const uint16_t*>(p.logits) + row;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) raw[i] = logits[min(first + begin + i, last)];
    }
    if (p.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) bias[i] = p.bias[min(first + begin + i, last)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float logit = detail::logit_of(raw[i], p.logits_dtype);
      const float score = softmax ? logit : detail::sigmoid(logit);
      scores[begin + i] = score;
      choices[begin + i] = begin + i < own ? detail::in_order(score + bias[i]) : kTaken;
    }
  }

  // 2. Groups, each by one lane; the experts of those of lower rank are taken from the start.
  if (p.groups > 1) {
    __shared__ float all_choices[kWaves][kExperts];
    __shared__ float all_groups[kWaves][kExperts];  // the sum of its two greatest
    float *staged = all_choices[wave], *sums = all_groups[wave];
    const int size = p.experts / p.groups;
    const int groups = token < p.tokens ? p.groups : 0;
#pragma unroll kUnroll
    for (int i = 0; i < kOfLane; ++i) {
      if (i < own) staged[first + i] = detail::from_order(choices[i]);
    }
    lds_barrier();
    for (int g = lane; g < groups; g += kWaveSize) {
      float greatest = -INFINITY, second = -INFINITY;
      for (int e = g * size; e < (g + 1) * size; ++e) {
        const float choice = staged[e];
        second = choice > greatest ? greatest : choice > second ? choice : second;
        greatest = choice > greatest ? choice : greatest;
      }
      sums[g] = size > 1 ? greatest + second : greatest;
    }
    lds_barrier();
#pragma unroll kUnroll
    for (int i = 0; i < kOfLane; ++i) {
      if (i >= own) continue;
      const int group = (first + i) / size;
      int rank = 0;
      for (int g = 0; g < groups; ++g) {
        rank += sums[g] > sums[group] || (sums[g] == sums[group] && g < group);
      }
      if (rank >= p.groups_kept) choices[i] = kTaken;
    }
  }

  // 3. Softmax's denominator.
  float greatest = 0.0f, total = 0.0f;
  if (softmax) {
    uint32_t most = 0;
#pragma unroll kUnroll
    for (int i = 0; i < kOfLane; ++i) most = max(most, choices[i]);
    greatest = detail::from_order(greatest_of_wave(most));
#pragma unroll kUnroll
    for (int i = 0; i < kOfLane; ++i) {
      scores[i] = i < own ? detail::exp_of_negative(scores[i] - greatest) : 0.0f;
      total += scores[i];
    }
    total = reduce_lanes<kWaveSize>(total, Sum{});
  }

  // 4. The k greatest; lane j keeps the j-th.
  float weight = 0.0f, sum = 0.0f;
  int id = 0;
  for (int j = 0; j < p.k; ++j) {
    uint32_t most = kTaken;
    int place = 0;
    float score = 0.0f;
#pragma unroll kUnroll
    for (int i = 0; i < kOfLane; ++i) {
      const bool is_more = choices[i] > most;  // of equal ones the first stays
      most = is_more ? choices[i] : most;
      place = is_more ? i : place;
      score = is_more ? scores[i] : score;
    }
    const int winner = lowest_lane(ballot(most == greatest_of_wave(most)));
    score = of_one_lane(score, winner);
    const int chosen = of_one_lane(first + place, winner);
    sum += score;
    weight = lane == j ? score : weight;
    id = lane == j ? chosen : id;
#pragma unroll kUnroll
    for (int i = 0; i < kOfLane; ++i) {
      choices[i] = first + i == chosen ? kTaken : choices[i];
    }
  }

  if (lane < p.k && token < p.tokens) {
    if (softmax) {
      // A NaN anywhere is in the total, and in all weights.
      weight = p.renormalize ? weight / sum + 0.0f * total : weight / total;
    } else {
      weight = (p.renormalize ? weight / (sum + 1e-20f) : weight) * p.scale;
    }
    p.weights[token * p.k + lane] = weight;
    p.ids[token * p.k + lane] = id;
  }
}

template <int kExperts, int kWaves>
Status launch_topk_of(const TopkArgs& args, const DeviceFacts& facts, const Context& context) {
  const int64_t blocks = (args.tokens + kWaves - 1) / kWaves;
  if (blocks > INT32_MAX) return "topk: too many tokens for one launch";
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(blocks));
  launch.block = kWaves * facts.wave_size;
  launch.stream = stream_of(context);
  launch.early = facts.is_hopper_or_later();
  return launch_kernel(topk_kernel<kExperts, kWaves>, launch, args);
}

Status launch_topk(const TopkArgs& args, const Context& context) {
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  if (args.experts <= 128) return launch_topk_of<128, 4>(args, facts, context);
  if (args.experts <= kFewExperts) return launch_topk_of<kFewExperts, 4>(args, facts, context);
  return launch_topk_of<kMaxExperts, 1>(args, facts, context);
}

}  // namespace rocm_kernels
