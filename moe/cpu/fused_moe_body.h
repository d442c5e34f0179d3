// The steps of moe/cpu/fused_moe.cpp between the products, for one instruction set (see
// common/cpu/isa.h): no include guard.

#include "../../blocks/rows/cpu/activation.h"

ROCM_KERNELS_VECTOR int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// n columns at p, which are kBlock of them or the last of a row.
template <class Order, class T>
ROCM_KERNELS_VECTOR Block load_columns(const T* p, int64_t n) {
  return n >= kBlock ? load_block<Order>(p) : load_block<Order>(p, static_cast<int>(n));
}
template <class Order, class T>
ROCM_KERNELS_VECTOR void store_columns(T* p, const Block& block, int64_t n) {
  if (n >= kBlock) {
    store_block<Order>(p, block);
  } else {
    store_block<Order>(p, block, static_cast<int>(n));
  }
}

// ---- Quantising a row

template <class In, bool kFnuz>
void quantize_group(const In* in, int64_t columns, ScaleRounding rounding, Float8E4M3<kFnuz>* out,
                    float* scale) {
  Block amax = all(0.0f);
  for (int64_t c = 0; c < columns; c += kBlock) {
    amax = max_magnitude(load_columns<In>(in + c, columns - c), amax);
  }
  *scale = DynamicScale{kFnuz ? 240.0f : 448.0f, 0.0f, rounding}(largest(amax));
  const Block inverse = all(1.0f / *scale);
  for (int64_t c = 0; c < columns; c += kBlock) {
    store_columns<In>(out + c, load_columns<In>(in + c, columns - c) * inverse, columns - c);
  }
}

// Row `row` of an operand from values of type In.
template <class In>
void quantize_row(const Operand& operand, const In* in, int64_t row) {
  float* const scales = operand.scales + row * operand.groups;
  for (int64_t group = 0; group < operand.groups; ++group) {
    const int64_t c = group * operand.group, n = smaller(operand.group, operand.columns - c);
    if (operand.dtype == DType::kFloat8E4M3FNUZ) {
      quantize_group(in + c, n, operand.rounding,
                     static_cast<Float8E4M3<true>*>(operand.row(row)) + c, scales + group);
    } else {
      quantize_group(in + c, n, operand.rounding,
                     static_cast<Float8E4M3<false>*>(operand.row(row)) + c, scales + group);
    }
  }
}

// ---- Tokens to the places of their slots

static void place_tokens(const MoeJob& job, int64_t begin, int64_t end) {
  const FusedMoeArgs& args = job.args;
  const Operand& x = job.x;
  for (int64_t token = begin; token < end; ++token) {
    const char* const in =
        static_cast<const char*>(args.x) + token * args.x_stride * size_of(args.x_dtype);
    int64_t first = -1;
    for (int64_t j = 0; j < args.k; ++j) {
      const int64_t row = job.places[token * args.k + j];
      if (row < 0) continue;
      if (x.scales == nullptr) {
        __builtin_memcpy(x.row(row), in, x.columns * size_of(x.dtype));
      } else if (first >= 0) {
        __builtin_memcpy(x.row(row), x.row(first), x.columns);
        __builtin_memcpy(x.scales + row * x.groups, x.scales + first * x.groups,
                         x.groups * sizeof(float));
      } else if (args.x_dtype == DType::kFloat16) {
        quantize_row(x, reinterpret_cast<const Float16*>(in), row);
      } else {
        quantize_row(x, reinterpret_cast<const BFloat16*>(in), row);
      }
      first = row;
    }
  }
}

// ---- Biases and activation

ROCM_KERNELS_VECTOR float bias_at(const ExpertWeights& w, int64_t expert, int64_t n) {
  const int64_t at = expert * w.bias_expert_stride + n;
  if (w.bias_dtype == DType::kFloat32) return static_cast<const float*>(w.bias)[at];
  if (w.bias_dtype == DType::kFloat16) return to_float(static_cast<const Float16*>(w.bias)[at]);
  return to_float(static_cast<const BFloat16*>(w.bias)[at]);
}

// gate and up of columns [c, c + n) of a row, in the order of Block<float>.
ROCM_KERNELS_VECTOR void load_gate_up(const MoeJob& job, const float* both, int64_t expert,
                                      int64_t c, int64_t n, Block& gate, Block& up) {
  const FusedMoeArgs& args = job.args;
  const ExpertWeights& w = args.gate_up;
  const int64_t columns = args.intermediate;
  if (!args.interleaved && w.bias == nullptr && args.limit == __builtin_inff()) {
    gate = load_columns<float>(both + c, n);
    up = load_columns<float>(both + columns + c, n);
    return;
  }
  float gates[kBlock] = {}, ups[kBlock] = {};
  for (int64_t i = 0; i < smaller(n, kBlock); ++i) {
    const int64_t g = args.interleaved ? 2 * (c + i) : c + i;
    const int64_t u = args.interleaved ? g + 1 : columns + c + i;
    gates[i] = both[g] + (w.bias == nullptr ? 0.0f : bias_at(w, expert, g));
    ups[i] = both[u] + (w.bias == nullptr ? 0.0f : bias_at(w, expert, u));
    // A NaN passes through these.
    gates[i] = gates[i] > args.limit ? args.limit : gates[i];
    ups[i] = ups[i] > args.limit ? args.limit : ups[i] < -args.limit ? -args.limit : ups[i];
  }
  gate = load_block<float>(gates);
  up = load_block<float>(ups);
}

ROCM_KERNELS_VECTOR Block gated(GatedActivation kind, const Block& gate, const Block& up) {
  switch (kind) {
    case GatedActivation::kGelu:
      return activation<Activation::kGelu>(gate) * up;
    case GatedActivation::kGeluTanh:
      return activation<Activation::kGeluTanh>(gate) * up;
    case GatedActivation::kSwigluOai:
      return gate / (all(1.0f) + exp(gate * all(-kSwigluOaiSlope))) * (up + all(1.0f));
    default:
      return activation<Activation::kSilu>(gate) * up;
  }
}

// Rounds a row's float32 columns to the 16-bit Out.
template <class Out>
void round_row(const float* in, int64_t columns, Out* out) {
  for (int64_t c = 0; c < columns; c += kBlock) {
    store_columns<Out>(out + c, load_columns<Out>(in + c, columns - c), columns - c);
  }
}

// h of rows [begin, end). It is first left in float32 in the row's own place: its column c is
// written when gate and up of it were read, and never lies beyond what is read next.
static void activate_rows(const MoeJob& job, int64_t begin, int64_t end) {
  const Operand& h = job.h;
  const int64_t columns = h.columns;
  for (int64_t row = begin; row < end; ++row) {
    float* const both = job.both + row * 2 * columns;
    const int64_t expert = job.expert_of(row);
    for (int64_t c = 0; c < columns; c += kBlock) {
      Block gate, up;
      load_gate_up(job, both, expert, c, columns - c, gate, up);
      store_columns<float>(both + c, gated(job.args.activation, gate, up), columns - c);
    }
    if (h.scales != nullptr) {
      quantize_row(h, both, row);
    } else if (h.dtype == DType::kFloat16) {
      round_row(both, columns, static_cast<Float16*>(h.row(row)));
    } else {
      round_row(both, columns, static_cast<BFloat16*>(h.row(row)));
    }
  }
}

// ---- Sums of slots

template <class Out>
void combine_token(const MoeJob& job, int64_t token) {
  const FusedMoeArgs& args = job.args;
  Out* const out = static_cast<Out*>(args.out) + token * args.out_stride;
  for (int64_t c = 0; c < args.hidden; c += kBlock) {
    const int64_t n = args.hidden - c;
    Block sum = all(0.0f);
    for (int64_t j = 0; j < args.k; ++j) {
      const int64_t slot = token * args.k + j, row = job.places[slot];
      if (row < 0) continue;
      Block y = load_columns<Out>(job.y + row * args.hidden + c, n);
      if (args.down.bias != nullptr) {
        float biases[kBlock] = {};
        for (int64_t i = 0; i < smaller(n, kBlock); ++i) {
          biases[i] = bias_at(args.down, args.topk_ids[slot], c + i);
        }
        y = y + load_block<Out>(biases);
      }
      sum = fma(all(args.topk_weights[slot]), y, sum);
    }
    store_columns<Out>(out + c, sum, n);
  }
}

static void combine_tokens(const MoeJob& job, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    if (job.args.out_dtype == DType::kFloat32) {
      combine_token<float>(job, token);
    } else if (job.args.out_dtype == DType::kFloat16) {
      combine_token<Float16>(job, token);
    } else {
      combine_token<BFloat16>(job, token);
    }
  }
}
