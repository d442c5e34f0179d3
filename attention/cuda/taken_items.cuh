// Items that the blocks of a kernel take one by one, by a word in memory that counts them. What it
// was before is anything: nobody clears a workspace. Its upper bits bear the launch's name
// (launch_name.h), and the last block to ask leaves 0, for a graph's next replay has the same name.
#pragma once

#include <cstdint>

namespace rocm_kernels {
namespace cuda {

using TakenWord = unsigned long long;
constexpr int kTakenBits = 24;  // that count

// Where there are more items than blocks; block b begins with item b.
struct TakenItems {
  TakenWord* word;  // or nullptr: there are as many blocks as items
  TakenWord name;
  int items, blocks;

  __device__ __forceinline__ bool any() const { return word != nullptr; }

  // Block 0, one thread, before it takes any; the others wait for it.
  __device__ __forceinline__ void begin() const { atomicExch(word, name << kTakenBits); }

  // `items` or more: there is none left. Each block takes until then.
  __device__ __forceinline__ int take() const {
    TakenWord found;
    do {
      found = atomicAdd(word, TakenWord{1});
    } while (found >> kTakenBits != name);
    const int taken = static_cast<int>(found & ((TakenWord{1} << kTakenBits) - 1));
    if (taken == items - 1) atomicExch(word, TakenWord{0});
    return blocks + taken;
  }
};

}  // namespace cuda
}  // namespace rocm_kernels
