// For benchmarks/moe_configs.py: the config of a layer of experts that NVIDIA's choice takes on an
// H200 or an H100, by the time model alone.
//
//   moe_choice [h100] < layers
//
// A layer is a line "tokens hidden intermediate experts k kind"; kind: fp8 (scales of channels),
// block (128 x 128), the same with 16-bit inputs (fp8_wide, block_wide), bf16 or mxfp4. Its config
// answers it, a line.
#include <cstdio>
#include <cstring>

#include "../moe/cuda/choose.h"

using namespace rocm_kernels;

int main(int count, char** arguments) {
  cuda::moe::MoeDevice device;
  if (count == 2 && std::strcmp(arguments[1], "h100") == 0) device.memory = cuda::h100_memory();
  int tokens, hidden, intermediate, experts, k;
  char kind[16];
  while (std::scanf("%d %d %d %d %d %15s", &tokens, &hidden, &intermediate, &experts, &k, kind) ==
         6) {
    const bool blocks = std::strncmp(kind, "block", 5) == 0;
    const bool fp8 = blocks || std::strncmp(kind, "fp8", 3) == 0;
    const bool wide = !fp8 || std::strstr(kind, "_wide") != nullptr;
    MoeShape s = {};
    s.rows = tokens * k, s.tokens = tokens, s.experts = experts;
    s.n = 2 * intermediate, s.k = hidden;
    s.fused = s.aligned = s.x_aligned = s.compact = 1;
    s.w_type = static_cast<int32_t>(fp8                              ? DType::kFloat8E4M3FN
                                    : std::strcmp(kind, "bf16") == 0 ? DType::kBFloat16
                                                                     : DType::kFloat4E2M1x2);
    s.a_type = wide ? static_cast<int32_t>(DType::kBFloat16) : s.w_type;
    s.out_type = static_cast<int32_t>(DType::kBFloat16);
    s.blocks = blocks ? 3 : 0;
    char text[kConfigTextBytes];
    if (!write_config(cuda::moe::choose_config(s, device), text)) return 1;
    std::puts(text);
  }
}
