#include "../../moe/topk.h"

#include <algorithm>

#include "../torch_binding.h"
#include "checks.h"
#include "launch.h"

using namespace rocm_kernels;

void topk(Tensor& weights, Tensor& ids, const Tensor& logits, std::optional<Tensor> bias,
          std::string scoring, int64_t groups, int64_t groups_kept, bool renormalize,
          double scale) {
  TopkArgs args;
  require_matrix(logits, "logits");
  require_matrix(ids, "ids");
  args.tokens = logits.size(0);
  const int64_t experts = logits.size(1), k = ids.size(1);
  require(1 <= experts && experts <= kMaxExperts, "logits must have 1 to ", kMaxExperts,
          " experts a token, got ", shape_of(logits));
  require(scoring == "softmax" || scoring == "sigmoid", "scoring must be softmax or sigmoid, got ",
          scoring);
  args.scoring = scoring == "softmax" ? Scoring::kSoftmax : Scoring::kSigmoid;
  require(args.scoring == Scoring::kSigmoid || (groups == 1 && !bias && scale == 1.0),
          "bias, groups and scale are for sigmoid scoring");
  require(groups >= 1 && experts % groups == 0, "groups must divide the ", experts,
          " experts, got ", groups);
  require(1 <= groups_kept && groups_kept <= groups, "groups_kept must be 1 to ", groups, ", got ",
          groups_kept);
  const int64_t most = std::min(kMaxTopk, experts / groups * groups_kept);
  require(1 <= k && k <= most, "k must be 1 to ", most, ", got ", k);
  args.logits_dtype = require_float(logits, "logits");
  require_device(weights, "weights", logits, "logits");
  require_device(ids, "ids", logits, "logits");
  require_shape(ids, "ids", args.tokens, k);
  require_shape(weights, "weights", args.tokens, k);
  require(weights.scalar_type() == ScalarType::Float && weights.is_contiguous(),
          "weights must be float32 and contiguous, got ", name_of(weights.scalar_type()));
  require(ids.scalar_type() == ScalarType::Int && ids.is_contiguous(),
          "ids must be int32 and contiguous, got ", name_of(ids.scalar_type()));
  require_no_overlap(weights, "weights", logits, "logits");
  require_no_overlap(weights, "weights", ids, "ids");
  require_no_overlap(ids, "ids", logits, "logits");
  if (bias) {
    require(bias->scalar_type() == ScalarType::Float, "bias must be float32, got ",
            name_of(bias->scalar_type()));
    require_device(*bias, "bias", logits, "logits");
    require_contiguous_vector(*bias, "bias", experts);
    require_no_overlap(weights, "weights", *bias, "bias");
    require_no_overlap(ids, "ids", *bias, "bias");
    args.bias = static_cast<const float*>(bias->data_ptr());
  }
  if (args.tokens == 0) return;

  args.experts = static_cast<int32_t>(experts);
  args.k = static_cast<int32_t>(k);
  args.logits = logits.data_ptr();
  args.logits_stride = row_stride(logits);
  args.weights = static_cast<float*>(weights.data_ptr());
  args.ids = static_cast<int32_t*>(ids.data_ptr());
  args.groups = static_cast<int32_t>(groups);
  args.groups_kept = static_cast<int32_t>(groups_kept);
  args.renormalize = renormalize;
  args.scale = static_cast<float>(scale);
  run_or_record(
      logits, [args](const Context& context) { check_status(launch_topk(args, context), "topk"); });
}
