// The tiles of one matrix product, as the warpgroup kernel (warpgroup.cuh) asks for them: how many
// there are, where each lies, how its operands are fetched, and what their rows are multiplied by
// at the end. The products of experts have another such class (moe/cuda/grouped_tiles.cuh).
#pragma once

#include "dense_sink.cuh"
#include "problem.cuh"

namespace rocm_kernels {
namespace cuda {

// The first row and column that a tile multiplies, and those that it stores: from its own on, up to
// the ends. They differ in tiles that the product's edge would cut.
struct TilePlace {
  int32_t first_row, first_column;
  int32_t own_row, own_column, end_row, end_column;
};

template <class Tile>
class DenseTiles {
 public:
  using Problem = WarpgroupProblem;
  using Place = TilePlace;
  static constexpr bool kCountedOnDevice = false;  // the host knows how many there are
  using Sink = DenseSink<Tile>;

  __device__ __forceinline__ DenseTiles(const Problem& p, int rank) : p_(p), rank_(rank) {}

  __device__ __forceinline__ const TileSchedule& schedule() const { return p_.schedule; }

  // This block's part of what its cluster takes.
  __device__ __forceinline__ Place place_of(int tile) const {
    int2 place = place_of_tile(p_, tile);
    if (p_.cluster > 1) {
      if (p_.share_rows) {
        place.y = place.y * 2 + rank_;
      } else {
        place.x = place.x * 2 + rank_;
      }
    }
    const int own_row = place.x * Tile::kRows, own_column = place.y * Tile::kColumns;
    return {first_of<Tile::kRows, Tile::kSwapAb>(own_row, p_.rows),
            first_of<Tile::kColumns, !Tile::kSwapAb>(own_column, p_.columns),
            own_row,
            own_column,
            p_.rows,
            p_.columns};
  }

  // 128 bytes of each row of an operand, from byte `x` on; row `row` of it is the first.
  __device__ __forceinline__ void load(const CUtensorMap& map, bool, const Place&, int x, int row,
                                       uint32_t to, uint32_t barrier, uint64_t policy) const {
#if __CUDA_ARCH__ >= 900
    load_box_2d(map, x, row, to, barrier, policy);
#endif
  }

  // Whether all rows of warpgroup `group` lie behind the tile's last; and how many of the boxes
  // that the two blocks of a cluster fetch of what they share have rows before it.
  __device__ __forceinline__ bool is_beyond_end(const UnitInfo&, int) const { return false; }
  __device__ __forceinline__ int boxes_of_pair(const Place&, int) const { return 2; }

  __device__ __forceinline__ const ScaleView& scale_a() const { return p_.scale_a; }
  // Its kind and strides, wherever a tile lies.
  __device__ __forceinline__ const ScaleView& blocks_of_w() const { return p_.scale_w; }
  __device__ __forceinline__ const ScaleView& scale_w(const Place&) const { return p_.scale_w; }
  // The row of w that group `group` of `size` rows of w begins with; -1 for none.
  __device__ __forceinline__ int w_row_of_group(const Place& place, int group, int size) const {
    const int row = (Tile::kSwapAb ? place.first_row : place.first_column) + group * size;
    return row < (Tile::kSwapAb ? p_.rows : p_.columns) ? row : -1;
  }

  // What row i of a, or of w, of the tile is multiplied by at the end; the bias of the latter.
  __device__ __forceinline__ float a_factor(const Place& place, int i) const {
    const int64_t row = (Tile::kSwapAb ? place.first_column : place.first_row) + i;
    return row < (Tile::kSwapAb ? p_.columns : p_.rows) ? p_.scale_a.outer(row) : 0.0f;
  }
  __device__ __forceinline__ float w_factor(const Place& place, int i) const {
    const int64_t row = (Tile::kSwapAb ? place.first_row : place.first_column) + i;
    return row < (Tile::kSwapAb ? p_.rows : p_.columns) ? p_.scale_w.outer(row) : 0.0f;
  }
  __device__ __forceinline__ bool has_bias() const { return p_.bias != nullptr; }
  __device__ __forceinline__ float bias(const Place& place, int i) const {
    const int64_t row = (Tile::kSwapAb ? place.first_row : place.first_column) + i;
    return row < (Tile::kSwapAb ? p_.rows : p_.columns) ? load_bias(p_.bias, p_.bias_dtype, row)
                                                        : 0.0f;
  }

 private:
  // Where a tile of kSize rows begins to multiply so that it ends where the matrix does: the copy
  // engine takes some 9 cycles for each row beyond it, as many as the products that it feeds. Not
  // w with block scales, whose groups of rows begin at the tile's own.
  template <int kSize, bool kIsW>
  __device__ __forceinline__ static int first_of(int own, int size) {
    if (kIsW && Tile::kBlockScales) return own;
    return own + kSize > size && size >= kSize ? size - kSize : own;
  }

  const Problem& p_;
  const int rank_;
};

}  // namespace cuda
}  // namespace rocm_kernels
