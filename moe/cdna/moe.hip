// topk, fused_moe and grouped_gemm for AMD GPUs. Their products: products.hip.
#include "../gpu/fused_moe.h"
#include "../gpu/grouped_gemm.h"
#include "../gpu/topk.h"
