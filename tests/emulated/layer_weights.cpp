// The stream of weights of decode_layers (decode_layers/cuda/weights.cuh) on the host: a thread for
// each lane of a block that fetches or multiplies, and a TMA that does what it is asked for
// in any order. Each row of each product is summed up once for each token, by one block, with its
// own factor.
//
// Prints "tiles N, wrong M", N being the launches.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#define __CUDA_ARCH_FEAT_SM90_ALL
#include "host.h"
// What follows needs its words.
#include "common/cuda/mbarrier.cuh"
#include "common/cuda/shared_memory.cuh"
#include "common/cuda/tma.cuh"

struct Place {
  unsigned x;
};
static thread_local int block_at, blocks_at;
#define blockIdx (Place{static_cast<unsigned>(block_at)})
#define gridDim (Place{static_cast<unsigned>(blocks_at)})

struct Warp {
  explicit Warp(int lanes) : meets(lanes) {}
  std::barrier<> meets;
  float values[32];
};
static thread_local Warp* this_warp;
static thread_local int lane_at;
static void __syncwarp(unsigned = 0) { this_warp->meets.arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float value, int other) {
  this_warp->values[lane_at] = value;
  __syncwarp();
  const float result = this_warp->values[lane_at ^ other];
  __syncwarp();
  return result;
}

static void dawdle() {
  static thread_local std::minstd_rand turn{std::random_device()()};
  if (turn() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(turn() % 200));
}

struct Copy {
  const uint8_t* from;
  uint32_t to;
  int bytes;
  uint32_t barrier;
};
static void check_order(const Copy& copy);
struct CopyEngine {
  std::mutex mutex;
  std::vector<Copy> asked;
  std::atomic<bool> ends{false};

  void run() {
    std::minstd_rand turn{std::random_device()()};
    while (!ends) {
      Copy copy{};
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!asked.empty()) {
          std::swap(asked[turn() % asked.size()], asked.back());
          copy = asked.back();
          asked.pop_back();
        }
      }
      if (copy.bytes == 0) {
        std::this_thread::yield();
        continue;
      }
      if (turn() % 8 == 0) dawdle();
      std::memcpy(emulated_shared + copy.to, copy.from, copy.bytes);
      emulated_barriers.change(copy.barrier, 0, -copy.bytes);
    }
  }
};
static CopyEngine engine;

namespace rocm_kernels {
namespace cuda {
inline uint64_t l2_policy(L2Policy) { return 0; }
inline void load_bulk(const void* from, uint32_t to, int bytes, uint32_t barrier, uint64_t) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || to % 16 || bytes % 16) std::abort();
  const Copy copy{static_cast<const uint8_t*>(from), to, bytes, barrier};
  check_order(copy);
  const std::lock_guard<std::mutex> lock(engine.mutex);
  engine.asked.push_back(copy);
}
}  // namespace cuda
}  // namespace rocm_kernels

#include "decode_layers/cuda/weights.cuh"

using namespace rocm_kernels;
using namespace rocm_kernels::cuda;
using namespace rocm_kernels::cuda::decode;

static_assert(kGroups * kGroupThreads == kThreads);
constexpr uint32_t kRingAt = 32 << 10, kBarriersAt = 240 << 10, kGroupBarrierBytes = 1024;

static uint8_t some_code() {
  const int code = below(256);
  return (code & 0x7F) == 0x7F ? 0 : code;  // no NaN
}

struct Weights {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

// What is asked for before its product has begun, is so behind a stage that has arrived.
static std::map<const uint8_t*, int> product_numbers;  // by where a product's weights begin
static Ring rings[kGroups];
static std::atomic<int> hasty{0};
static void check_order(const Copy& copy) {
  const Ring& ring = rings[(copy.barrier - kBarriersAt) / kGroupBarrierBytes];
  const int stage = static_cast<int>(copy.barrier - ring.full) / kMbarrierBytes;
  const uint32_t before = ring.full_of((stage + ring.num_stages - 1) % ring.num_stages);
  const std::lock_guard<std::mutex> lock(emulated_barriers.mutex);
  const bool arrives = emulated_barriers.all.at(before).bytes > 0;
  if (arrives && std::prev(product_numbers.upper_bound(copy.from))->second > *ring.begun) ++hasty;
}

constexpr int kKs[] = {1024, 1152, 2048, 2176, 4224};

// Whether some launch of so many tokens has gone wrong.
template <int kTokens>
static bool goes_wrong() {
  const int tokens = kTokens == kMostTokens ? kTokens - below(2) : kTokens;
  auto problem = std::make_unique<StackProblem<float>>();
  StackProblem<float>& p = *problem;
  p.tokens = tokens;
  p.count = 1 + below(3);
  p.of_last = 3 + below(2);
  p.num_stages = 2 + below(3);
  const int blocks = 1 + below(3);
  std::vector<uint8_t> x[kProducts];
  std::map<std::pair<int, int>, Weights> weights;
  product_numbers.clear();
  for (int i = 0; i < kProducts; ++i) {
    Product<float>& product = p.products[i];
    product.k = kKs[below(5)];
    product.unit_shift = i == 1;
    product.units = product.second = 1 + below(40);
    product.parts = (product.k + kPartBytes - 1) / kPartBytes;
    x[i].resize(tokens * product.k);
    for (uint8_t& code : x[i]) code = some_code();
    for (int l = 0; l < p.count; ++l) {
      Weights& its = weights[{l, i}];
      its.codes.resize(int64_t{product.units << product.unit_shift} * product.k);
      for (uint8_t& code : its.codes) code = some_code();
      its.scales.resize(product.units << product.unit_shift);
      for (float& scale : its.scales) scale = 1.0f + static_cast<float>(below(100));
      p.layers[l].products[i].w = its.codes.data();
      product_numbers[its.codes.data()] = l * kProducts + i + 1;
    }
  }

  std::mutex mutex;
  std::map<std::pair<int, int>, std::map<std::pair<int, int>, std::vector<float>>> found;
  bool right = true;
  for (int block = 0; block < blocks; ++block) {
    std::memset(emulated_shared, 0, sizeof(emulated_shared));
    int begun[kGroups] = {};
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t barriers = kBarriersAt + kGroupBarrierBytes * g;
      rings[g] = {barriers, barriers + 512, kRingAt + g * p.num_stages * kStageBytes, p.num_stages,
                  begun + g};
      for (int s = 0; s < p.num_stages; ++s) {
        emulated_barriers.init(rings[g].full_of(s), 1);
        emulated_barriers.init(rings[g].empty_of(s), kGroupWarps);
      }
    }
    Share shares[kProducts];
    block_at = block, blocks_at = blocks;
    for (int i = 0; i < kProducts; ++i) shares[i] = Share::of(p.products[i]);
    RowEnds ends;
    std::barrier<> all(kThreads);
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::thread> threads;
    engine.ends = false;
    std::thread copies([] { engine.run(); });
    for (int warp = 0; warp < kWarps + kGroupWarps; ++warp) {
      const bool fetches = warp >= kWarps;
      const int lanes = fetches ? kTileRows : 32;
      warps.push_back(std::make_unique<Warp>(lanes));
      for (int lane = 0; lane < lanes; ++lane) {
        threads.emplace_back([&, warp, lane, fetches, its = warps.back().get()] {
          block_at = block, blocks_at = blocks, this_warp = its, lane_at = lane;
          if (fetches) {
            const int group = (warp - kWarps) / kFetchers;
            return fetch_weights(p, rings[group], shares, group, warp % kFetchers, lane);
          }
          const int group = warp / kGroupWarps, thread = warp * 32 + lane;
          emulated_thread = thread % kGroupThreads;
          emulated_convergence = [] { __syncwarp(); };
          PipelineState state{0, 0};
          int turn = 0;
          for (int l = 0; l < p.count; ++l) {
            for (int i = 0; i < p.products_of(l); ++i) {
              const Product<float>& product = p.products[i];
              all.arrive_and_wait();
              const Tiles tiles(product, shares[i], group, turn);
              const auto addend_of = [](int row, int of) { return row + 0.25f * of; };
              AskedRowEnds(
                  product, shares[i], kTokens / 2, thread,
                  [&](int row) { return weights.at({l, i}).scales[row]; }, addend_of,
                  [](int row) { return row + 0.5f; })
                  .put(ends);
              if (thread == 0) {
                std::memset(emulated_shared, 0, tokens * product.row_bytes());
                for (int t = 0; t < tokens; ++t) {
                  std::memcpy(emulated_shared + t * product.row_bytes(),
                              x[i].data() + t * product.k, product.k);
                }
              }
              all.arrive_and_wait();
              dawdle();
              const int token = token_of_lane<kTokens>(lane);
              multiply<kTokens>(product, rings[group], state, tiles, shares[i].first, 0,
                                warp % kGroupWarps, lane,
                                [&](int row, bool there, float sum, int at) {
                                  if (!there || token >= tokens || lane % (16 / kTokens) != 0)
                                    return;
                                  const std::lock_guard<std::mutex> lock(mutex);
                                  found[{l, i}][{row, token}].push_back(sum * ends.scales[at]);
                                  const int place = (at << kTokens / 2) + token;
                                  right = right && ends.addends[place] == addend_of(row, token) &&
                                          ends.norms[at] == row + 0.5f;
                                });
            }
          }
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
    engine.ends = true;
    copies.join();
    const int products = (p.count - 1) * kProducts + p.of_last;
    for (const int its : begun) right = right && its == products;
  }

  for (int l = 0; l < p.count; ++l) {
    for (int i = 0; i < p.products_of(l); ++i) {
      const Product<float>& product = p.products[i];
      const Weights& its = weights.at({l, i});
      for (int row = 0; row < product.units << product.unit_shift; ++row) {
        for (int t = 0; t < tokens; ++t) {
          double sum = 0.0, size = 0.0;
          for (int k = 0; k < product.k; ++k) {
            const double term =
                double{fp8_to_float<false>(its.codes[int64_t{row} * product.k + k])} *
                fp8_to_float<false>(x[i][t * product.k + k]);
            sum += term, size += std::abs(term);
          }
          const std::vector<float>& said = found[{l, i}][{row, t}];
          right =
              right && said.size() == 1 && std::abs(said[0] / its.scales[row] - sum) <= 1e-5 * size;
        }
      }
      right = right && found[{l, i}].size() ==
                           static_cast<size_t>(tokens * (product.units << product.unit_shift));
    }
  }
  return !right || hasty > 0;
}

int main() {
  constexpr int kLaunches = 12;
  int wrong = 0;
  for (int launch = 0; launch < kLaunches; launch += 3) {
    wrong += goes_wrong<1>() + goes_wrong<2>() + goes_wrong<kMostTokens>();
  }
  std::printf("tiles %d, wrong %d\n", kLaunches, wrong);
}
