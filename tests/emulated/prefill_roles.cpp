// The producer's warps of attention/cuda/prefill.cuh, compiled for the host: a thread for each lane
// of some blocks, a TMA that does what it is asked for in any order, and consumers that
// look at what comes and leave outputs. Each item is done once, with its own queries, keys and
// values, and zeros for other sequences' rows; outputs come to theirs, and nothing else is written.
//
// Prints "tiles N, wrong M", N being the launches.
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>

#include "host.h"
// What follows needs its words.
#include "common/cuda/mbarrier.cuh"
#include "common/cuda/shared_memory.cuh"
#include "common/cuda/swizzle.h"
#include "common/cuda/tma.cuh"

using std::max;

struct Warp {
  std::barrier<> meets{32};
  int values[32];
};
static thread_local Warp* this_warp;
static thread_local int thread_at, block_at;
struct Place {
  unsigned x;
};
#define threadIdx (Place{static_cast<unsigned>(thread_at)})
#define blockIdx (Place{static_cast<unsigned>(block_at)})

static int __shfl_sync(unsigned, int value, int from) {
  this_warp->values[thread_at % 32] = value;
  this_warp->meets.arrive_and_wait();
  const int result = this_warp->values[from & 31];
  this_warp->meets.arrive_and_wait();
  return result;
}
static void __syncwarp() { this_warp->meets.arrive_and_wait(); }
static uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
// Of FP8 and FP4 alone.
static uint32_t __byte_perm(uint32_t, uint32_t, uint32_t) { std::abort(); }
static float __shfl_xor_sync(unsigned, float, int) { std::abort(); }
static uint32_t __float_as_uint(float) { std::abort(); }
static float __uint_as_float(uint32_t) { std::abort(); }
static unsigned long long atomicAdd(unsigned long long* to, unsigned long long more) {
  return std::atomic_ref<unsigned long long>(*to).fetch_add(more);
}
static unsigned long long atomicExch(unsigned long long* to, unsigned long long next) {
  return std::atomic_ref<unsigned long long>(*to).exchange(next);
}

static void dawdle() {
  static thread_local std::minstd_rand turn{std::random_device()()};
  // Seldom for so long that others come as far as they may.
  const int most = turn() % 16 == 0 ? 20000 : 300;
  if (turn() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(turn() % most));
}

// What TMA has been asked for, done one by one in any order.
struct CopyEngine {
  std::mutex mutex;
  std::vector<std::function<void()>> asked;
  std::atomic<bool> ends{false};

  void ask(std::function<void()> copy) {
    const std::lock_guard<std::mutex> lock(mutex);
    asked.push_back(std::move(copy));
  }
  void run() {
    std::minstd_rand turn{std::random_device()()};
    while (!ends) {
      std::function<void()> copy;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!asked.empty()) {
          std::swap(asked[turn() % asked.size()], asked.back());
          copy = std::move(asked.back());
          asked.pop_back();
        }
      }
      dawdle();
      if (copy) copy();
      std::this_thread::yield();
    }
  }
};
static CopyEngine engine;
static thread_local std::atomic<int> stores_under_way;

namespace rocm_kernels {
namespace cuda {

// Visits the lines of a box: its 128 bytes in shared memory, and the row's in memory or nullptr.
template <class Visit>
static void for_each_line(const CUtensorMap& map, const int (&at)[4], uint32_t place,
                          const Visit& visit) {
  uint32_t line = 0;
  for (int row = 0; row < map.box_rows; ++row) {
    for (int head = 0; head < map.sizes[1]; ++head, ++line) {
      const int64_t y = at[1] + row;
      const bool there = y < map.sizes[2] && at[2] < map.sizes[3] && at[3] < map.sizes[4];
      for (int vector = 0; vector < 8; ++vector) {
        const int column = at[0] + vector * 8;
        uint8_t* const from = map.data + head * map.strides[0] + y * map.strides[1] +
                              at[2] * map.strides[2] + at[3] * map.strides[3] + column * 2;
        visit(emulated_shared + place + swizzled(line, 0, 1, vector),
              there && column < map.sizes[0] ? from : nullptr);
      }
    }
  }
}
static void load_lines(const CUtensorMap& map, int x, int y, int z, int w, uint32_t to,
                       uint32_t barrier) {
  engine.ask([=] {
    int bytes = 0;
    for_each_line(map, {x, y, z, w}, to, [&](uint8_t* here, const uint8_t* from) {
      if (from == nullptr) std::memset(here, 0, 16);
      if (from != nullptr) std::memcpy(here, from, 16);
      bytes += 16;
    });
    emulated_barriers.change(barrier, 0, -bytes);
  });
}
static void load_box_4d(const CUtensorMap& map, int x, int y, int z, int w, uint32_t to,
                        uint32_t barrier, uint64_t) {
  load_lines(map, x, y, z, w, to, barrier);
}
static void load_head_group_box(const CUtensorMap& map, int x, int y, int z, int w, uint32_t to,
                                uint32_t barrier) {
  load_lines(map, x, y, z, w, to, barrier);
}
static void store_head_group_box(const CUtensorMap& map, int x, int y, int z, int w,
                                 uint32_t from) {
  std::atomic<int>& under_way = stores_under_way;
  ++under_way;
  engine.ask([=, &under_way] {
    for_each_line(map, {x, y, z, w}, from, [&](const uint8_t* here, uint8_t* to) {
      if (to != nullptr) std::memcpy(to, here, 16);
    });
    --under_way;
  });
}
static void commit_stores() {}
template <int kPending>
static void wait_for_reads_of_stores() {
  while (stores_under_way > kPending) std::this_thread::yield();
}
static void copy_vector(uint32_t to, const void* from, int bytes) {
  std::memset(emulated_shared + to, 0, 16);
  std::memcpy(emulated_shared + to, from, bytes);
}
static void bring_line(const void*) {}
static void copies_commit() {}
template <int kPending>
static void copies_wait() {}
static void copies_wait_all() {}
static void mbarrier_arrive_after_copies(uint32_t barrier) { mbarrier_arrive(barrier); }

}  // namespace cuda
}  // namespace rocm_kernels

#define __CUDA_ARCH_FEAT_SM90_ALL
#include "attention/cuda/prefill_producer.cuh"

using namespace rocm_kernels;
using namespace rocm_kernels::cuda;

// One warp of consumers, heads of 64, 32 keys a tile.
template <int kPlaces, int kTiles>
struct TestShape {
  using Q = __nv_bfloat16;
  static constexpr bool kBoxed = true, kScaledQ = false, kFp8 = false;
  static constexpr int kRows = 64, kKeys = 32, kBoxes = 1, kBoxesV = 1, kD = 64, kDV = 64;
  static constexpr int kQPlaces = kPlaces, kStages = kTiles, kSlots = 0;
  static constexpr int kKeyWarps = 2, kStoreWarp = 2, kItemWarp = 3, kWarps = 1;
  static constexpr int kQBytes = kRows * 128, kKBytes = kKeys * 128, kVBytes = kKeys * 128;
};

constexpr int kBlocks = 2, kBlockBytes = 1 << 18;
using Elements = std::vector<uint16_t>;

struct Launch {
  AttentionArgs args;
  PrefillGrid grid = {};
  PrefillMaps maps = {};
  std::vector<int32_t> ends{0}, used;
  Elements q, k, v, out;
  TakenWord word = chance();
  std::atomic<int> wrong{0};
  int blocks = kBlocks;

  Launch() {
    const int heads = std::vector<int>{1, 2, 3, 4, 7, 12}[below(6)];
    args.kv_heads = 1 + below(2), args.heads = args.kv_heads * heads;
    args.head_dim = args.head_dim_v = 48 + 16 * below(2), args.batch = 1 + below(3);
    args.max_seqlen_q = 1 + below(50), args.max_seqlen_k = 1 + below(below(2) == 0 ? 32 : 150);
    const bool ragged = below(2) == 0;
    args.total_q = args.batch * args.max_seqlen_q;
    if (ragged) {
      for (int b = 0; b < args.batch; ++b) {
        ends.push_back(ends.back() + below(static_cast<int>(args.max_seqlen_q) + 1));
        used.push_back(below(static_cast<int>(args.max_seqlen_k) + 1));
      }
      args.cu_seqlens_q = ends.data(), args.seqused_k = used.data();
    }
    if (below(2) == 0) args.window_right = 0;
    const auto rows = [&](AttentionRows& of, Elements& data, int64_t count, int64_t of_heads) {
      const int64_t size = args.head_dim + 8 * below(2);
      data.resize(args.batch * count * of_heads * size);
      for (uint16_t& element : data) element = static_cast<uint16_t>(chance());
      of = {data.data(), count * of_heads * size, of_heads * size, size};
    };
    rows(args.q, q, args.max_seqlen_q, args.heads);
    if (ragged) args.q.batch_stride = 0;
    rows(args.k, k, args.max_seqlen_k, args.kv_heads);
    rows(args.v, v, args.max_seqlen_k, args.kv_heads);
    out.assign(args.total_q * args.heads * (args.head_dim + 8), 0xABCD);
    args.out = out.data();
    args.out_head_stride = args.head_dim + 8;
    args.out_row_stride = args.out_head_stride * args.heads;
    args.out_batch_stride = ragged ? 0 : args.out_row_stride * args.max_seqlen_q;

    grid.window = Window::of(args), grid.rows = RowGroups::of(heads);
    grid.pairs = static_cast<int>(args.batch * args.kv_heads);
    grid.pairs_together = 1 + below(grid.pairs), grid.outer = 1;
    grid.item_rows = 64 / heads * heads;
    grid.q_in_boxes =
        below(4) != 0 && describe_rows(maps.q, args, args.q, args.head_dim, grid.item_rows);
    if (!grid.q_in_boxes) grid.item_rows = 64;
    const AttentionRows to = {args.out, args.out_batch_stride, args.out_row_stride,
                              args.out_head_stride};
    grid.out_in_boxes = grid.q_in_boxes && below(4) != 0 &&
                        describe_rows(maps.out, args, to, args.head_dim_v, grid.item_rows);
    describe_keys(maps.k, args, args.k, args.head_dim, 32);
    describe_keys(maps.v, args, args.v, args.head_dim_v, 32);
    const int64_t all_rows = args.max_seqlen_q * heads;
    grid.row_blocks = static_cast<int>((all_rows + grid.item_rows - 1) / grid.item_rows);
    const int items = grid.row_blocks * grid.pairs;
    if (items > kBlocks) {
      grid.taken = {&word, 1 + chance() % 1000, items, kBlocks};
    } else {
      blocks = items;
    }
  }

  const uint16_t* row_of(const AttentionRows& rows, int64_t batch, int64_t row, int head) const {
    return static_cast<const uint16_t*>(rows.data) + batch * rows.batch_stride +
           row * rows.row_stride + head * rows.head_stride;
  }
};

static uint8_t* vector_of(uint32_t place, int line, int vector) {
  return emulated_shared + place + swizzled(line, 0, 1, vector);
}
static uint16_t output_of(uint16_t query) { return query ^ 0x5555; }

// Looks at what comes, and leaves outputs made of the queries.
template <class Shape>
static void consume(Launch& launch, const PrefillMemory<Shape>& memory, const PrefillWork& first) {
  const AttentionArgs& args = launch.args;
  const int lane = thread_at % 32, vectors = static_cast<int>(args.head_dim) / 8;
  PipelineState state{0, 0}, q_at{0, 0};
  for_each_item(args, launch.grid, memory, first, [&](const PrefillWork& work) {
    if (lane == 0) dawdle();
    mbarrier_wait(memory.q_full(q_at.stage), q_at.parity);
    clear_rows_of_others<Shape, 32>(launch.grid, work, memory.q(q_at.stage), 0, lane);
    __syncwarp();
    const int heads = launch.grid.rows.heads;
    const auto query_row = [&](int line) {
      const int row = work.first_row + line, query = row / heads;
      return launch.row_of(args.q, work.b, work.s.q_begin + query, work.head * heads + row % heads);
    };
    for (int line = lane; line <= work.last_row - work.first_row; line += 32) {
      for (int i = 0; i < vectors; ++i) {
        launch.wrong +=
            std::memcmp(vector_of(memory.q(q_at.stage), line, i), query_row(line) + 8 * i, 16) != 0;
      }
    }
    for (int line = work.last_row - work.first_row + 1 + lane; line < Shape::kRows; line += 32) {
      for (int i = 0; i < vectors; ++i) {
        const uint8_t zeros[16] = {};
        launch.wrong += std::memcmp(vector_of(memory.q(q_at.stage), line, i), zeros, 16) != 0;
      }
    }
    for (int tile = work.keys.begin / 32 * 32; tile < work.keys.end; tile += 32) {
      for (const bool of_v : {false, true}) {
        mbarrier_wait(memory.full(of_v, state.stage), state.parity);
        const int key = tile + lane;
        if (key >= work.keys.begin && key < work.keys.end) {
          const uint32_t stage = (of_v ? memory.v : memory.k) + state.stage * Shape::kKBytes;
          const uint16_t* const row = launch.row_of(of_v ? args.v : args.k, work.b, key, work.head);
          for (int i = 0; i < vectors; ++i) {
            launch.wrong += std::memcmp(vector_of(stage, lane, i), row + 8 * i, 16) != 0;
          }
        }
        if (lane == 0) dawdle();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(memory.empty(of_v, state.stage));
      }
      state.advance(Shape::kStages);
    }
    const bool in_boxes = stored_in_boxes(args, launch.grid, work);
    for (int line = lane; line <= work.last_row - work.first_row; line += 32) {
      const int row = work.first_row + line, query = row / heads;
      uint16_t* const to = static_cast<uint16_t*>(args.out) + work.b * args.out_batch_stride +
                           (work.s.q_begin + query) * args.out_row_stride +
                           (work.head * heads + row % heads) * args.out_head_stride;
      for (int i = 0; i < 8 * vectors; ++i) {
        uint16_t value;
        uint8_t* const here = vector_of(memory.q(q_at.stage), line, i / 8) + i % 8 * 2;
        std::memcpy(&value, here, 2);
        value = output_of(value);
        if (in_boxes) std::memcpy(here, &value, 2);
        if (!in_boxes) to[i] = value;
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(memory.out_full(q_at.stage));
    q_at.advance(Shape::kQPlaces);
  });
}

template <class Shape>
static int wrong_in_launch() {
  Launch launch;
  const int warps = 4 + Shape::kWarps;
  std::vector<std::unique_ptr<Warp>> all_warps;
  std::vector<std::thread> threads;
  engine.ends = false;
  std::thread copies([] { engine.run(); });
  for (int block = 0; block < launch.blocks; ++block) {
    const PrefillMemory<Shape> memory(block * kBlockBytes);
    EmulatedBarriers& barriers = emulated_barriers;
    for (int i = 0; i < Shape::kQPlaces; ++i) {
      barriers.init(memory.q_full(i), launch.grid.q_in_boxes ? 1 : 32 * Shape::kKeyWarps);
      barriers.init(memory.q_empty(i), 1);
      barriers.init(memory.out_full(i), Shape::kWarps);
    }
    barriers.init(memory.work_full(), 1);
    barriers.init(memory.work_empty(), Shape::kKeyWarps + 1 + Shape::kWarps);
    barriers.init(memory.wanted(), 1);
    for (int i = 0; i < Shape::kStages; ++i) {
      for (const int of_v : {0, 1}) {
        barriers.init(memory.full(of_v, i), Shape::kKeyWarps);
        barriers.init(memory.empty(of_v, i), Shape::kWarps);
      }
    }
    for (int warp = 0; warp < warps; ++warp) {
      all_warps.push_back(std::make_unique<Warp>());
      for (int lane = 0; lane < 32; ++lane) {
        threads.emplace_back([&launch, memory, block, warp, lane, at = all_warps.back().get()] {
          this_warp = at, thread_at = 32 * warp + lane, block_at = block;
          const PrefillWork first = work_at<Shape>(
              launch.args, launch.grid, place_of<Shape>(launch.args, launch.grid, block));
          if (warp < 4) produce<Shape>(launch.args, launch.grid, launch.maps, memory, first);
          if (warp >= 4) consume<Shape>(launch, memory, first);
        });
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  engine.ends = true;
  copies.join();

  const AttentionArgs& args = launch.args;
  Elements expected(launch.out.size(), 0xABCD);
  for (int b = 0; b < args.batch; ++b) {
    const bool ragged = args.cu_seqlens_q != nullptr;
    const int begin = ragged ? launch.ends[b] : 0;
    const int count = ragged ? launch.ends[b + 1] - begin : static_cast<int>(args.max_seqlen_q);
    for (int query = 0; query < count; ++query) {
      for (int head = 0; head < args.heads; ++head) {
        const uint16_t* const from = launch.row_of(args.q, b, begin + query, head);
        uint16_t* const to = expected.data() + b * args.out_batch_stride +
                             (begin + query) * args.out_row_stride + head * args.out_head_stride;
        for (int i = 0; i < args.head_dim; ++i) to[i] = output_of(from[i]);
      }
    }
  }
  return launch.wrong + (expected != launch.out) + !engine.asked.empty() +
         (launch.grid.taken.any() && launch.word != 0);
}

int main() {
  int tiles = 0, wrong = 0;
  for (int i = 0; i < 20; ++i) {
    wrong += wrong_in_launch<TestShape<2, 2>>();
    wrong += wrong_in_launch<TestShape<1, 2>>();
    wrong += wrong_in_launch<TestShape<2, 4>>();
    tiles += 3;
  }
  std::printf("tiles %d, wrong %d\n", tiles, wrong);
}
