// Routing: which k of E experts a token goes to, and with which weights.
//
//   softmax: ids[t] = the k greatest of logits[t]
//            weights[t, j] = softmax(logits[t])[ids[t, j]], renormalised over the k if asked
//   sigmoid: s = sigmoid(logits[t]), choice = s + bias
//            Of `groups` equal runs of experts the `groups_kept` with the greatest sum of their two
//            greatest choices stay; ids[t] = the k greatest choices among their experts
//            weights[t, j] = s[ids[t, j]], divided by (their sum + 1e-20) if asked, times `scale`
//
// Ids come in descending order of what they are chosen by, of equal ones the lower id first. A NaN
// counts as -infinity in choosing, so ids are always of experts; it is NaN in the weights. float32
// inside.
//
// Each backend defines launch_topk once.
#pragma once

#include "../common/core/context.h"
#include "experts.h"

namespace rocm_kernels {

enum class Scoring : int32_t { kSoftmax, kSigmoid };

struct TopkArgs {
  int64_t tokens = 0;
  int32_t experts = 0;  // 1 to kMaxExperts
  int32_t k = 0;        // 1 to kMaxTopk, at most the experts of the groups kept

  const void* logits = nullptr;  // [T, E], logits_dtype
  int64_t logits_stride = 0;     // elements between rows
  const float* bias = nullptr;   // [E]; sigmoid alone; nullptr: none
  float* weights = nullptr;      // [T, k], contiguous
  int32_t* ids = nullptr;        // [T, k], contiguous

  DType logits_dtype = DType::kFloat32;  // float32, float16 or bfloat16
  Scoring scoring = Scoring::kSoftmax;
  int32_t groups = 1;  // divides experts; softmax: 1
  int32_t groups_kept = 1;
  bool renormalize = true;
  float scale = 1.0f;
};

// Caller's duty: tokens > 0 and the ranges above.
Status launch_topk(const TopkArgs& args, const Context& context);

}  // namespace rocm_kernels
