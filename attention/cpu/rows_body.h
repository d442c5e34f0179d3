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

  // Of so many calls one asks: that whose i is a multiple.
  template <int64_t kElements>
  static constexpr int64_t kCalls = 1;

  // Asks memory for the lines of some elements of the i-th row from row `begin` on.
  template <int64_t kElements>
  ROCM_KERNELS_VECTOR void fetch(int64_t begin, int64_t i, int64_t e) const {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    const T* const elements = at(begin + i, e);
    for (int64_t at = 0; at < kElements; at += kLine) __builtin_prefetch(elements + at);
  }
};

struct Nothing {
  template <int64_t kElements>
  static constexpr int64_t kCalls = 1;

  template <int64_t kElements>
  ROCM_KERNELS_VECTOR void fetch(int64_t, int64_t, int64_t) const {}
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

// What is asked for while products work: the rows of all heads that are read next.
#if ROCM_KERNELS_CPU_AVX2 || ROCM_KERNELS_CPU_AVX512

// The second cache, which has more places for lines that are waited for, and room for many rows; or
// the nearest.
#if ROCM_KERNELS_CPU_AVX512
constexpr int kNearness = 2;
#else
constexpr int kNearness = 3;
#endif

// Line after line in the order of memory, however the products go that ask: then the machine sees
// what comes, and reads ahead too.
template <class T>
struct Ahead {
  static constexpr bool kAcrossSplits = true;  // the next split's keys are most likely next
  // Elements of rows whose pages are worth a touch: of shorter ones it asks for one page many
  // times.
  static constexpr int64_t kLeastTouched = 4096 / static_cast<int64_t>(sizeof(T));
  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  const T* const* rows;
  const T* const* last;
  const T *line, *end;
  int64_t elements;  // of a row

  void list(const T* const* its_rows, int64_t count, int64_t heads, int64_t head_stride,
            int64_t head_elements) {
    rows = its_rows;
    last = rows + count - 1;
    elements = (heads - 1) * head_stride + head_elements;
    line = *rows;
    end = line + elements;
  }

  Ahead& of_head(int64_t, int64_t) { return *this; }

  template <int64_t kElements>
  static constexpr int64_t kCalls = kLine > kElements ? kLine / kElements : 1;

  template <int64_t kElements>
  ROCM_KERNELS_VECTOR void fetch(int64_t, int64_t i, int64_t) {
    if (i % kCalls<kElements> != 0) return;
    for (int64_t at = 0; at < kCalls<kElements> * kElements; at += kLine) {
      __builtin_prefetch(line, 0, kNearness);
      line += kLine;
      if (__builtin_expect(line >= end, 0)) {
        rows += rows != last;
        line = *rows;
        end = line + elements;
      }
    }
  }
};

#else

// For each product what its like of the next rows reads: of each head some rows, in the order of
// memory.
template <class T>
struct Ahead {
  static constexpr bool kAcrossSplits = false;
  static constexpr int64_t kLeastTouched = 0;
  static constexpr int64_t kMostPieces = 1024;
  const T* pieces[kMostPieces + 1];

  void list(const T* const* rows, int64_t count, int64_t heads, int64_t head_stride, int64_t) {
    const T** piece = pieces;
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t h = 0; h < heads; ++h) *piece++ = rows[j] + h * head_stride;
    }
  }

  Rows<T> of_head(int64_t h, int64_t count) const { return {pieces + h * count, 0}; }
};

#endif
