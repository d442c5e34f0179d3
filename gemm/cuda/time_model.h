// How long a config of gemm would take:
//
//   time = launch + chunks that the busiest worker takes x time of a chunk
//                   or bytes / memory, or bytes that tiles ask L2 for / L2, whichever is longest
//          + tiles that it ends x time of an end + combining by contributors, where tiles are
//          shared
//
// The times of a chunk and of an end are each tile's own; memory and L2 are the device's. All were
// fitted on an H200 and an H100 together by `python benchmarks/gemm_tiles.py fit`, to products of
// which every config was timed and to others of which the best of each schedule was; the tiles of
// weights that are widened by themselves, on an H200. How near the picks are to the best:
// docs/kernels/gemm.md, "The choice".
#pragma once

#include <cmath>

#include "config.h"

namespace rocm_kernels {
namespace cuda {

// What a tile takes alone, in clusters of two along m and along n; in the order of tiles.h.
struct TileTime {
  float chunk[3];  // us for 128 bytes of K
  float end[3];    // us for scales, rounding and stores, and the pipeline's start
};
constexpr TileTime kFp8Times[] = {
    {{0.7321, 0.7677, 0.7288}, {1.541, 1.397, 2.131}},  // 256 x 128
    {{0.3869, 0.4222, 0.3886}, {0.874, 1.144, 1.332}},  // 256 x 64
    {{0.5636, 0.5782, 0.5487}, {1.191, 1.112, 1.836}},  // 256 x 96
    {{0.5316, 0.5728, 0.5437}, {1.416, 1.332, 1.659}},  // 128 x 192
    {{0.3309, 0.3462, 0.3031}, {0.108, 0.891, 1.095}},  // 128 x 96
    {{0.2725, 0.2388, 0.2559}, {0.000, 1.129, 0.486}},  // 128 x 64
    {{0.4008, 0.3851, 0.3709}, {0.567, 1.000, 1.155}},  // 128 x 128
    {{0.4501, 0.4732, 0.4734}, {1.639, 1.276, 1.451}},  // 128 x 160
    {{0.4284, 0.3989, 0.4381}, {1.497, 3.086, 1.918}},  // 128 x 128, swapped
    {{0.3554, 0.3144, 0.3487}, {1.289, 2.760, 1.850}},  // 96 x 128, swapped
    {{0.3257, 0.2916, 0.2959}, {0.330, 1.418, 1.594}},  // 64 x 128, swapped
    {{0.5411, 0.4287, 0.5039}, {0.882, 2.021, 2.135}},  // 64 x 256, swapped
    {{0.2258, 0.2037, 0.2079}, {0.773, 1.350, 2.136}},  // 32 x 128, swapped
};
constexpr TileTime kFp8BlockTimes[] = {
    {{0.8221, 0.8265, 0.8075}, {1.231, 1.460, 1.901}},  // 256 x 128
    {{0.5028, 0.5217, 0.4796}, {0.492, 0.717, 1.008}},  // 256 x 64
    {{0.6958, 0.7416, 0.7081}, {0.879, 0.996, 1.953}},  // 256 x 96
    {{0.6995, 0.6553, 0.6767}, {0.734, 2.105, 1.579}},  // 128 x 192
    {{0.3557, 0.3663, 0.3374}, {0.876, 1.569, 1.657}},  // 128 x 96
    {{0.4000, 0.3987, 0.4054}, {1.160, 2.104, 1.417}},  // 128 x 128
    {{0.6067, 0.6399, 0.6280}, {2.053, 1.639, 1.964}},  // 128 x 160
    {{0.2841, 0.2945, 0.2542}, {0.500, 0.976, 1.403}},  // 128 x 64
    {{0.5977, 0.5827, 0.5939}, {2.504, 3.621, 2.801}},  // 128 x 128, swapped
    {{0.4774, 0.4511, 0.4729}, {2.167, 3.159, 2.581}},  // 96 x 128, swapped
    {{0.3788, 0.3487, 0.3699}, {1.779, 2.699, 2.433}},  // 64 x 128, swapped
    {{0.6393, 0.6172, 0.6479}, {2.700, 2.868, 3.087}},  // 64 x 256, swapped
    {{0.2562, 0.2188, 0.2562}, {1.620, 2.358, 2.359}},  // 32 x 128, swapped
};
constexpr TileTime k16BitTimes[] = {
    {{0.6821, 0.7046, 0.6726}, {1.954, 1.241, 2.000}},  // 256 x 128
    {{0.3851, 0.4249, 0.3765}, {0.500, 0.762, 1.327}},  // 256 x 64
    {{0.5205, 0.5143, 0.4992}, {1.322, 1.577, 1.746}},  // 128 x 192
    {{0.2631, 0.2931, 0.2772}, {0.825, 0.741, 1.350}},  // 128 x 96
    {{0.3476, 0.3661, 0.3640}, {0.993, 1.522, 1.230}},  // 128 x 128
    {{0.4089, 0.4262, 0.4212}, {1.918, 1.500, 1.333}},  // 128 x 160
    {{0.6696, 0.7254, 0.6872}, {2.100, 0.717, 1.950}},  // 128 x 256
    {{0.2211, 0.2153, 0.2157}, {0.000, 0.710, 0.725}},  // 128 x 64
    {{0.7801, 0.7310, 0.7696}, {2.197, 7.459, 2.967}},  // 256 x 128, swapped
    {{0.4026, 0.3389, 0.4019}, {1.392, 4.235, 1.781}},  // 128 x 128, swapped
    {{0.3380, 0.3242, 0.3356}, {0.939, 1.318, 1.566}},  // 96 x 128, swapped
    {{0.2820, 0.2289, 0.2797}, {0.854, 1.583, 1.475}},  // 64 x 128, swapped
    {{0.2124, 0.1913, 0.2176}, {1.653, 1.259, 2.396}},  // 32 x 128, swapped
};
constexpr TileTime kWidenedTimes[] = {
    {{0.696, 0, 0.715}, {3.3, 0, 3.9}},  // 256 x 128
    {{0.377, 0, 0.390}, {5.2, 0, 5.5}},  // 128 x 128
    {{0.432, 0, 0.439}, {4.0, 0, 4.7}},  // 128 x 128, swapped
    {{0.365, 0, 0.364}, {2.6, 0, 3.3}},  // 64 x 128, swapped
    {{0.311, 0, 0.319}, {2.4, 0, 2.7}},  // 32 x 128, swapped
};
constexpr TileTime kWidenedBlockTimes[] = {
    {{0.526, 0, 0.550}, {2.4, 0, 3.2}},  // 128 x 128
    {{0.671, 0, 0.693}, {4.3, 0, 4.8}},  // 128 x 128, swapped
    {{0.531, 0, 0.576}, {3.0, 0, 3.4}},  // 64 x 128, swapped
    {{0.427, 0, 0.452}, {2.2, 0, 2.4}},  // 32 x 128, swapped
};

inline const TileTime& time_of_tile(TileKind kind, int tile) {
  const auto at = [&](const auto& times, const auto& tiles) -> const TileTime& {
    static_assert(sizeof(times) / sizeof(times[0]) == sizeof(tiles) / sizeof(tiles[0]));
    return times[tile];
  };
  switch (kind) {
    case TileKind::kFp8:
      return at(kFp8Times, kFp8Tiles);
    case TileKind::kFp8Block:
      return at(kFp8BlockTimes, kFp8BlockTiles);
    case TileKind::k16Bit:
      return at(k16BitTimes, k16BitTiles);
    case TileKind::kWidened:
      return at(kWidenedTimes, kWidenedTiles);
    case TileKind::kWidenedBlock:
      break;
  }
  return at(kWidenedBlockTimes, kWidenedBlockTiles);
}

// Microseconds.
inline double modelled_time(const GemmArgs& args, const GemmConfig& c, const GemmDevice& device) {
  constexpr double kLaunch = 1.741;   // us
  constexpr double kMemory = 0.8043;  // of what the memory could read
  constexpr double kL2 = 0.1356;      // of L2, an us
  constexpr float kL2Power = 0.7672;  // tiles that ask at once count so
  constexpr double kL2Holds = 1.644, kMissed = 0.8769;
  constexpr double kCombine = 0.8441, kCombineKilobyte = 0.04261, kContributor = 0.1257;
  constexpr double kStreamed = 2.759;
  constexpr float kHeat = 0.02121;
  constexpr double kIdleGain = 0.2684;      // of a chunk's time, were all other SMs idle
  constexpr double kUnalignedL2 = 0.5829;   // rows that end in a line of 128 bytes: two for one
  constexpr double kUnalignedFp8 = 0.1712;  // of a chunk's time
  const TileTime& tile =
      time_of_tile(tile_kind_of(args), find_tile(args, c.block_m, c.block_n, c.swap_ab));
  const int64_t k_bytes = args.k * size_of(args.a_dtype);
  const TileSchedule s = cut_product(c, args.m, args.n, k_bytes, device.sm_count);
  const int workers = device.sm_count / (c.cluster_m * c.cluster_n);
  const double shared = s.split_k == 1 ? 0 : s.shared_tiles();
  double chunks, ends, busy, combine = 0.0;
  const double kilobytes = c.block_m * c.block_n * 4 / 1000.0;
  if (!s.streamed()) {
    const double units = double(s.whole) + double(s.shared_tiles()) * s.split_k;
    ends = std::ceil(units / workers);
    chunks = ends * std::ceil(double(s.chunks) / s.split_k);
    busy = units / workers;
    if (shared > 0) combine = kCombine + kilobytes * kCombineKilobyte + s.split_k * kContributor;
  } else {
    const double rounds = double(s.whole) / workers;
    ends = std::ceil(rounds) + 1;
    chunks = std::ceil(rounds * s.chunks + shared * s.chunks / s.workers);
    busy = s.whole > 0 ? 1.0 : double(s.workers) / workers;
    combine = (kCombine + 1.5 * kilobytes * kCombineKilobyte) * kStreamed;
  }
  const int cluster = c.cluster_m == 2 ? 1 : c.cluster_n == 2 ? 2 : 0;
  const bool unaligned = k_bytes % kChunkBytes != 0;
  const double slower = unaligned && is_fp8(args.a_dtype) ? 1 + kUnalignedFp8 : 1;
  // The clock falls with time. (float's pow: double's is newer than manylinux_2_28.)
  const double warm = std::pow(float(chunks / 64), kHeat);
  const double chunk =
      tile.chunk[cluster] * (1 - kIdleGain * (1 - std::min(1.0, busy))) * slower * warm;
  const double of_w = double(size_of(args.w_dtype)) / size_of(args.a_dtype);
  const double bytes = (double(args.m) + double(args.n) * of_w) * k_bytes +
                       double(args.m) * args.n * size_of(args.out_dtype);
  // What tiles ask L2 for, and how many of them ask for the same at about the same time, which is
  // partly served by one read.
  const double a_bytes =
      double(s.tiles) * c.cluster_m * std::min<int64_t>(c.block_m, args.m) * k_bytes;
  const double w_bytes =
      double(s.tiles) * c.cluster_n * std::min<int64_t>(c.block_n, args.n) * of_w * k_bytes;
  const auto at_once = [](int64_t length, int tile) {
    return double(std::pow(float(ceil_div(length, tile)), kL2Power - 1));
  };
  const double l2_bytes = a_bytes * at_once(args.n, c.block_n * c.cluster_n) +
                          w_bytes * at_once(args.m, c.block_m * c.cluster_m);
  double again = 0;  // bytes that come from memory once more
  if (s.streamed()) {
    // Workers are at different places of K, so that L2 keeps an operand for one of them alone.
    const double beyond = bytes / (kL2Holds * device.memory.l2_bytes) - 1;
    again = kMissed * (a_bytes + w_bytes) * shared / s.tiles * std::min(1.0, std::max(0.0, beyond));
  }
  // What nearly weighs as much adds to the longest.
  const auto to_fourth = [](double time) { return time * time * time * time; };
  const double sum =
      to_fourth(chunks * chunk) +
      to_fourth((bytes + again) / (kMemory * device.memory.bytes_per_us)) +
      to_fourth(l2_bytes * (unaligned ? 1 + kUnalignedL2 : 1) / (kL2 * device.memory.l2_bytes));
  const double fed = std::sqrt(std::sqrt(sum));
  return kLaunch + fed + ends * tile.end[cluster] + combine;
}

}  // namespace cuda
}  // namespace rocm_kernels
