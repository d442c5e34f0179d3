// Vectors of 16 bytes: arithmetic on their elements, and access to rows that need not be whole
// numbers of them.
#pragma once

#include "device.h"

namespace rocm_kernels {

// What a lane loads at once: 16 bytes, kept as the words that registers are, because arrays of
// 16-bit elements would be spread over a register each.
struct Vector {
  uint32_t word[4];
};

template <typename T>
constexpr int kVectorElements = 16 / static_cast<int>(sizeof(T));

// Arithmetic on the elements of a word: one float or a pair of 16-bit floats, the first low.
template <typename T>
struct Word;

template <>
struct Word<float> {
  static constexpr int kElements = 1;
  ROCM_KERNELS_DEVICE static void unpack(uint32_t word, float* values) {
    __builtin_memcpy(values, &word, 4);
  }
  ROCM_KERNELS_DEVICE static uint32_t pack(const float* values) {
    uint32_t word;
    __builtin_memcpy(&word, values, 4);
    return word;
  }
  ROCM_KERNELS_DEVICE static uint32_t add(uint32_t a, uint32_t b) {
    float x, y;
    unpack(a, &x), unpack(b, &y);
    x += y;
    return pack(&x);
  }
  ROCM_KERNELS_DEVICE static void multiply(uint32_t word, const float* factors, float* products) {
    float x;
    unpack(word, &x);
    products[0] = x * factors[0];
  }
  ROCM_KERNELS_DEVICE static void plus(uint32_t word, float addend, float* sums) {
    unpack(word, sums);
    sums[0] += addend;
  }
};

template <>
struct Word<bfloat16> {
  static constexpr int kElements = 2;
  ROCM_KERNELS_DEVICE static void unpack(uint32_t word, float* values) {
    const uint32_t bits[2] = {word << 16, word & 0xFFFF0000u};
    __builtin_memcpy(values, bits, 8);
  }
  ROCM_KERNELS_DEVICE static uint32_t pack(const float* values) {
#if defined(__CUDACC__)
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
#else
    const bfloat16 pair[2] = {static_cast<bfloat16>(values[0]), static_cast<bfloat16>(values[1])};
#endif
    uint32_t word;
    __builtin_memcpy(&word, &pair, 4);
    return word;
  }
  // Rounding a float32 sum of two bfloat16 gives what rounding the exact sum gives.
  ROCM_KERNELS_DEVICE static uint32_t add(uint32_t a, uint32_t b) {
    float x[2], y[2];
    unpack(a, x), unpack(b, y);
    x[0] += y[0], x[1] += y[1];
    return pack(x);
  }
  ROCM_KERNELS_DEVICE static void multiply(uint32_t word, const float* factors, float* products) {
    float x[2];
    unpack(word, x);
    products[0] = x[0] * factors[0], products[1] = x[1] * factors[1];
  }
  ROCM_KERNELS_DEVICE static void plus(uint32_t word, float addend, float* sums) {
    unpack(word, sums);
    sums[0] += addend, sums[1] += addend;
  }
};

template <>
struct Word<float16> {
  static constexpr int kElements = 2;
#if defined(__CUDACC__)
  using Pair = __half2;
#else
  typedef _Float16 Pair __attribute__((ext_vector_type(2)));
#endif
  ROCM_KERNELS_DEVICE static Pair pair_of(uint32_t word) {
    Pair pair;
    __builtin_memcpy(&pair, &word, 4);
    return pair;
  }
  ROCM_KERNELS_DEVICE static uint32_t word_of(Pair pair) {
    uint32_t word;
    __builtin_memcpy(&word, &pair, 4);
    return word;
  }
  ROCM_KERNELS_DEVICE static void unpack(uint32_t word, float* values) {
    const Pair pair = pair_of(word);
    values[0] = static_cast<float>(pair.x), values[1] = static_cast<float>(pair.y);
  }
  ROCM_KERNELS_DEVICE static uint32_t pack(const float* values) {
    return word_of(Pair{static_cast<float16>(values[0]), static_cast<float16>(values[1])});
  }
  // One packed addition; rounds as a float32 sum rounded to float16 does.
  ROCM_KERNELS_DEVICE static uint32_t add(uint32_t a, uint32_t b) {
    return word_of(pair_of(a) + pair_of(b));
  }
  ROCM_KERNELS_DEVICE static void multiply(uint32_t word, const float* factors, float* products) {
#if defined(__AMDGCN__)
    // Converts and multiplies at once. clang has no builtin for it, and turns x * y - 0 into a
    // conversion and a product.
    asm("v_fma_mix_f32 %0, %1, %2, neg(0) op_sel_hi:[1,0,0]"
        : "=v"(products[0])
        : "v"(word), "v"(factors[0]));
    asm("v_fma_mix_f32 %0, %1, %2, neg(0) op_sel:[1,0,0] op_sel_hi:[1,0,0]"
        : "=v"(products[1])
        : "v"(word), "v"(factors[1]));
#else
    float x[2];
    unpack(word, x);
    products[0] = x[0] * factors[0], products[1] = x[1] * factors[1];
#endif
  }
  ROCM_KERNELS_DEVICE static void plus(uint32_t word, float addend, float* sums) {
#if defined(__AMDGCN__)
    // As above: x * 1 + addend.
    asm("v_fma_mix_f32 %0, %1, 1.0, %2 op_sel_hi:[1,0,0]" : "=v"(sums[0]) : "v"(word), "s"(addend));
    asm("v_fma_mix_f32 %0, %1, 1.0, %2 op_sel:[1,0,0] op_sel_hi:[1,0,0]"
        : "=v"(sums[1])
        : "v"(word), "s"(addend));
#else
    unpack(word, sums);
    sums[0] += addend, sums[1] += addend;
#endif
  }
};

// The vector as if computed right here: see opaque().
ROCM_KERNELS_DEVICE Vector opaque(Vector v) {
#pragma unroll
  for (int w = 0; w < 4; ++w) v.word[w] = opaque(v.word[w]);
  return v;
}

template <typename T>
ROCM_KERNELS_DEVICE void unpack(const Vector& v, float (&values)[kVectorElements<T>]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) Word<T>::unpack(v.word[w], values + w * Word<T>::kElements);
}

// products[i] = element i * factors[i].
template <typename T, int kCount>
ROCM_KERNELS_DEVICE void multiply(const Vector& v, const float (&factors)[kCount],
                                  float (&products)[kCount]) {
  constexpr int kPerWord = Word<T>::kElements;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    Word<T>::multiply(v.word[w], factors + w * kPerWord, products + w * kPerWord);
  }
}

// sums[i] = element i + addend, which is the same for the whole wave.
template <typename T, int kCount>
ROCM_KERNELS_DEVICE void plus(const Vector& v, float addend, float (&sums)[kCount]) {
  constexpr int kPerWord = Word<T>::kElements;
#pragma unroll
  for (int w = 0; w < 4; ++w) Word<T>::plus(v.word[w], addend, sums + w * kPerWord);
}

template <typename T>
ROCM_KERNELS_DEVICE Vector pack(const float (&values)[kVectorElements<T>]) {
  Vector v;
#pragma unroll
  for (int w = 0; w < 4; ++w) v.word[w] = Word<T>::pack(values + w * Word<T>::kElements);
  return v;
}

// ---- Access to a row --------------------------------------------------------------------------

template <int kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using type = uint8_t;
};
template <>
struct UnsignedOf<2> {
  using type = uint16_t;
};
template <>
struct UnsignedOf<4> {
  using type = uint32_t;
};

// A byte of a row. The offset is unsigned so that a row's uniform address can stay in scalars, with
// 32 bits a lane beside it.
ROCM_KERNELS_DEVICE const uint8_t* at(const void* row, int bytes) {
  return static_cast<const uint8_t*>(row) + static_cast<uint32_t>(bytes);
}
ROCM_KERNELS_DEVICE uint8_t* at(void* row, int bytes) {
  return static_cast<uint8_t*>(row) + static_cast<uint32_t>(bytes);
}

// How rows meet vectors.
enum class Fit {
  kWhole,   // rows are whole numbers of vectors, at addresses that vectors may be loaded from
  kRagged,  // anything else: element by element where a vector does not fit
};

// The vector at `column` of a row of `columns` elements. Beyond the row's end there is anything
// with Fit::kWhole, zeros with Fit::kRagged. `aligned`: whether vectors may be loaded from the
// row's address and stride.
template <Touch kTouch, Fit kFit, typename T>
ROCM_KERNELS_DEVICE Vector load_vector(const T* row, int column, int columns, bool aligned) {
  constexpr int kCount = kVectorElements<T>;
  constexpr int kPerWord = Word<T>::kElements;
  const int count = columns - column;
  const uint8_t* address = at(row, column * static_cast<int>(sizeof(T)));
  if constexpr (kFit == Fit::kWhole) return load_if<kTouch, Vector>(count > 0, address);
  Vector v{};
  if (aligned && count >= kCount) {
    v = load<kTouch, Vector>(address);
  } else {
    using Bits = typename UnsignedOf<sizeof(T)>::type;
    const Bits* bits = reinterpret_cast<const Bits*>(row) + column;
#pragma unroll 1
    for (int i = 0; i < kCount && i < count; ++i) {
      const uint32_t placed = static_cast<uint32_t>(bits[i]) << (16 * (i % kPerWord));
#pragma unroll
      for (int w = 0; w < 4; ++w) v.word[w] |= w == i / kPerWord ? placed : 0;
    }
  }
  return v;
}

// Stores words of elements of `kElementBytes` each at `column`, likewise.
template <int kElementBytes, Fit kFit, int kWords>
ROCM_KERNELS_DEVICE void store_words(void* row, int column, int columns, bool aligned,
                                     const uint32_t (&word)[kWords]) {
  constexpr int kPerWord = 4 / kElementBytes;
  constexpr int kCount = kWords * kPerWord;
  using Bits = typename UnsignedOf<kElementBytes>::type;
  Bits* bits = static_cast<Bits*>(row) + column;
  const int count = columns - column;
  if (kFit == Fit::kWhole ? count > 0 : aligned && count >= kCount) {
    store<Touch::kOnce>(at(row, column * kElementBytes), word);
  } else if (kFit == Fit::kRagged) {
#pragma unroll 1
    for (int i = 0; i < kCount && i < count; ++i) {
      uint32_t holder = word[0];
#pragma unroll
      for (int w = 1; w < kWords; ++w) holder = w == i / kPerWord ? word[w] : holder;
      bits[i] = static_cast<Bits>(holder >> (8 * kElementBytes * (i % kPerWord)));
    }
  }
}

// Host: whether every vector of every row starts at a multiple of its size.
inline bool rows_aligned(const void* base, int64_t stride, int64_t element_bytes,
                         int64_t vector_bytes) {
  return reinterpret_cast<uintptr_t>(base) % vector_bytes == 0 &&
         (stride * element_bytes) % vector_bytes == 0;
}

}  // namespace rocm_kernels
