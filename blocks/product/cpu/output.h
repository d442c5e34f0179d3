// How the bodies of the CPU products write out, and the scales of partial sums. No include guard:
// see common/cpu/isa.h. The includer defines kGroup, the columns of out that are written together.

// Loops over arrays that must live in registers: GCC has to unroll them before it decides where to
// keep the arrays.
#define ROCM_KERNELS_UNROLL _Pragma("GCC unroll 16")

ROCM_KERNELS_VECTOR int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ROCM_KERNELS_VECTOR int64_t round_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

// ---- Scales

// The factor of a partial sum over the block of K that k lies in.
ROCM_KERNELS_VECTOR float block_scale(const GemmArgs& args, int64_t m, int64_t n, int64_t k) {
  return args.scale_a.block(m, k / kScaleBlock) *
         args.scale_w.block(n / kScaleBlock, k / kScaleBlock);
}

// out[m, n + i] = sums[m - begin][i] * gain * scale_a * scale_w + bias, for m in [begin, end) and
// i < columns.
template <class Out>
void write_columns(const GemmArgs& args, int64_t begin, int64_t end, int64_t n, int columns,
                   float gain, const float sums[][kGroup]) {
  static_assert(kGroup % kLanes == 0, "vectors must not reach beyond a group");
  float scales[kGroup], biases[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const bool inside = i < columns;
    scales[i] = inside ? args.scale_w.outer(n + i) : 0.0f;
    biases[i] = 0.0f;
    if (!inside || args.bias == nullptr) continue;
    biases[i] = args.bias_dtype == DType::kFloat32
                    ? static_cast<const float*>(args.bias)[n + i]
                    : as_float(static_cast<const Out*>(args.bias)[n + i]);
  }
  for (int64_t m = begin; m < end; ++m) {
    const F32 scale_a = set1(args.scale_a.outer(m));
    Out* const out = static_cast<Out*>(args.out) + m * args.out_stride + n;
    ROCM_KERNELS_UNROLL
    for (int i = 0; i < kGroup; i += kLanes) {
      const F32 product = load(sums[m - begin] + i) * set1(gain) * scale_a;
      const F32 value = args.bias == nullptr ? product * load(scales + i)
                                             : fma(product, load(scales + i), load(biases + i));
      if (columns - i >= kLanes) {
        store(out + i, value);
      } else if (columns > i) {
        store(out + i, value, columns - i);
      }
    }
  }
}

inline void write_columns(const GemmArgs& args, int64_t begin, int64_t end, int64_t n, int columns,
                          float gain, const float sums[][kGroup]) {
  if (args.out_dtype == DType::kFloat32) {
    write_columns<float>(args, begin, end, n, columns, gain, sums);
  } else if (args.out_dtype == DType::kFloat16) {
    write_columns<Float16>(args, begin, end, n, columns, gain, sums);
  } else {
    write_columns<BFloat16>(args, begin, end, n, columns, gain, sums);
  }
}
