// Stand-ins for what RadeonFlow's FP8 product includes (rocWMMA's fragments, HIP's FP8 types), so
// that its kernels compile by themselves. They come from a checkout (calibrate.py), nothing of
// which is kept here. Its main loop wants 16 x 16 x 32 fragments: 8 neighbours along K a lane.
#include "old_libraries.h"

#define HIP_HEADERS__
typedef __half half;
struct __hip_fp8_e4m3_fnuz {
  unsigned char bits;
};

namespace rocwmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };
using bfloat16_t = __hip_bfloat16;

template <class T>
struct Four {
  T values[4];
};
template <class T>
__device__ Four<T> make_vector(T a, T b, T c, T d) {
  return {{a, b, c, d}};
}

template <class Use, int M, int N, int K, class T, class Layout = row_major>
struct fragment {
  static constexpr int num_elements = 8;  // of A and B, along K
  long packed;
};
template <int M, int N, int K, class T>
struct fragment<accumulator, M, N, K, T, row_major> {
  static_assert(M == 16 && N == 16 && K == 32, "the layout below is that of 16 x 16 x 32");
  static constexpr int num_elements = 4;
  T x __attribute__((ext_vector_type(4)));
};

template <int M, int N, int K, class T>
__device__ void fill_fragment(fragment<accumulator, M, N, K, T>& f, T value) {
  f.x = value;
}

// A is read by rows and B by columns: in both K is contiguous, `stride` elements apart.
template <class Use, int M, int N, int K, class T, class Layout>
__device__ void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const T* from,
                                 unsigned stride) {
  unsigned lane = threadIdx.x % 64;
  f.packed = *reinterpret_cast<const long*>(from + lane % 16 * stride + lane / 16 * 8);
}

template <class A, class B, class C>
__device__ void mma_sync(C& d, const A& a, const B& b, const C& c) {
  d.x = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a.packed, b.packed, c.x, 0, 0, 0);
}

template <class T, class Fragment>
__device__ void store_matrix_sync(T* to, const Fragment& f, unsigned stride, layout_t) {
  unsigned lane = threadIdx.x % 64;
  for (int k = 0; k < 4; ++k) to[(lane / 16 * 4 + k) * stride + lane % 16] = f.x[k];
}
}  // namespace rocwmma
namespace wmma = rocwmma;
#define LIB_CALL(call) call
#define HOST_TYPE(x) hip##x

#define PARAMETERIZE_LIBRARY
#include "src/gemm/gemm_kernel.cpp"
#include "src/gemm/transpose_kernel.cpp"

// The launcher's tile for the MI300X. CASE(m, n, k, split): a product whose time is published.
using fp8 = __hip_fp8_e4m3_fnuz;
#define PRODUCT(out, m, n, k, split)                                                            \
  template __global__ void gemm_kernel::gemm_kernel<fp8, float, out, m, n, k / split, 256, 128, \
                                                    128, 128, 512, 4, 2, k, k, 16>(             \
      const fp8(*)[k], const fp8(*)[k], out(*)[n], const float (*)[m],                          \
      const float (*)[ceil_div(n, 128)])
#define CASE(m, n, k) PRODUCT(__hip_bfloat16, m, n, k, 1)
#define SPLIT_CASE(m, n, k, split)                                                             \
  PRODUCT(float, m, n, k, split);                                                              \
  template __global__ void gemm_kernel::reduce_kernel<m, n, split, 256>(const float (*)[m][n], \
                                                                        __hip_bfloat16(*)[n])
#define TRANSPOSE(rows, columns, tile, block, width) \
  template __global__ void                           \
  transpose_kernel::transpose_kernel<fp8, rows, columns, tile, block, width>(fp8*, const fp8*)

SPLIT_CASE(1024, 1536, 7168, 4);
SPLIT_CASE(1024, 3072, 1536, 2);
SPLIT_CASE(1024, 576, 7168, 8);
CASE(1024, 7168, 256);
CASE(1024, 7168, 2048);
SPLIT_CASE(1024, 4608, 7168, 2);
TRANSPOSE(256, 1024, 64, 256, 4);
TRANSPOSE(256, 7168, 64, 256, 8);
TRANSPOSE(1536, 1024, 64, 1024, 4);
TRANSPOSE(1536, 3072, 64, 512, 4);
TRANSPOSE(2048, 1024, 64, 1024, 4);
TRANSPOSE(2048, 7168, 128, 512, 8);
TRANSPOSE(7168, 576, 64, 512, 4);
TRANSPOSE(7168, 1024, 64, 256, 4);
TRANSPOSE(7168, 1536, 128, 1024, 8);
TRANSPOSE(7168, 4608, 128, 512, 8);
