// The arguments that matrix products take: gemm, and in part grouped_gemm.
#pragma once

#include <optional>
#include <string>

#include "../../gemm/gemm.h"
#include "checks.h"
#include "settled.h"
#include "tuning.h"

namespace rocm_kernels {

// Tells the granularity of a scale by its shape. `rows` is M or N; `row_block` is how many of these
// rows a block spans: 1 for a, 128 for w.
ScaleView parse_product_scale(const std::optional<Tensor>& scale, const char* name, int64_t rows,
                              int64_t row_block, int64_t k, const Tensor& a);

// Checks out [M, N], a [M, K], w [N, K] and what goes with them, and describes them.
GemmArgs describe_product(const Tensor& out, const Tensor& a, const Tensor& w,
                          const std::optional<Tensor>& scale_a,
                          const std::optional<Tensor>& scale_w, const std::optional<Tensor>& bias);

// The same of products with neighbours in them (JoinedGemmArgs): of an a to be quantised; and of an
// out [M, N / 2] of float32, act(gate) * up of what was rounded to `rounded`.
JoinedGemmArgs describe_quantized(const Tensor& out, const Tensor& a, const Tensor& w,
                                  const std::optional<Tensor>& scale_w,
                                  const std::optional<Tensor>& bias);
JoinedGemmArgs describe_gated(const Tensor& out, const Tensor& a, const Tensor& w,
                              const std::optional<Tensor>& scale_a,
                              const std::optional<Tensor>& scale_w,
                              const std::optional<Tensor>& bias, DType rounded);

// The entry of tuned configs for such a product.
TuningKey product_key(int64_t device, const GemmArgs& args);

// The config to take of those that are in force, nullptr where the backend chooses. One that serves
// its class may not serve these addresses, strides or output: gemm_configs tells then that it is
// not taken.
const char* usable_config(const TunedConfig& tuned, GemmArgs args, const Context& context);

// The product, with the scratch that it needs.
void launch_product(GemmArgs args, const Tensor& a, const Context& context);

// out += the product, rounded to out's 16-bit type first: with the bits of the product and a sum
// apart. Where the product's kernel does that; else nothing is done, and false returned.
bool add_gemm(Tensor& out, const Tensor& a, const Tensor& w, const std::optional<Tensor>& scale_a,
              const std::optional<Tensor>& scale_w, const std::optional<Tensor>& bias);

// What an entry of a tuning file says of a product; contiguous, its output in bfloat16.
GemmArgs describe_tuned_product(int64_t rows, int64_t n, int64_t k, const std::string& a_dtype,
                                const std::string& w_dtype, bool block_scales);

}  // namespace rocm_kernels
