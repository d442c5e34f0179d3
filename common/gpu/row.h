// Rows held in registers by teams of threads.
//
// A team of kTeam threads owns one row at a time and holds it as kVectors vectors of 16 bytes a
// thread: thread t has vectors t, t + kTeam, t + 2 kTeam, ... so that each load of a wave is one
// contiguous run. Short rows get a team inside a wave, with several teams a block and no barrier;
// long rows get a whole block. The team depends on the row's length alone: how many rows there are
// changes neither the order of any sum nor a bit of the result.
#pragma once

#include "device.h"
#include "reduce.h"

namespace rocm_kernels {

// ---- Team -------------------------------------------------------------------------------------

template <int kTeamThreads, int kThreadVectors, int kTeamBlocks = 1>
struct RowTeam {
  static constexpr int kThreads = kTeamThreads;
  static constexpr int kVectors = kThreadVectors;
  // Blocks that share a row: a thread block cluster of NVIDIA's sm_90 and later. The sums are taken
  // in the order of one block, so the bits are those of one block.
  static constexpr int kBlocks = kTeamBlocks;
  static constexpr int kBlockThreads = kThreads < 256 ? 256 : kThreads / kBlocks;
  static constexpr int kBlockRows = kThreads < 256 ? 256 / kThreads : 1;
  // Threads that a compute unit is to hold at once, and with them how many registers each may use:
  // 512 a lane of a SIMD on AMD (64 each for 2048 threads), 64 Ki an SM on NVIDIA (64 for 1024).
  static constexpr int kResidentThreads = kBlocks > 1 ? kBlockThreads
                                          : !kNvidia && kThreads >= 256 && kVectors <= 2 ? 2048
                                          : kNvidia && kThreads < 256 && kVectors > 2    ? 512
                                                                                         : 1024;
  static_assert(kBlocks == 1 || (kNvidia && kThreads >= 256),
                "RowTeam: only NVIDIA's thread block clusters let several blocks share a row");
};

// A barrier that orders LDS accesses and leaves global loads in flight (__syncthreads may wait for
// them too).
ROCM_KERNELS_DEVICE void block_barrier() {
#if defined(__CUDACC__)
  __syncthreads();
#else
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#endif
}

// LDS of a team's reductions. Two slots in turn: whoever writes a slot again has passed the barrier
// of the reduction in between, so everyone has read it; one barrier a reduction suffices.
struct TeamScratch {
  float partial[2][32];
};

// Of a cluster's blocks: this block's number, and the barrier. A block may write to another's LDS
// only once that one runs, which the first barrier tells: every team of several blocks arrives at
// its kernel's start and waits before its first reduction.
ROCM_KERNELS_DEVICE int block_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}
ROCM_KERNELS_DEVICE void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
ROCM_KERNELS_DEVICE void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Writes to the same place of another block's LDS.
ROCM_KERNELS_DEVICE void store_in_cluster(float& place, float value, int block) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f32 [remote], %2;\n"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(&place))),
      "r"(block), "f"(value)
      : "memory");
#else
  (void)place, (void)value, (void)block;
#endif
}

// Every thread of the team gets the reduction of all its threads' values. All threads of the block
// take part.
template <typename Team, typename Op>
ROCM_KERNELS_DEVICE float reduce_team(float value, Op op, TeamScratch& scratch, int& slot) {
  static_assert(Team::kThreads <= 1024, "reduce_team: a team has at most 1024 threads");
  if constexpr (Team::kThreads <= kWaveSize) {
    return reduce_lanes<Team::kThreads>(value, op);
  } else {
    constexpr int kWaves = Team::kThreads / kWaveSize;
    value = reduce_lanes<kWaveSize>(value, op);
    const unsigned thread = threadIdx.x;
    if constexpr (Team::kBlocks == 1) {
      if (thread % kWaveSize == 0) scratch.partial[slot][thread / kWaveSize] = value;
      block_barrier();
    } else {
      const unsigned wave = (block_in_cluster() * Team::kBlockThreads + thread) / kWaveSize;
      const int lane = static_cast<int>(thread % kWaveSize);
      if (lane < Team::kBlocks) store_in_cluster(scratch.partial[slot][wave], value, lane);
      cluster_arrive();
      cluster_wait();
    }
    value = reduce_lanes<kWaves>(scratch.partial[slot][thread % kWaves], op);
    slot ^= 1;
    return value;
  }
}

// ---- Vectors ----------------------------------------------------------------------------------

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
