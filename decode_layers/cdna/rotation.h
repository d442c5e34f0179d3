// How a wave has heads where they rotate: a lane has eight elements of a row of a unit, which is a
// head of 128, or two neighbours of 64; 16 lanes are a row.
//
//   halves (NeoX)  x[i] = x[i] * cos[i] -/+ x[i +/- rotary_dim / 2] * sin[i]
//   interleaved    x[i] = x[i] * cos[i / 2] -/+ x[i +/- 1] * sin[i / 2]
//
// of i below rotary_dim; - in the first half, or where i is even.
#pragma once

#include "../../common/gpu/lanes.h"
#include "problem.h"

namespace rocm_kernels::cdna::decode {

#if ROCM_KERNELS_CDNA

constexpr int kCount = 8;  // elements of a lane

// What a norm makes of x, of its factor and weights.
template <typename T>
ROCM_KERNELS_DEVICE void scale_by(const Vector& weights, float factor, float offset,
                                  float (&x)[kCount]) {
  float weight[kCount];
  unpack<T>(opaque(weights), weight);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = x[i] * factor * (weight[i] + offset);
}

template <typename T>
class Rotation {
 public:
  ROCM_KERNELS_DEVICE Rotation(const Attention<T>& a, int lane)
      : a_(a), lane_(lane), at_(kCount * (lane % 16)) {
    cosines_ = angles_of(a.cos, from_float<T>(1.0f));
    sines_ = angles_of(a.sin, from_float<T>(0.0f));
  }

  // Of the lane's elements: which of a unit's heads has them, and from where on.
  ROCM_KERNELS_DEVICE int head() const { return at_ >= a_.head_dim; }
  ROCM_KERNELS_DEVICE int dim() const { return at_ & (a_.head_dim - 1); }
  // Where they lie in a row of a cache, from the unit's first on.
  ROCM_KERNELS_DEVICE int place() const { return at_ + (at_ < kHalfDim ? 0 : a_.half_gap); }

  // Of x, the sum over its head.
  ROCM_KERNELS_DEVICE float sum_of_head(float x) const {
    x = reduce_lanes<8>(x, Sum{});
    const float all = x + other_half<8>(x);
    return a_.head_dim == kUnitDim ? all : x;
  }

  // Eight elements of a head; where it has a norm, they become that before. By all lanes.
  ROCM_KERNELS_DEVICE void rotate(const Vector& own, bool has_norm, const Vector& weights,
                                  float (&x)[kCount]) const {
    float y[kCount], cosine[kCount], sine[kCount];
    const Vector its = opaque(own);  // with what is made of it opaque too: one head after another
    unpack<T>(its, x);
    unpack<T>(partners_of(its), y);
    if (has_norm) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kCount; ++i) squares = fmaf(x[i], x[i], squares);
      const float mean = sum_of_head(squares) / static_cast<float>(a_.head_dim);
      const float factor = reciprocal_sqrt(mean + a_.eps);
      scale_by<T>(weights, factor, a_.weight_offset, x);
      scale_by<T>(partners_of(weights), factor, a_.weight_offset, y);
    }
    unpack<T>(opaque(cosines_), cosine);  // not kept as floats
    unpack<T>(opaque(sines_), sine);
    const float first = a_.interleaved || is_first() ? -1.0f : 1.0f;
    const float second = a_.interleaved ? 1.0f : first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = fmaf(x[i], cosine[i], (i % 2 == 0 ? first : second) * y[i] * sine[i]);
    }
  }

 private:
  ROCM_KERNELS_DEVICE bool is_first() const { return dim() < a_.rotary_dim / 2; }

  // Of the lane's elements; `none` where nothing rotates.
  ROCM_KERNELS_DEVICE Vector angles_of(const T* table, T none) const {
    uint32_t word = __builtin_bit_cast(uint16_t, none);
    word |= word << 16;
    Vector angles{{word, word, word, word}};
    if (dim() >= a_.rotary_dim) return angles;
    if (!a_.interleaved) return load<Touch::kAgain, Vector>(table + dim());
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // a pair each
      word = __builtin_bit_cast(uint16_t, table[dim() / 2 + w]);
      angles.word[w] = word | word << 16;
    }
    return angles;
  }

  // The elements that the lane's rotate with.
  ROCM_KERNELS_DEVICE Vector partners_of(const Vector& own) const {
    Vector others;
    if (a_.rotary_dim == kUnitDim && !a_.interleaved) {  // 8 lanes on: no trip through LDS
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        others.word[w] = __builtin_amdgcn_mov_dpp(own.word[w], 0x128, 0xF, 0xF, true);
      }
      return others;
    }
    const int half = a_.rotary_dim / (2 * kCount), lane = lane_ + (is_first() ? half : -half);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t swapped = own.word[w] << 16 | own.word[w] >> 16;
      const int found = of_lane(static_cast<int>(own.word[w]), lane);
      others.word[w] = a_.interleaved ? swapped : static_cast<uint32_t>(found);
    }
    return others;
  }

  const Attention<T>& a_;
  const int lane_, at_;
  Vector cosines_, sines_;
};

#endif

}  // namespace rocm_kernels::cdna::decode
