// skinny_gemm's part of offers.cpp: its headers and gemm's have names in common.
#include "offers.h"
#include "skinny_gemm/cuda/choose_config.h"

using namespace rocm_kernels;

void check_skinny_products(const Gpu& gpu) {
  cuda::SkinnyGemmDevice device;
  device.sm_count = gpu.sm_count;
  device.compute_capability = gpu.compute_capability;
  device.shared_bytes_per_block = gpu.block_kilobytes << 10;
  for (int i = 0; i < 3; ++i) device.clusters[i] = gpu.sm_count >> i;
  for_each_product([&](const GemmArgs& args) {
    if (args.m > kSkinnyGemmMaxRows) return;
    for (const bool chunks : {false, true}) {
      const cuda::SkinnyGemmConfig c = cuda::choose_config(args, {true, chunks}, device);
      if (c.design == cuda::Design::kTmaPipeline) {
        const int a_chunks = is_fp8(args.w_dtype) && !is_fp8(args.a_dtype) ? 2 : 1;
        expect_fit(gpu, c, cuda::kStaticBytes + cuda::tma_shared_bytes(c, a_chunks));
      } else if (c.design == cuda::Design::kWarpgroup) {
        expect_fit(gpu, c, cuda::kStaticBytes + cuda::warpgroup_shared_bytes(c, args.m));
      }
    }
  });
}
