// blocks/product/cuda/widen.cuh, compiled for the host: a thread for each that widens, one that
// brings narrow weights and one that takes the wide ones, at paces that chance has.
//
// Prints "tiles N, wrong M".
#include "host.h"

static thread_local std::barrier<>* this_warp;
#define __syncwarp() this_warp->arrive_and_wait()

static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(both >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i;
  }
  return result;
}

#define __CUDA_ARCH__ 800  // FP8 by arithmetic, not by an instruction
#include "common/cuda/widen.cuh"
#undef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#include "blocks/product/cuda/widen.cuh"

using namespace rocm_kernels;
using namespace rocm_kernels::cuda;

struct TestProblem {
  int num_stages, narrow_stages;
};

struct TestTiles {
  using Problem = TestProblem;
  TileSchedule cut;
  const uint8_t* scales = nullptr;
  int64_t stride = 0;
  int groups = 0, rows_there = 0;
  bool even = false;

  const TileSchedule& schedule() const { return cut; }
  int place_of(int tile) const { return tile; }
  void begin_exponents(Mxfp4Exponents& exponents, int, int row, int chunk) const {
    const uint8_t* const of_row = row < rows_there ? scales + row * stride : nullptr;
    exponents.begin(of_row, 2 * chunk, groups, even);
  }
};

static float fp8_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = exponent == 0 ? std::ldexp(mantissa / 8.0f, -6)
                                        : std::ldexp(1 + mantissa / 8.0f, exponent - 7);
  return code & 128 ? -magnitude : magnitude;
}
static float fp4_value(int code) {
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// Elements that are not what they should be.
template <class Tile>
int64_t wrong_elements(int chunks, int wide_stages, int narrow_stages) {
  constexpr int kRows = Tile::kTileRowsOfW, kRowBytes = Tile::kWRowBytes;
  constexpr bool kMx = Tile::kWType == DType::kFloat4E2M1x2;
  constexpr uint32_t kWide = 400 << 10, kBarriers = 900 << 10;
  const WideningStages at = {0, kBarriers, kBarriers + 64, kWide, kBarriers + 128, kBarriers + 192};
  for (int i = 0; i < kMaxStages; ++i) {
    emulated_barriers.init(at.narrow_full + i * 8, 1);
    emulated_barriers.init(at.narrow_empty + i * 8, Tile::kWidenWarps);
    emulated_barriers.init(at.wide_full + i * 8, Tile::kWidenWarps);
    emulated_barriers.init(at.wide_empty + i * 8, 1);
  }
  TestTiles tiles;
  tiles.cut = TileSchedule::make(2, chunks, 2, 1, 1);  // two tiles, one after the other
  tiles.groups = 2 * chunks - below(2);                // the last chunk may be half a one
  tiles.stride = tiles.groups + below(4);
  tiles.rows_there = kRows - below(9);
  std::vector<uint8_t> scales(kRows * tiles.stride + 64);
  for (uint8_t& scale : scales) scale = static_cast<uint8_t>(100 + below(60));
  tiles.scales = scales.data() + 32 - reinterpret_cast<uintptr_t>(scales.data()) % 16 + below(4);
  tiles.even = tiles.stride % 2 == 0 && reinterpret_cast<uintptr_t>(tiles.scales) % 2 == 0;
  std::vector<uint8_t> codes(static_cast<size_t>(2 * chunks) * kRows * kRowBytes);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(chance());

  const auto pause = [](std::mt19937& own) {
    if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
  };
  std::vector<std::thread> threads;
  threads.emplace_back([&, own = std::mt19937(chance())]() mutable {
    PipelineState state = {0, 1};
    for (int chunk = 0; chunk < 2 * chunks; ++chunk, state.advance(narrow_stages)) {
      mbarrier_wait(at.narrow_empty + state.stage * 8, state.parity);
      pause(own);
      const uint8_t* const from = codes.data() + static_cast<size_t>(chunk) * kRows * kRowBytes;
      for (uint32_t i = 0; i < kRows * kRowBytes; ++i) {
        // TMA's swizzle: bits 4 and up with those from 7 on.
        const uint32_t place = i ^ (i >> 7 & (kRowBytes / 16 - 1)) << 4;
        emulated_shared[at.narrow + state.stage * Tile::kNarrowBytes + place] = from[i];
      }
      mbarrier_arrive(at.narrow_full + state.stage * 8);
    }
  });
  int64_t wrong = 0;
  threads.emplace_back([&, own = std::mt19937(chance())]() mutable {
    PipelineState state = {0, 0};
    for (int chunk = 0; chunk < 2 * chunks; ++chunk, state.advance(wide_stages)) {
      mbarrier_wait(at.wide_full + state.stage * 8, state.parity);
      pause(own);
      uint8_t* const stage = emulated_shared + at.wide + state.stage * Tile::kStageBytes;
      const uint8_t* const from = codes.data() + static_cast<size_t>(chunk) * kRows * kRowBytes;
      for (int row = 0; row < kRows; ++row) {
        for (int k = 0; k < 64; ++k) {
          const uint32_t i = row * 128 + k * 2;
          uint16_t bits;
          std::memcpy(&bits, stage + (i ^ (i >> 7 & 7) << 4), 2);
          float expected;
          if (kMx) {
            const int group = chunk % chunks * 2 + k / 32;
            const bool there = row < tiles.rows_there && group < tiles.groups;
            const int scale = there ? tiles.scales[row * tiles.stride + group] : 127;
            expected =
                std::ldexp(fp4_value(from[row * kRowBytes + k / 2] >> k % 2 * 4 & 15), scale - 127);
          } else {
            expected = fp8_value(from[row * kRowBytes + k]);
          }
          float got;
          if (Tile::kType == DType::kBFloat16) {
            const uint32_t word = uint32_t{bits} << 16;
            std::memcpy(&got, &word, 4);
          } else {
            got = __half2float(__half(__half_raw{bits}));
          }
          const bool same = std::isnan(expected)
                                ? std::isnan(got)
                                : got == expected && std::signbit(got) == std::signbit(expected);
          wrong += !same;
        }
      }
      std::memset(stage, 0xEE, Tile::kStageBytes);
      mbarrier_arrive(at.wide_empty + state.stage * 8);
    }
  });
  const TestProblem problem = {wide_stages, narrow_stages};
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  for (int i = 0; i < Tile::kWidenWarps; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
  for (int thread = 0; thread < Tile::kWidenWarps * 32; ++thread) {
    threads.emplace_back([&, thread] {
      this_warp = warps[thread / 32].get();
      widen_weights<Tile>(tiles, problem, 0, thread, at);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

int main() {
  constexpr DType kBrain = DType::kBFloat16, kHalf = DType::kFloat16;
  constexpr DType kFp8 = DType::kFloat8E4M3FN, kMx = DType::kFloat4E2M1x2;
  int64_t wrong = 0;
  int tiles = 0;
  const auto check = [&](auto tile, int wide_stages, int narrow_stages) {
    wrong += wrong_elements<decltype(tile)>(5 + below(6), wide_stages, narrow_stages);
    ++tiles;
  };
  // Odd and even numbers of stages: a turn that is skipped shows as a parity that comes round.
  for (const int stages : {2, 3, 4}) {
    check(WarpgroupTile<kBrain, false, 2, 128, false, 0, true, kFp8>(), stages, 3);
    check(WarpgroupTile<kHalf, false, 1, 128, true, 4, false, kFp8>(), stages, 4);
    check(WarpgroupTile<kHalf, true, 1, 32, false, 0, false, kFp8>(), stages, 3);
    check(WarpgroupTile<kBrain, true, 2, 64, true, 4, true, kFp8>(), stages, 5);
    check(WarpgroupTile<kBrain, false, 2, 128, false, 0, true, kMx>(), stages, 3);
    check(WarpgroupTile<kBrain, false, 1, 128, false, 0, false, kMx>(), stages, 4);
    check(WarpgroupTile<kBrain, true, 2, 32, false, 0, true, kMx>(), stages, 5);
  }
  std::printf("tiles %d, wrong %lld\n", tiles, static_cast<long long>(wrong));
}
