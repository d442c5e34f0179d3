// The heads of rope_and_cache on a CPU; compiled once for each instruction set
// (common/cpu/isa.h).
//
// A head is at most 512 elements: it is read to float32 in the first level cache, worked on there,
// and rounded from there. Angles are spread over the elements once a token, so that one loop
// rotates halves and neighbours alike:  z[j] = y[j] * cos[j] + partner[j] * sin[j].

#include "../../blocks/rows/cpu/block.h"

struct HeadBuffer {
  alignas(64) float elements[kMaxRopeHeadDim];
};

struct Angles {
  HeadBuffer cos, sin;  // sin of an element that is first in its pair is negated
};

template <class T>
inline void read_head(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) {
    const int n = static_cast<int>(count - i);
    store(to + i, load(from + i, n), n);
  }
}

template <class T>
inline void write_head(const float* from, int64_t count, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) {
    const int n = static_cast<int>(count - i);
    store(to + i, load(from + i, n), n);
  }
}

template <bool kFnuz>
inline void write_fp8(const float* from, int64_t count, float scale, uint8_t* bytes) {
  auto* const to = reinterpret_cast<Float8E4M3<kFnuz>*>(bytes);
  const Block inverse = all(1.0f / scale);
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    store_block<float>(to + i, load_block<float>(from + i) * inverse);
  }
  if (i < count) {
    const int n = static_cast<int>(count - i);
    store_block<float>(to + i, load_block<float>(from + i, n) * inverse, n);
  }
}

inline float element_of(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DType::kFloat16:
      return to_float(static_cast<const Float16*>(data)[i]);
    default:
      return to_float(static_cast<const BFloat16*>(data)[i]);
  }
}

inline void read_angles(const RopeAndCacheArgs& args, int64_t b, int64_t row, Angles& angles) {
  if (args.positions.data != nullptr) {
    row = position_of(args, b, row);
    b = 0;
  }
  const int64_t half = args.rotary_dim / 2;
  const int64_t cos_at = b * args.cos_batch_stride + row * args.cos_row_stride;
  const int64_t sin_at = b * args.sin_batch_stride + row * args.sin_row_stride;
  for (int64_t i = 0; i < half; ++i) {
    const float cos = element_of(args.cos, args.table_dtype, cos_at + i);
    const float sin = element_of(args.sin, args.table_dtype, sin_at + i);
    const int64_t first = args.interleaved ? 2 * i : i;
    const int64_t second = args.interleaved ? 2 * i + 1 : i + half;
    angles.cos.elements[first] = angles.cos.elements[second] = cos;
    angles.sin.elements[first] = -sin;
    angles.sin.elements[second] = sin;
  }
}

inline void normalise_head(const float* weight, int64_t count, const RopeAndCacheArgs& args,
                           float* x) {
  F32 squares = set1(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  if (i < count) {
    const F32 rest = load(x + i, static_cast<int>(count - i));
    squares = fma(rest, rest, squares);
  }
  const float mean = sum(squares) / static_cast<float>(count);
  const float rstd = 1.0f / __builtin_sqrtf(mean + args.eps);
  for (i = 0; i < count; ++i) x[i] = x[i] * rstd * weight[i];
}

// To `z`, from `y`.
inline void rotate_head(const RopeAndCacheArgs& args, const Angles& angles, const float* y,
                        float* z) {
  const int64_t half = args.rotary_dim / 2;
  const float* const cos = angles.cos.elements;
  const float* const sin = angles.sin.elements;
  if (args.interleaved) {
    for (int64_t i = 0; i < args.rotary_dim; i += 2) {
      z[i] = y[i] * cos[i] + y[i + 1] * sin[i];
      z[i + 1] = y[i + 1] * cos[i + 1] + y[i] * sin[i + 1];
    }
  } else {
    for (int64_t i = 0; i < half; ++i) z[i] = y[i] * cos[i] + y[i + half] * sin[i];
    for (int64_t i = half; i < args.rotary_dim; ++i) z[i] = y[i] * cos[i] + y[i - half] * sin[i];
  }
  for (int64_t i = args.rotary_dim; i < args.head_dim; ++i) z[i] = y[i];
}

template <class T>
inline T* head_at(const HeadRows& rows, int64_t b, int64_t row, int64_t head) {
  return static_cast<T*>(rows.data) + b * rows.batch_stride + row * rows.row_stride +
         head * rows.head_stride;
}

template <class T>
inline void write_cache(const RopeAndCacheArgs& args, const HeadRows& cache, const float* scale_at,
                        const CachePlace& place, int64_t head, const float* z, int64_t count) {
  if (place.page < 0 || cache.data == nullptr) return;
  const float scale = scale_at == nullptr ? 1.0f : *scale_at;
  if (args.cache_dtype == DType::kFloat8E4M3FN) {
    write_fp8<false>(z, count, scale, head_at<uint8_t>(cache, place.page, place.row, head));
  } else if (args.cache_dtype == DType::kFloat8E4M3FNUZ) {
    write_fp8<true>(z, count, scale, head_at<uint8_t>(cache, place.page, place.row, head));
  } else {
    write_head(z, count, head_at<T>(cache, place.page, place.row, head));
  }
}

// Heads [begin, end) of all, a token's q, k and v after each other.
template <class T>
inline void heads_of(const RopeAndCacheArgs& args, int64_t begin, int64_t end) {
  const int64_t heads = args.heads + 2 * args.kv_heads;
  HeadBuffer x, rotated, q_weight, k_weight;
  Angles angles;
  const auto read_weight = [&](const void* weight, HeadBuffer& to) {
    for (int64_t i = 0; weight != nullptr && i < args.head_dim; ++i) {
      to.elements[i] = element_of(weight, args.weight_dtype, i) + args.weight_offset;
    }
  };
  read_weight(args.q_weight, q_weight);
  read_weight(args.k_weight, k_weight);
  for (int64_t i = begin; i < end;) {
    const int64_t token = i / heads, b = token / args.rows, row = token % args.rows;
    if (args.rotary_dim > 0) read_angles(args, b, row, angles);
    const CachePlace place = place_of(args, b, row);
    const auto finish = [&](const HeadRows& from, int64_t head, const void* weight,
                            const HeadBuffer& of_weight) {
      read_head(head_at<T>(from, b, row, head), args.head_dim, x.elements);
      if (weight != nullptr) normalise_head(of_weight.elements, args.head_dim, args, x.elements);
      if (args.rotary_dim == 0) return static_cast<const float*>(x.elements);
      rotate_head(args, angles, x.elements, rotated.elements);
      return static_cast<const float*>(rotated.elements);
    };
    const auto scale_at = [&](const float* scales, int64_t batch_stride, int64_t head_stride,
                              int64_t head) {
      return scales == nullptr ? nullptr : scales + b * batch_stride + head * head_stride;
    };
    for (; i < end && i < (token + 1) * heads; ++i) {
      const int64_t head = i - token * heads, kv = head - args.heads;
      if (kv < 0) {
        const float* const z = finish(args.q, head, args.q_weight, q_weight);
        write_head(z, args.head_dim, head_at<T>(args.out, b, row, head));
      } else if (kv < args.kv_heads) {
        const float* const z = finish(args.k, kv, args.k_weight, k_weight);
        if (args.k_out.data != nullptr) {
          write_head(z, args.head_dim, head_at<T>(args.k_out, b, row, kv));
        }
        write_cache<T>(
            args, args.k_cache,
            scale_at(args.k_scale, args.k_scale_batch_stride, args.k_scale_head_stride, kv), place,
            kv, z, args.head_dim);
      } else if (place.page >= 0) {
        const int64_t v = kv - args.kv_heads;
        read_head(head_at<T>(args.v, b, row, v), args.head_dim_v, x.elements);
        write_cache<T>(
            args, args.v_cache,
            scale_at(args.v_scale, args.v_scale_batch_stride, args.v_scale_head_stride, v), place,
            v, x.elements, args.head_dim_v);
      }
    }
  }
}

inline void rope_and_cache_heads(const RopeAndCacheArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::kFloat32:
      return heads_of<float>(args, begin, end);
    case DType::kFloat16:
      return heads_of<Float16>(args, begin, end);
    default:
      return heads_of<BFloat16>(args, begin, end);
  }
}
