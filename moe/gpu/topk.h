// The router on GPUs: a wave a token, its experts spread over the lanes. See ../topk.h for the
// maths. One source of each family includes it.
//
// Scores lie in LDS. The k greatest are found one after the other: each lane offers its greatest
// that is not taken yet, the wave takes the greatest of those, of equal ones the lowest id. That is
// k * (E / 64) comparisons a lane, all in registers and LDS; nothing is sorted.
//
// Timeline of a wave. | is a barrier of the block, though a wave reads its own LDS alone.
//
//   the kernel before; logits --> scores and choices in LDS
//   | groups: the two greatest choices of each | experts of groups that lose are taken
//   | softmax: exponentials in place of scores, their sum over the wave |
//   k times: the greatest that is left, over the wave; lane j keeps the j-th
//   lane j: weight j, id j to memory
#pragma once

#include <cmath>
#include <type_traits>

#include "../../common/gpu/barrier.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/element.h"
#include "../../common/gpu/launch.h"
#include "../../common/gpu/math.h"
#include "../../common/gpu/reduce.h"
#include "../topk.h"

namespace rocm_kernels {

constexpr int kTopkWaves = 4;  // of a block, a token each; one where experts are many

namespace detail {

struct Max {
  ROCM_KERNELS_DEVICE float operator()(float a, float b) const { return a > b ? a : b; }
};

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
  return v < 0.0f ? part / (1.0f + part) : 1.0f / (1.0f + part);
}

}  // namespace detail

// Grid: ceil(T / kWaves) blocks of kWaves waves. kExperts: at most.
template <int kExperts, int kWaves>
__global__ void __launch_bounds__(kWaves * 64) topk_kernel(const TopkArgs p) {
  __shared__ float all_scores[kWaves][kExperts];   // what weights are made of
  __shared__ float all_choices[kWaves][kExperts];  // what ids are chosen by
  __shared__ float all_groups[kWaves][kExperts];   // of each group, its two greatest choices
  const int wave = static_cast<int>(threadIdx.x) / kWaveSize;
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  float *scores = all_scores[wave], *choices = all_choices[wave], *groups = all_groups[wave];
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWaves + wave;
  const bool exists = token < p.tokens;
  const bool softmax = p.scoring == Scoring::kSoftmax;
  const int experts = exists ? p.experts : 0;
  begin_after_previous_kernel();

  // 1. Scores and choices.
  float greatest = -INFINITY;
  for (int e = lane; e < experts; e += kWaveSize) {
    const float logit = load_element(p.logits, p.logits_dtype, token * p.logits_stride + e);
    const float score = softmax ? logit : detail::sigmoid(logit);
    float choice = p.bias != nullptr ? score + p.bias[e] : score;
    if (choice != choice) choice = -INFINITY;
    scores[e] = score;
    choices[e] = choice;
    greatest = choice > greatest ? choice : greatest;
  }
  lds_barrier();

  // 2. Groups, each by one lane; those of lower rank have their experts taken from the start.
  const int group_size = p.experts / p.groups;
  using Taken = std::conditional_t<(kExperts > 32 * kWaveSize), uint64_t, uint32_t>;
  Taken taken = 0;  // bit i: expert lane + i * kWaveSize
  if (p.groups > 1) {
    for (int g = lane; g < (exists ? p.groups : 0); g += kWaveSize) {
      float first = -INFINITY, second = -INFINITY;
      for (int e = g * group_size; e < (g + 1) * group_size; ++e) {
        const float choice = choices[e];
        second = choice > first ? first : choice > second ? choice : second;
        first = choice > first ? choice : first;
      }
      groups[g] = group_size > 1 ? first + second : first;
    }
    lds_barrier();
    for (int e = lane, i = 0; e < experts; e += kWaveSize, ++i) {
      const int own = e / group_size;
      int rank = 0;
      for (int g = 0; g < p.groups; ++g) {
        rank += groups[g] > groups[own] || (groups[g] == groups[own] && g < own);
      }
      if (rank >= p.groups_kept) taken |= Taken{1} << i;
    }
  }

  // 3. Softmax's denominator.
  float total = 0.0f;
  if (softmax) {
    greatest = reduce_lanes<kWaveSize>(greatest, detail::Max{});
    for (int e = lane; e < experts; e += kWaveSize) {
      scores[e] = detail::exp_of_negative(scores[e] - greatest);
      total += scores[e];
    }
    total = reduce_lanes<kWaveSize>(total, Sum{});
    lds_barrier();
  }

  // 4. The k greatest; lane j keeps the j-th.
  static_assert(kMaxTopk <= 32, "topk_kernel: a wave has a lane for each slot");
  constexpr float kNone = 1e9f;
  float weight = 0.0f, sum = 0.0f;
  int own_id = 0;
  for (int j = 0; j < p.k; ++j) {
    float best = -INFINITY, best_id = kNone;
    for (int e = lane, i = 0; e < experts; e += kWaveSize, ++i) {
      const float choice = choices[e];
      if ((taken >> i & 1) == 0 && (best_id == kNone || choice > best)) {
        best = choice, best_id = static_cast<float>(e);
      }
    }
    const float winner = reduce_lanes<kWaveSize>(best, detail::Max{});
    const float lowest =
        -reduce_lanes<kWaveSize>(best == winner ? -best_id : -kNone, detail::Max{});
    if (!exists) continue;
    const int id = static_cast<int>(lowest);
    if (id % kWaveSize == lane) taken |= Taken{1} << (id / kWaveSize);
    sum += scores[id];
    if (j == lane) weight = scores[id], own_id = id;
  }

  if (lane < p.k && exists) {
    if (softmax) {
      // A NaN anywhere is in the total, and in all weights.
      weight = p.renormalize ? weight / sum + 0.0f * total : weight / total;
    } else {
      weight = (p.renormalize ? weight / (sum + 1e-20f) : weight) * p.scale;
    }
    p.weights[token * p.k + lane] = weight;
    p.ids[token * p.k + lane] = own_id;
  }
}

Status launch_topk(const TopkArgs& args, const Context& context) {
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  const bool few = args.experts <= kFewExperts;
  const int waves = few ? kTopkWaves : 1;
  const int64_t blocks = (args.tokens + waves - 1) / waves;
  if (blocks > INT32_MAX) return "topk: too many tokens for one launch";
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(blocks));
  launch.block = waves * facts.wave_size;
  launch.stream = stream_of(context);
  launch.early = facts.is_hopper_or_later();
  return launch_kernel(few ? topk_kernel<kFewExperts, kTopkWaves> : topk_kernel<kMaxExperts, 1>,
                       launch, args);
}

}  // namespace rocm_kernels
