// Partial sums of a tile that several workers share: published, flagged, added up in the order of
// k.
//
// The steps of the tile are divided among its contributors, its owners. Each hands over all steps
// but its own, flags that, and adds up its own as soon as all others have flagged. If they do not
// come soon (their blocks may not even run) it hands over its own steps too, and whoever sees all
// flags adds up. The bits do not depend on who that is: two who see it at once store the same.
#pragma once

#include "problem.cuh"

namespace rocm_kernels {
namespace cuda {

__device__ __forceinline__ uint64_t load_flag(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_flag(uint64_t* flag, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Where a contributor's sums of a warpgroup's part of a tile lie; step s, tile i of them
// (s * kStepTiles + i) * 128 further. `thread` counts within the warpgroup.
template <class Tile>
__device__ __forceinline__ float4* partial_sums_of(const WarpgroupProblem& p, const UnitInfo& unit,
                                                   int contributor, int rank, int group,
                                                   int thread) {
  const int64_t slot =
      (static_cast<int64_t>(unit.slot(contributor)) * p.cluster + rank) * kMathGroups + group;
  return reinterpret_cast<float4*>(p.partials) + slot * (Tile::kSteps * Tile::kStepTiles * 128) +
         thread;
}

// Publishes the sums of this warpgroup's part of a tile, of which this worker has one interval of
// K. Returns the steps (bits) that this warpgroup is to add up and finish. `shared_word` is a word
// of shared memory of its own.
//
// Flags are [owner of steps][contributor] words. One that holds the launch's name is set; whatever
// else it held before the launch is not. Who finishes clears them, so that a replay of the same
// launch begins with none.
template <class Tile>
__device__ __forceinline__ uint32_t
publish_sums(const WarpgroupProblem& p, const UnitInfo& unit, int rank, int group, int thread,
             int& shared_word, const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
  constexpr int64_t kPatience = 8000;  // cycles: some trips through L2, or a late start
  const int count = unit.contributors, me = unit.contributor;
  const int owners = min(count, Tile::kSteps);
  uint64_t* const flags =
      p.flags + static_cast<int64_t>((unit.shared_tile * p.cluster + rank) * kMathGroups + group) *
                    (kMaxSteps * kMaxContributors);
  const auto flag_of = [&](int owner, int contributor) {
    return flags + owner * kMaxContributors + contributor;
  };
  const auto hand_over = [&](bool own) {
    float4* const to = partial_sums_of<Tile>(p, unit, me, rank, group, thread);
    for_each_step<Tile::kSteps>([&](auto constant) {
      constexpr int step = decltype(constant)::value;
      if ((step % owners == me) != own) return;
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; ++i) {
        const float (&sum)[4] =
            sums[step / Tile::kColumnSteps][step % Tile::kColumnSteps * Tile::kStepTiles + i];
        __stcg(to + (step * Tile::kStepTiles + i) * 128,
               make_float4(sum[0], sum[1], sum[2], sum[3]));
      }
    });
    __threadfence();
    named_barrier(1 + group, 128);
  };
  // Whether all have flagged steps of `owner`, `except` counting as one who has. One warp.
  const auto all_flagged = [&](int owner, int except) {
    const bool counts = thread < count && thread != except;
    return __all_sync(~0u, !counts || load_flag(flag_of(owner, thread)) == p.launch) != 0;
  };
  const auto clear = [&](int owner) {
    if (thread < count) store_flag(flag_of(owner, thread), 0);
  };

  hand_over(false);
  if (thread < 32) {
    if (thread < owners && thread != me) store_flag(flag_of(thread, me), p.launch);
    __threadfence();  // before it looks at others' flags: of two, one at least sees both
    uint32_t finished = 0;
    for (int owner = 0; owner < owners; ++owner) {
      if (owner != me && all_flagged(owner, -1)) finished |= 1u << owner, clear(owner);
    }
    if (me < owners) {
      const int64_t begin = clock64();
      do {
        if (all_flagged(me, me)) {
          finished |= 1u << me, clear(me);
          break;
        }
      } while (__any_sync(~0u, unit.last && clock64() - begin < kPatience));
    }
    if (thread == 0) shared_word = finished;
    __threadfence();
  }
  named_barrier(1 + group, 128);
  uint32_t finished = shared_word;
  if (me < owners && !(finished >> me & 1)) {
    hand_over(true);
    if (thread < 32) {
      if (thread == 0) store_flag(flag_of(me, me), p.launch);
      __threadfence();
      if (all_flagged(me, -1)) finished |= 1u << me, clear(me);
      if (thread == 0) shared_word = finished;
      __threadfence();
    }
    named_barrier(1 + group, 128);
    finished = shared_word;
  }

  uint32_t steps = 0;
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step)
    steps |= (finished >> (step % owners) & 1) << step;
  return steps;
}

// The sums of one step over all contributors.
template <class Tile, int kStep>
__device__ __forceinline__ void add_up_step(
    const WarpgroupProblem& p, const UnitInfo& unit, int rank, int group, int thread,
    const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4], float (&total)[Tile::kStepTiles][4]) {
  constexpr int kAtOnce = Tile::kSteps > 4 ? 2 : 4;  // contributors whose sums are under way
  constexpr int kWave = kStep / Tile::kColumnSteps;
  constexpr int kFirstTile = kStep % Tile::kColumnSteps * Tile::kStepTiles;
  const int count = unit.contributors, me = unit.contributor;
  for (int first = 0; first < count; first += kAtOnce) {
    // Its own where none are loaded: a register that only a load under a condition writes would
    // keep what it holds through the whole K loop.
    float4 parts[kAtOnce][Tile::kStepTiles];
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; ++i) {
        const float (&own)[4] = sums[kWave][kFirstTile + i];
        parts[c][i] = make_float4(own[0], own[1], own[2], own[3]);
      }
      if (first + c >= count || first + c == me) continue;
      const float4* const from = partial_sums_of<Tile>(p, unit, first + c, rank, group, thread) +
                                 kStep * Tile::kStepTiles * 128;
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; ++i) parts[c][i] = __ldcg(from + i * 128);
    }
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      if (first + c >= count) continue;
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; ++i) {
        const float part[4] = {parts[c][i].x, parts[c][i].y, parts[c][i].z, parts[c][i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          total[i][j] = first + c == 0 ? part[j] : total[i][j] + part[j];
        }
      }
    }
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
