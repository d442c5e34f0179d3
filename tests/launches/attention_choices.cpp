// Prints what AMD's attention takes for some calls, a line "call: config", and "misfits N": how
// many of the configs that are offered would be refused.
#include <cstdio>

#include "../../attention/cdna/choose.h"

using namespace rocm_kernels;
using namespace rocm_kernels::cdna;

namespace {

int misfits = 0;

AttentionArgs call(int64_t batch, int64_t rows, int64_t keys, int64_t size, DType kv_dtype) {
  AttentionArgs args;
  args.batch = batch;
  args.heads = 32;
  args.kv_heads = 8;
  args.head_dim = args.head_dim_v = size;
  args.max_seqlen_q = rows;
  args.max_seqlen_k = keys;
  args.total_q = batch * rows;
  args.kv_dtype = kv_dtype;
  return args;
}

void tell(const char* name, const AttentionArgs& args, const Target& target) {
  const AttentionConfig chosen = choose_config(args, target);
  char text[kConfigTextBytes];
  AttentionConfig read;
  if (!write_config(chosen, text) || read_config(text, read) != nullptr ||
      !equal_configs(chosen, read)) {
    ++misfits;
  }
  for_each_config(args, target, [&](const AttentionConfig& config) {
    if (check_config(args, config, target) != nullptr) ++misfits;
  });
  std::printf("%s: %s\n", name, text);
}

}  // namespace

int main() {
  constexpr DType kHalf = DType::kBFloat16, kFnuz = DType::kFloat8E4M3FNUZ;
  const Target gfx942;
  tell("step", call(1, 1, 8192, 128, kHalf), gfx942);
  tell("batch", call(64, 1, 2048, 128, kHalf), gfx942);
  tell("fp8 step", call(8, 1, 8192, 128, kFnuz), gfx942);
  tell("eight queries", call(8, 8, 4096, 128, kHalf), gfx942);
  tell("heads of 512", call(1, 1000, 1000, 512, kHalf), gfx942);
  tell("prompt", call(1, 16384, 16384, 128, kHalf), gfx942);
  tell("short prompts", call(1, 2048, 2048, 128, kHalf), gfx942);
  tell("odd heads", call(1, 100, 100, 33, kHalf), gfx942);
  tell("foreign fp8", call(1, 1, 100, 128, DType::kFloat8E4M3FN), gfx942);
  tell("native fp8", call(1, 1, 8192, 128, DType::kFloat8E4M3FN), mi355x());
  AttentionArgs wide = call(1, 1, 100, 128, DType::kFloat32);
  wide.q_dtype = DType::kFloat32;
  tell("float32", wide, gfx942);
  Target without;
  without.matrix_instructions = false;
  tell("no matrix instructions", call(1, 1, 100, 128, kHalf), without);
  AttentionArgs pages = call(1, 1, 1 << 23, 128, kHalf);
  const int32_t table = 0;
  pages.block_table = &table;
  pages.page_size = 1568;
  tell("pages beyond the magic", pages, gfx942);
  std::printf("misfits %d\n", misfits);
}
