// attention/cuda/taken_items.cuh: whatever the word held, each item is taken once, and the word is
// 0 when all are, for the next replay of the same launch.
//
// Prints "tiles N, wrong M", N being the launches.
#include <atomic>

#include "host.h"

using Word = unsigned long long;
static void wait_now_and_then() {
  static thread_local std::minstd_rand turn{std::random_device()()};
  if (turn() % 3 == 0) std::this_thread::yield();
}
static Word atomicAdd(Word* to, Word more) {
  wait_now_and_then();
  return std::atomic_ref<Word>(*to).fetch_add(more);
}
static Word atomicExch(Word* to, Word next) {
  wait_now_and_then();
  return std::atomic_ref<Word>(*to).exchange(next);
}
#include "attention/cuda/taken_items.cuh"

using namespace rocm_kernels::cuda;

static bool take_all(Word& word, Word name, int blocks, int items) {
  const TakenItems taken = {&word, name, items, blocks};
  std::vector<std::atomic<int>> times(items);
  std::vector<std::thread> threads;
  for (int block = 0; block < blocks; ++block) {
    threads.emplace_back([&, block] {
      if (block == 0) taken.begin();
      for (int item = block; item < items; item = taken.take()) ++times[item];
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::atomic<int>& count : times) {
    if (count != 1) return false;
  }
  return word == 0;
}

int main() {
  int launches = 0, wrong = 0;
  while (launches < 200) {
    const Word name = (Word{chance()} << 8 | below(256)) | 1, other = name ^ 2;
    // What an earlier kernel left, another launch, and one that ended.
    for (Word word :
         {Word{chance()} << 32 | chance(), other << kTakenBits | 7, Word{0}, ~Word{0} - below(4)}) {
      const int blocks = 1 + below(6), items = blocks + 1 + below(40);
      for (int replay = 0; replay < 2; ++replay, ++launches) {
        wrong += !take_all(word, name, blocks, items);
      }
    }
  }
  std::printf("tiles %d, wrong %d\n", launches, wrong);
}
