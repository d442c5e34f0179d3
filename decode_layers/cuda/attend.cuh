// The attention of a token of each sequence: rotation, the cache's new row, softmax over all keys.
//
// Blocks share the keys of a unit of a sequence, or of eight query heads of it where it has more: a
// warp takes sixteen keys at a time. A unit is a KV head of 128, or two neighbours of 64: then a
// query is zero where the other one's keys are, and of its sums over values that half is left.
// While the layer before is multiplied they come to L2. Keys and values go from memory to
// registers, as mma.m16n8k16 wants them:
//
//   S [heads, keys] = q . k^T   heads are the 16 rows, of which eight are used
//   O [heads, dims] += P . v    P is S's registers as they are, pairs of keys
//
//   lane (g = lane / 4, j = lane % 4)
//   k    rows g and 8 + g of the tile; what pieces of 4 dims are a lane's is free, as long as q has
//        the same: neighbouring lanes load neighbouring bytes
//   v    rows 2 j, 2 j + 1, 2 j + 8, 2 j + 9; its 16 dims from 16 g on are a column of 16 products
//
// FP8 codes are widened to float16, which q then is too, divided by a power of two lest it exceed
// that. The warps of a block add up in shared memory. Which of a head's blocks comes last adds up
// theirs: no meeting of the grid, which would cost more.
//
//   s[key]   = (rotated q) . (rotated k[key]) * scale * k_scale
//              q is rounded to T, k to the cache's type; not before, where heads have norms
//   attended = sum(exp(s - greatest) * v) / sum(exp(s - greatest)) * v_scale
#pragma once

#include <type_traits>

#include "../../common/cuda/mma.cuh"
#include "heads.cuh"
#include "rotation.cuh"
#include "rows.cuh"

namespace rocm_kernels::cuda::decode {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// C: of caches, T or FP8 codes.
template <typename T, typename C>
class Attend {
 public:
  static constexpr bool kFp8 = sizeof(C) == 1;
  using Mma = std::conditional_t<kFp8, float16, T>;  // what is multiplied
  static constexpr bool kBFloat = std::is_same_v<Mma, bfloat16>;

  __device__ __forceinline__ Attend(const StackProblem<T>& p, const Layer<T>& layer,
                                    const Heads& heads, int warp, int lane, AttendScratch& scratch,
                                    int& is_last)
      : a_(p.attention),
        p_(p),
        layer_(layer),
        heads_(heads),
        warp_(warp),
        lane_(lane),
        rotation_(p.attention, lane),
        scratch_(scratch),
        is_last_(is_last),
        tile_(heads_.index * kWarps + warp) {}

  // Brings the keys and values of a layer to L2, while products of the layer before stream their
  // weights.
  static __device__ __forceinline__ void prefetch(const Attention<T>& a, const Layer<T>& layer,
                                                  const Heads& heads, int warp, int lane) {
    if (!heads.has_keys()) return;
    const int end = min(heads.seen.position, heads.seen.end);
    const C* const cache = static_cast<const C*>(lane < 16 ? layer.k_cache : layer.v_cache) +
                           heads.token * a.batch_stride + heads.unit * a.unit_stride;
    for (int tile = heads.index * kWarps + warp; tile < heads.tiles;
         tile += heads.blocks * kWarps) {
      const int key = heads.seen.begin + tile * kTileKeys + lane % 16;
      if (key >= end) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(cache + key * a.row_stride +
                                                      half * (kHalfDim + a.half_gap)));
      }
    }
  }

  // Asks for what the layers before do not write.
  __device__ __forceinline__ void ask() {
    if (!heads_.has_keys()) return;
    if (tile_ < heads_.tiles) load_keys(), load_values();
    rotation_.ask(heads_.token);
    const bool is_key = warp_ >= heads_.count;
    const T* const norm = is_key ? layer_.k_norm : layer_.q_norm;
    if (norm != nullptr) norm_ = four_of(norm);
  }

  // `qkv` of all tokens.
  __device__ __forceinline__ void attend(const T* qkv) {
    if (!heads_.has_keys()) return;
    qkv += heads_.token * (a_.heads + 2 * a_.kv_heads) * a_.head_dim;
#pragma unroll 1
    for (int task = warp_; task <= heads_.count; task += kWarps) rotate(qkv, task);
    meet();
    float greatest = -INFINITY, total = 0.0f;
    if (tile_ < heads_.tiles) {
      float sums[kMmas][4] = {};
      load_queries();
      const int row = min(lane_ / 4, heads_.count - 1);
      const float k_scale = scale_of(layer_.k_scale, a_.k_scale_stride, heads_.half_of(row));
      const float factor = a_.scale_log2 * k_scale * scratch_.query_factors[row];
#pragma unroll 1
      while (tile_ < heads_.tiles) add_tile(factor, greatest, total, sums);
      leave(sums);
      total = reduce_lanes<4>(total, Sum{});
    }
    if (lane_ % 4 == 0) scratch_.weights[warp_][lane_ / 4] = make_float2(greatest, total);
    meet();
    add_warps();
    if (heads_.blocks > 1) add_blocks();
  }

 private:
  static constexpr int kMmas = kUnitDim / 8;                   // columns of eight dims
  static constexpr int kSteps = kUnitDim / 16;                 // of an mma along a unit
  static constexpr int kKeyLoads = kUnitDim * sizeof(C) / 64;  // of 16 bytes a lane, of a row
  static constexpr int kValueLoads = kKeyLoads / 2;

  // Four elements of a head are a lane's where it rotates.
  using Four = typename Rotation<T>::Four;
  __device__ __forceinline__ Four four_of(const T* head) const {
    return *reinterpret_cast<const Four*>(head + rotation_.dim());
  }

  // The first dim of a lane's four of step s.
  __device__ __forceinline__ int dim_of(int s) const {
    const int j = lane_ % 4;
    return kFp8 ? 64 * (s / 4) + 16 * j + 4 * (s % 4) : 32 * (s / 2) + 8 * j + 4 * (s % 2);
  }

  __device__ __forceinline__ int key_of(int slot) const {
    return heads_.seen.begin + tile_ * kTileKeys + slot;
  }
  static constexpr __device__ int value_slot(int j, int i) { return 2 * j + i % 2 + i / 2 * 8; }

  // Where the cache has rows of this unit, in elements.
  __device__ __forceinline__ int64_t first_row() const {
    return heads_.token * a_.batch_stride + heads_.unit * a_.unit_stride;
  }
  // Byte `at` of a row.
  __device__ __forceinline__ const uint8_t* within(const uint8_t* row, int at) const {
    constexpr int kHalfBytes = kHalfDim * sizeof(C);
    return row + at + (at < kHalfBytes ? 0 : a_.half_gap * static_cast<int>(sizeof(C)));
  }
  // A row of the cache. The last one that is there stands for those behind it, and for the new one.
  __device__ __forceinline__ const uint8_t* row_of(const void* cache, int key) const {
    const int64_t row = max(min(key, min(heads_.seen.position, heads_.seen.end) - 1), 0);
    return reinterpret_cast<const uint8_t*>(static_cast<const C*>(cache) + first_row() +
                                            row * a_.row_stride);
  }
  __device__ __forceinline__ Vector load(const uint8_t* from) const {
    // Where none is there, a weight of 0 must meet a number.
    return load_if<Touch::kAgain, Vector>(
        min(heads_.seen.position, heads_.seen.end) > heads_.seen.begin, from);
  }
  // The tile's keys and values; and the new row's in the tile that has it.
  __device__ __forceinline__ void load_keys() {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint8_t* const row = row_of(layer_.k_cache, key_of(8 * t + lane_ / 4));
#pragma unroll
      for (int c = 0; c < kKeyLoads; ++c) {
        keys_[t][c] = load(within(row, 64 * c) + 16 * (lane_ % 4));
      }
    }
  }
  __device__ __forceinline__ void load_values() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* const row = row_of(layer_.v_cache, key_of(value_slot(lane_ % 4, i)));
#pragma unroll
      for (int c = 0; c < kValueLoads; ++c) {
        values_[i][c] = load(within(row, 16 * kValueLoads * (lane_ / 4)) + 16 * c);
      }
    }
  }
  __device__ __forceinline__ bool has_new_row() const {
    return key_of(0) <= heads_.seen.position && heads_.seen.position < key_of(kTileKeys);
  }
  static __device__ __forceinline__ Vector new_vector(const uint8_t* from) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    return Vector{{raw.x, raw.y, raw.z, raw.w}};
  }
  __device__ __forceinline__ void put_new_key() {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (key_of(8 * t + lane_ / 4) != heads_.seen.position) continue;
#pragma unroll
      for (int c = 0; c < kKeyLoads; ++c) {
        keys_[t][c] = new_vector(scratch_.new_key + 64 * c + 16 * (lane_ % 4));
      }
    }
  }
  __device__ __forceinline__ void put_new_value() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key_of(value_slot(lane_ % 4, i)) != heads_.seen.position) continue;
#pragma unroll
      for (int c = 0; c < kValueLoads; ++c) {
        values_[i][c] = new_vector(scratch_.new_value + 16 * (kValueLoads * (lane_ / 4) + c));
      }
    }
  }

  // A query head to shared memory, or the new key and value there and to the cache.
  __device__ __forceinline__ void rotate(const T* qkv, int task) {
    const bool is_key = task == heads_.count;
    const auto load = [&](int head) {
      return __ldcg(reinterpret_cast<const Four*>(qkv + head * a_.head_dim + rotation_.dim()));
    };
    const int kv_head = heads_.kv_head + rotation_.head();
    const Four own = load(is_key ? a_.heads + kv_head : heads_.first + task);
    Four value{};
    if (is_key) value = load(a_.heads + a_.kv_heads + kv_head);
    float x[4];
    rotation_.unpack(own, x);
    const T* const norm = is_key ? layer_.k_norm : layer_.q_norm;
    if (norm != nullptr) {
      float squares = 0.0f, weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) squares = fmaf(x[i], x[i], squares);
      const float mean = rotation_.sum_of_head(squares) / static_cast<float>(a_.head_dim);
      const float factor = reciprocal_sqrt(mean + p_.eps);
      rotation_.unpack(task == warp_ ? norm_ : four_of(norm), weight);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = x[i] * factor * (weight[i] + p_.weight_offset);
    }
    rotation_.rotate(x);
    if (!is_key) return put_query(task, x);
    float its_value[4];
    rotation_.unpack(value, its_value);
    put_row(x, layer_.k_scale, a_.k_scale_stride, scratch_.new_key, layer_.k_cache);
    put_row(its_value, layer_.v_scale, a_.v_scale_stride, scratch_.new_value, layer_.v_cache);
  }

  __device__ __forceinline__ void put_query(int head, float (&x)[4]) {
    if constexpr (kFp8) {
      float greatest = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = to_float(from_float<T>(x[i]));
        greatest = fmaxf(greatest, fabsf(x[i]));
      }
      // Its exponent, and so x below 2.
      const uint32_t exponent = greatest_of_wave(__float_as_uint(greatest)) & 0x7F800000u;
      const float factor = exponent == 0 ? 1.0f : __uint_as_float(exponent);
      if (lane_ == 0) scratch_.query_factors[head] = factor;
      const float inverse = 1.0f / factor;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] *= inverse;
    } else {
      if (lane_ == 0) scratch_.query_factors[head] = 1.0f;
    }
    // Of two heads of 64 one is its own.
    const bool its = a_.head_dim == kUnitDim || rotation_.head() == heads_.half_of(head);
    *reinterpret_cast<uint2*>(scratch_.queries[head] + 8 * lane_) =
        its ? make_uint2(Word<Mma>::pack(x), Word<Mma>::pack(x + 2)) : make_uint2(0, 0);
  }

  __device__ __forceinline__ void put_row(const float (&x)[4], const float* scales, int stride,
                                          uint8_t* shared, void* cache) {
    constexpr int kBytes = 4 * sizeof(C);
    C* const row = static_cast<C*>(cache) + first_row() + heads_.seen.position * a_.row_stride +
                   4 * lane_ + (lane_ < 16 ? 0 : a_.half_gap);
    const bool writes = heads_.index == 0 && heads_.part == 0 && heads_.seen.has_room;
    if constexpr (kFp8) {
      const float inverse = 1.0f / scale_of(scales, stride, rotation_.head());
      const uint32_t codes =
          fp8x4_from_float<false>(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
      *reinterpret_cast<uint32_t*>(shared + kBytes * lane_) = codes;
      if (writes) *reinterpret_cast<uint32_t*>(row) = codes;
    } else {
      const uint2 words = make_uint2(Word<T>::pack(x), Word<T>::pack(x + 2));
      *reinterpret_cast<uint2*>(shared + kBytes * lane_) = words;
      if (writes) *reinterpret_cast<uint2*>(row) = words;
    }
  }

  __device__ __forceinline__ void load_queries() {
    const int row = min(lane_ / 4, heads_.count - 1);  // the last one again where there are fewer
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      queries_[s] = *reinterpret_cast<const uint2*>(scratch_.queries[row] + 2 * dim_of(s));
    }
  }

  // And goes on to the warp's next tile. Its keys are asked for as soon as these are multiplied,
  // its values likewise.
  __device__ __forceinline__ void add_tile(float factor, float& greatest, float& total,
                                           float (&sums)[kMmas][4]) {
    if (has_new_row()) put_new_key();
    float scores[2][4] = {};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t low, high;
        if constexpr (kFp8) {
          halves_from_fp8(keys_[t][s / 4].word[s % 4], low, high);
        } else {
          low = keys_[t][s / 2].word[s % 2 * 2], high = keys_[t][s / 2].word[s % 2 * 2 + 1];
        }
        multiply_16x8<kBFloat>(scores[t], queries_[s].x, 0, queries_[s].y, 0, low, high);
      }
    }
    const int tile = tile_, next = tile_ + heads_.blocks * kWarps;
    if (next < heads_.tiles) tile_ = next, load_keys();
    tile_ = tile;
    float most = greatest;
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool seen = key_of(value_slot(lane_ % 4, i)) < heads_.seen.end;
      weights[i] = seen ? scores[i / 2][i % 2] * factor : -INFINITY;
      most = fmaxf(most, weights[i]);
    }
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    const float kept = factor_to(most, greatest);
    greatest = most, total *= kept;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = factor_to(most, weights[i]);
      total += weights[i];
    }
    if (has_new_row()) put_new_value();
    const uint32_t first = Word<Mma>::pack(weights), second = Word<Mma>::pack(weights + 2);
#pragma unroll
    for (int m = 0; m < kMmas; ++m) sums[m][0] *= kept, sums[m][1] *= kept;
    constexpr int kWordDims = 4 / static_cast<int>(sizeof(C));
#pragma unroll
    for (int word = 0; word < kMmas / kWordDims; ++word) {
      const auto of = [&](int i) { return values_[i][word / 4].word[word % 4]; };
      const auto add = [&](int dim, uint32_t low, uint32_t high) {
        multiply_16x8<kBFloat>(sums[word * kWordDims + dim], first, 0, second, 0, low, high);
      };
      if constexpr (kFp8) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t order = half == 0 ? 0x5140u : 0x7362u;  // pairs of keys, dim by dim
          uint32_t low[2], high[2];
          halves_from_fp8(__byte_perm(of(0), of(1), order), low[0], low[1]);
          halves_from_fp8(__byte_perm(of(2), of(3), order), high[0], high[1]);
          add(2 * half, low[0], high[0]), add(2 * half + 1, low[1], high[1]);
        }
      } else {
        add(0, __byte_perm(of(0), of(1), 0x5410), __byte_perm(of(2), of(3), 0x5410));
        add(1, __byte_perm(of(0), of(1), 0x7632), __byte_perm(of(2), of(3), 0x7632));
      }
    }
    tile_ = next;
    if (tile_ < heads_.tiles) load_values();
  }

  __device__ __forceinline__ float* values_of(int warp, int head) const {
    return scratch_.values[warp * heads_.count + head];
  }

  // A warp's sums to shared memory: lane (g, j) has head g's dims 32 j to 32 j + 31.
  __device__ __forceinline__ void leave(const float (&sums)[kMmas][4]) const {
    if (lane_ / 4 >= heads_.count) return;
    float* const to = values_of(warp_, lane_ / 4) + 32 * (lane_ % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < kMmas; m += 4) {
        *reinterpret_cast<float4*>(to + 16 * half + m) =
            make_float4(sums[m][half], sums[m + 1][half], sums[m + 2][half], sums[m + 3][half]);
      }
    }
  }

  // Of FP8 codes, of one of the unit's heads.
  __device__ __forceinline__ float scale_of(const float* scales, int stride, int head) const {
    return kFp8 && scales != nullptr ? scales[(heads_.kv_head + head) * stride] : 1.0f;
  }
  // A head's place among those of all tokens.
  __device__ __forceinline__ int head_of_all(int head) const {
    return heads_.token * a_.heads + heads_.first + head;
  }
  // By a warp, for a head of 64, or half of one of 128.
  __device__ __forceinline__ void store(int head, int dim, float2 sum, float total) const {
    const float factor = scale_of(layer_.v_scale, a_.v_scale_stride, heads_.half_of(head)) / total;
    float two[2] = {sum.x * factor, sum.y * factor};
    const uint32_t word = Word<T>::pack(two);
    const int at = head_of_all(head) * a_.head_dim + dim;
    *reinterpret_cast<uint32_t*>(a_.attended + at) = word;
    Word<T>::unpack(word, two);
    const uint32_t amax = greatest_of_wave(__float_as_uint(fmaxf(fabsf(two[0]), fabsf(two[1]))));
    if (lane_ == 0) a_.left[at / kHalfDim] = {__uint_as_float(amax), 0.0f};
  }
  __device__ __forceinline__ float* partial_of(int head, int index) const {
    return a_.partials + (int64_t{head_of_all(head)} * a_.splits + index) * kPartialFloats;
  }

  // The block's warps: to the row, or for the last block. Two dims a thread.
  __device__ __forceinline__ void add_warps() const {
    const int warps = min(heads_.tiles - heads_.index * kWarps, kWarps);
#pragma unroll 1
    for (int i = warp_ * 32 + lane_; i < heads_.count * a_.head_dim / 2; i += kThreads) {
      const int head = 2 * i / a_.head_dim, dim = 2 * i % a_.head_dim;
      const int at = dim + kHalfDim * heads_.half_of(head);
      float2 weights[kWarps], values[kWarps];
      float most = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        weights[w] = w < warps ? scratch_.weights[w][head] : make_float2(-INFINITY, 0.0f);
        values[w] = w < warps ? *reinterpret_cast<const float2*>(values_of(w, head) + at)
                              : make_float2(0.0f, 0.0f);
        most = fmaxf(most, weights[w].x);
      }
      float2 sum = make_float2(0.0f, 0.0f);
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float factor = factor_to(most, weights[w].x);
        sum.x = fmaf(values[w].x, factor, sum.x);
        sum.y = fmaf(values[w].y, factor, sum.y);
        total = fmaf(weights[w].y, factor, total);
      }
      if (heads_.blocks == 1) {
        store(head, dim, sum, total);
        continue;
      }
      float* const partial = partial_of(head, heads_.index);
      *reinterpret_cast<float2*>(partial + dim) = sum;
      if (dim == 0) *reinterpret_cast<float2*>(partial + kUnitDim) = make_float2(most, total);
    }
  }

  // The head's blocks, by the last of them.
  __device__ __forceinline__ void add_blocks() const {
    uint32_t* const arrived = a_.arrived + heads_.kind;
    meet();
    if (warp_ == 0 && lane_ == 0) {
      uint32_t before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(arrived)
                   : "memory");
      is_last_ = before + 1 == static_cast<uint32_t>(heads_.blocks);
      if (is_last_) *arrived = 0;  // for the next layer, which a meeting is before
    }
    meet();
    if (!is_last_) return;
#pragma unroll 1
    for (int i = warp_ * 32 + lane_; i < heads_.count * a_.head_dim / 2; i += kThreads) {
      const int head = 2 * i / a_.head_dim, dim = 2 * i % a_.head_dim;
      constexpr int kAtOnce = 8;
      float most = -INFINITY, total = 0.0f;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
      for (int first = 0; first < heads_.blocks; first += kAtOnce) {
        float2 values[kAtOnce], weights[kAtOnce];
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) {
          const float* const partial = partial_of(head, min(first + b, heads_.blocks - 1));
          values[b] = __ldcg(reinterpret_cast<const float2*>(partial + dim));
          weights[b] = __ldcg(reinterpret_cast<const float2*>(partial + kUnitDim));
        }
        float greatest = most;
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) greatest = fmaxf(greatest, weights[b].x);
        const float kept = factor_to(greatest, most);
        most = greatest, total *= kept, sum.x *= kept, sum.y *= kept;
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) {
          if (first + b >= heads_.blocks) continue;
          const float factor = factor_to(most, weights[b].x);
          sum.x = fmaf(values[b].x, factor, sum.x);
          sum.y = fmaf(values[b].y, factor, sum.y);
          total = fmaf(weights[b].y, factor, total);
        }
      }
      store(head, dim, sum, total);
    }
  }

  const Attention<T>& a_;
  const StackProblem<T>& p_;
  const Layer<T>& layer_;
  const Heads& heads_;
  const int warp_, lane_;
  Rotation<T> rotation_;
  AttendScratch& scratch_;
  int& is_last_;
  int tile_;
  Four norm_;
  uint2 queries_[kSteps];
  Vector keys_[2][kKeyLoads], values_[4][kValueLoads];
};

#endif

}  // namespace rocm_kernels::cuda::decode
