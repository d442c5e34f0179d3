// Checks of the weights of a mixture of experts.
#pragma once

#include <optional>

#include "../../moe/experts.h"
#include "checks.h"

namespace rocm_kernels {

// From a tensor's first byte to its last, gaps between its rows included.
inline bool spans_overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto begin = [](const Tensor& t) { return reinterpret_cast<intptr_t>(t.data_ptr()); };
  const auto end = [&](const Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    return begin(t) + static_cast<intptr_t>((last + 1) * t.element_size());
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

inline void require_spans_apart(const Tensor& out, const Tensor& other, const char* name) {
  require(!spans_overlap(out, other), "out is written and must not share memory with ", name);
}

// How the messages name what belongs to one weight.
struct ExpertNames {
  const char* w;
  const char* scale;
  const char* bias;
};

// Checks w [E, n, k] (MXFP4: [E, n, k / 2] uint8) with its scale and bias, and describes them. Both
// are on the device of `first`, and none shares memory with `out`.
ExpertWeights describe_experts(const Tensor& w, const std::optional<Tensor>& scale,
                               const std::optional<Tensor>& bias, const ExpertNames& names,
                               int64_t experts, int64_t n, int64_t k, const Tensor& out,
                               const Tensor& first, const char* first_name);

// E, from a w of three dimensions.
inline int32_t require_experts(const Tensor& w, const char* name) {
  require(w.dim() == 3, name, " must have three dimensions, of experts, rows and columns, got ",
          shape_of(w));
  require(1 <= w.size(0) && w.size(0) <= kMaxExperts, name, " must have 1 to ", kMaxExperts,
          " experts, got ", shape_of(w));
  return static_cast<int32_t>(w.size(0));
}

}  // namespace rocm_kernels
