// grouped_gemm for the CPU: see grouped_gemm.h. product.cpp tells the mapping.
#include "../grouped_gemm.h"

#include "../../blocks/product/cpu/amx.h"
#include "../../blocks/product/cpu/job.h"
#include "product.h"

namespace rocm_kernels {
namespace {

int64_t ends_bytes(const GroupedGemmArgs& args) { return ceil_div(args.experts * 8, 64) * 64; }

cpu::ExpertProduct product_of(const GroupedGemmArgs& args) {
  cpu::ExpertProduct product;
  product.rows = args.rows;
  product.n = args.n;
  product.k = args.k;
  product.experts = args.experts;
  product.a = args.a;
  product.a_stride = args.a_stride;
  product.a_dtype = args.a_dtype;
  product.scale_a = args.scale_a;
  product.w = &args.w;
  product.out = args.out;
  product.out_stride = args.out_stride;
  product.out_dtype = args.out_dtype;
  return product;
}

}  // namespace

int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs& args, const Context&) {
  return ends_bytes(args) + cpu::product_workspace_bytes(product_of(args));
}

Status visit_grouped_gemm_configs(const GroupedGemmArgs& args, const Context&,
                                  void (*visit)(const char* config, void* state), void* state) {
  const bool by_tiles = cpu::amx_serves(args.a_dtype, args.w.dtype);
  if (const Status error = cpu::check_config(args.config, by_tiles)) return error;
  visit(cpu::config_name(by_tiles), state);
  return nullptr;
}

Status launch_grouped_gemm(const GroupedGemmArgs& args, const Context& context) {
  const bool by_tiles = cpu::amx_serves(args.a_dtype, args.w.dtype);
  if (const Status error = cpu::check_config(args.config, by_tiles)) return error;
  int64_t* const ends = static_cast<int64_t*>(args.workspace);
  int64_t last = 0;
  for (int32_t expert = 0; expert < args.experts; ++expert) {
    const int64_t end = args.offsets[expert] < args.rows ? args.offsets[expert] : args.rows;
    last = end > last ? end : last;
    ends[expert] = last;
  }
  cpu::ExpertProduct product = product_of(args);
  product.ends = ends;
  product.workspace = static_cast<char*>(args.workspace) + ends_bytes(args);
  cpu::multiply_experts(product, context);
  return nullptr;
}

}  // namespace rocm_kernels
