// Routing on the CPU: a thread takes whole tokens. The scores of a token stay
// in the first level cache while its k greatest are picked one after the other.
#include "../topk.h"

#include <cmath>
#include <limits>

#include "../../common/core/half.h"
#include "../../common/cpu/parallel.h"

namespace rocm_kernels {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

float logit_at(const TopkArgs& args, int64_t token, int64_t expert) {
  const int64_t at = token * args.logits_stride + expert;
  if (args.logits_dtype == DType::kFloat32) return static_cast<const float*>(args.logits)[at];
  if (args.logits_dtype == DType::kFloat16) {
    return to_float(static_cast<const Float16*>(args.logits)[at]);
  }
  return to_float(static_cast<const BFloat16*>(args.logits)[at]);
}

// The index of the greatest of values, the first of equal ones, and -1 if all are taken. What is
// taken is NaN; so a value that is -infinity can still be chosen.
int32_t greatest(const float* values, int32_t count) {
  int32_t best = -1;
  for (int32_t i = 0; i < count; ++i) {
    if (values[i] == values[i] && (best < 0 || values[i] > values[best])) best = i;
  }
  return best;
}

// Marks the experts of all but the best groups as taken.
void drop_groups(const TopkArgs& args, float* choice) {
  if (args.groups_kept == args.groups) return;
  float sums[kMaxExperts];
  const int32_t size = args.experts / args.groups;
  for (int32_t group = 0; group < args.groups; ++group) {
    float first = kLowest, second = size > 1 ? kLowest : 0.0f;
    for (int32_t i = group * size; i < (group + 1) * size; ++i) {
      if (choice[i] > first) {
        if (size > 1) second = first;
        first = choice[i];
      } else if (choice[i] > second && size > 1) {
        second = choice[i];
      }
    }
    sums[group] = first + second;
  }
  bool kept[kMaxExperts] = {};
  for (int32_t i = 0; i < args.groups_kept; ++i) {
    const int32_t group = greatest(sums, args.groups);
    kept[group] = true;
    sums[group] = std::numeric_limits<float>::quiet_NaN();
  }
  for (int32_t i = 0; i < args.experts; ++i) {
    if (!kept[i / size]) choice[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

void route(const TopkArgs& args, int64_t token) {
  float score[kMaxExperts], choice[kMaxExperts];
  const bool sigmoid = args.scoring == Scoring::kSigmoid;
  float largest = kLowest;
  bool any_nan = false;
  for (int32_t i = 0; i < args.experts; ++i) {
    const float logit = logit_at(args, token, i);
    score[i] = sigmoid ? 1.0f / (1.0f + std::exp(-logit)) : logit;
    any_nan |= logit != logit;
    choice[i] = sigmoid && args.bias != nullptr ? score[i] + args.bias[i] : score[i];
    if (choice[i] != choice[i]) choice[i] = kLowest;
    largest = choice[i] > largest ? choice[i] : largest;
  }
  float total = 0.0f;
  if (!sigmoid) {
    for (int32_t i = 0; i < args.experts; ++i) total += score[i] = std::exp(score[i] - largest);
  } else {
    drop_groups(args, choice);
  }

  float* const weights = args.weights + token * args.k;
  int32_t* const ids = args.ids + token * args.k;
  float chosen = 0.0f;
  for (int32_t j = 0; j < args.k; ++j) {
    ids[j] = greatest(choice, args.experts);
    choice[ids[j]] = std::numeric_limits<float>::quiet_NaN();
    weights[j] = score[ids[j]];
    chosen += weights[j];
  }
  // softmax is over all experts, so one NaN among the logits is in every weight.
  if (!sigmoid && any_nan) chosen = total = std::numeric_limits<float>::quiet_NaN();
  const float divisor =
      sigmoid ? (args.renormalize ? chosen + 1e-20f : 1.0f) : (args.renormalize ? chosen : total);
  for (int32_t j = 0; j < args.k; ++j) weights[j] = weights[j] / divisor * args.scale;
}

}  // namespace

Status launch_topk(const TopkArgs& args, const Context& context) {
  // Waking a thread costs about 3 us, in which one routes two tokens to 128 experts.
  const int64_t grain = 1 + 256 / args.experts;
  cpu::parallel_for(context, args.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) route(args, token);
  });
  return nullptr;
}

}  // namespace rocm_kernels
