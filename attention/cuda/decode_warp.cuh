// What a warp of the decode kernel (decode.cuh) computes: its queries as an operand, then for 16
// keys at a time S^T, P^T and O^T.
#pragma once

#include "../../common/cuda/widen.cuh"
#include "decode_shape.cuh"

namespace rocm_kernels {
namespace cuda {

// Q^T as columns: of row first + 8 t + group what the lane multiplies, t from `tile` on.
template <class Shape>
__device__ __forceinline__ void load_queries(const AttentionArgs& args, const RowGroups& groups,
                                             const DecodeRows& rows, int tile, int group, int quad,
                                             uint32_t (&q)[Shape::kHeld][Shape::kSteps][2]) {
  using Q = typename Shape::Q;
#pragma unroll
  for (int t = 0; t < Shape::kHeld; ++t) {
    const int row = min(rows.first + 8 * (tile + t) + group, rows.last);
    const int query = groups.query_of(row);
    const Q* const from =
        static_cast<const Q*>(args.q.data) +
        (args.cu_seqlens_q == nullptr ? rows.b * args.q.batch_stride : 0) +
        (rows.s.q_begin + query) * args.q.row_stride +
        (rows.head * groups.heads + row - query * groups.heads) * args.q.head_stride;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      // FP8: four codes that follow each other are a lane's share of both halves of K.
      const int at0 = step * 16 + (Shape::kFp8 ? 4 * quad : 2 * quad);
      const int at1 = Shape::kFp8 ? at0 + 2 : at0 + 8;
      q[t][step][0] = at0 < args.head_dim ? *reinterpret_cast<const uint32_t*>(from + at0) : 0;
      q[t][step][1] = at1 < args.head_dim ? *reinterpret_cast<const uint32_t*>(from + at1) : 0;
    }
  }
}

// Of FP8 keys, a row of bfloat16 queries as float16: divided by a power of two, its largest element
// then lies in [2^13, 2^14). Returns that power.
template <class Shape>
__device__ __forceinline__ float queries_to_halves(uint32_t (&q)[Shape::kSteps][2]) {
  __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most = __hmax2(most, __habs2(*reinterpret_cast<const __nv_bfloat162*>(&q[step][half])));
    }
  }
  float largest = fmaxf(__low2float(most), __high2float(most));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const uint32_t exponent = exponent_for_halves(largest);
  const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair =
          __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&q[step][half]));
      q[step][half] = pack<__half>(pair.x * inverse, pair.y * inverse);
    }
  }
  return __uint_as_float(exponent << 23);
}

// Where a block's warps share the operands: [tile][pair of steps][lane].
template <class Shape>
__device__ __forceinline__ uint32_t shared_queries(int t, int pair) {
  return static_cast<uint32_t>((t * (Shape::kSteps / 2) + pair) * 32 * 16);
}

// Q K of 16 keys. `k_at`: the lane's address for ldmatrix; `q_at`: of its shared operands.
template <class Shape>
__device__ __forceinline__ void multiply_keys(uint32_t k_at,
                                              const uint32_t (&q)[Shape::kHeld][Shape::kSteps][2],
                                              uint32_t q_at, float (&products)[Shape::kTiles][4]) {
  using Mma = typename Shape::Mma;
  // An instruction waits for the one that it adds to: of few tiles, two sums take turns.
  constexpr bool kTwoSums = Shape::kTiles <= 2;
  float others[Shape::kTiles][4] = {};
#pragma unroll
  for (int load = 0; load < Shape::kLoads; ++load) {
    uint32_t words[4];
    load_matrices(words, Shape::Lines::pairs_further(k_at, load));
    if constexpr (Shape::kFp8) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        halves_from_fp8(words[2 * i], a[i][0], a[i][2]);
        halves_from_fp8(words[2 * i + 1], a[i][1], a[i][3]);
      }
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) {
        float (&second)[4] = kTwoSums ? others[t] : products[t];
        if constexpr (Shape::kSharesQueries) {
          const uint4 b = load_shared(q_at + shared_queries<Shape>(t, load));
          multiply_16x8<Mma>(products[t], a[0], b.x, b.y);
          multiply_16x8<Mma>(second, a[1], b.z, b.w);
        } else {
          multiply_16x8<Mma>(products[t], a[0], q[t][2 * load][0], q[t][2 * load][1]);
          multiply_16x8<Mma>(second, a[1], q[t][2 * load + 1][0], q[t][2 * load + 1][1]);
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) {
        multiply_16x8<Mma>(kTwoSums && load % 2 == 1 ? others[t] : products[t], words,
                           q[t][load][0], q[t][load][1]);
      }
    }
  }
  if constexpr (kTwoSums) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[t][i] += others[t][i];
    }
  }
}

// P^T = exp2(S^T - maximum) of the 16 keys from first_key on, to `p`; `products` are Q K. Sums are
// moved to a new maximum only where one has grown by 2^8 since, so that most tiles ask each other
// nothing but that.
template <class Shape>
__device__ __forceinline__ void softmax(const DecodeColumns<Shape>& columns, int first_key,
                                        int group, float (&products)[Shape::kTiles][4],
                                        DecodeSums<Shape>& sums, uint32_t (&p)[Shape::kTiles][2]) {
  using Mma = typename Shape::Mma;
  if (columns.capped) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = columns.scale[t][i % 2], capped = tanhf(products[t][i] * scale);
        products[t][i] = fabsf(scale) < 1e-30f ? 0 : capped * __fdividef(columns.cap, scale);
      }
    }
  }
  if (first_key < columns.all_begin || first_key + 16 > columns.all_end) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const KeyRange sees = columns.seen(t, i % 2);
        const int at = first_key + group + i / 2 * 8;
        const float least = copysignf(kInfinity, -columns.scale[t][i % 2]);
        products[t][i] = at < sees.begin || at >= sees.end ? least : products[t][i];
      }
    }
  }
  float scores[Shape::kTiles][4];  // beyond the maximum
  const auto find_scores = [&] {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[t][i] = fmaf(products[t][i], columns.scale[t][i % 2], -sums.maximum[t][i % 2]);
      }
    }
  };
  find_scores();
  bool grows = false;
#pragma unroll
  for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) grows = grows || scores[t][i] > 8;
  }
  if (__any_sync(~0u, grows)) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      float by[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float scale = columns.scale[t][c];
        float most = fmaxf(products[t][c] * scale, products[t][c + 2] * scale);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
        most = fmaxf(most, sums.maximum[t][c]);
        by[c] = fast_exp2(sums.maximum[t][c] - most);
        sums.maximum[t][c] = most;
        sums.sum[t][c] *= by[c];
      }
#pragma unroll
      for (int i = 0; i < Shape::kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums.out[t][i][j] *= by[j % 2];
      }
    }
    find_scores();
  }
#pragma unroll
  for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[t][i] = fast_exp2(scores[t][i]);
      sums.sum[t][i % 2] += scores[t][i];
    }
    p[t][0] = transpose_matrix(pack<Mma>(scores[t][0], scores[t][1]));
    p[t][1] = transpose_matrix(pack<Mma>(scores[t][2], scores[t][3]));
  }
}

// O^T of 16 keys. `v_at`: the lane's address for ldmatrix.
template <class Shape>
__device__ __forceinline__ void multiply_values(uint32_t v_at,
                                                const uint32_t (&p)[Shape::kTiles][2],
                                                float (&out)[Shape::kTiles][Shape::kSteps][4]) {
  using Mma = typename Shape::Mma;
#pragma unroll
  for (int load = 0; load < Shape::kLoads; ++load) {
    uint32_t words[4];
    load_transposed(words, Shape::Lines::pairs_further(v_at, load));
    if constexpr (Shape::kFp8) {
      // Words hold elements 2 group and 2 group + 1 of two keys: rows `group` and group + 8.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        halves_from_fp8(__byte_perm(words[2 * i], 0, 0x3120), a[0], a[1]);
        halves_from_fp8(__byte_perm(words[2 * i + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
        for (int t = 0; t < Shape::kTiles; ++t) {
          multiply_16x8<Mma>(out[t][2 * load + i], a, p[t][0], p[t][1]);
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) {
        multiply_16x8<Mma>(out[t][load], words, p[t][0], p[t][1]);
      }
    }
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
