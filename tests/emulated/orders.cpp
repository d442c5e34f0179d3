// moe/gpu/order.h: whatever experts have of rows, each order goes through every tile once.
//
// Prints "tiles N, wrong M", N being the cases.
#include "host.h"
#include "moe/gpu/order.h"

using namespace rocm_kernels;

struct Expert {
  Range tiles, rows;
};

// Experts with many rows, few and none.
static std::vector<Expert> random_experts(int block_m) {
  std::vector<Expert> experts(1 + below(9));
  int tile = 0, row = 0;
  for (Expert& expert : experts) {
    const int rows = below(3) == 0 ? 0 : 1 + below(below(2) == 0 ? 9 * block_m : block_m);
    const int tiles = (rows + block_m - 1) / block_m;
    expert = {{tile, tile + tiles}, {row, row + rows}};
    tile += tiles, row += rows;
  }
  return experts;
}

// Whether order=expert meets each row of each tile of columns once, beside rows of its own alone.
static bool is_complete(const std::vector<Expert>& experts, int block_m, int group_m, int tiles_n) {
  const int rows = experts.back().rows.end;
  std::vector<TileGroup> groups;
  for (size_t e = 0; e < experts.size(); ++e) {
    const Expert& expert = experts[e];
    for (int tile = expert.tiles.begin; tile < expert.tiles.end; ++tile) {
      groups.push_back(
          TileGroup::of(tile, static_cast<int>(e), expert.tiles, expert.rows, block_m, group_m));
    }
  }
  std::vector<int> met(static_cast<size_t>(rows) * tiles_n);
  for (int tile = 0; tile < static_cast<int>(groups.size()) * tiles_n; ++tile) {
    const TileGroup& group = groups[tile / tiles_n];
    const TileGroup::Place place = group.place_of(tile, tiles_n, block_m);
    const Range& own = experts[group.expert].rows;
    if (place.n < 0 || place.n >= tiles_n || place.begin < own.begin || place.end > own.end ||
        place.begin >= place.end || place.end - place.begin > block_m) {
      return false;
    }
    for (int row = place.begin; row < place.end; ++row) ++met[row * tiles_n + place.n];
  }
  return std::all_of(met.begin(), met.end(), [](int times) { return times == 1; });
}

// The same of the other orders, by tiles, with K divided and workgroups dealt to XCDs.
static bool is_complete(const GroupedOrder& order, int tiles_m) {
  std::vector<int> met(static_cast<size_t>(tiles_m) * order.tiles_n * order.split_k);
  const int workgroups = static_cast<int>(met.size());
  for (int workgroup = 0; workgroup < workgroups + 5; ++workgroup) {
    const GroupedOrder::Place place = order.place_of(workgroup, tiles_m);
    if (place.m < 0 != workgroup >= workgroups) return false;
    if (place.m < 0) continue;
    if (place.m >= tiles_m || place.n >= order.tiles_n || place.part >= order.split_k) return false;
    ++met[(place.m * order.tiles_n + place.n) * order.split_k + place.part];
  }
  return std::all_of(met.begin(), met.end(), [](int times) { return times == 1; });
}

int main() {
  constexpr int kCases = 2000;
  int wrong = 0;
  for (int i = 0; i < kCases; ++i) {
    const int block_m = 32 << below(4), group_m = below(4) == 0 ? INT32_MAX : 1 + below(6);
    const int tiles_n = 1 + below(9), tiles_m = 1 + below(20);
    const GroupedOrder order = {tiles_n, 1 + below(3), 1 + below(8), below(5)};
    if (!is_complete(random_experts(block_m), block_m, group_m, tiles_n) ||
        !is_complete(order, tiles_m)) {
      ++wrong;
    }
  }
  std::printf("tiles %d, wrong %d\n", kCases, wrong);
}
