// gemm for sm_90a: TMA fills stages in shared memory, two warpgroups multiply. Weights
// narrower than a are widened between the two by a third (widen.cuh).
//
//   rows operand [R, K]     a worker's unit: block_r x block_c x an interval of K
//   columns operand [C, K]    producer warps   boxes of block_r (block_c) rows x 128 bytes of K
//                             2 warpgroups     64 * kWaves rows each, times block_c columns
//
//   sums[r, c] = sum_k rows[r, k] * columns[c, k]      its Sink: scales, bias, ...; out
//
// clang-format off
// Timeline of a block. Barriers: full and empty of each stage (narrow_full, narrow_empty of weights to
// be widened), and of two units ahead unit_full, factors_full, unit_empty.
//
//   who              waits for             does                                   then tells
//   fetch: a lane    the kernel before     (weights go to L2 before that)
//   for rows, one    empty[stage], or      orders a chunk's box                   full[stage], or
//   for columns      narrow_empty                                                 narrow_full: its bytes
//   widen: a third   narrow_full           makes w as wide as a                   narrow_empty
//   kind of warps    empty[stage]          stores it                              full[stage]
//   look_up: a warp  the kernel before
//                    unit_empty            where a unit lies                      unit_full
//                                          factors and biases of its tile         factors_full
//   look_up_places:  the kernel before
//   a warp           unit_empty            which rows of out, if Sink::kPlaces    factors_full
//   multiply: two    the kernel before
//   warpgroups       unit_full
//                    full[stage]           multiplies a chunk, promotes sums      empty[stage], in each block
//                    factors_full          Sink::finish                           unit_empty
// clang-format on
//
// Rows and columns are what wgmma calls M and N: it takes 64 rows and 8 to 256 columns. Which
// operand is which is the config's to say: a prompt has a as rows (out[m, n] as it lies in
// registers); for fewer than 256 tokens w is the rows and the tokens are columns, whose number fits
// in steps of 16.
//
// Why clusters. An SM multiplies 256 x 128 x 128 in about 1500 cycles and its two boxes are 48 KB:
// 55 bytes a nanosecond, all that L2 gives. SMs that ask for the same lines at about the same time
// are given them by one read of L2 (tma.cuh), but they drift apart. Two blocks that share an
// operand can load half of it each and send it to both; then each waits for the other's stages too.
#pragma once

#include "block_scales.cuh"
#include "dense_tiles.cuh"
#include "main_loop.cuh"
#include "widen.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The roles of a block's warps, and what they share.
template <class Tile, class Tiles>
struct WarpgroupBlock {
  using Problem = typename Tiles::Problem;
  using Sink = typename Tiles::Sink;
  static constexpr int kRowBytes = Tile::kRows * kChunkBytes;
  static constexpr int kStageBytes = Tile::kStageBytes;
  static constexpr int kGroupRows = Tile::kGroupRows;
  static constexpr int kPlaces = Sink::kPlaces > 0 ? Sink::kPlaces : 1;

  const Problem& p;
  Tiles& tiles;
  UnitInfo (&units_ahead)[2];
  int32_t (&places_ahead)[2][kPlaces];
  int (&finished_groups)[kMathGroups];
  typename Sink::Shared& of_sink;
  // Barriers: of stages, of stages of narrow weights, of the two units ahead.
  uint32_t full, empty, narrow_full, narrow_empty, unit_full, factors_full, unit_empty;
  uint32_t stages, narrow;
  uint8_t* after_stages;
  int rank, worker, warp, lane;

  // ---- Who widens weights: warps of their own ---------------------------------------------------

  __device__ __forceinline__ void widen() const {
    if constexpr (Tile::kWidened) {
      drop_registers<Tile::kWidenRegisters>();
      const WideningStages at = {
          narrow, narrow_full, narrow_empty, stages + (Tile::kSwapAb ? 0 : kRowBytes), full, empty};
      widen_weights<Tile>(tiles, p, worker, threadIdx.x - kWarpgroupThreads, at);
    }
  }

  // ---- Who fetches an operand: a lane for rows, a lane for columns ------------------------------

  __device__ __forceinline__ void fetch(const CUtensorMap& rows_map, const CUtensorMap& columns_map,
                                        int role) const {
    const bool is_rows = role == 0, is_w = is_rows == Tile::kSwapAb;
    const bool widens = Tile::kWidened && is_w;
    const int row_bytes = widens ? Tile::kWRowBytes : kChunkBytes;
    const int num_stages = widens ? p.narrow_stages : p.num_stages;
    const int stage_bytes = widens ? Tile::kNarrowBytes : kStageBytes;
    const uint32_t is_full = widens ? narrow_full : full;
    const uint32_t is_empty = widens ? narrow_empty : empty;
    const CUtensorMap& map = is_rows ? rows_map : columns_map;
    prefetch_tensor_map(map);
    const bool shared = p.cluster > 1 && is_rows == p.share_rows;
    const int box_rows = is_rows ? p.rows_box : p.columns_box;
    const int box_bytes = box_rows * row_bytes;
    const int part = shared ? rank * box_rows : 0;
    const uint32_t to = widens ? narrow : stages + (is_rows ? 0 : kRowBytes) + part * kChunkBytes;
    const uint64_t policy = l2_policy(is_rows ? p.rows_policy : p.columns_policy);
    bool waiting = true;
    if constexpr (Tiles::kCountedOnDevice) wait_for_previous_kernel(), waiting = false;
    const auto& schedule = tiles.schedule();
    Units units(schedule, worker);
    Unit unit;
    PipelineState state{0, 1};
    while (units.take(unit)) {
      const auto place = tiles.place_of(unit.tile);
      const int row = (is_rows ? place.first_row : place.first_column) + part;
      const int boxes = shared ? tiles.boxes_of_pair(place, box_rows) : 1;
      if (waiting) {
        // Weights may be brought to L2 before the predecessor is done, though not read: L2 is
        // where its stores land.
        if (is_w) {
          for (int chunk = unit.begin; chunk < unit.end && chunk < unit.begin + 2; ++chunk) {
            prefetch_box_2d(map, chunk * row_bytes, row);
          }
        }
        wait_for_previous_kernel();
        waiting = false;
      }
      for (int chunk = unit.begin; chunk < unit.end; ++chunk) {
        mbarrier_wait(is_empty + state.stage * 8, state.parity);
        mbarrier_arrive_expect(is_full + state.stage * 8, boxes * box_bytes);
        if (shared) {
          if (rank < boxes) {
            load_box_2d_in_cluster(map, chunk * row_bytes, row, to + state.stage * stage_bytes,
                                   is_full + state.stage * 8, 3, policy);
          }
        } else {
          tiles.load(map, is_w, place, chunk * row_bytes, row, to + state.stage * stage_bytes,
                     is_full + state.stage * 8, policy);
        }
        state.advance(num_stages);
      }
    }
  }

  // ---- Who looks up units, and what their ends need from memory: a warp -------------------------

  // So that the products of the first need not wait for it.
  __device__ __forceinline__ void look_up() const {
    wait_for_previous_kernel();
    const auto& schedule = tiles.schedule();
    Units units(schedule, worker);
    Unit unit;
    for (PipelineState ahead{0, 1};; ahead.advance(2)) {
      UnitInfo& info = units_ahead[ahead.stage];
      const bool more = units.take(unit);
      typename Tiles::Place place{};
      if (more) place = tiles.place_of(unit.tile);
      mbarrier_wait(unit_empty + ahead.stage * 8, ahead.parity);
      if (lane == 0) {
        info.chunks = more ? unit.end - unit.begin : 0;
        info.first_chunk = unit.begin;
        info.first_row = place.first_row;
        info.first_column = place.first_column;
        info.own_row = place.own_row;
        info.own_column = place.own_column;
        info.end_row = place.end_row;
        info.end_column = place.end_column;
        info.contributor = unit.contributor;
        info.contributors = unit.contributors;
        info.shared_tile = unit.tile - schedule.whole;
        info.first_slot = unit.first_slot;
        info.other_slots = schedule.slot(unit, worker, 1) - schedule.slot_step();
        info.slot_step = schedule.slot_step();
        info.last = unit.last;
        info.zero = 0;
        if constexpr (Tile::kBlockScales) {
          const ScaleView& scale_w = tiles.scale_w(place);
#pragma unroll
          for (int i = 0; i < Tile::kWGroups; ++i) {
            const int row = more ? tiles.w_row_of_group(place, i, Tile::kWGroup) : 0;
            info.w_scales[i] = scale_w.data + max(row, 0) / kScaleBlock * scale_w.row_stride;
          }
        }
        mbarrier_arrive(unit_full + ahead.stage * 8);
      }
      if (!more) break;
      // All loads are under way before any is waited for. With those of the bias, or the next
      // unit's place, they would not fit in this warp's registers, and be awaited one by one.
      constexpr int kRowLanes = (Tile::kRows + 31) / 32, kColumnLanes = (Tile::kColumns + 31) / 32;
      float row_factor[kRowLanes], column_factor[kColumnLanes];
#pragma unroll
      for (int i = 0; i < kRowLanes; ++i) {
        const int row = lane + i * 32;
        row_factor[i] = Tile::kSwapAb ? tiles.w_factor(place, row) : tiles.a_factor(place, row);
      }
#pragma unroll
      for (int i = 0; i < kColumnLanes; ++i) {
        const int column = lane + i * 32;
        column_factor[i] =
            Tile::kSwapAb ? tiles.a_factor(place, column) : tiles.w_factor(place, column);
      }
#pragma unroll
      for (int i = 0; i < kRowLanes; ++i) info.row_factor[lane + i * 32] = row_factor[i];
#pragma unroll
      for (int i = 0; i < kColumnLanes; ++i) info.column_factor[lane + i * 32] = column_factor[i];
      if (tiles.has_bias()) {
        constexpr int kBiasLanes = Tile::kSwapAb ? kRowLanes : kColumnLanes;
        float bias[kBiasLanes];
#pragma unroll
        for (int i = 0; i < kBiasLanes; ++i) bias[i] = tiles.bias(place, lane + i * 32);
#pragma unroll
        for (int i = 0; i < kBiasLanes; ++i) info.bias[lane + i * 32] = bias[i];
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(factors_full + ahead.stage * 8);
    }
  }

  // ---- Who looks up where rows of a unit's sums go: a warp --------------------------------------

  __device__ __forceinline__ void look_up_places() const {
    if constexpr (Sink::kPlaces > 0) {
      // Where rows of a unit's sums go, so that its end need not ask memory.
      wait_for_previous_kernel();
      const auto& schedule = tiles.schedule();
      Units units(schedule, worker);
      Unit unit;
      for (PipelineState ahead{0, 1}; units.take(unit); ahead.advance(2)) {
        const auto place = tiles.place_of(unit.tile);
        constexpr int kLanes = (Sink::kPlaces + 31) / 32;
        int32_t places[kLanes];
#pragma unroll
        for (int i = 0; i < kLanes; ++i) places[i] = tiles.place_of_row(place, lane + i * 32);
        mbarrier_wait(unit_empty + ahead.stage * 8, ahead.parity);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) places_ahead[ahead.stage][lane + i * 32] = places[i];
        __syncwarp();
        if (lane == 0) mbarrier_arrive(factors_full + ahead.stage * 8);
      }
    }
  }

  // ---- Who multiplies, and hands its sums to the Sink: two warpgroups ---------------------------

  __device__ __forceinline__ void multiply() const {
    raise_registers<Tile::kMathRegisters>();
    const int group = warp / 4;
    Sink sink(p, rank, of_sink);
    wait_for_previous_kernel();

    const StagedOperands operands = {wgmma_operand_low(stages + group * kGroupRows * kChunkBytes),
                                     wgmma_operand_low(stages + kRowBytes), full, p.num_stages};
    // A lane for each block of the cluster tells it of stages that are read.
    const uint32_t empty_there = mbarrier_in_cluster(empty, lane < p.cluster ? lane : 0);
    std::conditional_t<Tile::kBlockScales, BlockScales<Tile>, NoBlockScales> scales(
        warp, lane,
        reinterpret_cast<float*>(after_stages + kMathGroups * 4 * Sink::warp_staging(p)));
    PipelineState state{0, 0};
    for (PipelineState ahead{0, 0};;) {
      mbarrier_wait(unit_full + ahead.stage * 8, ahead.parity);
      const UnitInfo& unit = units_ahead[ahead.stage];
      const int chunks = unit.chunks;
      if (chunks == 0) break;

      const auto release = [&](int of_stage) {
        if (lane < p.cluster) mbarrier_arrive_in_cluster(empty_there + of_stage * 8);
      };
      const auto next_unit = [&] {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(unit_empty + ahead.stage * 8);
        ahead.advance(2);
      };
      if (tiles.is_beyond_end(unit, group)) {
        for (int chunk = 0; chunk < chunks; ++chunk) {
          mbarrier_wait(full + state.stage * 8, state.parity);
          release(state.stage);
          state.advance(p.num_stages);
        }
        next_unit();
        continue;
      }

      float sums[Tile::kWaves][Tile::kColumnTiles][4];
      if constexpr (Tile::kChain == 0) {
        multiply_in_place<Tile>(operands, chunks, state, release, sums);
      } else {
        multiply_and_promote<Tile>(operands, tiles, unit, chunks, scales, state, release, sums);
      }

      // Computed from what the compiler does not know: or it keeps all that follows from it, for
      // every tile, in registers that the sums need.
      const int thread = threadIdx.x % 128 + unit.zero;
      mbarrier_wait(factors_full + ahead.stage * 8, ahead.parity);
      sink.finish({unit, places_ahead[ahead.stage], group, thread,
                   after_stages + warp * Sink::warp_staging(p), finished_groups[group]},
                  sums);
      next_unit();
    }
    sink.end();
  }
};

#endif

// `Tiles` says which product's tiles these are, and Tiles::Sink what becomes of their sums. Grid:
// workers * cluster blocks of Tile::kThreads. Boxes: [rows_box, 128 bytes] and [columns_box, 128
// bytes], but kWRowBytes of w. Shared memory: warpgroup_shared_bytes() and narrow_stages; rows of a
// tile that no box brings hold anything, and are not stored. Blocks of a cluster do not share
// weights that are widened.
template <class Tile, class Tiles = DenseTiles<Tile>>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_warpgroup_kernel(const __grid_constant__ CUtensorMap rows_map,
                          const __grid_constant__ CUtensorMap columns_map,
                          const __grid_constant__ typename Tiles::Problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Block = WarpgroupBlock<Tile, Tiles>;
  using Sink = typename Tiles::Sink;
  static_assert(kIsSinkOf<Sink, UnitPart, float (&)[Tile::kWaves][Tile::kColumnTiles][4]>, "");
  constexpr int kStageBytes = Tile::kStageBytes;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, as registers go
  const int lane = threadIdx.x % 32;
  const int rank = p.cluster > 1 ? cluster_rank() : 0;
  const int worker = static_cast<int>(blockIdx.x) / p.cluster;

  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t full_barriers[kMaxStages], empty_barriers[kMaxStages];
  __shared__ uint64_t narrow_full_barriers[kMaxStages], narrow_empty_barriers[kMaxStages];
  __shared__ uint64_t unit_full_barriers[2], factors_full_barriers[2], unit_empty_barriers[2];
  __shared__ UnitInfo units_ahead[2];
  __shared__ int finished_groups[kMathGroups];
  __shared__ int32_t places_ahead[2][Block::kPlaces];
  __shared__ typename Sink::Shared of_sink;
  const uint32_t full = pinned_address(full_barriers);
  const uint32_t empty = pinned_address(empty_barriers);
  const uint32_t unit_full = pinned_address(unit_full_barriers);
  const uint32_t factors_full = pinned_address(factors_full_barriers);
  const uint32_t unit_empty = pinned_address(unit_empty_barriers);
  const uint32_t padding = -shared_address(dynamic_shared) & (kStageAlignment - 1);
  const uint32_t stages = pinned_address(dynamic_shared + padding);
  const uint32_t narrow = stages + p.num_stages * kStageBytes;
  uint8_t* const after_stages =
      dynamic_shared + padding + p.num_stages * kStageBytes + p.narrow_stages * Tile::kNarrowBytes;

  allow_next_kernel();
  if (threadIdx.x == 0) {
    init_pipeline(full, empty, p.num_stages, Tile::kWidened ? 1 + Tile::kWidenWarps : 2,
                  kMathGroups * 4 * p.cluster);
    if constexpr (Tile::kWidened) {
      init_pipeline(shared_address(narrow_full_barriers), shared_address(narrow_empty_barriers),
                    p.narrow_stages, 1, Tile::kWidenWarps);
    }
    init_pipeline(unit_full, unit_empty, 2, 1, kMathGroups * 4);
    for (int i = 0; i < 2; ++i) mbarrier_init(factors_full + i * 8, Sink::kPlaces > 0 ? 2 : 1);
    Sink::init(of_sink);
    fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < kBiases; i += Tile::kThreads) {
    for (UnitInfo& info : units_ahead) info.bias[i] = 0.0f;
  }
  __syncthreads();
  if (p.cluster > 1) cluster_arrive(), cluster_wait();

  Tiles tiles(p, rank);
  const Block block{p,
                    tiles,
                    units_ahead,
                    places_ahead,
                    finished_groups,
                    of_sink,
                    full,
                    empty,
                    shared_address(narrow_full_barriers),
                    shared_address(narrow_empty_barriers),
                    unit_full,
                    factors_full,
                    unit_empty,
                    stages,
                    narrow,
                    after_stages,
                    rank,
                    worker,
                    warp,
                    lane};
  if (Tile::kWidened && warp >= kWarpgroupThreads / 32) {
    block.widen();
    __syncwarp();
  } else if (warp >= kMathGroups * 4) {
    drop_registers<Tile::kFetchRegisters>();
    const int role = warp - kMathGroups * 4;
    if (role < 2 && lane == 0) {
      block.fetch(rows_map, columns_map, role);
    } else if (role == 2) {
      block.look_up();
    } else if (role == 3) {
      block.look_up_places();
    }
    __syncwarp();
  } else {
    block.multiply();
  }
  // A block must not end while the other of its cluster still sends to it.
  if (p.cluster > 1) {
    __syncwarp();
    cluster_arrive(), cluster_wait();
  }
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
