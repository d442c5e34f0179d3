// A layer's row kernels, beside its two products: x and h to FP8, and the sum of a token's slots.
// AMD has kernels of its own for each. There clang waits for loads under conditions one after the
// other, so in these a load depends on nothing but its address.
//
// Timeline. Blocks do not wait for each other; | is a barrier of the block.
//
//   quantize   a team a row: the block, or 32 neighbouring lanes
//              the row's id; the kernel before; to where the row's copies go, in LDS; the row, to
//              registers
//              | a scale a row: its largest magnitude, over the team (| where that is many waves)
//              each vector: a scale of a group, over neighbouring lanes; codes; all copies
//   combine    a block some columns of a token, a thread up to 4 of them
//              ids and weights of the token's slots; the kernel before (first, unless a gate is)
//              8 slots at once: loads of their parts of K, sums in order, by weight; one store
//   on AMD     quantize has no copies and no first barrier; combine has a slot's id and weight in
//              one lane, which tells its wave
#pragma once

#include "../../blocks/rows/gpu/quantize.h"
#include "../../blocks/rows/gpu/row.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/lanes.h"
#include "problem.h"

namespace rocm_kernels {

constexpr int kRowThreads = 256;
constexpr int kCleared = 2;

struct QuantizeProblem {
  const void* rows;  // [row_count, columns], T
  int64_t stride;    // elements
  int32_t row_count, columns;
  bool aligned;               // whole vectors may be loaded
  const int32_t* rows_there;  // how many there are, where the device alone knows it; or nullptr
  const int32_t* ids;  // [rows]: those whose id is no expert's are left out; nullptr: none is
  int32_t experts;
  const int32_t* slot_rows;  // [rows, copies]: where each row's copies go, -1 for nowhere; nullptr:
                             // to its own place
  int32_t copies;            // at most kMaxTopk
  bool is_gate;              // of the layer: it lets the next kernel begin once it has waited
  int32_t* cleared;          // [kCleared] that a gate sets to 0; or nullptr
  Output output;
  int32_t block_columns;  // moe_quantize_whole_kernel: of a row, whole scale groups
};

// Threads of a row: a block's, or some that are 32 neighbours, where there are more rows than
// blocks to keep the device busy.
constexpr int kFewThreads = 32;
constexpr int kKeptVectors = 8;  // by a thread

// Rows to FP8 with one scale a row or one for each 128 columns, or as they are; converted once for
// all copies. A thread keeps what it has loaded; of rows that are longer than that the rest is read
// again, from cache. Grid: kRowThreads / kTeam rows a block.
template <typename T, int kTeam>
__global__ void __launch_bounds__(kRowThreads) moe_quantize_kernel(const QuantizeProblem p) {
  constexpr int kCount = kVectorElements<T>;
  constexpr int kStep = kTeam * kCount;
  constexpr int kRows = kRowThreads / kTeam;
  __shared__ TeamScratch scratch;
  __shared__ int32_t destinations[kRows][kMaxTopk];
  if (p.is_gate) {
    wait_for_previous_kernel();
    allow_next_kernel();
    if constexpr (kNvidia) {
      if (p.cleared != nullptr && blockIdx.x == 0 && threadIdx.x < kCleared) {
        p.cleared[threadIdx.x] = 0;
      }
    }
  } else {
    allow_next_kernel();
  }
  const int team = static_cast<int>(threadIdx.x) / kTeam;
  const int thread = static_cast<int>(threadIdx.x) % kTeam;
  const int row = static_cast<int>(blockIdx.x) * kRows + team;
  // Ids are older than the gate: no load of a row waits for its id.
  const int32_t id = p.ids != nullptr && row < p.row_count ? load_older(p.ids + row) : 0;
  if (!p.is_gate) wait_for_previous_kernel();
  const bool is_there = row < p.row_count && (p.rows_there == nullptr || row < *p.rows_there) &&
                        (p.ids == nullptr || (id >= 0 && id < p.experts));
  const int columns = is_there ? p.columns : 0;
  if (thread < p.copies) {
    destinations[team][thread] = !is_there                ? -1
                                 : p.slot_rows != nullptr ? p.slot_rows[row * p.copies + thread]
                                                          : row;
  }
  const T* const source = static_cast<const T*>(p.rows) + row * p.stride;
  const auto load_at = [&](int column) {
    return column < columns
               ? load_vector<Touch::kAgain, Fit::kRagged>(source, column, columns, p.aligned)
               : Vector{};
  };
  const int begin = thread * kCount;
  Vector kept[kKeptVectors];
#pragma unroll
  for (int i = 0; i < kKeptVectors; ++i) kept[i] = load_at(i * kStep + begin);
  lds_barrier();  // destinations

  float scale = 1.0f;
  if (p.output.scaling == Scaling::kPerToken) {
    float amax = 0.0f;
    const auto weigh = [&](const Vector& vector) {
      float values[kCount];
      unpack<T>(vector, values);
      amax = amax_of(values, amax);
    };
#pragma unroll
    for (int i = 0; i < kKeptVectors; ++i) weigh(kept[i]);
    for (int column = kKeptVectors * kStep + begin; column < columns; column += kStep) {
      weigh(load_at(column));
    }
    int slot = 0;
    amax = reduce_team<RowTeam<kTeam, 1>>(amax, MaxMagnitude{}, scratch, slot);
    scale = scale_of_amax(amax, p.output);
    if (thread < p.copies && destinations[team][thread] >= 0) {
      p.output.scales[destinations[team][thread]] = scale;
    }
  }
  // A group of columns is reduced over neighbouring lanes, so all of a team's go on to the end.
  const auto store_at = [&](Vector vector, int column) {
    if (p.output.scaling == Scaling::kNone) {
      for (int copy = 0; copy < p.copies; ++copy) {
        const int to = destinations[team][copy];
        if (to < 0) continue;
        store_words<sizeof(T), Fit::kRagged>(static_cast<T*>(p.output.data) + to * p.output.stride,
                                             column, columns, p.output.aligned, vector.word);
      }
      return;
    }
    float values[kCount];
    unpack<T>(vector, values);
    GroupScale of_group = {scale, -1};
    if (p.output.scaling == Scaling::kPerGroup) {
      of_group = group_scale<T>(values, column, columns, p.output);
    }
    uint32_t codes[kCount / 4];
    fp8_codes<Fit::kRagged>(values, 1.0f / of_group.scale, p.output, codes);
    for (int copy = 0; copy < p.copies; ++copy) {
      const int to = destinations[team][copy];
      if (to < 0) continue;
      store_codes<Fit::kRagged>(codes, to, column, columns, p.output);
      if (of_group.group >= 0) {
        p.output.scales[int64_t{to} * p.output.groups + of_group.group] = of_group.scale;
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kKeptVectors; ++i) {
    if (i * kStep < columns) store_at(kept[i], i * kStep + begin);
  }
  for (int first = kKeptVectors * kStep; first < columns; first += kStep) {
    store_at(load_at(first + begin), first + begin);
  }
}

// The same on AMD for rows that are Fit::kWhole, of which none is copied. With experts == 0 none is
// left out, and ids are any words that may be read. Grid: as above, or a row a block of more
// threads; x block_columns.
template <typename T, int kTeam, Scaling kScaling>
__global__ void __launch_bounds__(kTeam < kRowThreads ? kRowThreads : kTeam)
    moe_quantize_whole_kernel(const QuantizeProblem p) {
  constexpr int kCount = kVectorElements<T>;
  constexpr int kStep = kTeam * kCount;
  constexpr int kRows = kTeam < kRowThreads ? kRowThreads / kTeam : 1;
  __shared__ TeamScratch scratch;
  const int team = kRows == 1 ? 0 : static_cast<int>(threadIdx.x) / kTeam;
  const int thread = static_cast<int>(threadIdx.x) % kTeam;
  const int row = static_cast<int>(blockIdx.x) * kRows + team;
  const bool is_row = row < p.row_count && (p.rows_there == nullptr || row < *p.rows_there);
  const int32_t id = p.ids[is_row ? row : 0];  // a row is loaded before it is known whose it is
  const int first = static_cast<int>(blockIdx.y) * p.block_columns;
  const int after = p.columns - first < p.block_columns ? p.columns : first + p.block_columns;
  const int loaded = is_row ? after : 0;
  const T* const source = static_cast<const T*>(p.rows) + row * p.stride;
  const auto load_at = [&](int column) {
    return load_vector<Touch::kAgain, Fit::kWhole>(source, column, loaded, true);
  };
  const int begin = first + thread * kCount;
  Vector kept[kKeptVectors];
#pragma unroll
  for (int i = 0; i < kKeptVectors; ++i) kept[i] = load_at(i * kStep + begin);
  // All are awaited here, so that none is awaited behind a store.
#pragma unroll
  for (int i = 0; i < kKeptVectors; ++i) kept[i] = opaque(kept[i]);
  const bool is_there = p.experts == 0 || (id >= 0 && id < p.experts);
  const int columns = is_there ? loaded : 0;

  float inverse = 1.0f;
  if constexpr (kScaling == Scaling::kPerToken) {
    float amax = 0.0f;
    const auto weigh = [&](const Vector& vector, int column) {
      float values[kCount];
      unpack<T>(vector, values);
      const float with = amax_of(values, amax);
      amax = column < columns ? with : amax;
    };
#pragma unroll
    for (int i = 0; i < kKeptVectors; ++i) {
      if (i * kStep < columns) weigh(kept[i], i * kStep + begin);
    }
    for (int column = kKeptVectors * kStep + begin; column < columns; column += kStep) {
      weigh(load_at(column), column);
    }
    int slot = 0;
    amax = reduce_team<RowTeam<kTeam, 1>>(amax, MaxMagnitude{}, scratch, slot);
    const float scale = scale_of_amax(amax, p.output);
    inverse = 1.0f / scale;
    if (thread == 0 && columns > 0) p.output.scales[row] = scale;
  }
  // A group of columns is reduced over neighbouring lanes, so all of a team's go on to the end.
  const auto store_at = [&](Vector vector, int column) {
    float values[kCount];
    // Unpacked again: what was weighed would take more registers to keep.
    unpack<T>(opaque(vector), values);
    if constexpr (kScaling == Scaling::kPerGroup) {
      const GroupScale of_group = group_scale<T>(values, column, columns, p.output);
      inverse = 1.0f / of_group.scale;
      if (of_group.group >= 0) {
        p.output.scales[int64_t{row} * p.output.groups + of_group.group] = of_group.scale;
      }
    }
    store_fp8<Fit::kWhole>(values, inverse, row, column, columns, p.output);
  };
#pragma unroll
  for (int i = 0; i < kKeptVectors; ++i) {
    if (first + i * kStep < columns) store_at(kept[i], i * kStep + begin);
  }
  for (int from = first + kKeptVectors * kStep; from < columns; from += kStep) {
    store_at(load_at(from + thread * kCount), from + thread * kCount);
  }
}

struct CombineProblem {
  const float* parts;  // [split_k][slots][hidden]
  int64_t slots;
  const float* weights;  // [tokens, k]
  const int32_t* ids;    // [tokens, k]
  int32_t split_k, k, experts, hidden;
  void* out;  // [tokens, hidden]
  int64_t out_stride;
  DType out_dtype;
  bool gated;  // ids and weights are older than the layer's first kernel, which is a gate
};

// Neighbours of a row, rounded to T, which lie at a multiple of all their bytes.
template <typename T, int kCount>
ROCM_KERNELS_DEVICE void store_run(void* out, int64_t at, const Vec<float, kCount>& values) {
  constexpr int kPerWord = Word<T>::kElements;
  uint32_t words[kCount / kPerWord];
#pragma unroll
  for (int i = 0; i < kCount; i += kPerWord) words[i / kPerWord] = Word<T>::pack(values.data + i);
  store<Touch::kOnce>(static_cast<T*>(out) + at, words);
}

// A token's sums, at `column` of its row of the output.
template <int kColumns>
ROCM_KERNELS_DEVICE void store_sum(const CombineProblem& p, int column,
                                   const Vec<float, kColumns>& sum) {
  const int64_t to = blockIdx.x * p.out_stride + column;
  if constexpr (kColumns == 1) {
    store_element(p.out, p.out_dtype, to, sum[0]);
  } else if (p.out_dtype == DType::kFloat32) {
    store_run<float>(p.out, to, sum);
  } else if (p.out_dtype == DType::kFloat16) {
    store_run<float16>(p.out, to, sum);
  } else {
    store_run<bfloat16>(p.out, to, sum);
  }
}

// out[t] = sum over its slots, in order, of weight * (sum over the parts of K, in order); rounded
// once. Grid: tokens x blocks of kRowThreads * kColumns columns. The parts of several slots are on
// their way at once.
template <int kColumns>
__global__ void __launch_bounds__(kRowThreads) moe_combine_kernel(const CombineProblem p) {
  using Part = Vec<float, kColumns>;
  constexpr int kAtOnce = 8;
  const int64_t first_slot = int64_t{blockIdx.x} * p.k;
  const int column =
      (static_cast<int>(blockIdx.y) * kRowThreads + static_cast<int>(threadIdx.x)) * kColumns;
  bool is_there[kAtOnce];
  float weights[kAtOnce];
  const auto read_slots = [&](int first) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t slot = first_slot + first + j;
      const int32_t id = first + j < p.k ? load_older(p.ids + slot) : -1;
      is_there[j] = id >= 0 && id < p.experts;
      weights[j] = first + j < p.k ? load_older(p.weights + slot) : 0.0f;
    }
  };
  allow_next_kernel();
  if (p.gated) read_slots(0);
  wait_for_previous_kernel();
  if (!p.gated) read_slots(0);
  if (column >= p.hidden) return;
  Part sum = {};
  for (int first = 0; first < p.k; first += kAtOnce) {
    if (first > 0) read_slots(first);
    Part values[kAtOnce] = {};
    for (int part = 0; part < p.split_k; ++part) {
      const float* const from = p.parts + (part * p.slots + first_slot + first) * p.hidden + column;
      Part added[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float* const address = from + int64_t{j} * p.hidden;
        if constexpr (kColumns == 4) {
          added[j] = load_if<Touch::kOnce, Part>(is_there[j], address);
        } else {
          if (is_there[j]) added[j] = load<Touch::kOnce, Part>(address);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) values[j][i] += added[j][i];
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!is_there[j]) continue;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] = fmaf(weights[j], values[j][i], sum[i]);
    }
  }
  store_sum(p, column, sum);
}

// The same on AMD: small blocks, so that few tokens meet many compute units. kAllParts: those of
// slots that are left out are loaded, too, so that no load waits for ids; memory is there for them.
constexpr int kCombineThreads = 64;
template <int kColumns, int kAtOnce, bool kAllParts>
__global__ void __launch_bounds__(kCombineThreads)
    moe_combine_narrow_kernel(const CombineProblem p) {
  using Part = Vec<float, kColumns>;
  ask_for(p.out_dtype);
  // A lane a slot; those without one have the last.
  static_assert(kMaxTopk <= 32, "moe_combine_narrow_kernel: a wave has a lane for each slot");
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int64_t first_slot = int64_t{blockIdx.x} * p.k;
  const int64_t slot = first_slot + (lane < p.k ? lane : p.k - 1);
  const int32_t id = p.ids[slot];
  const float weight = p.weights[slot];
  const auto routed = [&] {
    const int32_t its = opaque(id);  // not awaited before it is asked for
    return static_cast<uint32_t>(ballot(lane < p.k && its >= 0 && its < p.experts));
  };
  const int column =
      (static_cast<int>(blockIdx.y) * kCombineThreads + static_cast<int>(threadIdx.x)) * kColumns;
  const bool is_column = column < p.hidden;  // lanes without one stay: they may have a slot
  uint32_t left = kAllParts ? 0 : routed();  // slots, a bit each
  const int count = kAllParts ? p.k : bits_of(left);
  Part sum = {};
  for (int first = 0; first < count; first += kAtOnce) {
    // Behind the last slot it comes again.
    int slots[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if constexpr (kAllParts) {
        slots[j] = first + j < p.k ? first + j : p.k - 1;
      } else {
        slots[j] = __builtin_ctz(left);
        const uint32_t others = left & (left - 1);
        left = others != 0 ? others : left;
      }
    }
    const auto load_part = [&](int part, Part(&loaded)[kAtOnce]) {
      const float* const from = p.parts + (part * p.slots + first_slot) * p.hidden;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int offset = slots[j] * p.hidden + (is_column ? column : 0);  // below 2^29
        loaded[j] = load<Touch::kOnce, Part>(at(from, offset * static_cast<int>(sizeof(float))));
      }
      keep_order();
    };
    Part values[kAtOnce];
    load_part(0, values);
    for (int part = 1; part < p.split_k; ++part) {
      Part added[kAtOnce];
      load_part(part, added);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) values[j][i] += added[j][i];
      }
    }
    const uint32_t counted = kAllParts ? routed() >> first : (2u << (count - 1 - first)) - 1;
    const float there = opaque(weight);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float its = of_one_lane(there, slots[j]);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float with = fmaf(its, values[j][i], sum[i]);
        sum[i] = (counted >> j & 1) != 0 ? with : sum[i];
      }
    }
  }
  if (is_column) store_sum(p, column, sum);
}

}  // namespace rocm_kernels
