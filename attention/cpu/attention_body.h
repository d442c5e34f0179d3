// Attention of one task; compiled once for each instruction set (common/cpu/isa.h).
//
// Keys are taken kKeyBlock at a time: scores of all rows, their softmax with a running maximum, and
// the product with the values. products_body.h includes kinds_body.h and rows_body.h, which the
// rest needs too.

#include "products_body.h"
#include "softmax_body.h"

// ---- States ------------------------------------------------------------------------------------

inline void clear(AttentionState state, int64_t rows, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    state.most[r] = kUnseen;
    state.total[r] = 0.0f;
  }
  for (int64_t e = 0; e < rows * stride; ++e) state.values[e] = 0.0f;
}

// state becomes that of its own keys and of those of `next`.
void join_states(AttentionState state, AttentionState next, int64_t rows, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    const float most = state.most[r] < next.most[r] ? next.most[r] : state.most[r];
    const float base = most < kLeast ? kLeast : most;
    float by[kBlock], next_by[kBlock];
    store_block<float>(by, exp_of_negative(all(state.most[r] - base)));
    store_block<float>(next_by, exp_of_negative(all(next.most[r] - base)));
    state.most[r] = most;
    state.total[r] = state.total[r] * by[0] + next.total[r] * next_by[0];
    float* const values = state.values + r * stride;
    const float* const added = next.values + r * stride;
    for (int64_t e = 0; e < stride; e += kLanes) {
      store(values + e, fma(load(added + e), set1(next_by[0]), load(values + e) * set1(by[0])));
    }
  }
}

inline float sink_of(const AttentionArgs& args, int64_t head) {
  if (args.sink_dtype == DType::kFloat32) return static_cast<const float*>(args.sinks)[head];
  if (args.sink_dtype == DType::kFloat16) {
    return sum(load(static_cast<const Float16*>(args.sinks) + head, 1));
  }
  return sum(load(static_cast<const BFloat16*>(args.sinks) + head, 1));
}

// The values of a state, from the order of their kind.
#if !ROCM_KERNELS_CPU_AVX2
template <class K>
void put_in_order(float* values, int64_t elements) {
  constexpr int kQuad = 4, kQuads = K::kChunk / kQuad;
  for (int64_t e = 0; e < elements; e += K::kChunk) {
    float chunk[K::kChunk];
    __builtin_memcpy(chunk, values + e, sizeof(chunk));
    for (int quad = 0; quad < kQuads; ++quad) {
      const int part = quad % K::kParts, lane = quad / K::kParts * kQuad;
      __builtin_memcpy(values + e + quad * kQuad, chunk + part * kLanes + lane,
                       kQuad * sizeof(float));
    }
  }
}
#endif

// Rows of out and lse.
template <class K, class Q>
void finish(const AttentionArgs& args, const AttentionTask& task, AttentionState state) {
  float gain = K::kGain;
  const int64_t group = args.heads / args.kv_heads, stride = aligned_size(args.head_dim_v);
  const bool ragged = args.cu_seqlens_q != nullptr;
  if (args.v_descale != nullptr) {
    gain *= args.v_descale[task.sequence * args.v_descale_batch_stride +
                           task.kv_head * args.v_descale_head_stride];
  }
  for (int64_t r = 0; r < task.rows; ++r) {
    const int64_t i = task.q_begin + (task.row + r) / group;
    const int64_t head = task.kv_head * group + (task.row + r) % group;
    float most = state.most[r], total = state.total[r], factor = 1.0f;
    if (args.sinks != nullptr) {
      const float sink = sink_of(args, head), both = sink < most ? most : sink;
      if (!(both < kLeast)) {  // NaN too
        float by[kBlock], of_sink[kBlock];
        store_block<float>(by, exp_of_negative(all(most - both)));
        store_block<float>(of_sink, exp_of_negative(all(sink - both)));
        factor = by[0];
        total = total * factor + of_sink[0];
        most = both;
      }
    }
    if (args.lse != nullptr) {
      args.lse[(ragged ? 0 : task.sequence * args.lse_batch_stride) + head * args.lse_head_stride +
               i] = total == 0.0f ? -__builtin_inff() : most + __builtin_logf(total);
    }
    factor = total == 0.0f ? 0.0f : factor / total * gain;
    Q* const out = static_cast<Q*>(args.out) +
                   (ragged ? 0 : task.sequence * args.out_batch_stride) + i * args.out_row_stride +
                   head * args.out_head_stride;
    float* const values = state.values + r * stride;
    if constexpr (!K::kInOrder) put_in_order<K>(values, args.head_dim_v);
    int64_t e = 0;
    for (; e + kLanes <= args.head_dim_v; e += kLanes) {
      store(out + e, load(values + e) * set1(factor));
    }
    if (e < args.head_dim_v) {
      store(out + e, load(values + e) * set1(factor), static_cast<int>(args.head_dim_v - e));
    }
  }
}

// ---- A task ------------------------------------------------------------------------------------

// Finds the keys from `begin` to the end of their block or `last`, with pointers for a whole block.
template <class T>
int64_t find_block(const KeyRows<T>& k, int64_t begin, int64_t last, const T** rows) {
  if (begin >= last) return 0;
  const int64_t count = smaller((begin / kKeyBlock + 1) * kKeyBlock, last) - begin;
  k.find(begin, count, rows);
  for (int64_t j = count; j < kKeyBlock; ++j) rows[j] = rows[count - 1];
  return count;
}

// How many rows, of all heads that are read together, are read at once.
#if ROCM_KERNELS_CPU_AVX2 || ROCM_KERNELS_CPU_AVX512
// So many that where a product begins and ends matters little, so few that the nearest cache holds
// those of a head.
#if ROCM_KERNELS_CPU_AVX512
constexpr int64_t kRowsAtOnce = 32;
#else
constexpr int64_t kRowsAtOnce = 16;
#endif

template <class K, class T>
int64_t rows_at_once(int64_t, int64_t, int64_t, int64_t) {
  return kRowsAtOnce;
}
#else
// Few, since the nearest cache holds what is read next as well, and what is packed of a head; more
// where elements are small, since the sums of values go by once for these rows. Scores want whole
// tiles, and the last queries, fewer than four, have the widest.
template <class K, class T>
int64_t rows_at_once(int64_t queries, int64_t heads, int64_t of_head, int64_t elements) {
  constexpr int64_t kSize = sizeof(T), kBytes = kSize == 1 ? 16384 : 8192, kPackedBytes = 8192;
  constexpr int64_t kPackedSize = sizeof(typename K::Multiplier::Value);
  const int64_t last = queries % 4;
  const int64_t least = kTileSums / (last == 1 || last == 2 ? last : 4);
  int64_t packed = queries > K::kFewRows ? of_head * kPackedSize : 0;
  int64_t rows = kKeyBlock;
  while (rows > least && (rows * elements * kSize > kBytes || rows * packed > kPackedBytes ||
                          rows * heads > Ahead<T>::kMostPieces)) {
    rows /= 2;
  }
  return rows;
}
#endif

// The states of keys [first, last) of a split, from nothing, for the task's KV head and those that
// follow it: `heads` of them, each with queries, `q_elements` apart, and a state.
//
// Some rows of all heads are read at a time, in the order of memory, and each product asks for a
// share of the next rows: the machine foresees little of it, since rows of a page end where the
// page does. That is even, and not far ahead: what waits for memory has few places.
template <class K, class T>
void attend_split(const AttentionArgs& args, const AttentionTask& task, int64_t heads,
                  const Sight* sights, const typename K::Multiplier::Value* q, int64_t q_elements,
                  int64_t first, int64_t last, const AttentionState* states) {
  using Weight = typename K::Weight;
  alignas(64) float scores[kMaxTaskRows * kKeyBlock];
  const T* key_rows[2][kKeyBlock];  // of this block and the next
  const T* value_rows[2][kKeyBlock];
  const KeyRows<T> k = KeyRows<T>::of(args, args.k, task), v = KeyRows<T>::of(args, args.v, task);
  const int64_t q_stride = aligned_size(args.head_dim), stride = aligned_size(args.head_dim_v);
  Scratch<K> scratch;
  Ahead<T> ahead;
  const int64_t size = args.head_dim, size_v = args.head_dim_v;
  const int64_t to_head = args.k.head_stride, to_head_v = args.v.head_stride;
  const int64_t all = (heads - 1) * to_head + size;  // elements of a row of all heads
  const int64_t all_v = (heads - 1) * to_head_v + size_v;
  const int64_t at_once =
      rows_at_once<K, T>(task.rows, heads, larger(size, size_v), larger(all, all_v));
  for (int64_t h = 0; h < heads; ++h) clear(states[h], task.rows, stride);
  int now = 0;
  int64_t count = find_block(k, first, last, key_rows[now]);
  find_block(v, first, last, value_rows[now]);
  touch_lines(key_rows[now], smaller(at_once, count), all);
  for (int64_t begin = first; begin < last; now = 1 - now) {
    const int64_t end = begin + count, next = find_block(k, end, last, key_rows[1 - now]);
    find_block(v, end, last, value_rows[1 - now]);
    int64_t after = next;
    if (Ahead<T>::kAcrossSplits && next == 0) {
      after = find_block(k, end, task.last_key, key_rows[1 - now]);
    }
    for (int64_t j = 0; j < count; j += at_once) {
      const int64_t some = smaller(at_once, count - j);
      if (all >= Ahead<T>::kLeastTouched) {
        touch_pages(key_rows[1 - now] + j, smaller(some, larger(next - j, 0)), all);
      }
      if (j + at_once < count) {
        ahead.list(key_rows[now] + j + at_once, at_once, heads, to_head, size);
      } else {
        ahead.list(value_rows[now], at_once, heads, to_head_v, size_v);
      }
      for (int64_t h = 0; h < heads; ++h) {
        const Rows<T> rows{key_rows[now] + j, h * to_head};
        auto&& asked = ahead.of_head(h, at_once);
        score<K>(q + h * q_elements, task.rows, q_stride, rows, some, size,
                 scores + h * task.rows * kKeyBlock + j, scratch, asked);
      }
    }
    for (int64_t j = 0; j < count; j += at_once) {
      const int64_t some = smaller(at_once, count - j);
      if (all_v >= Ahead<T>::kLeastTouched) {
        touch_pages(value_rows[1 - now] + j, smaller(some, larger(next - j, 0)), all_v);
      }
      if (j + at_once < count) {
        ahead.list(value_rows[now] + j + at_once, at_once, heads, to_head_v, size_v);
      } else if (after > 0) {
        ahead.list(key_rows[1 - now], at_once, heads, to_head, size);
      }
      for (int64_t h = 0; h < heads; ++h) {
        float* const its = scores + h * task.rows * kKeyBlock;
        if (j == 0) softmax<Weight>(sights[h], task, begin, count, its, states[h], stride);
        const Rows<T> rows{value_rows[now] + j, h * to_head_v};
        auto&& asked = ahead.of_head(h, at_once);
        const Weight* const weights = reinterpret_cast<const Weight*>(its) + j;
        float* const sums = states[h].values;
        add_values<K>(weights, task.rows, rows, some, size_v, sums, stride, scratch, asked);
      }
    }
    begin = end;
    count = next;
  }
}

// Splits [first, last) of a task, and of those of the KV heads that follow its own. Into `results`,
// or, of one head, out where that has no memory.
template <class T, class Q>
void attend(const AttentionArgs& args, const AttentionTask& task, int64_t heads, int64_t first,
            int64_t last, const AttentionState* results) {
  using K = Kind<Q, T>;
  using Multiplier = typename K::Multiplier;
  alignas(64) typename Multiplier::Value q[kMaxTaskElements];
  alignas(64) float own[kMaxTaskElements + 2 * kMaxTaskRows];
  alignas(64) float next[kMaxTaskElements + 2 * kMaxTaskRows];
  const int64_t group = args.heads / args.kv_heads, stride = aligned_size(args.head_dim_v);
  const int64_t q_stride = aligned_size(args.head_dim);
  const int64_t q_elements = task.rows * q_stride;
  Sight sights[kMaxTaskRows];
  for (int64_t h = 0; h < heads; ++h) {
    AttentionTask its = task;
    its.kv_head += h;
    sights[h] = {group,
                 task.k_count - task.q_count,
                 args.window_left,
                 args.window_right,
                 args.scale * Decode<Multiplier, T>::kGain,
                 args.softcap};
    if (args.k_descale != nullptr) {
      sights[h].factor *= args.k_descale[task.sequence * args.k_descale_batch_stride +
                                         its.kv_head * args.k_descale_head_stride];
    }
    load_queries<typename K::QueryMultiplier, typename K::Order, Q>(args, its, q + h * q_elements);
  }
#if ROCM_KERNELS_CPU_AVX2
  if constexpr (!K::kInOrder) put_in_pairs<K>(q, heads * q_elements);
#endif
  if (results != nullptr) {
    attend_split<K, T>(args, task, heads, sights, q, q_elements,
                       larger(first * kSplitKeys, task.first_key),
                       smaller(last * kSplitKeys, task.last_key), results);
    return;
  }
  const AttentionState state = AttentionState::at(own, task.rows);
  if (first == last) clear(state, task.rows, stride);
  for (int64_t split = first; split < last; ++split) {
    const AttentionState into = split == first ? state : AttentionState::at(next, task.rows);
    attend_split<K, T>(args, task, 1, sights, q, q_elements,
                       larger(split * kSplitKeys, task.first_key),
                       smaller((split + 1) * kSplitKeys, task.last_key), &into);
    if (split != first) join_states(state, into, task.rows, stride);
  }
  finish<K, Q>(args, task, state);
}

template <class Q>
void attend_keys(const AttentionArgs& args, const AttentionTask& task, int64_t heads, int64_t first,
                 int64_t last, const AttentionState* results) {
  if (args.kv_dtype == DType::kFloat8E4M3FN) {
    return attend<Fp8<false>, Q>(args, task, heads, first, last, results);
  }
  if (args.kv_dtype == DType::kFloat8E4M3FNUZ) {
    return attend<Fp8<true>, Q>(args, task, heads, first, last, results);
  }
  return attend<Q, Q>(args, task, heads, first, last, results);
}

inline void attend_task(const AttentionArgs& args, const AttentionTask& task, int64_t heads,
                        int64_t first, int64_t last, const AttentionState* results) {
  if (args.q_dtype == DType::kFloat32) {
    return attend_keys<float>(args, task, heads, first, last, results);
  }
  if (args.q_dtype == DType::kFloat16) {
    return attend_keys<Float16>(args, task, heads, first, last, results);
  }
  return attend_keys<BFloat16>(args, task, heads, first, last, results);
}

// Joins the states of a task's splits, which follow each other in memory, and ends the task.
template <class Q>
void join_keys(const AttentionArgs& args, const AttentionTask& task, float* states) {
  const int64_t stride = aligned_size(args.head_dim_v);
  const int64_t floats = AttentionState::floats(task.rows, args.head_dim_v);
  const AttentionState state = AttentionState::at(states, task.rows);
  for (int64_t split = 1; split < task.splits(); ++split) {
    join_states(state, AttentionState::at(states + split * floats, task.rows), task.rows, stride);
  }
  if (args.kv_dtype == DType::kFloat8E4M3FN) {
    return finish<Kind<Q, Fp8<false>>, Q>(args, task, state);
  }
  if (args.kv_dtype == DType::kFloat8E4M3FNUZ) {
    return finish<Kind<Q, Fp8<true>>, Q>(args, task, state);
  }
  return finish<Kind<Q, Q>, Q>(args, task, state);
}

inline void join_task(const AttentionArgs& args, const AttentionTask& task, float* states) {
  if (args.q_dtype == DType::kFloat32) return join_keys<float>(args, task, states);
  if (args.q_dtype == DType::kFloat16) return join_keys<Float16>(args, task, states);
  return join_keys<BFloat16>(args, task, states);
}
