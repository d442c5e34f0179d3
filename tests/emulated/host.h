// What the programs of this folder share: CUDA's words for a host's compiler, and chance.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
using std::min;

template <class T>
static T __ldg(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) std::abort();
  return *from;
}

static std::mt19937 chance{std::random_device()()};
static int below(int n) { return static_cast<int>(chance() % n); }
