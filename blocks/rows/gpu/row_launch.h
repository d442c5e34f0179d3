// Host: from the arguments of a row op to the launch of its kernel.
#pragma once

#include <initializer_list>

#include "../../../common/gpu/dependent_launch.h"
#include "../../../common/gpu/launch.h"
#include "quantize.h"
#include "row.h"

namespace rocm_kernels {

// ---- Checks and element type ------------------------------------------------------------------

// Null, or which size the kernels' 32-bit indices cannot hold: rows and elements are counted in 31
// bits, bytes of a row too.
inline Status check_sizes(int64_t rows, int64_t columns, std::initializer_list<int64_t> strides) {
  if (rows > int64_t{1} << 30) return "rows must be at most 2^30";
  if (columns > int64_t{1} << 28) return "columns must be at most 2^28";
  for (const int64_t stride : strides) {
    if (stride >= int64_t{1} << 31 || stride < 0) return "row strides must be below 2^31 elements";
  }
  return nullptr;
}

// Null, or what is wrong with a group size.
inline Status check_group_size(int32_t group_size) {
  const bool ok =
      group_size >= 8 && group_size <= kLargestGroup && (group_size & (group_size - 1)) == 0;
  return ok ? nullptr : "group_size must be 8, 16, 32, 64 or 128 columns on a GPU";
}

// Calls launch(element, facts, stream), which gives a Status, with a value of the type that `dtype`
// names, once the sizes are known to be ones that the kernels take. `strides`: of every row.
template <typename Args, typename Launch>
Status launch_rows(const Args& args, DType dtype, int64_t columns,
                   std::initializer_list<int64_t> strides, const Context& context,
                   const Launch& launch) {
  if (args.rows == 0 || columns == 0) return nullptr;
  if (const Status error = check_sizes(args.rows, columns, strides)) return error;
  if (args.scaling == Scaling::kPerGroup) {
    if (const Status error = check_group_size(args.group_size)) return error;
  }
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  const Stream stream = stream_of(context);
  switch (dtype) {
    case DType::kFloat32:
      return launch(float{}, facts, stream);
    case DType::kFloat16:
      return launch(float16{}, facts, stream);
    case DType::kBFloat16:
      return launch(bfloat16{}, facts, stream);
    default:
      return "inputs must be float32, float16 or bfloat16";
  }
}

// ---- Launches ---------------------------------------------------------------------------------

// Blocks for `blocks` pieces of equal work: at most as many as the device holds at once, and no
// more than it takes for all of them to get the same number of pieces, give or take one.
inline int64_t persistent_grid(int64_t blocks, int block_threads, int resident_threads,
                               const DeviceFacts& facts) {
  const int64_t resident = int64_t{facts.compute_units} * (resident_threads / block_threads);
  const int64_t rounds = (blocks + resident - 1) / resident;
  return (blocks + rounds - 1) / rounds;
}

// How a row kernel is launched; each of them calls begin_after_previous_kernel().
inline Launch row_launch(int64_t grid, int block, const DeviceFacts& facts, Stream stream) {
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(grid));
  launch.block = block;
  launch.stream = stream;
  launch.early = facts.is_hopper_or_later();
  return launch;
}

// ---- Rows held by teams -----------------------------------------------------------------------

// Blocks that share a long row on NVIDIA while every SM can have one of its own. H200, 16384
// columns: 1 row takes 2.27 us with 8 blocks, 2.30 with 4, 2.80 with 1; 32 rows are quickest
// with 1.
constexpr int kClusterBlocks = 8;

// Calls launch(RowTeam) with the smallest team that holds a row of `vectors` vectors; false if none
// does. One or two vectors a thread, so that a lone row has all its loads in flight at once; four
// only where a wave spares a barrier, or where the block is as large as it can be.
template <typename Launch>
bool with_row_team(int64_t vectors, int64_t rows, const DeviceFacts& facts, const Launch& launch) {
  const auto holds = [&](auto team) {
    using Team = decltype(team);
    if (vectors > Team::kThreads * Team::kVectors) return false;
    if constexpr (kNvidia && Team::kThreads >= 512) {
      if (facts.is_hopper_or_later() && rows * kClusterBlocks <= facts.compute_units) {
        launch(RowTeam<Team::kThreads, Team::kVectors, kClusterBlocks>{});
        return true;
      }
    }
    launch(team);
    return true;
  };
  return holds(RowTeam<16, 1>{}) || holds(RowTeam<32, 2>{}) || holds(RowTeam<32, 4>{}) ||
         holds(RowTeam<256, 1>{}) || holds(RowTeam<256, 2>{}) || holds(RowTeam<512, 2>{}) ||
         holds(RowTeam<1024, 2>{}) || holds(RowTeam<1024, 4>{});
}

// Launches a kernel of teams over `rows` rows: no more blocks than the device holds at once, each
// doing several rows in turn, unless a block does one row.
template <typename Team, bool kOneRow = false, typename Params>
Status launch_team(void (*kernel)(Params), int64_t rows, const Params& params,
                   const DeviceFacts& facts, Stream stream) {
  const int64_t blocks = (rows + Team::kBlockRows - 1) / Team::kBlockRows * Team::kBlocks;
  const int64_t grid =
      Team::kBlocks > 1 || kOneRow
          ? blocks
          : persistent_grid(blocks, Team::kBlockThreads, Team::kResidentThreads, facts);
  Launch launch = row_launch(grid, Team::kBlockThreads, facts, stream);
  launch.cluster = Team::kBlocks;
  return launch_kernel(kernel, launch, params);
}

// ---- Rows that are read again -----------------------------------------------------------------

// Launches one of two kernels that take any row with a block of 256 or 1024 threads.
template <typename Params>
Status launch_any_row(void (*kernel_256)(Params), void (*kernel_1024)(Params), int64_t vectors,
                      int64_t rows, const Params& params, const DeviceFacts& facts, Stream stream) {
  const int threads = vectors <= 512 ? 256 : 1024;
  const int64_t grid = persistent_grid(rows, threads, 1024, facts);
  return launch_kernel(threads == 256 ? kernel_256 : kernel_1024,
                       row_launch(grid, threads, facts, stream), params);
}

}  // namespace rocm_kernels
