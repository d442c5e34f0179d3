// blocks/product/cuda/block_scales.cuh, compiled for the host: a thread for each of the warps that
// multiply, at paces that chance has.
//
// Prints "tiles N, wrong M".
#include <type_traits>

#include "host.h"

struct EmulatedWarp {
  std::barrier<> all{32};
  float values[32];
};
static std::barrier<> warpgroups[2] = {std::barrier<>(128), std::barrier<>(128)};
static thread_local EmulatedWarp* this_warp;
static thread_local int this_lane;
static thread_local std::mt19937 own_chance;
#define __syncwarp() this_warp->all.arrive_and_wait()
static float __shfl_sync(unsigned, float value, int from) {
  this_warp->values[this_lane] = value;
  __syncwarp();
  const float result = this_warp->values[from];
  __syncwarp();
  return result;
}

namespace rocm_kernels {
namespace cuda {
static void named_barrier(int id, int) { warpgroups[id - 1].arrive_and_wait(); }
}  // namespace cuda
}  // namespace rocm_kernels

#define __CUDA_ARCH__ 900
#include "blocks/product/cuda/block_scales.cuh"

using namespace rocm_kernels;
using namespace rocm_kernels::cuda;

// The scales of one operand: `rows` of `blocks`, in rows, in columns, or none of blocks.
struct Scales {
  std::vector<float> values;
  ScaleView view = {};

  Scales(int rows, int blocks) : values(static_cast<size_t>(rows) * blocks) {
    for (float& value : values) value = 0.5f + static_cast<float>(below(1 << 20)) / (1 << 20);
    const int layout = below(5);
    view.kind = layout == 0 ? ScaleView::Kind::kRow : ScaleView::Kind::kBlock;
    view.data = values.data();
    view.row_stride = layout < 3 ? blocks : 1;
    view.block_stride = layout < 3 ? 1 : rows;
  }
  float of(int row, int block) const {
    return view.is_blocked() ? values[row * view.row_stride + block * view.block_stride] : 1.0f;
  }
};

struct TestTiles {
  const ScaleView &a, &w;
  const ScaleView& scale_a() const { return a; }
  const ScaleView& blocks_of_w() const { return w; }
};

// Of some units, one after the other: products that are not what they should be.
template <class Tile>
int64_t wrong_products() {
  constexpr int kUnits = 3, kLoopChunks = Tile::kParts;
  constexpr int kTileA = Tile::kSwapAb ? Tile::kColumns : Tile::kRows;
  const int chunks_of_k = 1 + below(40);
  const int blocks = (chunks_of_k + Tile::kChunksOfBlock - 1) / Tile::kChunksOfBlock;
  const int a_rows = kTileA + below(kTileA), w_rows = 12;
  const Scales a(a_rows, blocks), w(w_rows, blocks);
  const TestTiles tiles = {a.view, w.view};
  struct Unit : UnitInfo {
    int rows_of_w[kMaxScaleGroups];
  };
  std::vector<Unit> units(kUnits);
  for (Unit& unit : units) {
    unit.first_chunk = below(chunks_of_k);
    unit.chunks = 1 + below(chunks_of_k - unit.first_chunk);
    const int first = below(a_rows), end = std::min(a_rows, first + 1 + below(kTileA));
    (Tile::kSwapAb ? unit.first_column : unit.first_row) = first;
    (Tile::kSwapAb ? unit.end_column : unit.end_row) = end;
    for (int i = 0; i < Tile::kWGroups; ++i) {
      unit.rows_of_w[i] = below(w_rows);
      unit.w_scales[i] = w.view.data + unit.rows_of_w[i] * w.view.row_stride;
    }
  }

  const auto of_lane = [&](int warp, int lane, float* tables) {
    int64_t wrong = 0;
    BlockScales<Tile> scales(warp, lane, tables);
    const int warpgroup = warp / 4;
    const auto pause = [] {
      if (own_chance() % 16 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(own_chance() % 50));
      }
    };
    for (const Unit& unit : units) {
      const int first = Tile::kSwapAb ? unit.first_column : unit.first_row;
      const int end = Tile::kSwapAb ? unit.end_column : unit.end_row;
      scales.begin(tiles, unit);
      const auto check = [&](int chunk, int row, int group, float got) {
        if (row >= end) return;
        const int block = (unit.first_chunk + chunk) / Tile::kChunksOfBlock;
        wrong += got != a.of(row, block) * w.of(unit.rows_of_w[group], block);
      };
      for (int chunk = 0; chunk < unit.chunks; ++chunk) {
        pause();
        if (chunk % kLoopChunks == 0) {
          scales.template advance<0, kLoopChunks>(tiles);
        } else {
          scales.template advance<1, kLoopChunks>(tiles);
        }
        pause();
        if constexpr (Tile::kSwapAb) {
          for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
            for (int i = 0; i < Tile::kWScales; ++i) {
              const float2 two = scales.read_columns(tile, i);
              const int column = first + tile * 8 + lane % 4 * 2;
              const int group = warpgroup * Tile::kGroupRows / Tile::kWGroup + i;
              check(chunk, column, group, two.x);
              check(chunk, column + 1, group, two.y);
            }
          }
        } else {
          for (int wave = 0; wave < Tile::kWaves; ++wave) {
            float low[Tile::kWScales], high[Tile::kWScales];
            scales.read_rows(wave, low, high);
            const int row =
                first + warpgroup * Tile::kGroupRows + wave * kWgmmaRows + warp % 4 * 16 + lane / 4;
            for (int i = 0; i < Tile::kWScales; ++i) {
              check(chunk, row, i, low[i]);
              check(chunk, row + 8, i, high[i]);
            }
          }
        }
      }
    }
    return wrong;
  };

  constexpr int kWarps = kMathGroups * 4;
  std::vector<std::unique_ptr<EmulatedWarp>> warps;
  std::vector<float4> tables(kWarps * Tile::kWarpScaleBytes / sizeof(float4),
                             float4{NAN, NAN, NAN, NAN});
  std::vector<int64_t> wrong(kWarps * 32);
  std::vector<std::thread> threads;
  for (int warp = 0; warp < kWarps; ++warp) {
    warps.push_back(std::make_unique<EmulatedWarp>());
  }
  for (int thread = 0; thread < kWarps * 32; ++thread) {
    threads.emplace_back([&, thread, seed = chance()] {
      this_warp = warps[thread / 32].get();
      this_lane = thread % 32;
      own_chance.seed(seed);
      wrong[thread] = of_lane(thread / 32, thread % 32, reinterpret_cast<float*>(tables.data()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t sum = 0;
  for (const int64_t of_thread : wrong) sum += of_thread;
  return sum;
}

int main() {
  constexpr DType kFp8 = DType::kFloat8E4M3FN, kBrain = DType::kBFloat16;
  int64_t wrong = 0;
  int tiles = 0;
  const auto check = [&](auto tile) {
    wrong += wrong_products<decltype(tile)>();
    ++tiles;
  };
  for (int i = 0; i < 3; ++i) {
    // Of gemm: one group of columns of w, two, three and five; tokens as columns.
    check(WarpgroupTile<kFp8, false, 1, 128, true, 4>());
    check(WarpgroupTile<kFp8, false, 2, 128, true, 2>());
    check(WarpgroupTile<kFp8, false, 1, 192, true, 4>());
    check(WarpgroupTile<kFp8, false, 2, 96, true, 4>());
    check(WarpgroupTile<kFp8, false, 1, 160, true, 4>());
    check(WarpgroupTile<kFp8, true, 1, 96, true, 4>());
    check(WarpgroupTile<kFp8, true, 1, 128, true, 4>());
    check(WarpgroupTile<kFp8, true, 2, 64, true, 4>());
    // Two chunks of 16-bit elements have a block.
    check(WarpgroupTile<kBrain, false, 1, 128, true, 4, false, kFp8>());
    check(WarpgroupTile<kBrain, true, 1, 64, true, 4, false, kFp8>());
    // Of experts: gates and ups lie apart.
    check(WarpgroupTile<kFp8, false, 2, 128, true, 4, true>());
    check(WarpgroupTile<kFp8, true, 2, 32, true, 4, true>());
  }
  std::printf("tiles %d, wrong %lld\n", tiles, static_cast<long long>(wrong));
}
