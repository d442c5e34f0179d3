// Rows held in registers by teams of threads.
//
// A team of kTeam threads owns one row at a time and holds it as kVectors vectors of 16 bytes a
// thread: thread t has vectors t, t + kTeam, t + 2 kTeam, ... so that each load of a wave is one
// contiguous run. Short rows get a team inside a wave, with several teams a block and no barrier;
// long rows get a whole block. The team depends on the row's length alone: how many rows there are
// changes neither the order of any sum nor a bit of the result.
#pragma once

#include "../../../common/gpu/barrier.h"
#include "../../../common/gpu/cluster.h"
#include "../../../common/gpu/reduce.h"
#include "../../../common/gpu/vector.h"

namespace rocm_kernels {

template <int kTeamThreads, int kThreadVectors, int kTeamBlocks = 1>
struct RowTeam {
  static constexpr int kThreads = kTeamThreads;
  static constexpr int kVectors = kThreadVectors;
  // Blocks that share a row: a thread block cluster of NVIDIA's sm_90 and later. The sums are taken
  // in the order of one block, so the bits are those of one block.
  static constexpr int kBlocks = kTeamBlocks;
  static constexpr int kBlockThreads = kThreads < 256 ? 256 : kThreads / kBlocks;
  static constexpr int kBlockRows = kThreads < 256 ? 256 / kThreads : 1;
  // Threads that a compute unit is to hold at once, and with them how many registers each may use:
  // 512 a lane of a SIMD on AMD (64 each for 2048 threads), 64 Ki an SM on NVIDIA (64 for 1024).
  static constexpr int kResidentThreads = kBlocks > 1 ? kBlockThreads
                                          : !kNvidia && kThreads >= 256 && kVectors <= 2 ? 2048
                                          : kNvidia && kThreads < 256 && kVectors > 2    ? 512
                                                                                         : 1024;
  static_assert(kBlocks == 1 || (kNvidia && kThreads >= 256),
                "RowTeam: only NVIDIA's thread block clusters let several blocks share a row");
};

// LDS of a team's reductions. Two slots in turn: whoever writes a slot again has passed the barrier
// of the reduction in between, so everyone has read it; one barrier a reduction suffices.
struct TeamScratch {
  float partial[2][32];
};

// Every thread of the team gets the reduction of all its threads' values. All threads of the block
// take part.
template <typename Team, typename Op>
ROCM_KERNELS_DEVICE float reduce_team(float value, Op op, TeamScratch& scratch, int& slot) {
  static_assert(Team::kThreads <= 1024, "reduce_team: a team has at most 1024 threads");
  if constexpr (Team::kThreads <= kWaveSize) {
    return reduce_lanes<Team::kThreads>(value, op);
  } else {
    constexpr int kWaves = Team::kThreads / kWaveSize;
    value = reduce_lanes<kWaveSize>(value, op);
    const unsigned thread = threadIdx.x;
    if constexpr (Team::kBlocks == 1) {
      if (thread % kWaveSize == 0) scratch.partial[slot][thread / kWaveSize] = value;
      lds_barrier();
    } else {
      const unsigned wave = (cluster_rank() * Team::kBlockThreads + thread) / kWaveSize;
      const int lane = static_cast<int>(thread % kWaveSize);
      if (lane < Team::kBlocks) store_in_cluster(scratch.partial[slot][wave], value, lane);
      cluster_arrive();
      cluster_wait();
    }
    value = reduce_lanes<kWaves>(scratch.partial[slot][thread % kWaves], op);
    slot ^= 1;
    return value;
  }
}

// Where a thread stands. A kernel makes one before its first load.
template <typename Team>
struct TeamThread {
  int thread;  // in the team; a kernel passes it through opaque() in each pass
  int team;    // in the block
  int step;    // rows from one pass of the team to the next

  ROCM_KERNELS_DEVICE TeamThread() {
    const int member = static_cast<int>(threadIdx.x % Team::kThreads);
    thread = Team::kBlocks == 1 ? member : cluster_rank() * Team::kBlockThreads + member;
    // A constant where a block has one row: then the row's address is uniform and lives in scalars.
    team = Team::kBlockRows == 1 ? 0 : static_cast<int>(threadIdx.x / Team::kThreads);
    step = static_cast<int>(gridDim.x) / Team::kBlocks * Team::kBlockRows;
    if constexpr (Team::kBlocks > 1) cluster_arrive();
  }

  // Once the first loads are issued, before the first reduction.
  ROCM_KERNELS_DEVICE void wait_for_team() const {
    if constexpr (Team::kBlocks > 1) cluster_wait();
  }
  // The first column of the thread's vector number `v`, of elements of type T.
  template <typename T>
  ROCM_KERNELS_DEVICE int column(int v) const {
    return (v * Team::kThreads + thread) * kVectorElements<T>;
  }
  // The first row of the block's first team.
  ROCM_KERNELS_DEVICE static int first_row() {
    return static_cast<int>(blockIdx.x) / Team::kBlocks * Team::kBlockRows;
  }
};

}  // namespace rocm_kernels
