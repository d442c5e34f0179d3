// Host: the launches of routing and of a grouped product, as fused_moe and grouped_gemm ask for
// them, and memory for what lies between launches.
#pragma once

#include "../../common/gpu/launch.h"
#include "../config.h"
#include "problem.h"

namespace rocm_kernels {

// The slots of a layer, with the expert of each: a product whose config routes itself sorts them by
// their ids. grouped_gemm gives the number of its rows for slots, and no ids.
struct SlotIds {
  const int32_t* ids = nullptr;  // [slots]
  int32_t slots = 0, experts = 0;
  bool first = false;              // this product is the layer's first kernel
  const float* weights = nullptr;  // [slots], of a down product that adds a token's slots itself
  int32_t* taken = nullptr;        // [1], 0 when the product begins, where config.takes_units()
};

// From ids to work: which slots each expert has, in the order of slots, and the tiles of rows that
// workgroups take. All on the device; the host knows only how many there can be. The kernels:
// route_kernels.h.
constexpr int kRouteThreads = kFewExperts;
constexpr int kSlotsPerChunk = 2 * kRouteThreads;

struct RoutingProblem {
  const int32_t* ids;      // [slots]; nullptr: grouped_gemm
  const int32_t* offsets;  // [experts]: grouped_gemm's ends
  int64_t slots;           // grouped_gemm: rows
  int32_t experts;
  int32_t block_m;
  int32_t chunks;
  int32_t* counts;      // [chunks][experts]: of each chunk; then the row of its first slot
  int32_t* row_slots;   // [slots]
  int32_t* slot_rows;   // [slots], the reverse: -1 for a slot without a row; nullptr: not wanted
  RowTile* tiles;       // [most_row_tiles()]
  int32_t* tile_count;  // [2]: tiles, rows
  TileGroup* groups;    // [most_row_tiles()]: of up to group_m tiles; nullptr: not wanted
  int32_t group_m;
};

// Each GPU backend defines it once, in products.hip or products.cu. Beside its MoeConfig it
// declares
//   launch_product(end, problem, config, most_tiles, slots, facts, stream)
// which starts a grouped product (launches.h).
Status launch_routing(const RoutingProblem& p, const DeviceFacts& facts, Stream stream);

// Pieces of the workspace, one after the other. Without memory it counts their bytes.
class WorkspacePieces {
 public:
  explicit WorkspacePieces(void* memory) : memory_(static_cast<uint8_t*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    T* const piece = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* memory_;
  int64_t bytes_ = 0;
};

// Whether `rows` rows of an expert's weights, and their scales, span less than 2 GiB.
inline bool is_compact(const ExpertWeights& w, int64_t rows) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  return rows * w.row_stride * size_of(w.dtype) < kLimit && rows * w.mx_row_stride < kLimit &&
         rows * w.scale.row_stride * 4 < kLimit;
}
// Whether four neighbours of a row of out can be stored together.
inline bool has_wide_stores(const void* out, int64_t stride, DType dtype) {
  return reinterpret_cast<uintptr_t>(out) % (4 * size_of(dtype)) == 0 && stride % 4 == 0;
}
// Whether rows of `k` elements of an expert's weights all begin at multiples of 16 bytes and do not
// overlap: TMA takes no others.
inline bool has_aligned_rows(const ExpertWeights& w, int64_t k) {
  const int64_t bytes = size_of(w.dtype);
  return w.row_stride * bytes >= w_row_bytes(w.dtype, k) && w.expert_stride > 0 &&
         reinterpret_cast<uintptr_t>(w.data) % 16 == 0 && w.row_stride * bytes % 16 == 0 &&
         w.expert_stride * bytes % 16 == 0;
}
inline bool has_aligned_rows(const void* data, int64_t stride, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * size_of(dtype) % 16 == 0;
}

}  // namespace rocm_kernels
