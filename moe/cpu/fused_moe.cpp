// fused_moe for the CPU: see fused_moe.h.
//   1. Slots are sorted by expert: a counting sort on the caller's thread.
//   2. A token's row goes to the places of its slots, quantised once where the products are FP8.
//   3. The first product (product.cpp) leaves gate and up in float32.
//   4. A row's bias, activation and rounding happen in place, in the cache.
//   5. The second product, in float32 too.
//   6. A token gathers its slots' rows in their order, with their weights, and rounds once.
// Long prompts go through these steps in chunks of tokens, whose workspace is reused: a chunk has
// rows enough for each expert to fill a slice of a product.
// A row meets its own expert alone and sums run along K in one order, so a token's bits depend
// neither on other tokens nor on the number of threads.
#include "../fused_moe.h"

#include "../../blocks/product/cpu/amx.h"
#include "../../blocks/product/cpu/job.h"
#include "../../blocks/rows/cpu/scale.h"
#include "product.h"

namespace rocm_kernels {
namespace cpu {
namespace {

// The rows of a product: 16-bit, or FP8 with scales.
struct Operand {
  void* rows = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t columns = 0;
  float* scales = nullptr;  // [rows, groups]; nullptr: not quantised
  int64_t group = 0;        // columns that share a scale
  int64_t groups = 1;       // of a row
  ScaleRounding rounding{};

  void* row(int64_t i) const { return static_cast<char*>(rows) + i * columns * size_of(dtype); }
  ScaleView scale() const {
    ScaleView view;
    if (scales == nullptr) return view;
    view.data = scales;
    view.kind = group == kScaleBlock ? ScaleView::Kind::kBlock : ScaleView::Kind::kRow;
    view.row_stride = groups;
    view.block_stride = 1;
    return view;
  }
};

// Tokens of a chunk. A slice of a product does not grow beyond so many rows, so a longer chunk
// would take more memory and save no time.
int64_t chunk_tokens(const FusedMoeArgs& args) {
  constexpr int64_t kRows = 8192, kRowsAnExpert = 64;
  const int64_t rows = args.experts * kRowsAnExpert > kRows ? args.experts * kRowsAnExpert : kRows;
  return ceil_div(rows, args.k);
}

// The layer on tokens [begin, end).
FusedMoeArgs tokens_of(FusedMoeArgs args, int64_t begin, int64_t end) {
  args.tokens = end - begin;
  args.x = static_cast<const char*>(args.x) + begin * args.x_stride * size_of(args.x_dtype);
  args.out = static_cast<char*>(args.out) + begin * args.out_stride * size_of(args.out_dtype);
  args.topk_weights += begin * args.k;
  args.topk_ids += begin * args.k;
  return args;
}

// What the steps share; all of it lies in the workspace.
struct MoeJob {
  FusedMoeArgs args;
  int64_t* ends;    // [E]: where the rows of each expert end
  int64_t* places;  // [T, k]: the row of each slot, -1 where it is skipped
  int64_t* slots;   // [rows]: token * k + slot of each row
  Operand x;        // [rows, H]
  Operand h;        // [rows, I]
  float* both;      // [rows, 2I]
  float* y;         // [rows, H], in the place of x's rows, which it follows
  void* product;    // both products' workspace

  int64_t expert_of(int64_t row) const { return args.topk_ids[slots[row]]; }
};

Operand operand_of(const FusedMoeArgs& args, const ExpertWeights& w, int64_t columns) {
  Operand operand;
  operand.columns = columns;
  operand.dtype = args.quantize_input ? w.dtype : args.x_dtype;
  if (!args.quantize_input) return operand;
  const bool blocks = w.scale.is_blocked();
  operand.group = blocks ? kScaleBlock : columns;
  operand.groups = blocks ? ceil_div(columns, kScaleBlock) : 1;
  operand.rounding = ScaleRounding::of(args.ue8m0);
  return operand;
}

ExpertProduct product_of(const MoeJob& job, const Operand& a, const ExpertWeights& w, int64_t n,
                         float* out) {
  ExpertProduct product;
  product.rows = job.args.tokens * job.args.k;
  product.n = n;
  product.k = a.columns;
  product.experts = job.args.experts;
  product.a = a.rows;
  product.a_stride = a.columns;
  product.a_dtype = a.dtype;
  product.scale_a = a.scale();
  product.w = &w;
  product.out = out;
  product.out_stride = n;
  product.ends = job.ends;
  product.workspace = job.product;
  return product;
}

// Lays the workspace out from `base` on; returns its size.
int64_t lay_out(MoeJob& job, char* base) {
  const FusedMoeArgs& args = job.args;
  const int64_t rows = args.tokens * args.k;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    void* const part = base == nullptr ? nullptr : base + used;
    used += ceil_div(bytes, 64) * 64;
    return part;
  };
  job.ends = static_cast<int64_t*>(take(args.experts * sizeof(int64_t)));
  job.places = static_cast<int64_t*>(take(rows * sizeof(int64_t)));
  job.slots = static_cast<int64_t*>(take(rows * sizeof(int64_t)));
  job.x = operand_of(args, args.gate_up, args.hidden);
  job.h = operand_of(args, args.down, args.intermediate);
  job.y = static_cast<float*>(take(rows * args.hidden * sizeof(float)));
  job.x.rows = job.y;
  job.both = static_cast<float*>(take(rows * 2 * args.intermediate * sizeof(float)));
  job.h.rows = take(rows * args.intermediate * size_of(job.h.dtype));
  if (args.quantize_input) {
    job.x.scales = static_cast<float*>(take(rows * job.x.groups * sizeof(float)));
    job.h.scales = static_cast<float*>(take(rows * job.h.groups * sizeof(float)));
  }
  const int64_t first =
      product_workspace_bytes(product_of(job, job.x, args.gate_up, 2 * args.intermediate, nullptr));
  const int64_t second =
      product_workspace_bytes(product_of(job, job.h, args.down, args.hidden, nullptr));
  job.product = take(first > second ? first : second);
  return used;
}

// Sorts the slots by expert, each expert's in the order of tokens. Returns the rows in all.
int64_t sort_slots(const MoeJob& job) {
  const FusedMoeArgs& args = job.args;
  const int64_t count = args.tokens * args.k;
  const auto is_served = [&](int32_t id) { return 0 <= id && id < args.experts; };
  int64_t next[kMaxExperts] = {};
  for (int64_t i = 0; i < count; ++i) {
    if (is_served(args.topk_ids[i])) ++next[args.topk_ids[i]];
  }
  int64_t rows = 0;
  for (int32_t expert = 0; expert < args.experts; ++expert) {
    const int64_t begin = rows;
    rows += next[expert];
    next[expert] = begin;
    job.ends[expert] = rows;
  }
  for (int64_t i = 0; i < count; ++i) {
    job.places[i] = is_served(args.topk_ids[i]) ? next[args.topk_ids[i]]++ : -1;
    if (job.places[i] >= 0) job.slots[job.places[i]] = i;
  }
  return rows;
}

}  // namespace
}  // namespace cpu
}  // namespace rocm_kernels

#define ROCM_KERNELS_CPU_BODY "../../moe/cpu/fused_moe_body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {
namespace cpu {
namespace {

void run_chunk(const FusedMoeArgs& args, const Context& context) {
  MoeJob job{};
  job.args = args;
  lay_out(job, static_cast<char*>(args.workspace));
  const int64_t rows = sort_slots(job);

  const auto place = ROCM_KERNELS_CPU_SELECT(place_tokens);
  const auto activate = ROCM_KERNELS_CPU_SELECT(activate_rows);
  const auto combine = ROCM_KERNELS_CPU_SELECT(combine_tokens);
  // Columns worth a thread of their own, about 6 us of work: waking it costs 3.
  constexpr int64_t kColumnsPerThread = 16384;
  const auto grain = [](int64_t columns) { return ceil_div(kColumnsPerThread, columns + 1); };
  parallel_for(context, args.tokens, grain(args.hidden),
               [&](int64_t begin, int64_t end) { place(job, begin, end); });
  multiply_experts(product_of(job, job.x, job.args.gate_up, 2 * args.intermediate, job.both),
                   context);
  parallel_for(context, rows, grain(2 * args.intermediate),
               [&](int64_t begin, int64_t end) { activate(job, begin, end); });
  multiply_experts(product_of(job, job.h, job.args.down, args.hidden, job.y), context);
  parallel_for(context, args.tokens, grain(args.k * args.hidden),
               [&](int64_t begin, int64_t end) { combine(job, begin, end); });
}

}  // namespace
// Both products have operands of one kind.
bool by_tiles(const FusedMoeArgs& args) {
  return amx_serves(args.quantize_input ? args.gate_up.dtype : args.x_dtype, args.gate_up.dtype);
}

}  // namespace cpu

int64_t fused_moe_workspace_bytes(const FusedMoeArgs& args, const Context&) {
  const int64_t chunk = cpu::chunk_tokens(args);
  cpu::MoeJob job{};
  job.args = args;
  job.args.tokens = args.tokens < chunk ? args.tokens : chunk;
  return cpu::lay_out(job, nullptr);
}

Status visit_fused_moe_configs(const FusedMoeArgs& args, const Context&,
                               void (*visit)(const char* config, void* state), void* state) {
  if (const Status error = cpu::check_config(args.config, cpu::by_tiles(args))) return error;
  visit(cpu::config_name(cpu::by_tiles(args)), state);
  return nullptr;
}

Status launch_fused_moe(const FusedMoeArgs& args, const Context& context) {
  if (const Status error = cpu::check_config(args.config, cpu::by_tiles(args))) return error;
  const int64_t chunk = cpu::chunk_tokens(args);
  for (int64_t begin = 0; begin < args.tokens; begin += chunk) {
    const int64_t end = begin + chunk < args.tokens ? begin + chunk : args.tokens;
    cpu::run_chunk(cpu::tokens_of(args, begin, end), context);
  }
  return nullptr;
}

}  // namespace rocm_kernels
