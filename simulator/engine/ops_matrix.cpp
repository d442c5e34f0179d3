// Dense MFMA and sparse SMFMAC. Matrix instructions ignore EXEC.
//
// Lane layouts (64 lanes, M x N x K, B blocks, P = M * K * B / 64 elements of A a lane):
//   A[b][i][k]: lane = i + M * (b + B * (k / P)), element k % P;  B the same with j for i.
//   D[b][i][j]: four rows share a register group g = i / 4 + b * M / 4, which lies at
//               lane = N * (g % (64 / N)) + j, register 4 * (g / (64 / N)) + i % 4.
// Products and sums of the 8- and 16-bit types are formed in f64 and rounded once to f32. The
// hardware's own order of summation is not public; f32 and f64 types use a chain of FMAs over k.
#include <algorithm>

#include "float8.h"

namespace sim {
namespace {

enum class El { F16, Bf16, Fp8, Bf8, I8, F32, Xf32, F64, F8f6f4 };

// The matrix unit drops the 13 bits that it does not take; a NaN stays one.
float xf32(u32 x) {
  bool nan = (x & 0x7fffffffu) > 0x7f800000u;
  return bits<float>((x & ~0x1fffu) | (nan ? 0x400000u : 0));
}

// Element `n` of every lane: out[lane]. Fnuz: the dialect of 8-bit floats.
template <El E, bool Fnuz, class T>
void decode(const Wave& w, int row, int n, T* out) {
  constexpr int perWord = E == El::F64 || E == El::F32 || E == El::Xf32 ? 1
                          : E == El::F16 || E == El::Bf16               ? 2
                                                                        : 4;
  if constexpr (E == El::F64) {
    const u32 *lo = w.row(row + 2 * n), *hi = w.row(row + 2 * n + 1);
    for (int l = 0; l < kLanes; ++l) out[l] = bits<double>(lo[l] | static_cast<u64>(hi[l]) << 32);
    return;
  }
  const u32* words = w.row(row + n / perWord);
  int shift = n % perWord * (32 / perWord);
  if constexpr (E == El::F16) {
    Row shifted;
    float values[kLanes];
    for (int l = 0; l < kLanes; ++l) shifted.x[l] = words[l] >> shift;
    fromHalves(shifted.x, values);
    std::copy_n(values, kLanes, out);
    return;
  }
  for (int l = 0; l < kLanes; ++l) {
    u32 x = words[l] >> shift;
    if constexpr (E == El::F32) out[l] = bits<float>(x);
    if constexpr (E == El::Xf32) out[l] = xf32(x);
    if constexpr (E == El::Bf16) out[l] = fromBf16(x & 0xffff);
    if constexpr (E == El::I8) out[l] = static_cast<i8>(x);
    if constexpr (E == El::Fp8) out[l] = decode8<Fnuz ? kE4M3Fnuz : kE4M3>(x & 255);
    if constexpr (E == El::Bf8) out[l] = decode8<Fnuz ? kE5M2Fnuz : kE5M2>(x & 255);
  }
}

// BLGP permutes the lanes that B is read from.
int blgpLane(int lane, int blgp) {
  switch (blgp) {
    case 1:
      return lane & 31;
    case 2:
      return 32 + (lane & 31);
    case 3:
      return (lane + 16) & 63;
    case 4:
    case 5:
    case 6:
    case 7:
      return 16 * (blgp - 4) + (lane & 15);
    default:
      return lane;
  }
}

// A source as [element of a lane][lane]: what matrix element that is follows from the layout.
template <El E, class T, int Per>
void gather(const Wave& w, int row, int blgp, T (*out)[kLanes]) {
  constexpr bool kFloat8 = E == El::Fp8 || E == El::Bf8;
  bool fnuz = kFloat8 && w.object->gpu->fnuz;
  for (int n = 0; n < Per; ++n) {
    fnuz ? decode<E, kFloat8>(w, row, n, out[n]) : decode<E, false>(w, row, n, out[n]);
    if (blgp) {
      T moved[kLanes];
      for (int l = 0; l < kLanes; ++l) moved[l] = out[n][blgpLane(l, blgp)];
      std::copy_n(moved, kLanes, out[n]);
    }
  }
}

// f64 results lie differently: row i is at lane group i % 4, register pair i / 4.
template <int N>
int lane64(int b, int i, int j) {
  return N == 16 ? 16 * (i % 4) + j : 16 * i + 4 * b + j;
}

// N neighbours, which the host computes at once.
template <class T, int N>
using Lanes = T __attribute__((ext_vector_type(N)));

template <class T, int N>
Lanes<T, N> lanesAt(const T* p) {
  Lanes<T, N> r;
  std::memcpy(&r, p, sizeof r);
  return r;
}

template <class T, int N>
Lanes<T, N> fromBits(Lanes<u32, N> x) {
  if constexpr (std::is_same_v<T, i64>) {
    return __builtin_convertvector(__builtin_bit_cast(Lanes<i32, N>, x), Lanes<T, N>);
  } else {
    return __builtin_convertvector(__builtin_bit_cast(Lanes<float, N>, x), Lanes<T, N>);
  }
}

// x * y + acc; in double the product is exact anyway.
template <class T, int N>
Lanes<T, N> multiplyAdd(T x, Lanes<T, N> y, Lanes<T, N> acc) {
  if constexpr (std::is_floating_point_v<T>) {
    return __builtin_elementwise_fma(Lanes<T, N>(x), y, acc);
  } else {
    return acc + Lanes<T, N>(x) * y;
  }
}

// A sum as the result register has it.
template <class T, int N>
Lanes<u32, N> toBits(Lanes<T, N> sum, bool clamp) {
  if constexpr (std::is_same_v<T, i64>) {
    if (clamp) {
      sum = __builtin_elementwise_max(sum, Lanes<T, N>(i64{INT32_MIN}));
      sum = __builtin_elementwise_min(sum, Lanes<T, N>(i64{INT32_MAX}));
    }
    return __builtin_convertvector(sum, Lanes<u32, N>);
  } else {
    auto r = __builtin_convertvector(sum, Lanes<float, N>);
    return r != r ? Lanes<u32, N>(kNan32) : __builtin_bit_cast(Lanes<u32, N>, r);
  }
}

// Where a product goes: the result's first row, C, and the modifiers that act on it.
struct Sum {
  u16 dst;
  const Operand& c;
  u8 cbsz, abid;
  bool clamp;
};

// D = A * B + C. T is the type of the arithmetic: double for narrow floats, float, or i64 for
// integers. `a(block, row, k)` gives elements of A, `b(block, k)` a row of N elements of B.
template <class T, int M, int N, int K, int B, class GetA, class GetB>
void multiply(Wave& w, const Sum& i, GetA a, GetB b) {
  constexpr int groups = 64 / N, registers = M * N * B / kLanes;
  // All of C is read before D is written. They may overlap in part: then C is set aside.
  alignas(64) u32 aside[registers][kLanes];
  const u32* rows = i.c.is(Kind::Vgpr) ? w.row(i.c.index) : nullptr;
  if (rows && i.c.index != i.dst && std::abs(i.c.index - i.dst) < registers) {
    std::memcpy(aside, rows, sizeof aside);
    rows = aside[0];
  }
  for (int block = 0; block < B; ++block) {
    // CBSZ and ABID: groups of 2^CBSZ blocks take their A from one block of the group.
    int from = (block & ~((1 << i.cbsz) - 1)) + (i.cbsz ? i.abid : 0);
    // Four rows at a time: they lie in the same lanes of four registers.
    for (int r = 0; r < M; r += 4) {
      int g = r / 4 + block * M / 4, reg = 4 * (g / groups), lane = N * (g % groups);
      Lanes<T, N> c[4], acc[4];
      for (int q = 0; q < 4; ++q) {
        c[q] = fromBits<T, N>(rows ? lanesAt<u32, N>(rows + (reg + q) * kLanes + lane)
                                   : Lanes<u32, N>(literal32(i.c)));
        acc[q] = std::is_same_v<T, float> ? c[q] : Lanes<T, N>(T(0));
      }
      for (int k = 0; k < K; ++k) {
        auto y = lanesAt<T, N>(b(block, k));
        for (int q = 0; q < 4; ++q) acc[q] = multiplyAdd<T, N>(a(from, r + q, k), y, acc[q]);
      }
      for (int q = 0; q < 4; ++q) {
        if (!std::is_same_v<T, float>) acc[q] += c[q];
        auto out = toBits<T, N>(acc[q], i.clamp);
        std::memcpy(w.row(i.dst + reg + q) + lane, &out, sizeof out);
      }
    }
  }
}

template <El E>
using Arithmetic =
    std::conditional_t<E == El::I8, i64, std::conditional_t<E == El::F32, float, double>>;

// Element k of row i (or column j) of a block, in gathered form.
template <int M, int B, int Per>
struct At {
  static int lane(int block, int k) { return M * (block + B * (k / Per)); }
};

template <El Ea, El Eb, int M, int N, int K, int B>
void mfma(Wave& w, const Inst& i) {
  using T = Arithmetic<Ea>;
  constexpr int per = M * K * B / 64;
  alignas(64) T a[per][kLanes], b[per][kLanes];
  gather<Ea, T, per>(w, i.src[0].index, 0, a);
  gather<Eb, T, per>(w, i.src[1].index, i.blgp, b);
  using P = At<M, B, per>;
  multiply<T, M, N, K, B>(
      w, {i.dst.index, i.src[2], i.cbsz, i.abid, i.clamp},
      [&](int block, int r, int k) { return a[k % per][P::lane(block, k) + r]; },
      [&](int block, int k) { return b[k % per] + P::lane(block, k); });
}

template <int M, int N, int K, int B>
void mfma64(Wave& w, const Inst& i) {
  double a[1][kLanes], b[1][kLanes];  // one element a lane
  gather<El::F64, double, 1>(w, i.src[0].index, 0, a);
  gather<El::F64, double, 1>(w, i.src[1].index, 0, b);
  static thread_local u32 out[8][kLanes];
  for (int block = 0; block < B; ++block) {
    for (int r = 0; r < M; ++r) {
      for (int j = 0; j < N; ++j) {
        int lane = lane64<N>(block, r, j), reg = M == 16 ? 2 * (r / 4) : 0;
        u64 c = i.src[2].is(Kind::Vgpr)
                    ? w.row(i.src[2].index + reg)[lane] |
                          static_cast<u64>(w.row(i.src[2].index + reg + 1)[lane]) << 32
                    : bits<u64>(i.src[2].isReal ? i.src[2].real
                                                : static_cast<double>(bits<i64>(i.src[2].imm)));
        double acc = bits<double>(c);
        if (i.neg & 4) acc = -acc;
        for (int k = 0; k < K; ++k) {
          int lane = At<M, B, 1>::lane(block, k);
          double x = (i.neg & 1) ? -a[0][lane + r] : a[0][lane + r];
          double y = (i.neg & 2) ? -b[0][lane + j] : b[0][lane + j];
          acc = std::fma(x, y, acc);
        }
        out[reg][lane] = static_cast<u32>(bits<u64>(acc));
        out[reg + 1][lane] = bits<u64>(acc) >> 32;
      }
    }
  }
  std::memcpy(w.row(i.dst.index), out, sizeof(u32) * 2 * M * N * B);
}

// Sparse A: of each four consecutive k, two are stored; the index register says which.
template <El Ea, El Eb, int M, int N, int K>
void smfmac(Wave& w, const Inst& i) {
  using T = Arithmetic<Ea>;
  constexpr int span = M * K / 64;  // dense k a lane
  alignas(64) T a[M][K] = {}, stored[span / 2][kLanes], b[span][kLanes];
  gather<Ea, T, span / 2>(w, i.src[0].index, 0, stored);
  gather<Eb, T, span>(w, i.src[1].index, 0, b);
  int set = 0;
  if (i.cbsz == 0 && span < 32) set = i.abid & (span == 8 ? 3 : 1);
  const u32* index = w.row(i.src[2].index);
  for (int lane = 0; lane < kLanes; ++lane) {
    u64 positions = index[lane] >> (span * set);
    for (int n = 0; n < span / 2; ++n) {
      int k = lane / M * span + n / 2 * 4 + (positions >> (2 * n) & 3);
      a[lane % M][k] += stored[n][lane];
    }
  }
  multiply<T, M, N, K, 1>(
      w, {i.dst.index, i.dst, 0, 0, i.clamp}, [&](int, int r, int k) { return a[r][k]; },
      [&](int, int k) { return b[k % span] + M * (k / span); });
}

// gfx950: formats by CBSZ (A) and BLGP (B): fp8, bf8, fp6, bf6, fp4; 32 consecutive k a lane.
float narrow(u32 x, int mantissa, int exponentBits, int bias) {
  int m = x & ((1 << mantissa) - 1), e = x >> mantissa & ((1 << exponentBits) - 1);
  float v = e ? std::ldexp(1 + std::ldexp(float(m), -mantissa), e - bias)
              : std::ldexp(float(m), 1 - bias - mantissa);
  return x >> (mantissa + exponentBits) & 1 ? -v : v;
}
double f8f6f4Element(const Wave& w, int row, int lane, int n, int format) {
  if (format < 2) {
    u32 x = w.row(row + n / 4)[lane] >> (8 * (n & 3)) & 255;
    return format ? decode8<kE5M2>(x) : decode8<kE4M3>(x);
  }
  int width = format == 4 ? 4 : 6, at = n * width;
  u64 pair = w.row(row + at / 32)[lane];
  if (at % 32 + width > 32) pair |= static_cast<u64>(w.row(row + at / 32 + 1)[lane]) << 32;
  u32 x = pair >> (at % 32) & ((1u << width) - 1);
  return format == 2 ? narrow(x, 3, 2, 1) : format == 3 ? narrow(x, 2, 3, 3) : narrow(x, 1, 2, 1);
}

template <int M, int K, bool Scaled>
void f8f6f4(Wave& w, const Inst& i) {
  alignas(64) double ab[2][K][M];  // [side][k][row or column]
  for (int side = 0; side < 2; ++side) {
    int format = side ? i.blgp : i.cbsz;
    for (int lane = 0; lane < kLanes; ++lane) {
      double scale = 1;
      if (Scaled) {
        int byte = (i.opSel >> side & 1) | (i.opSelHi >> side & 1) << 1;
        Row tmp;
        u32 e = fetch(w, i.src[3 + side], tmp)[lane] >> (8 * byte) & 255;
        scale = e == 255 ? NAN : std::ldexp(1.0, static_cast<int>(e) - 127);
      }
      for (int n = 0; n < 32; ++n) {
        ab[side][lane / M * 32 + n][lane % M] =
            scale * f8f6f4Element(w, i.src[side].index, lane, n, format);
      }
    }
  }
  multiply<double, M, M, K, 1>(
      w, {i.dst.index, i.src[2], 0, 0, false}, [&](int, int r, int k) { return ab[0][k][r]; },
      [&](int, int k) { return ab[1][k]; });
}

// FLOPs a cycle of one SIMD's matrix pipe; older multi-block shapes run at half rate, the shapes
// that gfx950 added at twice that of the others.
constexpr int rate(El e) {
  return e == El::F64 || e == El::F32    ? 64
         : e == El::Xf32                 ? 256
         : e == El::F16 || e == El::Bf16 ? 512
                                         : 1024;
}
constexpr int cycles(El e, int m, int n, int k, int b, int times) {
  int speed = rate(e) * times / (b > 1 && rate(e) > 256 ? 2 : 1);
  return std::max(8, 2 * m * n * k * b / speed);
}

}  // namespace

void registerMatrix(OpTable& t) {
#define DENSE(name, ea, eb, m, k, b, ...)                               \
  t["v_mfma_" name] = {mfma<El::ea, El::eb, m, m, k, b>, Class::Matrix, \
                       cycles(El::ea, m, m, k, b, 1 __VA_ARGS__)}
#define FP8(dims, m, k)                             \
  DENSE("f32_" dims "_fp8_fp8", Fp8, Fp8, m, k, 1); \
  DENSE("f32_" dims "_fp8_bf8", Fp8, Bf8, m, k, 1); \
  DENSE("f32_" dims "_bf8_fp8", Bf8, Fp8, m, k, 1); \
  DENSE("f32_" dims "_bf8_bf8", Bf8, Bf8, m, k, 1)
#define HALF(dims, m, k, b, ...)                             \
  DENSE("f32_" dims "_f16", F16, F16, m, k, b, __VA_ARGS__); \
  DENSE("f32_" dims "_bf16", Bf16, Bf16, m, k, b, __VA_ARGS__)
  FP8("16x16x32", 16, 32);
  FP8("32x32x16", 32, 16);
  HALF("16x16x16", 16, 16, 1);
  HALF("32x32x8", 32, 8, 1);
  HALF("32x32x4_2b", 32, 4, 2);
  HALF("16x16x4_4b", 16, 4, 4);
  HALF("4x4x4_16b", 4, 4, 16);
  DENSE("i32_16x16x32_i8", I8, I8, 16, 32, 1);
  DENSE("i32_32x32x16_i8", I8, I8, 32, 16, 1);
  DENSE("i32_32x32x4_2b_i8", I8, I8, 32, 4, 2);
  DENSE("i32_16x16x4_4b_i8", I8, I8, 16, 4, 4);
  DENSE("i32_4x4x4_16b_i8", I8, I8, 4, 4, 16);
  DENSE("f32_32x32x1_2b_f32", F32, F32, 32, 1, 2);
  DENSE("f32_16x16x1_4b_f32", F32, F32, 16, 1, 4);
  DENSE("f32_4x4x1_16b_f32", F32, F32, 4, 1, 16);
  DENSE("f32_32x32x2_f32", F32, F32, 32, 2, 1);
  DENSE("f32_16x16x4_f32", F32, F32, 16, 4, 1);
  DENSE("f32_16x16x8_xf32", Xf32, Xf32, 16, 8, 1);
  DENSE("f32_32x32x4_xf32", Xf32, Xf32, 32, 4, 1);
  t["v_mfma_f64_16x16x4_f64"] = {mfma64<16, 16, 4, 1>, Class::Matrix, 32};
  t["v_mfma_f64_4x4x4_4b_f64"] = {mfma64<4, 4, 4, 4>, Class::Matrix, 16};
  // gfx950
  HALF("16x16x32", 16, 32, 1, *2);
  HALF("32x32x16", 32, 16, 1, *2);
  DENSE("i32_16x16x64_i8", I8, I8, 16, 64, 1, *2);
  DENSE("i32_32x32x32_i8", I8, I8, 32, 32, 1, *2);
  t["v_mfma_f32_16x16x128_f8f6f4"] = {f8f6f4<16, 128, false>, Class::Matrix, 32};
  t["v_mfma_f32_32x32x64_f8f6f4"] = {f8f6f4<32, 64, false>, Class::Matrix, 64};
  t["v_mfma_scale_f32_16x16x128_f8f6f4"] = {f8f6f4<16, 128, true>, Class::Matrix, 32};
  t["v_mfma_scale_f32_32x32x64_f8f6f4"] = {f8f6f4<32, 64, true>, Class::Matrix, 64};

#define SPARSE(name, ea, eb, m, k, ...)                                  \
  t["v_smfmac_" name] = {smfmac<El::ea, El::eb, m, m, k>, Class::Matrix, \
                         cycles(El::ea, m, m, k, 1, 2 __VA_ARGS__)}
#define SPARSE8(dims, m, k, ...)                               \
  SPARSE("f32_" dims "_fp8_fp8", Fp8, Fp8, m, k, __VA_ARGS__); \
  SPARSE("f32_" dims "_fp8_bf8", Fp8, Bf8, m, k, __VA_ARGS__); \
  SPARSE("f32_" dims "_bf8_fp8", Bf8, Fp8, m, k, __VA_ARGS__); \
  SPARSE("f32_" dims "_bf8_bf8", Bf8, Bf8, m, k, __VA_ARGS__); \
  SPARSE("i32_" dims "_i8", I8, I8, m, k, __VA_ARGS__)
  SPARSE8("16x16x64", 16, 64);
  SPARSE8("32x32x32", 32, 32);
  SPARSE("f32_16x16x32_f16", F16, F16, 16, 32);
  SPARSE("f32_16x16x32_bf16", Bf16, Bf16, 16, 32);
  SPARSE("f32_32x32x16_f16", F16, F16, 32, 16);
  SPARSE("f32_32x32x16_bf16", Bf16, Bf16, 32, 16);
  // gfx950
  SPARSE8("16x16x128", 16, 128, *2);
  SPARSE8("32x32x64", 32, 64, *2);
  SPARSE("f32_16x16x64_f16", F16, F16, 16, 64, *2);
  SPARSE("f32_16x16x64_bf16", Bf16, Bf16, 16, 64, *2);
  SPARSE("f32_32x32x32_f16", F16, F16, 32, 32, *2);
  SPARSE("f32_32x32x32_bf16", Bf16, Bf16, 32, 32, *2);
#undef SPARSE8
#undef SPARSE
#undef HALF
#undef FP8
#undef DENSE
}

}  // namespace sim
