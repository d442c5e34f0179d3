// All workgroups of a kernel meet between two of its phases.
//
// clang-format off
//   arrive   a counter for each share of the grid: one more is here       a line each
//            the last of its share: the share's epoch is this meeting's    one line for all
//   wait     until all shares have come to this meeting's epoch
// clang-format on
//
// Workgroup w is of share w % 8. Workgroups are dealt to the 8 XCDs in turn, so those of a share
// run on one XCD, and XCDs hear of each other by 8 words; where they are dealt otherwise it is as
// right, and slower.
//
// Epochs grow through all launches and are kept here, not by the caller: nothing is set back
// between launches, and a graph may replay one. The epoch of a share cannot grow before all of its
// workgroups have arrived, so what one of them finds there at its start is the last meeting's.
//
// What was published (stores at agent scope) before arrive() is seen behind wait(). All workgroups
// must run at once, which a cooperative launch makes sure of.
#pragma once

#include "../../../common/cdna/sync.h"

namespace rocm_kernels::cdna {

constexpr int kGridShares = 8;

// Zero before its first launch; then kernels' alone. Launches that use it follow one another.
struct GridState {
  struct alignas(128) Counter {
    uint32_t arrived;
  };
  Counter shares[kGridShares];
  alignas(128) uint32_t epochs[kGridShares];
};

#if ROCM_KERNELS_CDNA

// One wave of each workgroup has one, which it makes before the workgroup arrives anywhere.
class GridBarrier {
 public:
  explicit ROCM_KERNELS_DEVICE GridBarrier(GridState* state)
      : state_(state), share_(blockIdx.x % kGridShares), epoch_(epoch_of(share_)) {}

  // What other waves of the workgroup published is complete: they waited for it before a barrier.
  ROCM_KERNELS_DEVICE void arrive(int lane) {
    ++epoch_;
    if (lane != 0) return;
    const uint32_t members = (gridDim.x - share_ + kGridShares - 1) / kGridShares;
    uint32_t* const arrived = &state_->shares[share_].arrived;
    const uint32_t before =
        __hip_atomic_fetch_add(arrived, 1, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
    if (before + 1 != members) return;
    __hip_atomic_store(arrived, 0, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_store(state_->epochs + share_, epoch_, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
  }

  ROCM_KERNELS_DEVICE void wait(int lane) const {
    const int shares = gridDim.x < kGridShares ? static_cast<int>(gridDim.x) : kGridShares;
    const auto is_behind = [&] {
      return lane < shares && static_cast<int32_t>(epoch_of(lane) - epoch_) < 0;
    };
    while (__builtin_amdgcn_ballot_w64(is_behind()) != 0) __builtin_amdgcn_s_sleep(1);
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  }

 private:
  ROCM_KERNELS_DEVICE uint32_t epoch_of(int share) const {
    return __hip_atomic_load(state_->epochs + share, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }

  GridState* const state_;
  const int share_;
  uint32_t epoch_;
};

#endif

}  // namespace rocm_kernels::cdna
