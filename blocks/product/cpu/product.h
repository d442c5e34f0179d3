// What the bodies of the products by vectors (few_rows_body.h, body.h) have in common: packing a,
// and the way from dtypes to types. No include guard: see common/cpu/isa.h. The includer defines
// kPanelDepth (a multiple of kScaleBlock), kGroup (see output.h) and multiply_units.

#include "output.h"

// ---- a, converted once: panel by panel of K, row by row within a panel

template <class Multiplier>
ROCM_KERNELS_VECTOR typename Multiplier::Value* packed_panel(const GemmJob& job, int64_t k) {
  // All panels but the last are full, so those before k take m * k values.
  return static_cast<typename Multiplier::Value*>(job.args.workspace) + job.args.m * k;
}

template <class Multiplier, class Element>
void pack_rows(const GemmJob& job, int64_t begin, int64_t end) {
  const GemmArgs& args = job.args;
  for (int64_t unit = begin; unit < end; ++unit) {  // one row of one panel
    const int64_t m = unit % args.m, k = unit / args.m * kPanelDepth;
    const int64_t depth = smaller(kPanelDepth, args.k - k);
    const Element* const row = static_cast<const Element*>(args.a) + m * args.a_stride + k;
    typename Multiplier::Value* const packed =
        packed_panel<Multiplier>(job, k) + m * round_up(depth, Multiplier::kChunk);
    typename Multiplier::Operand operands[Multiplier::kParts];
    for (int64_t i = 0; i < depth; i += Multiplier::kChunk) {
      if (i + Multiplier::kChunk <= depth) {
        Decode<Multiplier, Element>::chunk(row + i, operands);
      } else {
        decode_tail<Multiplier>(row + i, depth - i, operands);
      }
      for (int part = 0; part < Multiplier::kParts; ++part) {
        Multiplier::store_operand(packed + i + part * Multiplier::kWidth, operands[part]);
      }
    }
  }
}

// ---- From dtypes to types

struct Pack {
  template <class Multiplier, class A, class W>
  static void run(const GemmJob& job, int64_t begin, int64_t end) {
    pack_rows<Multiplier, A>(job, begin, end);
  }
};

// The includer's: units [begin, end) of out.
template <class Multiplier, class Element>
void multiply_units(const GemmJob& job, int64_t begin, int64_t end, float gain);

struct Multiply {
  template <class Multiplier, class A, class W>
  static void run(const GemmJob& job, int64_t begin, int64_t end) {
    constexpr float kGain = Decode<Multiplier, A>::kGain * Decode<Multiplier, W>::kGain;
    multiply_units<Multiplier, W>(job, begin, end, kGain);
  }
};

template <class Step, bool kFnuz>
void with_fp8_weights(const GemmJob& job, int64_t begin, int64_t end) {
#if ROCM_KERNELS_CPU_AVX512
  using Multiplier = BF16Multiplier;
  using BFloat16A = BFloat16InFp8Order;
#else
  using Multiplier = F32Multiplier;
  using BFloat16A = BFloat16;
#endif
  if (job.args.a_dtype == DType::kFloat16) {
    Step::template run<F32Multiplier, Float16, Fp8<kFnuz>>(job, begin, end);
  } else if (job.args.a_dtype == DType::kBFloat16) {
    Step::template run<Multiplier, BFloat16A, Fp8<kFnuz>>(job, begin, end);
  } else {
    Step::template run<Multiplier, Fp8<kFnuz>, Fp8<kFnuz>>(job, begin, end);
  }
}

template <class Step>
void with_types(const GemmJob& job, int64_t begin, int64_t end) {
#if ROCM_KERNELS_CPU_AVX512
  using BFloat16Multiplier = BF16Multiplier;
#else
  using BFloat16Multiplier = F32Multiplier;
#endif
  switch (job.args.w_dtype) {
    case DType::kFloat16:
      return Step::template run<F32Multiplier, Float16, Float16>(job, begin, end);
    case DType::kBFloat16:
      if (job.args.a_dtype == DType::kFloat16) {  // beside MXFP4 weights, decoded
        return Step::template run<F32Multiplier, Float16, BFloat16>(job, begin, end);
      }
      return Step::template run<BFloat16Multiplier, BFloat16, BFloat16>(job, begin, end);
    case DType::kFloat8E4M3FNUZ:
      return with_fp8_weights<Step, true>(job, begin, end);
    default:
      return with_fp8_weights<Step, false>(job, begin, end);
  }
}

// Units: rows of panels of a.
static void pack(const GemmJob& job, int64_t begin, int64_t end) {
  with_types<Pack>(job, begin, end);
}

// Units: those of multiply_units.
static void multiply(const GemmJob& job, int64_t begin, int64_t end) {
  with_types<Multiply>(job, begin, end);
}
