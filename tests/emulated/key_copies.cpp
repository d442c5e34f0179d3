// Where attention's copies find keys and values in pages of any size (attention/cuda/pages.cuh,
// tile_copies.cuh, key_copies.cuh), compiled for the host: a warp is 32 threads.
//
// Prints "tiles N, wrong M", N being the cases.
#include <mutex>
#include <set>

#include "host.h"
// What follows needs its words.
#include "common/cuda/shared_memory.cuh"

using std::max;

static thread_local int lane, warp_at;
struct ThreadIndex {
  struct Value {
    operator unsigned() const { return 32 * warp_at + lane; }
  } x;
};
static ThreadIndex threadIdx;
static std::barrier<> this_warp{32};

static int __shfl_sync(unsigned, int value, int from) {
  static int values[32];
  values[lane] = value;
  this_warp.arrive_and_wait();
  const int result = values[from & 31];
  this_warp.arrive_and_wait();
  return result;
}
static uint32_t __byte_perm(uint32_t, uint32_t, uint32_t) { std::abort(); }  // of FP4 alone

// Bytes that may be read, of keys and of values.
struct Allowed {
  const uint8_t* data;
  std::vector<bool> bytes;

  bool has(const void* from, int count) const {
    const ptrdiff_t at = static_cast<const uint8_t*>(from) - data;
    for (ptrdiff_t i = at; i < at + count; ++i) {
      if (i < 0 || i >= static_cast<ptrdiff_t>(bytes.size()) || !bytes[i]) return false;
    }
    return true;
  }
};
static const Allowed* allowed[2];
static std::atomic<int> foreign_reads;

namespace rocm_kernels {
namespace cuda {

static void copy_vector(uint32_t to, const void* from, int bytes) {
  std::memset(emulated_shared + to, 0, 16);
  if (bytes == 0) return;
  if (!allowed[0]->has(from, bytes) && !allowed[1]->has(from, bytes)) {
    ++foreign_reads;
    return;
  }
  std::memcpy(emulated_shared + to, from, bytes);
}
static std::set<const void*> brought;  // to L2
static std::mutex bringing;
static void bring_line(const void* from) {
  const std::lock_guard<std::mutex> lock(bringing);
  brought.insert(from);
}
static void copies_commit() {}
template <int kPending>
static void copies_wait() {}

}  // namespace cuda
}  // namespace rocm_kernels

#include "attention/cuda/key_copies.cuh"
#include "attention/cuda/tile_copies.cuh"
#include "attention/cuda/tiles.h"

using namespace rocm_kernels;
using namespace rocm_kernels::cuda;

// A cache in pages, and the keys of one sequence and head that are seen.
struct Cache {
  AttentionArgs args;
  std::vector<int32_t> table;
  std::vector<uint8_t> data[2];
  Allowed may_read[2];
  Sequence s = {};
  KeyRange keys;
  int head, bytes;  // of an element

  Cache(int page_size, KeyRange seen, int head_dim, int head_dim_v, int element) : keys(seen) {
    const int kv_heads = 1 + below(3), used = (keys.end + page_size - 1) / page_size;
    const int pages = used + below(3);
    bytes = element;
    head = below(kv_heads);
    for (int page = 0; page < used; ++page) table.push_back(page + pages - used);
    std::shuffle(table.begin(), table.end(), chance);
    args.page_size = page_size;
    args.head_dim = head_dim, args.head_dim_v = head_dim_v;
    args.block_table = s.pages = table.data();
    for (const bool of_v : {false, true}) {
      AttentionRows& rows = of_v ? args.v : args.k;
      const int size = of_v ? head_dim_v : head_dim, spare = 16 / element * below(3);
      const bool heads_first = below(2) == 0;
      rows.head_stride = heads_first ? page_size * (size + spare) : size + spare;
      rows.row_stride = heads_first ? size + spare : kv_heads * (size + spare);
      rows.batch_stride = kv_heads * page_size * (size + spare) + 16 / element * below(3);
      std::vector<uint8_t>& to = data[of_v];
      to.resize(pages * rows.batch_stride * element);
      for (uint8_t& byte : to) byte = static_cast<uint8_t>(1 + below(255));
      rows.data = to.data();
      may_read[of_v] = {to.data(), std::vector<bool>(to.size())};
      for (int key = keys.begin; key < keys.end; ++key) {
        const int64_t at = row_of(of_v, key) - to.data();
        for (int i = 0; i < size * element; ++i) may_read[of_v].bytes[at + i] = true;
      }
      allowed[of_v] = &may_read[of_v];
    }
  }

  const uint8_t* row_of(bool of_v, int key) const {
    const AttentionRows& rows = of_v ? args.v : args.k;
    const int64_t page = table[key / args.page_size], row = key % args.page_size;
    return data[of_v].data() +
           (page * rows.batch_stride + row * rows.row_stride + head * rows.head_stride) * bytes;
  }

  // A byte that is to arrive: zero of what nobody sees, and beyond the head.
  uint8_t expected(bool of_v, int key, int byte) const {
    const int64_t size = (of_v ? args.head_dim_v : args.head_dim) * bytes;
    return key >= keys.begin && key < keys.end && byte < size ? row_of(of_v, key)[byte] : 0;
  }
};

// Calls body() on the lanes of a warp at once.
template <class Body>
static void as_warp(int warp, const Body& body) {
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([&, i] {
      lane = i, warp_at = warp;
      body();
    });
  }
  for (std::thread& thread : lanes) thread.join();
}

static KeyRange random_keys(int most) {
  const int end = 1 + below(most);
  return {below(3) == 0 ? below(end) : 0, end};
}

// ---- decode

template <int kTile, bool kFp8>
struct TestTile {
  static constexpr DecodeBlock kBlock = {kDecodeTiles[kTile].head_dim, kDecodeTiles[kTile].rows,
                                         kFp8 ? 1 : 2, false};
  static constexpr int kBytes = kBlock.bytes, kRowBytes = kBlock.row_bytes();
  static constexpr int kKeys = kDecodeKeys, kWarps = kBlock.warps();
  using Lines = TileLines<kRowBytes, kKeys>;
};

// Wrong bytes. `page_size`: 0 where keys are in rows.
template <class Shape, class Copies = TileCopies<Shape>>
static int wrong_in_tiles(int page_size, int most) {
  const bool whole = std::is_same<Copies, RowTileCopies<Shape>>::value || below(2) == 0;
  const int size = Shape::kBlock.head_dim - (whole ? 0 : 16);
  const int size_v = whole || below(2) == 0 ? size : size - 16;
  Cache cache(page_size == 0 ? most : page_size, random_keys(most), size, size_v, Shape::kBytes);
  if (page_size == 0) {
    cache.args.block_table = cache.s.pages = nullptr;
    cache.s.k_batch = cache.table[0] * cache.args.k.batch_stride;
    cache.s.v_batch = cache.table[0] * cache.args.v.batch_stride;
  }
  const PageSize pages = PageSize::of(cache.args);
  const int warp = below(Shape::kWarps), v_stage = 1 << 18;
  std::atomic<int> wrong{0};
  brought.clear();
  as_warp(warp, [&] {
    int tile = cache.keys.begin / Shape::kKeys + warp;
    if (page_size == 0) {
      const KeyRows at(cache.args, cache.s, cache.head, Shape::kBytes);
      bring_tile<Shape>(cache.args, at, tile * Shape::kKeys, cache.keys.end);
    }
    Copies copies(cache.args, cache.s, cache.head, cache.keys, pages, tile);
    for (; tile * Shape::kKeys < cache.keys.end; tile += Shape::kWarps) {
      copies.start(tile * Shape::kKeys, 0, v_stage);
      this_warp.arrive_and_wait();
      for (int row = lane; row < Shape::kKeys; row += 32) {
        for (int byte = 0; byte < Shape::kRowBytes; ++byte) {
          const int at = Shape::Lines::at(row, byte / 16) + byte % 16;
          const int key = tile * Shape::kKeys + row;
          wrong += emulated_shared[at] != cache.expected(false, key, byte);
          wrong += emulated_shared[v_stage + at] != cache.expected(true, key, byte);
        }
      }
      this_warp.arrive_and_wait();
    }
  });
  if (page_size != 0) return wrong;
  // What comes to L2: each 128 bytes of the first tile's rows, and nothing else.
  const int first = (cache.keys.begin / Shape::kKeys + warp) * Shape::kKeys;
  size_t lines = 0;
  for (int key = first; key < std::min(first + Shape::kKeys, cache.keys.end); ++key) {
    for (const bool of_v : {false, true}) {
      for (int byte = 0; byte < (of_v ? size_v : size) * Shape::kBytes; byte += 128, ++lines) {
        wrong += brought.count(cache.row_of(of_v, key) + byte) == 0;
      }
    }
  }
  return wrong + (brought.size() != lines);
}

// ---- prefill

template <int kTile, bool kFp8>
struct TestStage {
  static constexpr PrefillTile kOf = kPrefillTiles[kTile].of(kFp8);
  static constexpr int kD = kOf.head_dim, kDV = kOf.head_dim_v, kKeys = kOf.keys;
  static constexpr int kBoxes = kOf.boxes(kD), kBoxesV = kOf.boxes(kDV);
  static constexpr int kSlots = kOf.slots(64);
};

template <class Shape>
static int wrong_in_stages(int page_size, int most) {
  const Cache cache(page_size, random_keys(most), Shape::kD - 16 * below(2), Shape::kDV, 2);
  const PageSize pages = PageSize::of(cache.args);
  const int warp = below(4), v_stage = 1 << 18;
  std::atomic<int> wrong{0};
  as_warp(warp, [&] {
    int first = cache.keys.begin / Shape::kKeys * Shape::kKeys;
    KeyCopies<Shape> copies(cache.args, pages, cache.s, cache.head, cache.keys, first,
                            static_cast<int>(threadIdx.x));
    for (; first < cache.keys.end; first += Shape::kKeys) {
      copies.copy_k(first, 0);
      copies.copy_v(first, v_stage);
      copies.next_tile(first);
      this_warp.arrive_and_wait();
      for (int row = 4 * warp + lane / 8; row < Shape::kKeys; row += 16) {
        for (const bool of_v : {false, true}) {
          for (int byte = 16 * (lane % 8); byte < 2 * (of_v ? Shape::kDV : Shape::kD);
               byte += byte % 16 == 15 ? 113 : 1) {
            const int at = (of_v ? v_stage : 0) + byte / 128 * Shape::kKeys * 128 +
                           swizzled(row, 0, 1, byte % 128 / 16) + byte % 16;
            wrong += emulated_shared[at] != cache.expected(of_v, first + row, byte);
          }
        }
      }
      this_warp.arrive_and_wait();
    }
  });
  return wrong;
}

template <class Shape>
static int wrong_in_widened(int page_size, int most) {
  Cache cache(page_size, random_keys(most), Shape::kD - 16 * below(2), Shape::kDV, 1);
  for (std::vector<uint8_t>& bytes : cache.data) {
    for (uint8_t& byte : bytes) byte &= 0x77;  // no NaN, which differs from itself
  }
  const PageSize pages = PageSize::of(cache.args);
  const int warp = below(4), v_stage = 1 << 18, slots = 1 << 19;
  std::atomic<int> wrong{0};
  as_warp(warp, [&] {
    int first = cache.keys.begin / Shape::kKeys * Shape::kKeys;
    const int thread = static_cast<int>(threadIdx.x);
    WidenedKeys<Shape> keys(cache.args, pages, cache.s, cache.head, cache.keys, thread, slots);
    for (int i = 0; i < Shape::kSlots; ++i) keys.copy_next();
    for (; first < cache.keys.end; first += Shape::kKeys) {
      keys.template widen<Shape::kBoxes>(0);
      keys.copy_next();
      keys.template widen<Shape::kBoxesV>(v_stage);
      keys.copy_next();
      for (int row = thread / 4; row < Shape::kKeys; row += 32) {
        for (const bool of_v : {false, true}) {
          for (int box = 0; box < (of_v ? Shape::kBoxesV : Shape::kBoxes); ++box) {
            for (int i = 0; i < 16; ++i) {
              const int code = thread % 4 * 16 + i;
              __half half;
              std::memcpy(&half,
                          emulated_shared + (of_v ? v_stage : 0) + box * Shape::kKeys * 128 +
                              swizzled(row, 0, 1, code / 8) + code % 8 * 2,
                          2);
              const uint8_t byte = cache.expected(of_v, first + row, box * 64 + code);
              uint32_t low, high;
              halves_from_fp8(byte, low, high);
              const uint16_t bits = static_cast<uint16_t>(low);
              wrong += std::memcmp(&half, &bits, 2) != 0;
            }
          }
        }
      }
    }
  });
  return wrong;
}

// Vectors that ldmatrix loads are found from the first or the second of a row, and those of eight
// rows lie on different banks; each has a place of its own, within the tile.
template <int kRowBytes, int kRows>
static int wrong_in_lines() {
  using Lines = TileLines<kRowBytes, kRows>;
  std::set<int> places;
  int wrong = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int vector = 0; vector < kRowBytes / 16; ++vector) {
      const uint32_t base = 128 * below(1000);
      const uint32_t first = base + static_cast<uint32_t>(Lines::at(row, vector % 2));
      wrong += Lines::pairs_further(first, vector / 2) != base + Lines::at(row, vector);
      wrong += !places.insert(Lines::at(row, vector)).second;
      wrong += Lines::at(row, vector) + 16 > tile_bytes(kRowBytes, kRows);
      for (int other = row / 8 * 8; other < row; ++other) {
        wrong += (Lines::at(other, vector) - Lines::at(row, vector)) % 128 == 0;
      }
    }
  }
  return wrong;
}

// The barrier of a block of a cluster lies behind all that its warps copy, and leave.
static int wrong_barriers() {
  int wrong = 0;
  for (const DecodeTile& tile : kDecodeTiles) {
    for (const int bytes : {1, 2}) {
      for (const bool few_stages : {false, true}) {
        const DecodeBlock block = {tile.head_dim, tile.rows, bytes, few_stages};
        const int barrier = block.sent_at(2) - kSentBarrierBytes;
        wrong += barrier < block.warps() * block.warp_bytes() || barrier < block.sums_bytes() ||
                 barrier % 16 != 0;
      }
    }
  }
  return wrong;
}

static int wrong_pages() {
  int wrong = 0;
  for (int i = 0; i < 200000; ++i) {
    AttentionArgs args;
    const int32_t table = 0;
    args.block_table = &table;
    args.page_size = i < 3000 ? i + 1 : 1 + (chance() >> below(32));
    const uint32_t key = chance() >> (1 + below(31));
    const uint32_t near = static_cast<uint32_t>(key - key % args.page_size);
    for (const uint32_t at : {key, near, near - (near > 0), 0x7FFFFFFFu}) {
      wrong += PageSize::of(args).page_of(static_cast<int>(at)) != at / args.page_size;
    }
  }
  return wrong;
}

int main() {
  int tiles = 0, wrong = wrong_pages();
  const auto add = [&](int more) { ++tiles, wrong += more; };
  wrong += wrong_barriers() + wrong_in_lines<64, 16>() + wrong_in_lines<96, 16>() +
           wrong_in_lines<128, 32>() + wrong_in_lines<192, 16>() + wrong_in_lines<1024, 16>();
  for (const int page_size : {1, 4, 8, 16, 24, 48, 1568, 1 + below(100)}) {
    // So many keys that pages are asked for more than once.
    const int most = page_size % 16 == 0 ? 5000 : 500;
    add(wrong_in_tiles<TestTile<5, false>>(page_size, most));  // heads of 128
    add(wrong_in_tiles<TestTile<5, true>>(page_size, most));
    add(wrong_in_tiles<TestTile<0, false>>(page_size, most));
    add(wrong_in_tiles<TestTile<3, false>>(page_size, 500));   // irregular
    add(wrong_in_tiles<TestTile<12, false>>(page_size, 500));  // heads of 512
    add(wrong_in_stages<TestStage<2, false>>(page_size, 1700));
    add(wrong_in_stages<TestStage<4, false>>(page_size, 1300));
    add(wrong_in_widened<TestStage<2, true>>(page_size, 1700));
  }
  for (int i = 0; i < 4; ++i) {
    using Tile = TestTile<5, false>;
    add(wrong_in_tiles<Tile>(0, 700));
    add(wrong_in_tiles<Tile, RowTileCopies<Tile>>(0, 700));
    add(wrong_in_tiles<TestTile<5, true>>(0, 700));
    add(wrong_in_tiles<TestTile<5, true>, RowTileCopies<TestTile<5, true>>>(0, 700));
    add(wrong_in_tiles<TestTile<0, true>, RowTileCopies<TestTile<0, true>>>(0, 700));
    add(wrong_in_tiles<TestTile<12, false>, RowTileCopies<TestTile<12, false>>>(0, 300));
  }
  std::printf("tiles %d, wrong %d\n", tiles, wrong + foreign_reads);
}
