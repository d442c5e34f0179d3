// The rows of rmsnorm_fp8 on a CPU; compiled once for each instruction set (common/cpu/isa.h).
//
// A row is read from memory once. Its first pass adds the residual, writes h back and sums h^2;
// the later ones find h, two bytes a column, in the first or second level cache: h is the
// residual's row, or x's own without one, so there is no buffer. y = (h * rstd) * weight is cheaper
// to compute again for each pass than to keep.

#include "../blocks/rows/cpu/block.h"

// Columns whose squares are summed in float32, 64 in each lane; these sums are added in float64. So
// the error does not grow with the hidden size.
constexpr int64_t kSumColumns = 64 * kLanes;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <bool kResidual, bool kWhole, class X>
ROCM_KERNELS_VECTOR Block load_h(const X* x, const X* addend, X* residual, int n) {
  Block h = kWhole ? load_block<X>(x) : load_block<X>(x, n);
  if constexpr (kResidual) {
    const Block r = kWhole ? load_block<X>(addend) : load_block<X>(addend, n);
    h = kWhole ? store_block<X>(residual, h + r) : store_block<X>(residual, h + r, n);
  }
  return h;
}

template <bool kResidual, class X>
float sum_of_squares(const X* x, const X* addend, X* residual, int64_t columns) {
  Block total = all(0.0f);
  int64_t c = 0;
  for (; c + kBlock <= columns; c += kBlock) {
    const Block h = load_h<kResidual, true>(x + c, kResidual ? addend + c : nullptr,
                                            kResidual ? residual + c : nullptr, kBlock);
    total = fma(h, h, total);
  }
  if (c < columns) {
    const int n = static_cast<int>(columns - c);
    const Block h = load_h<kResidual, false>(x + c, kResidual ? addend + c : nullptr,
                                             kResidual ? residual + c : nullptr, n);
    total = fma(h, h, total);
  }
  return sum(total);
}

template <bool kResidual, class X>
float reciprocal_rms(const X* x, const X* addend, X* residual, int64_t hidden, float eps) {
  double total = 0.0;
  for (int64_t c = 0; c < hidden; c += kSumColumns) {
    const int64_t columns = smaller(kSumColumns, hidden - c);
    total += sum_of_squares<kResidual>(x + c, kResidual ? addend + c : nullptr,
                                       kResidual ? residual + c : nullptr, columns);
  }
  return 1.0f / __builtin_sqrtf(static_cast<float>(total / static_cast<double>(hidden)) + eps);
}

// What the passes after the first one read: y[c] = (h[c] * rstd) * (weight[c] + offset).
// An offset of -0 is none: w + -0 is w for every w.
template <class X, class W>
struct NormalisedRow {
  const X* h;
  const W* weight;
  float rstd;
  float offset;

  template <bool kWhole>
  ROCM_KERNELS_VECTOR Block at(int64_t c, int n) const {
    const Block input = kWhole ? load_block<X>(h + c) : load_block<X>(h + c, n);
    const Block factor = kWhole ? load_block<X>(weight + c) : load_block<X>(weight + c, n);
    return input * all(rstd) * (factor + all(offset));
  }
};

template <class X, class W>
float amax(const NormalisedRow<X, W>& y, int64_t begin, int64_t end) {
  Block result = all(0.0f);
  int64_t c = begin;
  for (; c + kBlock <= end; c += kBlock) {
    result = max_magnitude(y.template at<true>(c, kBlock), result);
  }
  if (c < end) {
    result = max_magnitude(y.template at<false>(c, static_cast<int>(end - c)), result);
  }
  return largest(result);
}

template <class X, class W, class Out>
void write(const NormalisedRow<X, W>& y, float inverse_scale, Out* out, int64_t begin,
           int64_t end) {
  const Block inverse = all(inverse_scale);
  int64_t c = begin;
  for (; c + kBlock <= end; c += kBlock) {
    store_block<X>(out + c, y.template at<true>(c, kBlock) * inverse);
  }
  if (c < end) {
    const int n = static_cast<int>(end - c);
    store_block<X>(out + c, y.template at<false>(c, n) * inverse, n);
  }
}

template <class X, class W, class Out>
void normalise_rows(const RmsnormFp8Args& args, int64_t begin, int64_t end) {
  const DynamicScale scale_for{fp8_max(args.out_dtype), args.scale_ub,
                               ScaleRounding::of(args.ue8m0)};
  const int64_t hidden = args.hidden;
  const float offset = args.weight_offset == 0.0f ? -0.0f : args.weight_offset;
  for (int64_t row = begin; row < end; ++row) {
    const X* const x = static_cast<const X*>(args.x) + row * args.x_stride;
    Out* const out = static_cast<Out*>(args.out) + row * args.out_stride;
    NormalisedRow<X, W> y{x, static_cast<const W*>(args.weight), 0.0f, offset};
    if (args.residual != nullptr) {
      X* const residual = static_cast<X*>(args.residual) + row * args.residual_stride;
      const X* const addend = args.addend == nullptr
                                  ? residual
                                  : static_cast<const X*>(args.addend) + row * args.addend_stride;
      y.rstd = reciprocal_rms<true, X>(x, addend, residual, hidden, args.eps);
      y.h = residual;
    } else {
      y.rstd = reciprocal_rms<false, X>(x, nullptr, nullptr, hidden, args.eps);
    }

    if (args.scaling == Scaling::kNone) {
      write(y, 1.0f, out, 0, hidden);
    } else if (args.scaling == Scaling::kStatic) {
      write(y, 1.0f / *args.static_scale, out, 0, hidden);
    } else {
      const int64_t group = args.scaling == Scaling::kPerToken ? hidden : args.group_size;
      const int64_t groups = (hidden + group - 1) / group;
      float* const scales = args.scales + row * groups;
      // All scales before the first is used: one group's two divisions would hold up the next.
      for (int64_t g = 0; g < groups; ++g) {
        scales[g] = scale_for(amax(y, g * group, smaller(g * group + group, hidden)));
      }
      for (int64_t g = 0; g < groups; ++g) {
        write(y, 1.0f / scales[g], out, g * group, smaller(g * group + group, hidden));
      }
    }
  }
}

template <class X, class W>
void normalise_rows(const RmsnormFp8Args& args, int64_t begin, int64_t end) {
  switch (args.out_dtype) {
    case DType::kFloat8E4M3FN:
      return normalise_rows<X, W, Float8E4M3<false>>(args, begin, end);
    case DType::kFloat8E4M3FNUZ:
      return normalise_rows<X, W, Float8E4M3<true>>(args, begin, end);
    default:
      return normalise_rows<X, W, X>(args, begin, end);
  }
}

inline void rmsnorm_fp8_rows(const RmsnormFp8Args& args, int64_t begin, int64_t end) {
  const bool float_weight = args.weight_dtype == DType::kFloat32;
  if (args.x_dtype == DType::kFloat32) return normalise_rows<float, float>(args, begin, end);
  if (args.x_dtype == DType::kFloat16) {
    return float_weight ? normalise_rows<Float16, float>(args, begin, end)
                        : normalise_rows<Float16, Float16>(args, begin, end);
  }
  return float_weight ? normalise_rows<BFloat16, float>(args, begin, end)
                      : normalise_rows<BFloat16, BFloat16>(args, begin, end);
}
