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

// Where elements lie, or what is read next: those of a head, `first` of a row of all heads.
template <class T>
struct Rows {
  const T* const* rows;
  int64_t first;

  ROCM_KERNELS_VECTOR const T* at(int64_t j, int64_t e) const { return rows[j] + (first + e); }
  Rows from(int64_t j) const { return {rows + j, first}; }

  // Asks memory for the lines of some elements.
  template <int64_t kElements>
  ROCM_KERNELS_VECTOR void fetch(int64_t j, int64_t e) const {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    const T* const elements = at(j, e);
    for (int64_t i = 0; i < kElements; i += kLine) __builtin_prefetch(elements + i);
  }
};

struct Nothing {
  Nothing from(int64_t) const { return {}; }

  template <int64_t kElements>
  ROCM_KERNELS_VECTOR void fetch(int64_t, int64_t) const {}
};

// Asks for all lines of `count` rows.
template <class T>
void touch_lines(const T* const* rows, int64_t count, int64_t elements) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t at = 0; at < elements; at += kLine) __builtin_prefetch(rows[j] + at);
  }
}

// Asks for a line of each of the memory's pages that `count` rows have: when their other lines are
// asked for, much later, the machine knows where the pages are.
template <class T>
void touch_pages(const T* const* rows, int64_t count, int64_t elements) {
  constexpr int64_t kPage = 4096 / static_cast<int64_t>(sizeof(T));
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t at = 0; at < elements; at += kPage) __builtin_prefetch(rows[j] + at);
  }
}
