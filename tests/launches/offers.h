// What the parts of offers.cpp share: the GPUs, and the count of what does not fit.
#pragma once

#include <cstdio>

#include "blocks/product/config_fields.h"
#include "gemm/gemm.h"

struct Gpu {
  int compute_capability, sm_count, sm_kilobytes, block_kilobytes;
};
constexpr int64_t kReserved = 1 << 10;  // by the runtime, of each block

inline int offers = 0, misfits = 0;

// `blocks`: that an SM is to have at once.
template <typename Config>
void expect_fit(const Gpu& gpu, const Config& config, int64_t bytes, int blocks = 1) {
  ++offers;
  if (bytes <= int64_t{gpu.block_kilobytes} << 10 &&
      (bytes + kReserved) * blocks <= int64_t{gpu.sm_kilobytes} << 10) {
    return;
  }
  ++misfits;
  char text[rocm_kernels::kConfigTextBytes] = "?";
  rocm_kernels::write_config(config, text);
  std::printf("sm_%d: %lld bytes: %s\n", gpu.compute_capability, static_cast<long long>(bytes),
              text);
}

// Calls visit(args) for products of many kinds and sizes.
template <typename Visit>
void for_each_product(const Visit& visit) {
  using rocm_kernels::DType;
  constexpr DType kFp8 = DType::kFloat8E4M3FN, kBf16 = DType::kBFloat16, kHalf = DType::kFloat16;
  struct Types {
    DType a, w;
  };
  for (const Types& types : {Types{kBf16, kBf16}, Types{kHalf, kHalf}, Types{kBf16, kFp8},
                             Types{kHalf, kFp8}, Types{kFp8, kFp8}}) {
    for (const bool blocks : {false, true}) {
      if (blocks && types.w != kFp8) continue;
      for (const int64_t m : {1, 8, 16, 17, 33, 64, 128, 1000, 8192}) {
        for (const int64_t n : {16, 128, 2304, 4096, 13312, 28672}) {
          for (const int64_t k : {64, 128, 2048, 4096, 16384}) {
            rocm_kernels::GemmArgs args;
            args.m = m, args.n = n, args.k = k;
            args.a_stride = args.w_stride = k, args.out_stride = n;
            args.a_dtype = types.a, args.w_dtype = types.w;
            if (blocks) args.scale_w.kind = rocm_kernels::ScaleView::Kind::kBlock;
            visit(args);
          }
        }
      }
    }
  }
}

void check_skinny_products(const Gpu& gpu);  // skinny_offers.cpp
