// A share of attention on the CPU: some rows of queries that see the keys of one KV head. Plain
// structs and whole numbers alone, for the launcher and the bodies alike.
//
// The query heads of a KV head and the queries of a sequence make the rows of one matrix, row
// i * group + g for query i and head g of the group, so that each key and value is read once for
// all of them. Keys are taken in splits of kSplitKeys, counted from the sequence's first key: each
// gives a State from nothing, and states join in their order. So the bits depend neither on who
// computes which split nor on the other sequences, and a long sequence has sums of two levels.
#pragma once

#include <cstdint>

#include "../../common/core/math.h"
#include "../attention.h"

namespace rocm_kernels {
namespace cpu {

constexpr int64_t kKeyBlock = 64;              // keys whose scores are held at a time
constexpr int64_t kSplitKeys = 8 * kKeyBlock;  // keys of a State
constexpr int64_t kMaxTaskRows = 64;           // rows of a task,
constexpr int64_t kMaxTaskElements = 1 << 14;  // and elements of its matrices
constexpr int64_t kElementAlign = 64;  // the elements of a row of these, at most kMaxHeadDim

constexpr int64_t aligned_size(int64_t elements) {
  return ceil_div(elements, kElementAlign) * kElementAlign;
}

inline int64_t task_rows(const AttentionArgs& args) {
  const int64_t larger = args.head_dim > args.head_dim_v ? args.head_dim : args.head_dim_v;
  const int64_t rows = kMaxTaskElements / aligned_size(larger);
  return rows < kMaxTaskRows ? rows : kMaxTaskRows;
}

struct AttentionTask {
  int64_t sequence, kv_head;
  int64_t q_begin, q_count;     // the sequence's queries, as rows of q
  int64_t k_begin, k_count;     // its keys; k_begin is a row of k, 0 in pages
  int64_t row, rows;            // of the sequence's q_count * group rows
  int64_t first_key, last_key;  // keys [first_key, last_key) are seen by some row

  int64_t first_split() const { return first_key / kSplitKeys; }
  int64_t splits() const {
    return last_key > first_key ? ceil_div(last_key, kSplitKeys) - first_split() : 0;
  }
};

// What rows know after some keys: out * total on the scale e^-most, and the sums themselves.
struct AttentionState {
  float* most;    // [rows]
  float* total;   // [rows]
  float* values;  // [rows, aligned_size(head_dim_v)]

  static int64_t floats(int64_t rows, int64_t head_dim_v) {
    return rows * (2 + aligned_size(head_dim_v));
  }
  static AttentionState at(float* memory, int64_t rows) {
    return {memory, memory + rows, memory + 2 * rows};
  }
};

}  // namespace cpu
}  // namespace rocm_kernels
