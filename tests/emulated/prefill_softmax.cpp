// The softmax of a warp's rows of a prompt (attention/cuda/prefill_softmax.cuh), compiled for the
// host: a warp is 32 threads. Against sums in double precision, with scores small and large.
//
// Prints "tiles N, wrong M", N being the cases.
#include <cstring>

#include "host.h"
// What follows needs its words.
#include "common/cuda/mbarrier.cuh"
#include "common/cuda/shared_memory.cuh"

using std::max;

constexpr unsigned kAll = ~0u;
static thread_local int lane;
struct ThreadIndex {
  struct Value {
    operator unsigned() const { return lane; }
  } x;
};
static ThreadIndex threadIdx;
static std::barrier<> this_warp{32};

// What `value` of lane `from` is, of lanes that all ask.
template <class T>
static T of_lane(T value, int from) {
  static T values[32];
  values[lane] = value;
  this_warp.arrive_and_wait();
  const T result = values[from];
  this_warp.arrive_and_wait();
  return result;
}
template <class T>
static T __shfl_sync(unsigned, T value, int from) {
  return of_lane(value, from & 31);
}
static float __shfl_xor_sync(unsigned, float value, int other) {
  return of_lane(value, lane ^ other);
}
static bool __any_sync(unsigned, bool value) {
  bool any = value;
  for (int other = 1; other < 32; other *= 2) any |= of_lane(any, lane ^ other);
  return any;
}
static void __syncwarp() { this_warp.arrive_and_wait(); }
static uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
static uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
static float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static uint32_t __byte_perm(uint32_t, uint32_t, uint32_t) { std::abort(); }  // of FP4 alone
static unsigned long long atomicAdd(unsigned long long*, unsigned long long) { std::abort(); }
static unsigned long long atomicExch(unsigned long long*, unsigned long long) { std::abort(); }

#include "common/gpu/math.h"
#define fast_exp2 std::exp2f
#define __CUDA_ARCH_FEAT_SM90_ALL
#include "attention/cuda/prefill_softmax.cuh"

using namespace rocm_kernels;
using namespace rocm_kernels::cuda;

constexpr int kKeys = 32;

// 16 rows of an item. Queries, and so scores, are zeros behind the sequence's `rows`.
struct Problem {
  PrefillGrid grid = {};
  PrefillWork work = {};
  int rows;
  float factor;
  std::vector<float> scores;  // [16][keys]

  Problem() {
    const int heads = 1 + below(4), queries = 1 + below(60), keys = 1 + below(200);
    AttentionArgs args;
    if (below(2) == 0) args.window_right = 0;
    if (below(3) == 0) args.window_left = below(100);
    grid.window = Window::of(args);
    grid.rows = RowGroups::of(heads);
    grid.item_rows = 64 / heads * heads;
    work.s.q_count = queries, work.s.k_count = keys;
    work.first_row =
        below((queries * heads + grid.item_rows - 1) / grid.item_rows) * grid.item_rows;
    work.last_row = min(work.first_row + grid.item_rows, queries * heads) - 1;
    const int first = grid.rows.query_of(work.first_row), last = grid.rows.query_of(work.last_row);
    work.keys = grid.window.seen(work.s, first, last);
    work.all = grid.window.seen_by_all(work.s, first, last);
    rows = min(work.last_row - work.first_row + 1, 16);
    factor = 0.1f + below(100) * 0.01f;
    std::normal_distribution<float> normal;
    for (int i = 0; i < 16 * 256; ++i) scores.push_back(normal(chance));
    // Rows whose later scores exceed the first tile's by far.
    const float growth = below(3) == 0 ? 3000.0f : below(2) == 0 ? 60.0f : 1.0f;
    for (int row = 0; row < 16; ++row) {
      const float more = below(2) == 0 ? growth : 1;
      for (int key = below(256); key < 256; ++key) scores[row * 256 + key] *= more;
    }
    std::fill(scores.begin() + rows * 256, scores.end(), 0.0f);
  }

  double log_of_sum(int row) const {
    const int query = grid.rows.query_of(work.first_row + row);
    const KeyRange sees = grid.window.seen(work.s, query, query);
    double most = -INFINITY, sum = 0;
    for (int key = sees.begin; key < sees.end; ++key) {
      most = std::max(most, double{scores[row * 256 + key]} * factor);
    }
    for (int key = sees.begin; key < sees.end; ++key) {
      sum += std::exp2(double{scores[row * 256 + key]} * factor - most);
    }
    return sees.begin < sees.end ? most + std::log2(sum) : -INFINITY;
  }
};

// Of each lane: the rows' maxima and sums, and P added up as a product with values of 1 does.
struct Result {
  float maximum[32][2], sum[32][2], product[32][2];
};

template <bool kInBoxes>
static Result run(const Problem& problem) {
  Result result;
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([&, i] {
      lane = i;
      PrefillRows rows;
      const PrefillWork& work = problem.work;
      for (int r = 0; r < 2; ++r) {
        const int row = min(work.first_row + lane / 4 + 8 * r, work.last_row);
        const int query = problem.grid.rows.query_of(row);
        rows.sees[r] = problem.grid.window.seen(work.s, query, query);
      }
      rows.factor[0] = rows.factor[1] = problem.factor;
      float scores[kKeys / 8][4], by[2] = {1, 1}, product[2] = {0, 0};
      for (int first = work.keys.begin / kKeys * kKeys; first < work.keys.end; first += kKeys) {
        const auto multiply = [&] {
          for (int t = 0; t < kKeys / 8; ++t) {
            for (int j = 0; j < 4; ++j) {
              const int row = lane / 4 + j / 2 * 8, key = first + 8 * t + lane % 4 * 2 + j % 2;
              scores[t][j] = problem.scores[row * 256 + key];
            }
          }
        };
        multiply();
        const bool all_seen = first >= work.all.begin && first + kKeys <= work.all.end;
        bool rescale;
        if constexpr (kInBoxes) {
          rescale = softmax_tile(scores, rows, first, all_seen, 0.0f, by, multiply);
        } else {
          rescale = softmax_tile(scores, rows, first, all_seen, 0.0f, by);
        }
        for (int r = 0; r < 2; ++r) {
          if (rescale) product[r] *= by[r];
          for (int t = 0; t < kKeys / 8; ++t) product[r] += scores[t][2 * r] + scores[t][2 * r + 1];
        }
      }
      for (int r = 0; r < 2; ++r) {
        float total = rows.sum[r];
        total += __shfl_xor_sync(kAll, total, 1);
        total += __shfl_xor_sync(kAll, total, 2);
        result.maximum[i][r] = rows.maximum[r], result.sum[i][r] = total;
        product[r] += __shfl_xor_sync(kAll, product[r], 1);
        product[r] += __shfl_xor_sync(kAll, product[r], 2);
        result.product[i][r] = product[r];
      }
    });
  }
  for (std::thread& thread : lanes) thread.join();
  return result;
}

static int wrong_rows(const Problem& problem, const Result& result) {
  int wrong = 0;
  for (int row = 0; row < problem.rows; ++row) {
    const int at = row % 8 * 4, r = row / 8;
    const double expected = problem.log_of_sum(row), sum = result.sum[at][r];
    const double got = sum > 0 ? result.maximum[at][r] + std::log2(sum) : -INFINITY;
    // Of scores in float32: half a unit in the last place of the largest is an error of 2^x.
    const double most = 1e-4 + 2e-7 * std::abs(expected);
    wrong += !(got == expected || std::abs(got - expected) < most);
    wrong += !(std::abs(result.product[at][r] - sum) <= 1e-4 * sum);
  }
  return wrong;
}

int main() {
  int tiles = 0, wrong = 0;
  for (; tiles < 30; ++tiles) {
    const Problem problem;
    wrong += wrong_rows(problem, run<false>(problem));
    wrong += wrong_rows(problem, run<true>(problem));
  }
  std::printf("tiles %d, wrong %d\n", tiles, wrong);
}
