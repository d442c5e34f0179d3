// What the CUDA kernels of skinny_gemm share: how bytes become tensor-core fragments, and how a sum
// becomes an output element.
//
// The weights are the 16-row operand of mma.m16n8k16 and the tokens its 8 columns, so that a lane
// (group = lane / 4, quad = lane % 4) feeds weight rows `group` and `group + 8` and token `group`.
// The order of K inside an mma is free as long as both operands agree on it: a lane's 16
// consecutive bytes of a weight row are taken to be the K elements that the lane must supply, and
// one 16-byte load fills its registers for several mma without any shuffle.
//
// FP8 is widened to float16, exactly, and multiplied there: on sm_90 and sm_100 the FP8 form of
// mma.sync is compiled to the same two steps, and where an FP8 unit exists it accumulates in fewer
// bits than float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/core/fp8.h"
#include "../skinny_gemm.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kTileTokens = 8;  // tokens of one mma

// The two element types of a product, and what one 16-byte load of weights amounts to.
template <DType kADType, DType kWDType>
struct Operands {
  static constexpr DType kA = kADType;
  static constexpr DType kW = kWDType;
  static constexpr bool kFp8A = is_fp8(kA);
  static constexpr bool kFp8W = is_fp8(kW);
  static constexpr int kABytes = size_of(kA);
  static constexpr int kWBytes = size_of(kW);
  static constexpr bool kWideA = !kFp8A && kFp8W;
  static constexpr bool kBFloat = kA == DType::kBFloat16;
  static constexpr int kVectorElements = 16 / kWBytes;     // K elements in 16 bytes of w
  static constexpr int kVectorMmas = kVectorElements / 4;  // mma fed by them: a lane gives 4 each
  static constexpr int kAVectors = kWideA ? 2 : 1;         // 16-byte loads of a beside them
  static_assert(kA != DType::kFloat8E4M3FNUZ && kW != DType::kFloat8E4M3FNUZ,
                "the tensor-core kernels read e4m3fn; e4m3fnuz goes to the plain kernel");
  static_assert(is_fp8(kW) || kA == kW, "16-bit weights take activations of the same type");
};

// Four FP8 codes to two pairs of float16, in order.
__device__ __forceinline__ void halves_from_fp8(uint32_t codes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  // The code's fields placed in a float16 leave its exponent 8 too small; 2^8 restores it and makes
  // subnormals normal. 480 is what the code of NaN would mean.
  const auto widen = [](uint32_t spread) {
    const uint32_t placed = (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 1);
    const __half2 value =
        __hmul2(*reinterpret_cast<const __half2*>(&placed), __float2half2_rn(256.0f));
    return *reinterpret_cast<const uint32_t*>(&value) |
           __hgt2_mask(__habs2(value), __float2half2_rn(448.0f));
  };
  low = widen((codes & 0xFFu) << 8 | (codes & 0xFF00u) << 16);
  high = widen((codes & 0xFF0000u) >> 8 | (codes & 0xFF000000u));
#endif
}

__device__ __forceinline__ uint32_t bfloats_from_halves(uint32_t halves) {
  const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  const __nv_bfloat162 narrow = __float22bfloat162_rn(wide);
  return *reinterpret_cast<const uint32_t*>(&narrow);
}

// One lane's share of the K side of kMmas products: two registers of two elements for each.
template <int kMmas>
struct Fragment {
  uint32_t pair[kMmas][2];
};

template <class Types>
__device__ __forceinline__ Fragment<Types::kVectorMmas> widen_w(const uint4& vector) {
  Fragment<Types::kVectorMmas> fragment;
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < Types::kVectorMmas; ++i) {
    if constexpr (Types::kFp8W) {
      halves_from_fp8(words[i], fragment.pair[i][0], fragment.pair[i][1]);
      if constexpr (Types::kBFloat) {
        fragment.pair[i][0] = bfloats_from_halves(fragment.pair[i][0]);
        fragment.pair[i][1] = bfloats_from_halves(fragment.pair[i][1]);
      }
    } else {
      fragment.pair[i][0] = words[2 * i];
      fragment.pair[i][1] = words[2 * i + 1];
    }
  }
  return fragment;
}

template <class Types>
__device__ __forceinline__ Fragment<Types::kVectorMmas> widen_a(
    const uint4 (&vectors)[Types::kAVectors]) {
  if constexpr (Types::kFp8A == Types::kFp8W) {
    return widen_w<Types>(vectors[0]);
  } else {
    Fragment<Types::kVectorMmas> fragment;
#pragma unroll
    for (int v = 0; v < Types::kAVectors; ++v) {
      fragment.pair[2 * v][0] = vectors[v].x;
      fragment.pair[2 * v][1] = vectors[v].y;
      fragment.pair[2 * v + 1][0] = vectors[v].z;
      fragment.pair[2 * v + 1][1] = vectors[v].w;
    }
    return fragment;
  }
}

// sum[0..1]: row `group`, tokens 2 * quad and 2 * quad + 1 of the mma; sum[2..3]: row `group + 8`.
template <class Types>
__device__ __forceinline__ void multiply(float (&sum)[4],
                                         const Fragment<Types::kVectorMmas>& low_rows,
                                         const Fragment<Types::kVectorMmas>& high_rows,
                                         const Fragment<Types::kVectorMmas>& tokens) {
#define ROCM_KERNELS_MMA(TYPE)                                                                  \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                           \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                         \
               : "r"(low_rows.pair[i][0]), "r"(high_rows.pair[i][0]), "r"(low_rows.pair[i][1]), \
                 "r"(high_rows.pair[i][1]), "r"(tokens.pair[i][0]), "r"(tokens.pair[i][1]))
#pragma unroll
  for (int i = 0; i < Types::kVectorMmas; ++i) {
    if constexpr (Types::kBFloat) {
      ROCM_KERNELS_MMA("bf16");
    } else {
      ROCM_KERNELS_MMA("f16");
    }
  }
#undef ROCM_KERNELS_MMA
}

// The factor of a scale block in the K loop; the other kinds are applied once, by `finish`.
__device__ __forceinline__ float block_scale(const ScaleView& scale, int64_t row, int64_t block) {
  if (scale.kind != ScaleView::Kind::kBlock) return 1.0f;
  return __ldg(scale.data + row * scale.row_stride + block * scale.block_stride);
}

__device__ __forceinline__ float outer_scale(const ScaleView& scale, int64_t row) {
  if (scale.kind == ScaleView::Kind::kTensor) return __ldg(scale.data);
  if (scale.kind == ScaleView::Kind::kRow) return __ldg(scale.data + row * scale.row_stride);
  return 1.0f;
}

__device__ __forceinline__ float load_float(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::kFloat8E4M3FN:
      return fp8_to_float<false>(static_cast<const uint8_t*>(data)[index]);
    case DType::kFloat8E4M3FNUZ:
      return fp8_to_float<true>(static_cast<const uint8_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

// Rounds once and stores out[m, n].
__device__ __forceinline__ void store_output(const GemmArgs& args, int64_t m, int64_t n,
                                             float value) {
  const int64_t index = m * args.out_stride + n;
  if (args.out_dtype == DType::kFloat32) {
    static_cast<float*>(args.out)[index] = value;
  } else if (args.out_dtype == DType::kFloat16) {
    static_cast<__half*>(args.out)[index] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(args.out)[index] = __float2bfloat16_rn(value);
  }
}

// The same for out[m, n] and, if `both`, out[m, n + 1] of a 16-bit type.
__device__ __forceinline__ void store_pair(const GemmArgs& args, int64_t m, int64_t n, float low,
                                           float high, bool both) {
  uint16_t* to = static_cast<uint16_t*>(args.out) + m * args.out_stride + n;
  uint32_t bits;
  if (args.out_dtype == DType::kFloat16) {
    const __half2 pair = __floats2half2_rn(low, high);
    bits = *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    bits = *reinterpret_cast<const uint32_t*>(&pair);
  }
  if (both && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = bits;
  } else {
    to[0] = static_cast<uint16_t>(bits);
    if (both) to[1] = static_cast<uint16_t>(bits >> 16);
  }
}

__device__ __forceinline__ void finish(const GemmArgs& args, int64_t m, int64_t n, float sum) {
  float value = sum * outer_scale(args.scale_a, m) * outer_scale(args.scale_w, n);
  if (args.bias != nullptr) value += load_float(args.bias, args.bias_dtype, n);
  store_output(args, m, n, value);
}

// Programmatic dependent launch: a kernel of a stream may start while its predecessor drains. Until
// await_predecessor() returns nothing that a kernel may have written is read and nothing is stored.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
