// Device code and launcher of rmsnorm_fp8 for both GPU families; see rmsnorm_fp8.h for the maths.
//
// The kernel reads four bytes and writes three for each 16-bit element and does about nine
// instructions on it: memory decides. So every byte is touched once. A team of threads holds its
// row in registers between the sum of squares and the scaling (h is rounded to x's type before it
// is used, so holding it in that type loses nothing), asks for the weight before it waits for the
// row, and asks for its next row before it reduces the present one: loads are in flight all the
// time. Blocks stay for many rows, with the weight in registers.
//
// Timeline of a team, whose threads all do the same. | is a barrier of its block, or of its cluster
// of blocks; there is none where a team is lanes of one wave. Teams wait for nothing of each other.
//
//   (NVIDIA, settled weight: load it, and do a row without columns)
//   the kernel before; load the first row of x and of the residual, the weight
//   each row: h = x + residual, to memory; squares; load the next row
//             | sum of squares over the team: 1 / rms
//             a scale a token: | largest magnitude of y over the team
//             y, with the scale of a group over neighbouring lanes; codes; stores
//
// Rows beyond registers (rmsnorm_fp8_any_kernel) are read again behind each |, mostly from cache.
#pragma once

#include "../blocks/rows/gpu/norm.h"
#include "../blocks/rows/gpu/row_launch.h"
#include "rmsnorm_fp8.h"

namespace rocm_kernels {
namespace {

// Whether a block has registers for one row and no more. Then it does one row, and asks for the
// weight once x and the residual are added; the loads of other blocks are in flight meanwhile.
// (H200, 2048 rows of 32768: 116 us, where registers that spilled took 270.)
template <typename Team>
constexpr bool kOneRow =
    kNvidia && Team::kBlocks == 1 && Team::kThreads >= 512 && Team::kVectors > 2;

// Rows that fit in the registers of a team. Grid: any number of blocks; a block a row if kOneRow.
template <typename T, typename Team>
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(Team::kBlockThreads, Team::kResidentThreads)
    rmsnorm_fp8_kernel(const RmsnormParams<T> p) {
  allow_next_kernel();
  constexpr int kVectors = Team::kVectors;
  __shared__ TeamScratch scratch;
  int slot = 0;

  TeamThread<Team> here;
  const auto column_of = [&](int v) { return here.template column<T>(v); };
  // Teams without a row keep to the block's barriers: their row has no columns.
  const auto columns_of = [&](int row) { return row < p.rows ? p.hidden : 0; };

  Vector x[kVectors], residual[kVectors], weight[kVectors];
  const auto load_row = [&](int row) {
    const int columns = columns_of(row);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x[v] = load_vector<Touch::kOnce, Fit::kWhole>(p.x + int64_t{row} * p.x_stride, column_of(v),
                                                    columns, p.aligned);
    }
    if (p.residual == nullptr) return;  // they stay -0
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      residual[v] = load_vector<Touch::kOnce, Fit::kWhole>(
          p.addend + int64_t{row} * p.addend_stride, column_of(v), columns, p.aligned);
    }
  };

  const auto load_weight = [&] {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      weight[v] = load_vector<Touch::kAgain, Fit::kWhole>(static_cast<const T*>(p.weight),
                                                          column_of(v), p.hidden, p.aligned);
    }
  };
  // What other kernels stream meanwhile makes memory slow: a weight that is not in L2 comes late,
  // and so does code. So a kernel that may have its weight first does a row that is not there,
  // while it waits (H200, decoder layers of 4096 columns: 0.7 us of a norm's 2.7).
  const bool rehearses = kNvidia && !kOneRow<Team> && p.weight_is_settled;
  if (rehearses) load_weight();
  bool team_is_there = false;
#pragma unroll 1
  for (int pass = rehearses ? 0 : 1; pass < 2; ++pass) {
    const bool rehearsal = kNvidia && opaque_uniform(pass) == 0;
    if (!rehearsal) wait_for_previous_kernel();
    const float given_scale =
        p.output.scaling == Scaling::kStatic && !rehearsal ? *p.output.scale : 1.0f;
    // Without a residual: x + -0 is x for every x, also for -0, and spares a second path.
    if (p.residual == nullptr) {
      const float zeros[2] = {-0.0f, -0.0f};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int w = 0; w < 4; ++w) residual[v].word[w] = opaque(Word<T>::pack(zeros));
      }
    }

    int first = rehearsal ? p.rows : here.first_row();
    const int end = rehearsal ? p.rows + 1 : p.rows;
    load_row(first + here.team);
    if (!kOneRow<Team> && !rehearses) load_weight();
    if (!team_is_there) here.wait_for_team();
    team_is_there = true;
    float inverse = opaque(1.0f / given_scale);

    for (; first < end; first += here.step) {
      first = opaque_uniform(first);
      here.thread = opaque(here.thread);
      const int row = first + here.team;
      const int columns = columns_of(row);

      Vector h[kVectors];
      float squares = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        h[v] = add<T>(x[v], residual[v]);
        squares += sum_of_squares<T>(h[v], column_of(v), columns);
        if (p.residual != nullptr) {
          store_words<sizeof(T), Fit::kWhole>(p.residual + int64_t{row} * p.residual_stride,
                                              column_of(v), columns, p.aligned, h[v].word);
        }
      }
      if constexpr (kOneRow<Team>) {
        load_weight();
      } else if (first + here.step < p.rows) {
        load_row(row + here.step);
      }

      const float sum = reduce_team<Team>(squares, Sum{}, scratch, slot);
      store_norm<T, Team>(h, weight, sum, row, columns, here, p, scratch, slot, inverse);
      if constexpr (kOneRow<Team>) return;
    }
  }
}

// Everything else: rows too long for registers, or no whole number of vectors, or misaligned, a
// float32 weight beside 16-bit rows, an FP8 dialect foreign to the target. h is read again for the
// later passes, mostly from cache.
template <typename T, int kTeam>
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(kTeam, 1024)
    rmsnorm_fp8_any_kernel(const RmsnormParams<T> p) {
  begin_after_previous_kernel();
  constexpr int kCount = kVectorElements<T>;
  __shared__ TeamScratch scratch;
  int slot = 0;
  const int begin = static_cast<int>(threadIdx.x) * kCount;
  // The same for all threads, since groups are reduced across lanes.
  const int end = (p.hidden + kTeam * kCount - 1) / (kTeam * kCount) * (kTeam * kCount);
  const float given_scale = p.output.scaling == Scaling::kStatic ? *p.output.scale : 1.0f;

  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x_row = p.x + int64_t{row} * p.x_stride;
    // Each thread reads back what it wrote itself, so no fence is needed.
    const T* h_row = p.residual != nullptr ? p.residual + int64_t{row} * p.residual_stride : x_row;

    float squares = 0.0f;
    for (int column = begin; column < end; column += kTeam * kCount) {
      Vector h = load_vector<Touch::kAgain, Fit::kRagged>(x_row, column, p.hidden, p.aligned);
      if (p.residual != nullptr) {
        const T* addend_row = p.addend + int64_t{row} * p.addend_stride;
        h = add<T>(
            h, load_vector<Touch::kAgain, Fit::kRagged>(addend_row, column, p.hidden, p.aligned));
        store_words<sizeof(T), Fit::kRagged>(p.residual + int64_t{row} * p.residual_stride, column,
                                             p.hidden, p.aligned, h.word);
      }
      squares += sum_of_squares<T>(h, column, p.hidden);
    }
    const float sum = reduce_team<RowTeam<kTeam, 1>>(squares, Sum{}, scratch, slot);
    const float rstd = reciprocal_sqrt(sum * p.inverse_hidden + p.eps);

    const auto y_of = [&](int column, float (&y)[kCount]) {
      float scaled[kCount];
      normalize<T>(load_vector<Touch::kAgain, Fit::kRagged>(h_row, column, p.hidden, p.aligned),
                   rstd, scaled);
      if (!p.float_weight) {
        const T* weight = static_cast<const T*>(p.weight);
        apply_weight<T>(
            load_vector<Touch::kAgain, Fit::kRagged>(weight, column, p.hidden, p.aligned),
            p.weight_offset, scaled, y);
        return;
      }
      const float* weight = static_cast<const float*>(p.weight);
      for (int i = 0; i < kCount; i += 4) {
        float quad[4];
        unpack<float>(
            load_vector<Touch::kAgain, Fit::kRagged>(weight, column + i, p.hidden, p.aligned),
            quad);
        for (int j = 0; j < 4; ++j) y[i + j] = scaled[i + j] * (quad[j] + p.weight_offset);
      }
    };

    float inverse = 1.0f / given_scale;
    if (p.output.scaling == Scaling::kPerToken) {
      float amax = 0.0f;
      for (int column = begin; column < end; column += kTeam * kCount) {
        float y[kCount];
        y_of(column, y);
        amax = amax_of(y, amax);
      }
      amax = reduce_team<RowTeam<kTeam, 1>>(amax, MaxMagnitude{}, scratch, slot);
      const float scale = scale_of_amax(amax, p.output);
      inverse = 1.0f / scale;
      if (threadIdx.x == 0) p.output.scales[row] = scale;
    }
    for (int column = begin; column < end; column += kTeam * kCount) {
      float y[kCount];
      y_of(column, y);
      store_output<T, Fit::kRagged>(y, inverse, row, column, p.hidden, p.output);
    }
  }
}

// ---- Launcher ---------------------------------------------------------------------------------

template <typename T>
Status launch_typed(const RmsnormFp8Args& args, const DeviceFacts& facts, Stream stream) {
  constexpr int kCount = kVectorElements<T>;
  RmsnormParams<T> p = make_norm_params<T>(args);
  p.weight_is_settled &= facts.is_hopper_or_later();  // before, no kernel starts early
  const int64_t vectors = (args.hidden + kCount - 1) / kCount;
  const bool whole =
      args.hidden % kCount == 0 && p.aligned && !p.float_weight && fits(p.output, facts);
  Status status = nullptr;
  const auto launch_held = [&](auto team) {
    using Team = decltype(team);
    status =
        launch_team<Team, kOneRow<Team>>(rmsnorm_fp8_kernel<T, Team>, args.rows, p, facts, stream);
  };
  if (whole && with_row_team(vectors, args.rows, facts, launch_held)) return status;
  return launch_any_row(rmsnorm_fp8_any_kernel<T, 256>, rmsnorm_fp8_any_kernel<T, 1024>, vectors,
                        args.rows, p, facts, stream);
}

}  // namespace

Status launch_rmsnorm_fp8(const RmsnormFp8Args& args, const Context& context) {
  const auto launch = [&](auto element, const DeviceFacts& facts, Stream stream) {
    return launch_typed<decltype(element)>(args, facts, stream);
  };
  return launch_rows(args, args.x_dtype, args.hidden,
                     {args.x_stride, args.residual_stride, args.addend_stride, args.out_stride},
                     context, launch);
}

}  // namespace rocm_kernels
