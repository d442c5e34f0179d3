// topk, fused_moe and grouped_gemm for NVIDIA GPUs. Their products: products.cu.
#include "../gpu/fused_moe.h"
#include "../gpu/grouped_gemm.h"
#include "../gpu/topk.h"
