// Where the rows of keys and values lie; part of attention_body.h, so no include guard.

#include "../../common/cpu/vector.h"

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows of a sequence's keys or values of one head.
template <class T>
struct KeyRows {
  const T* data;
  int64_t row_stride;
  int64_t page_stride;
  const int32_t* pages;  // nullptr: the rows follow each other
  int64_t page_size;

  static KeyRows of(const AttentionArgs& args, const AttentionRows& rows,
                    const AttentionTask& task) {
    const T* data = static_cast<const T*>(rows.data) + task.kv_head * rows.head_stride;
    const int32_t* pages = nullptr;
    if (args.block_table != nullptr) {
      pages = args.block_table + task.sequence * args.block_table_stride;
    } else if (args.cu_seqlens_k == nullptr) {
      data += task.sequence * rows.batch_stride;
    }
    return {data + task.k_begin * rows.row_stride, rows.row_stride, rows.batch_stride, pages,
            args.page_size};
  }

  // Where rows [begin, begin + count) lie.
  void find(int64_t begin, int64_t count, const T** rows) const {
    if (pages == nullptr) {
      for (int64_t j = 0; j < count; ++j) rows[j] = data + (begin + j) * row_stride;
      return;
    }
    int64_t page = begin / page_size, row = begin % page_size;
    for (int64_t j = 0; j < count;) {
      const T* const in_page = data + pages[page++] * page_stride;
      for (; row < page_size && j < count; ++row, ++j) rows[j] = in_page + row * row_stride;
      row = 0;
    }
  }
};

// Rows that are read next. They lie apart from each other, so the machine does not foresee them.
// They are asked for line by line, evenly: what waits for memory has few places, and a crowd of
// lines holds up the loads between.
template <class T>
struct Ahead {
  const T* const* rows;
  int64_t count;
  int64_t elements;
  int64_t row = 0, at = 0;  // the next line

  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));

  // As many lines as `read` elements that are read meanwhile have.
  template <int64_t read>
  ROCM_KERNELS_VECTOR void fetch() {
    for (int64_t i = 0; i < (read + kLine - 1) / kLine && row < count; ++i) {
      __builtin_prefetch(rows[row] + at);
      at += kLine;
      if (at >= elements) {
        at = 0;
        ++row;
      }
    }
  }
};

// What the rows of queries behind the first take along.
struct Nothing {
  template <int64_t read>
  ROCM_KERNELS_VECTOR void fetch() {}
};
