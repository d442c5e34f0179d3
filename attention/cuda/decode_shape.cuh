// What an instance of the decode kernel (decode.cuh) is made for, how the work is divided, and what
// of it a block and a lane have.
#pragma once

#include <type_traits>

#include "../gpu/problem.h"
#include "matrix.cuh"
#include "row_groups.cuh"
#include "tile_copies.cuh"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

struct NoTokens {};

// T: of q and out. kTile: of kDecodeTiles. kOfRows: keys and values are in rows, not in pages, and
// their heads as wide as the tile's. kNew: each sequence has a new token (new_token.cuh). Without,
// a kernel has nothing of it: in a step its code is not in the caches, and each line of it counts.
template <typename T, bool kFp8KV, int kTile, bool kOfRows, bool kNew>
struct DecodeShape {
  using Q = T;
  static constexpr bool kInRows = kOfRows;
  static constexpr bool kHasNew = kNew;
  using NewTokens = std::conditional_t<kNew, RopeAndCacheArgs, NoTokens>;
  using Mma = std::conditional_t<kFp8KV, __half, T>;  // that are multiplied
  static constexpr bool kFp8 = kFp8KV;
  static constexpr DecodeBlock kBlock = {kDecodeTiles[kTile].head_dim, kDecodeTiles[kTile].rows,
                                         kFp8 ? 1 : 2, false};
  static constexpr int kD = kBlock.head_dim, kRows = kBlock.rows, kTiles = kRows / 8;
  static constexpr int kSteps = kD / 16;  // of 16 elements of a head
  static constexpr int kBytes = kBlock.bytes, kRowBytes = kBlock.row_bytes();
  static constexpr int kLoads = kRowBytes / 32;  // of ldmatrix, for a row
  static constexpr int kKeys = kDecodeKeys, kTileBytes = kBlock.warp_tile_bytes();
  using Lines = TileLines<kRowBytes, kKeys>;
  static constexpr int kWarps = kBlock.warps(), kThreads = 32 * kWarps;
  static constexpr int kOutPitch = kBlock.out_pitch();
  static constexpr bool kSharesQueries = kBlock.shares_queries();
  static constexpr int kHeld = kSharesQueries ? 1 : kTiles;  // tiles of queries that a warp loads
  static_assert(kTiles <= kWarps, "each tile of shared queries has a warp that loads it");
  using Copies = std::conditional_t<kInRows, RowTileCopies<DecodeShape>, TileCopies<DecodeShape>>;
};

// Two numbers on their way from block to block through memory, and whose they are. Stored and
// loaded as one: whoever finds the name has the numbers.
struct alignas(16) DecodeWord {
  float first, second;
  uint64_t launch;
};

// How the work is divided.
struct DecodeGrid {
  Window window;
  RowGroups rows;
  PageSize page_size;
  int parts;                        // of the keys: cluster * outer
  int cluster;                      // that meet in shared memory
  int row_blocks;                   // of kRows rows
  int stages, sent_at, queries_at;  // of DecodeBlock
  DecodeWord* words;                // where outer > 1: what parts leave in memory (decode_end.cuh)
  uint64_t launch;                  // the name of this launch, that such words bear
};

// Rows of q of a block.
struct DecodeRows {
  Sequence s;
  int b, head;      // number of the sequence, KV head
  int first, last;  // of the sequence's rows for the head
};

// What of the work is a block's: of the rows, whose keys, and tiles of them, which each warp takes
// in turn.
struct DecodePart {
  DecodeRows rows;
  int row_count;       // of the sequence
  KeyRange keys, all;  // that some row sees, that every row sees
  int begin, end;      // tiles
};

// A lane's columns of S^T, rows first + 8 t + {0, 1} of q: what makes a score of a product, and
// which keys they see. That is worked out where some key is not seen by all: kept, it would be 16
// registers of a tile of 32 rows, whose kernel has none to spare.
template <class Shape>
struct DecodeColumns {
  const DecodeGrid& grid;
  const DecodeRows& rows;
  int first;
  float scale[Shape::kTiles][2];  // not 0: a product that is not seen is infinite
  int all_begin, all_end;         // that every row sees
  bool capped;
  float cap;

  __device__ __forceinline__ KeyRange seen(int t, int c) const {
    const int query = grid.rows.query_of(min(first + 8 * t + c, rows.last));
    return grid.window.seen(rows.s, query, query);
  }
};

// Where a maximum begins: any score is beyond it, and a difference to it is no NaN.
constexpr float kLeastScore = -3e38f;

// Sums of these columns over the keys that the warp has met.
template <class Shape>
struct DecodeSums {
  float maximum[Shape::kTiles][2], sum[Shape::kTiles][2];
  float out[Shape::kTiles][Shape::kSteps][4];
};

}  // namespace cuda
}  // namespace rocm_kernels
