// Device code and launcher of swiglu_fp8 for both GPU families; see swiglu_fp8.h for the maths.
//
// Four bytes in and one out for each output element of 16-bit inputs: memory decides, as long as
// the activation is a handful of operations, and FP8 is made two at a time.
//
// Unless a scale depends on a whole row, no thread needs another's elements, so rows are one long
// run of vectors, one a thread, in blocks that come and go. With a scale a token, a team of threads
// holds its row's results in registers between the reduction of their magnitude and their scaling,
// as in rmsnorm_fp8.
//
// Many long rows have a block each on NVIDIA, of as many threads as hold the row: nothing is loaded
// ahead, but a multiprocessor has two such blocks where a team of 1024 threads is alone on it.
//
// Timeline. | is a barrier of a team's block or cluster; there is none where a team is lanes of one
// wave.
//
//   flat    the kernel before; load gate and up of one vector; y, with the scale of a group over
//           neighbouring lanes; store
//   token   the kernel before; load gate and up of the team's first row
//           each row: y; load the next row | largest magnitude over the team; codes, stores
//   row     the kernel before; load gate and up; y | largest magnitude over the block; codes,
//           stores
#pragma once

#include "../blocks/rows/gpu/activation.h"
#include "../blocks/rows/gpu/row_launch.h"
#include "swiglu_fp8.h"

namespace rocm_kernels {
namespace {

template <typename T>
struct SwigluParams {
  const T* gate;  // [rows, columns]
  const T* up;    // [rows, columns] or nullptr
  int32_t gate_stride;
  int32_t up_stride;
  int32_t rows;
  int32_t columns;
  Activation activation;
  int32_t aligned;  // whole vectors may be loaded from gate and up
  Output output;
};

template <int kCount>
ROCM_KERNELS_DEVICE void activate(Activation activation, float (&v)[kCount]) {
  if (activation == Activation::kSilu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = silu(v[i]);
  } else if (activation == Activation::kGelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = gelu(v[i]);
  } else if (activation == Activation::kGeluTanh) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = gelu_tanh(v[i]);
  }
}

// y of one vector.
template <typename T>
ROCM_KERNELS_DEVICE void gated(const SwigluParams<T>& p, const Vector& gate, const Vector& up,
                               float (&y)[kVectorElements<T>]) {
  unpack<T>(gate, y);
  activate(p.activation, y);
  if (p.up != nullptr) multiply<T>(up, y, y);
}

template <Touch kTouch, Fit kFit, typename T>
ROCM_KERNELS_DEVICE void load_gate_up(const SwigluParams<T>& p, int row, int column, int columns,
                                      Vector& gate, Vector& up) {
  gate =
      load_vector<kTouch, kFit>(p.gate + int64_t{row} * p.gate_stride, column, columns, p.aligned);
  if (p.up == nullptr) return;
  up = load_vector<kTouch, kFit>(p.up + int64_t{row} * p.up_stride, column, columns, p.aligned);
}

// ---- No scale a token: every vector by itself -------------------------------------------------

constexpr int kFlatThreads = 256;

// Division of numbers below 2^31 by one that is known on the host.
struct Divisor {
  uint32_t value;
  uint32_t multiplier;  // floor(2^(32 + shift) / value) + 1
  uint32_t shift;
};

inline Divisor make_divisor(uint32_t value) {
  uint32_t shift = 0;
  while ((uint64_t{2} << shift) < value) ++shift;
  const uint64_t multiplier = value == 1 ? 0 : (uint64_t{1} << (32 + shift)) / value + 1;
  return {value, static_cast<uint32_t>(multiplier), shift};
}

ROCM_KERNELS_DEVICE int quotient(int number, const Divisor& divisor) {
  if (divisor.value == 1) return number;
  return static_cast<int>(__umulhi(static_cast<uint32_t>(number), divisor.multiplier) >>
                          divisor.shift);
}

// Thread i of the grid has vector i % vectors of row i / vectors; `vectors` is padded so that no
// group straddles two waves.
template <typename T, Fit kFit>
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(kFlatThreads, 2048)
    swiglu_fp8_flat_kernel(const SwigluParams<T> p, const Divisor vectors) {
  begin_after_previous_kernel();
  const int item = static_cast<int>(blockIdx.x * kFlatThreads + threadIdx.x);
  const int row = quotient(item, vectors);
  const int column = (item - row * static_cast<int>(vectors.value)) * kVectorElements<T>;
  const int columns = row < p.rows ? p.columns : 0;

  Vector gate, up;
  load_gate_up<Touch::kOnce, kFit>(p, row, column, columns, gate, up);
  float inverse = 1.0f;
  if (p.output.scaling == Scaling::kStatic) inverse = opaque(1.0f / *p.output.scale);
  float y[kVectorElements<T>];
  gated(p, gate, up, y);
  store_output<T, kFit>(y, inverse, row, column, columns, p.output);
}

// ---- A scale a token --------------------------------------------------------------------------

// Rows that fit in the registers of a team. Grid: any number of blocks.
template <typename T, typename Team>
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(Team::kBlockThreads, Team::kResidentThreads)
    swiglu_fp8_token_kernel(const SwigluParams<T> p) {
  begin_after_previous_kernel();
  constexpr int kVectors = Team::kVectors;
  constexpr int kCount = kVectorElements<T>;
  __shared__ TeamScratch scratch;
  int slot = 0;

  TeamThread<Team> here;
  const auto column_of = [&](int v) { return here.template column<T>(v); };
  // Teams without a row keep to the block's barriers: their row has no columns.
  const auto columns_of = [&](int row) { return row < p.rows ? p.columns : 0; };

  Vector gate[kVectors], up[kVectors];
  const auto load_row = [&](int row) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      load_gate_up<Touch::kOnce, Fit::kWhole>(p, row, column_of(v), columns_of(row), gate[v],
                                              up[v]);
    }
  };

  int first = here.first_row();
  load_row(first + here.team);
  here.wait_for_team();
  for (; first < p.rows; first += here.step) {
    first = opaque_uniform(first);
    here.thread = opaque(here.thread);
    const int row = first + here.team;
    const int columns = columns_of(row);

    float y[kVectors][kCount];
    float amax = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      gated(p, gate[v], up[v], y[v]);
      amax = column_of(v) < columns ? amax_of(y[v], amax) : amax;
    }
    if (first + here.step < p.rows) load_row(row + here.step);

    amax = reduce_team<Team>(amax, MaxMagnitude{}, scratch, slot);
    const float scale = scale_of_amax(amax, p.output);
    if (here.thread == 0 && columns > 0) p.output.scales[row] = scale;
    const float inverse = opaque(1.0f / scale);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      store_fp8<Fit::kWhole>(y[v], inverse, row, column_of(v), columns, p.output);
    }
  }
}

// Long rows, on NVIDIA. Five vectors a thread: of 480 at most, so that a multiprocessor holds two
// rows. Grid: rows.
template <int kVectors>
constexpr int kRowThreads = kVectors == 5 ? 480 : 1024;

template <typename T, int kVectors>
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(kRowThreads<kVectors>, 1024)
    swiglu_fp8_row_kernel(const SwigluParams<T> p) {
  begin_after_previous_kernel();
  constexpr int kCount = kVectorElements<T>;
  __shared__ float partial[32];
  const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const auto column_of = [&](int v) { return (v * threads + thread) * kCount; };

  Vector gate[kVectors], up[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    load_gate_up<Touch::kOnce, Fit::kWhole>(p, row, column_of(v), p.columns, gate[v], up[v]);
  }
  float y[kVectors][kCount];
  float amax = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    gated(p, gate[v], up[v], y[v]);
    amax = column_of(v) < p.columns ? amax_of(y[v], amax) : amax;
  }

  const int lane = thread % kWaveSize;
  amax = reduce_lanes<kWaveSize>(amax, MaxMagnitude{});
  if (lane == 0) partial[thread / kWaveSize] = amax;
  lds_barrier();
  amax = lane < threads / kWaveSize ? partial[lane] : 0.0f;
  const float scale = scale_of_amax(reduce_lanes<kWaveSize>(amax, MaxMagnitude{}), p.output);
  if (thread == 0) p.output.scales[row] = scale;
  const float inverse = opaque(1.0f / scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    store_fp8<Fit::kWhole>(y[v], inverse, row, column_of(v), p.columns, p.output);
  }
}

// Any row at all: too long for registers, or no whole number of vectors, or misaligned, or of an
// FP8 dialect foreign to the target. Read twice, the second time mostly from cache.
template <typename T, int kTeam>
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(kTeam, 1024)
    swiglu_fp8_any_token_kernel(const SwigluParams<T> p) {
  begin_after_previous_kernel();
  constexpr int kCount = kVectorElements<T>;
  __shared__ TeamScratch scratch;
  int slot = 0;
  const int begin = static_cast<int>(threadIdx.x) * kCount;

  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const auto y_of = [&](int column, float (&y)[kCount]) {
      Vector gate, up;
      load_gate_up<Touch::kAgain, Fit::kRagged>(p, row, column, p.columns, gate, up);
      gated(p, gate, up, y);
    };
    float amax = 0.0f;
    for (int column = begin; column < p.columns; column += kTeam * kCount) {
      float y[kCount];
      y_of(column, y);
      amax = amax_of(y, amax);
    }
    amax = reduce_team<RowTeam<kTeam, 1>>(amax, MaxMagnitude{}, scratch, slot);
    const float scale = scale_of_amax(amax, p.output);
    if (threadIdx.x == 0) p.output.scales[row] = scale;
    const float inverse = 1.0f / scale;
    for (int column = begin; column < p.columns; column += kTeam * kCount) {
      float y[kCount];
      y_of(column, y);
      store_fp8<Fit::kRagged>(y, inverse, row, column, p.columns, p.output);
    }
  }
}

// ---- Launcher ---------------------------------------------------------------------------------

// Whether each row has a block of its own. Rows that a team of 1024 threads holds at two vectors a
// thread: once there are more of them than multiprocessors. At four: unless a cluster shares them.
inline bool has_row_blocks(int64_t vectors, int64_t rows, const DeviceFacts& facts) {
  if (!kNvidia || vectors <= 1024 || vectors > 4096) return false;
  return vectors > 2048 ? rows * kClusterBlocks > facts.compute_units : rows > facts.compute_units;
}

template <typename T, int kVectors>
Status launch_row_blocks(const SwigluParams<T>& p, int64_t vectors, const DeviceFacts& facts,
                         Stream stream) {
  const int64_t wave = facts.wave_size, threads = (vectors + kVectors - 1) / kVectors;
  const int block = static_cast<int>((threads + wave - 1) / wave * wave);
  return launch_kernel(swiglu_fp8_row_kernel<T, kVectors>, row_launch(p.rows, block, facts, stream),
                       p);
}

template <typename T>
Status launch_token(const SwigluParams<T>& p, int64_t vectors, bool whole, const DeviceFacts& facts,
                    Stream stream) {
  Status status = nullptr;
  const auto launch_held = [&](auto team) {
    using Team = decltype(team);
    status = launch_team<Team>(swiglu_fp8_token_kernel<T, Team>, p.rows, p, facts, stream);
  };
  if constexpr (kNvidia) {
    if (whole && has_row_blocks(vectors, p.rows, facts)) {
      // Five a thread where a multiprocessor holds two rows so, but not with four.
      const bool five = vectors > 2048 && vectors <= 5 * kRowThreads<5>;
      return five && p.rows > facts.compute_units
                 ? launch_row_blocks<T, 5>(p, vectors, facts, stream)
                 : launch_row_blocks<T, 4>(p, vectors, facts, stream);
    }
  }
  if (whole && with_row_team(vectors, p.rows, facts, launch_held)) return status;
  return launch_any_row(swiglu_fp8_any_token_kernel<T, 256>, swiglu_fp8_any_token_kernel<T, 1024>,
                        vectors, p.rows, p, facts, stream);
}

template <typename T>
Status launch_flat(const SwigluParams<T>& p, int64_t vectors, bool whole, const DeviceFacts& facts,
                   Stream stream) {
  const int64_t lanes = int64_t{1} << p.output.group_shift;
  const int64_t padded = (vectors + lanes - 1) / lanes * lanes;
  const Divisor divisor = make_divisor(static_cast<uint32_t>(padded));
  const int64_t blocks = (padded * p.rows + kFlatThreads - 1) / kFlatThreads;
  return launch_kernel(
      whole ? swiglu_fp8_flat_kernel<T, Fit::kWhole> : swiglu_fp8_flat_kernel<T, Fit::kRagged>,
      row_launch(blocks, kFlatThreads, facts, stream), p, divisor);
}

// Items, the vectors of a launch, are counted in 31 bits: very large tensors take several launches.
constexpr int64_t kMostItems = int64_t{1} << 30;

template <typename T>
Status launch_typed(const SwigluFp8Args& args, const DeviceFacts& facts, Stream stream,
                    int64_t most_items = kMostItems) {
  constexpr int kCount = kVectorElements<T>;
  SwigluParams<T> p{};
  p.gate = static_cast<const T*>(args.gate);
  p.up = static_cast<const T*>(args.up);
  p.gate_stride = static_cast<int32_t>(args.gate_stride);
  p.up_stride = static_cast<int32_t>(args.up_stride);
  p.rows = static_cast<int32_t>(args.rows);
  p.columns = static_cast<int32_t>(args.columns);
  p.activation = args.activation;
  p.aligned = !kNeedsAlignedVectors ||
              (rows_aligned(args.gate, args.gate_stride, sizeof(T), sizeof(Vector)) &&
               rows_aligned(args.up, args.up_stride, sizeof(T), sizeof(Vector)));
  p.output = make_output(args, args.columns, kCount);

  const int64_t vectors = (args.columns + kCount - 1) / kCount;
  const bool whole = args.columns % kCount == 0 && p.aligned && fits(p.output, facts);
  if (args.scaling == Scaling::kPerToken) return launch_token(p, vectors, whole, facts, stream);
  const int64_t slice = (most_items - 1) / (vectors + kLargestGroup) + 1;
  for (int64_t begin = 0; begin < args.rows; begin += slice) {
    SwigluParams<T> part = p;
    part.rows = static_cast<int32_t>(args.rows - begin < slice ? args.rows - begin : slice);
    part.gate += begin * args.gate_stride;
    if (part.up != nullptr) part.up += begin * args.up_stride;
    part.output.data =
        static_cast<uint8_t*>(p.output.data) + begin * args.out_stride * size_of(args.out_dtype);
    part.output.scales += begin * p.output.groups;
    if (const Status error = launch_flat(part, vectors, whole, facts, stream)) return error;
  }
  return nullptr;
}

}  // namespace

Status launch_swiglu_fp8(const SwigluFp8Args& args, const Context& context) {
  const auto launch = [&](auto element, const DeviceFacts& facts, Stream stream) {
    return launch_typed<decltype(element)>(args, facts, stream);
  };
  return launch_rows(args, args.in_dtype, args.columns,
                     {args.gate_stride, args.up_stride, args.out_stride}, context, launch);
}

}  // namespace rocm_kernels
