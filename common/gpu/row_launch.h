// Host: from the arguments of a row op to the launch of its kernel.
#pragma once

#include <initializer_list>

#include "launch.h"
#include "quantize.h"

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
  if (!device_facts(facts)) return "the GPU runtime does not answer";
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
      if (facts.hopper && rows * kClusterBlocks <= facts.compute_units) {
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
void launch_team(void (*kernel)(Params), int64_t rows, const Params& params,
                 const DeviceFacts& facts, Stream stream) {
  const int64_t blocks = (rows + Team::kBlockRows - 1) / Team::kBlockRows * Team::kBlocks;
  const int64_t grid =
      Team::kBlocks > 1 || kOneRow
          ? blocks
          : persistent_grid(blocks, Team::kBlockThreads, Team::kResidentThreads, facts);
  launch_kernel(kernel, grid, Team::kBlockThreads, Team::kBlocks, facts, stream, params);
}

// ---- Rows that are read again -----------------------------------------------------------------

// Launches one of two kernels that take any row with a block of 256 or 1024 threads.
template <typename Params>
void launch_any_row(void (*kernel_256)(Params), void (*kernel_1024)(Params), int64_t vectors,
                    int64_t rows, const Params& params, const DeviceFacts& facts, Stream stream) {
  const int threads = vectors <= 512 ? 256 : 1024;
  launch_kernel(threads == 256 ? kernel_256 : kernel_1024,
                persistent_grid(rows, threads, 1024, facts), threads, 1, facts, stream, params);
}

}  // namespace rocm_kernels
