// decode_mlp for CDNA3 and CDNA4: a workgroup a compute unit, from the norm to the residual.
//
// All bytes that matter are the weights'. So eight waves of a workgroup do nothing but stream them,
// tile after tile; while the grid meets between the two products, the first weights of the second
// are on their way. Four waves, the helpers, do all the rest, since on AMD a wave's
// loads return in order: one that waits for a flag must have no weights on their way.
//
// Timeline. | is a barrier of the workgroup, || a meeting of the grid.
//
// clang-format off
//   streamers   | ask for the first K blocks of w_gate_up |||
//               multiply a by its tiles, each wave its part of K, asking ahead; sums to LDS | next tile ...
//               ask for the first K blocks of w_down |
//               |  multiply b by its tiles | ...
//   helpers     ask for x, residual, weight | h, norm, codes of a to LDS |||
//               | add the waves' sums; SiLU(gate) * up to memory, and its greatest | ...
//               || the grid meets |  y of all workgroups: scale, codes of b to LDS
//               |  | add the waves' sums; + h, to out | ...
// clang-format on
//
// A tile is 16 rows of w: of w_gate_up 8 of the gate and the 8 of up that meet them, of w_down 16
// neighbours. Every workgroup makes all of a and all of b for itself, which spares a meeting each:
// 8 KB and 57 KB of an 8-billion Llama, from L2. The one row of a is broadcast to all 16 of the
// matrix instruction.
//
// Sums are taken in the order of skinny_gemm's register pipeline with 8 waves and no split, so the
// bits are those of the five launches.
#include "../../blocks/grid/cdna/grid_barrier.h"
#include "../../blocks/product/cdna/target.h"
#include "../../blocks/product/cdna/tile_loader.h"
#include "../../blocks/product/even_split.h"
#include "../../blocks/product/schedule.h"
#include "../../blocks/rows/gpu/activation.h"
#include "../../blocks/rows/gpu/norm.h"
#include "../../blocks/rows/gpu/row_launch.h"
#include "../decode_mlp.h"

namespace rocm_kernels::cdna {
namespace {

constexpr int kHelpers = 4, kStreamers = 8;  // waves
constexpr int kLanes = 64;
constexpr int kThreads = (kHelpers + kStreamers) * kLanes;
constexpr int kHelperThreads = kHelpers * kLanes;
constexpr int kProducts = 2;
constexpr int kMostWorkgroups = 512;
constexpr int kHalf = kMmaRows / 2;  // rows of the gate in a tile, and of up
static_assert(sizeof(GridState) <= kDecodeMlpStateBytes);

// A product whose rows of w are read in tiles.
struct Product {
  const uint8_t* w;
  ScaleView scale;
  uint32_t row_bytes;
  uint32_t half_bytes;  // from a tile's first 8 rows to its other 8
  uint32_t tile_bytes;  // from tile to tile
  int32_t tiles, k_blocks;
};

template <typename T>
struct MlpProblem {
  RmsnormParams<T> norm;
  Product products[kProducts];
  T* out;
  float* y;     // [I]
  float* amax;  // [workgroups]
  GridState* grid;
  int32_t intermediate;
  int32_t code_bytes;  // of LDS: the longer of a and b
};

// LDS: codes of a, then of b; a place for each streamer; the sums of two tiles in turn.
constexpr int32_t kPlaceBytes = transpose_bytes(1, 1);
constexpr int32_t kSumBytes = 2 * kStreamers * kMmaRows * 4;
constexpr int32_t lds_bytes_of(int32_t code_bytes) {
  return code_bytes + kStreamers * kPlaceBytes + kSumBytes;
}

#if ROCM_KERNELS_CDNA

constexpr int kStages = 4;  // K blocks of a streamer under way

// The K blocks of a streamer, in the order in which it takes them: its part of each tile of its
// workgroup, tile after tile.
class Walk {
 public:
  ROCM_KERNELS_DEVICE Walk(const Product& p, int streamer) : tiles_(p.tiles) {
    const EvenSplit parts = EvenSplit::of(p.k_blocks, kStreamers);
    begin_ = parts.begin_of(streamer), end_ = parts.begin_of(streamer + 1);
    tile_ = blockIdx.x, k_ = begin_;
  }
  ROCM_KERNELS_DEVICE bool is_over() const { return tile_ >= tiles_; }
  ROCM_KERNELS_DEVICE int tile() const { return tile_; }
  ROCM_KERNELS_DEVICE int k() const { return k_; }

  // One K block on; whether that ends the tile.
  ROCM_KERNELS_DEVICE bool ends_tile() {
    if (++k_ < end_) return false;
    k_ = begin_;
    tile_ += gridDim.x;
    return true;
  }

 private:
  int tiles_, tile_, k_, begin_, end_;
};

// Asks for a streamer's weights of a product, ahead of their use.
class WeightStream {
 public:
  ROCM_KERNELS_DEVICE WeightStream(const Product& p, int streamer, int lane)
      : walk_(p, streamer),
        w_(buffer_at(p.w)),
        lane_offset_(load_row(0, lane) * p.row_bytes + load_byte(0, lane)),
        half_bytes_(p.half_bytes),
        tile_bytes_(p.tile_bytes) {}

  // The next K block: 8 rows in each of two loads; zeros, which nothing fetches, behind the last.
  ROCM_KERNELS_DEVICE void ask(Words (&block)[2]) {
    const uint32_t hide = walk_.is_over() ? kOutside : 0;
    const uint32_t at = walk_.tile() * tile_bytes_ + walk_.k() * kBlockK;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      block[n] = load_words<Cache::kNonTemporal>(w_, lane_offset_ | hide, at + n * half_bytes_);
    }
    walk_.ends_tile();
  }

 private:
  Walk walk_;
  Buffer w_;
  uint32_t lane_offset_, half_bytes_, tile_bytes_;
};

using Sums = Accumulator[1][1];

// sums += the K block's product with `codes`, the row of a from this K block on.
ROCM_KERNELS_DEVICE void multiply_add(const Words (&block)[2], const uint8_t* codes, uint8_t* place,
                                      int lane, Sums& sums) {
  const LdsTranspose<1> transpose(place, lane);
  Words w[2], a[2];
  transpose.write(block);
  transpose.template read<1>(w, lane % kMmaRows);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    // The elements of k that LdsTranspose gives a lane for its row of w.
    a[n] = *reinterpret_cast<const Words*>(codes + n * (kBlockK / 2) + lane / kMmaRows * 16);
  }
  sums[0][0] = Mma<MmaKind::kFp8>::multiply_add(w, a, lane, sums[0][0]);
}

// What the two kinds of waves share.
struct Meeting {
  TeamScratch scratch;
  float scale_a;
};

// What the helpers do before a product has barriers, to which the streamers come between their
// first asks: a wave that asks waits until the memory of its compute unit takes it.
//   gate and up   x is asked for | the norm's first sum | its greatest | a is in LDS
//   down          the grid has met | b is in LDS
constexpr bool has_barrier_before(int product, int stage) {
  return product == 0 ? stage < 4 : stage == kStages / 2 || stage == kStages;
}
static_assert(kStages >= 4);

ROCM_KERNELS_DEVICE void stream(const Product* products, int streamer, int lane,
                                const uint8_t* codes, uint8_t* place, float* sums_lds) {
  int parity = 0;
#pragma unroll 1
  for (int product = 0; product < kProducts; ++product) {
    const Product& p = products[product];
    WeightStream ahead(p, streamer, lane);
    Words stages[kStages][2];
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (has_barrier_before(product, s)) workgroup_barrier();
      ahead.ask(stages[s]);
      __builtin_amdgcn_sched_barrier(0);
    }
    if (has_barrier_before(product, kStages)) workgroup_barrier();

    Sums sums = {};
    Walk walk(p, streamer);
    while (!walk.is_over()) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) {
        if (walk.is_over()) break;
        multiply_add(stages[s], codes + walk.k() * kBlockK, place, lane, sums);
        keep_order(sums);
        ahead.ask(stages[s]);
        __builtin_amdgcn_sched_barrier(0);
        if (!walk.ends_tile()) continue;
        // Of the equal columns the first: four rows of w in each group of lanes.
        if (lane % kMmaRows == 0) {
          float* const own = sums_lds + (parity * kStreamers + streamer) * kMmaRows;
          *reinterpret_cast<Accumulator*>(own + lane / kMmaRows * 4) = sums[0][0];
        }
        workgroup_barrier();
        sums[0][0] = Accumulator{};
        parity ^= 1;
      }
    }
  }
}

// The sum of all streamers for row `row` of a tile, in their order.
ROCM_KERNELS_DEVICE float sum_of(const float* sums_lds, int parity, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kStreamers; ++s) sum += sums_lds[(parity * kStreamers + s) * kMmaRows + row];
  return sum;
}

template <typename T>
ROCM_KERNELS_DEVICE float rounded(float value) {
  return to_float(from_float<T>(value));
}

// h, its norm, the codes of a and their scale to LDS.
template <typename T, int kVectors>
ROCM_KERNELS_DEVICE void make_a(const MlpProblem<T>& p, uint8_t* codes, Meeting& meeting) {
  using Team = RowTeam<kHelperThreads, kVectors>;
  RmsnormParams<T> norm = p.norm;
  norm.output.data = codes;
  norm.output.scales = &meeting.scale_a;
  TeamThread<Team> here;
  Vector h[kVectors], residual[kVectors], weight[kVectors];
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = here.template column<T>(v);
    const auto load_from = [&](const void* row) {
      return load_vector<Touch::kAgain, Fit::kWhole>(static_cast<const T*>(row), column,
                                                     norm.hidden, true);
    };
    h[v] = load_from(norm.x);
    residual[v] = load_from(norm.addend);
    weight[v] = load_from(norm.weight);
  }
  workgroup_barrier();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    h[v] = add<T>(h[v], residual[v]);
    squares += sum_of_squares<T>(h[v], here.template column<T>(v), norm.hidden);
  }
  int slot = 0;
  float inverse = 1.0f;
  const float sum = reduce_team<Team>(squares, Sum{}, meeting.scratch, slot);
  store_norm<T, Team>(h, weight, sum, 0, norm.hidden, here, norm, meeting.scratch, slot, inverse);
}

// The codes of b to LDS, from what all workgroups published; returns their scale.
template <typename T>
ROCM_KERNELS_DEVICE float make_b(const MlpProblem<T>& p, int thread, int lane, uint8_t* codes) {
  float found[kMostWorkgroups / kLanes];
#pragma unroll
  for (int i = 0; i < kMostWorkgroups / kLanes; ++i) {
    const int workgroup = i * kLanes + lane;
    found[i] = p.amax[workgroup < static_cast<int>(gridDim.x) ? workgroup : 0];
  }
  constexpr int kAtOnce = 16;
  const int vectors = p.intermediate / 4;
  Accumulator four[kAtOnce];
  const auto load_from = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int vector = first + i * kHelperThreads;
      four[i] = reinterpret_cast<const Accumulator*>(p.y)[vector < vectors ? vector : 0];
    }
  };
  load_from(thread);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostWorkgroups / kLanes; ++i) amax = fmaxf(amax, found[i]);
  const Output& output = p.norm.output;
  const float scale = scale_of_amax(reduce_lanes<kLanes>(amax, MaxMagnitude{}), output);
  const float inverse = opaque(1.0f / scale);
  for (int first = thread;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int vector = first + i * kHelperThreads;
      const float y[4] = {four[i][0], four[i][1], four[i][2], four[i][3]};
      uint32_t word[1];
      fp8_codes<Fit::kWhole>(y, inverse, output, word);
      if (vector < vectors) reinterpret_cast<uint32_t*>(codes)[vector] = word[0];
    }
    first += kAtOnce * kHelperThreads;
    if (first - thread >= vectors) return scale;
    load_from(first);
  }
}

template <typename T, int kVectors>
ROCM_KERNELS_DEVICE void help(const MlpProblem<T>& p, int wave, int lane, uint8_t* codes,
                              const float* sums_lds, Meeting& meeting) {
  const int thread = static_cast<int>(threadIdx.x);
  GridBarrier grid(p.grid);
  make_a<T, kVectors>(p, codes, meeting);
  workgroup_barrier();

  int parity = 0;
  float amax = 0.0f, scale_a = meeting.scale_a;
  // A tile's scales are asked for a tile ahead.
  const auto column_of = [&](int tile) { return tile * kHalf + lane % kHalf; };
  const auto scale_of = [&](int tile, int from) {
    return tile < p.products[0].tiles ? p.products[0].scale.outer(from + column_of(tile)) : 0.0f;
  };
  float next_of_gate = scale_of(blockIdx.x, 0);
  float next_of_up = scale_of(blockIdx.x, p.intermediate);
  for (int tile = blockIdx.x; tile < p.products[0].tiles; tile += gridDim.x) {
    const float of_gate = next_of_gate, of_up = next_of_up;
    next_of_gate = scale_of(tile + gridDim.x, 0);
    next_of_up = scale_of(tile + gridDim.x, p.intermediate);
    workgroup_barrier();
    if (thread < kHalf) {
      const float gate = rounded<T>(sum_of(sums_lds, parity, thread) * scale_a * of_gate);
      const float up = rounded<T>(sum_of(sums_lds, parity, thread + kHalf) * scale_a * of_up);
      const float y = silu(gate) * up;
      amax = fmaxf(amax, fabsf(y));
      __hip_atomic_store(p.y + column_of(tile), y, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
    parity ^= 1;
  }

  if (wave == 0) {
    amax = reduce_lanes<kLanes>(amax, MaxMagnitude{});
    if (lane == 0) {
      __hip_atomic_store(p.amax + blockIdx.x, amax, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
    grid.arrive(lane);
    grid.wait(lane);
  }
  workgroup_barrier();
  scale_a = make_b(p, thread, lane, codes);
  workgroup_barrier();

  for (int tile = blockIdx.x; tile < p.products[1].tiles; tile += gridDim.x) {
    const int column = tile * kMmaRows + lane % kMmaRows;
    const float of_down = p.products[1].scale.outer(column);
    const T x = p.norm.x[column], residual = p.norm.addend[column];
    workgroup_barrier();
    if (thread < kMmaRows) {
      const float h = rounded<T>(to_float(x) + to_float(residual));
      const float down = rounded<T>(sum_of(sums_lds, parity, thread) * scale_a * of_down);
      p.out[column] = from_float<T>(h + down);
    }
    parity ^= 1;
  }
}

#endif

// kVectors: of 16 bytes that a helper holds of a row of H.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kThreads, 3)
    decode_mlp_kernel([[maybe_unused]] const MlpProblem<T> p) {
#if ROCM_KERNELS_CDNA
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  __shared__ Meeting meeting;
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kLanes);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  uint8_t* const places = lds + p.code_bytes;
  float* const sums = reinterpret_cast<float*>(places + kStreamers * kPlaceBytes);
  if (wave < kHelpers) {
    help<T, kVectors>(p, wave, lane, lds, sums, meeting);
  } else {
    const int streamer = wave - kHelpers;
    stream(p.products, streamer, lane, lds, places + streamer * kPlaceBytes, sums);
  }
#endif
}

// ---- Launcher ---------------------------------------------------------------------------------

Status check(const DecodeMlpArgs& args, const Target& target) {
  if (!target.matrix_instructions || target.compute_units > kMostWorkgroups) {
    return "decode_mlp needs a gfx942 or a gfx950, of at most 512 compute units";
  }
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16) {
    return "x must be bfloat16 or float16";
  }
  if (args.fp8_dtype != target.fp8) return "weights must be of the FP8 dialect of this GPU";
  if (args.hidden % kBlockK != 0 || args.hidden < 1024 || args.hidden > 8192) {
    return "hidden must be a multiple of 128, from 1024 to 8192";
  }
  if (args.intermediate % kBlockK != 0 || args.intermediate < 1024) {
    return "intermediate must be a multiple of 128, from 1024 on";
  }
  const int64_t codes = args.intermediate > args.hidden ? args.intermediate : args.hidden;
  if (codes > target.lds_bytes ||
      lds_bytes_of(static_cast<int32_t>(codes)) + int64_t{sizeof(TeamScratch)} + 64 >
          target.lds_bytes) {
    return "intermediate exceeds what LDS holds of it; run the ops one by one";
  }
  if (2 * args.intermediate * args.hidden >= int64_t{1} << 31) {
    return "w_gate_up must have less than 2 GiB";
  }
  if (args.scale_gate_up.is_blocked() || args.scale_down.is_blocked()) {
    return "scales of weights must be one a tensor or one a row";
  }
  if (args.workspace == nullptr || args.state == nullptr) {
    return "decode_mlp needs a workspace and a state";
  }
  return nullptr;
}

template <typename T>
MlpProblem<T> make_mlp_problem(const DecodeMlpArgs& args) {
  MlpProblem<T> p{};
  RmsnormFp8Args norm;
  norm.rows = 1;
  norm.hidden = args.hidden;
  norm.x = args.x;
  norm.addend = args.residual;
  norm.weight = args.norm_weight;
  norm.eps = args.eps;
  norm.weight_offset = args.weight_offset;
  norm.x_dtype = norm.weight_dtype = args.dtype;
  norm.out_dtype = args.fp8_dtype;
  norm.scaling = Scaling::kPerToken;
  p.norm = make_norm_params<T>(norm);
  const auto hidden = static_cast<uint32_t>(args.hidden);
  const auto intermediate = static_cast<uint32_t>(args.intermediate);
  p.products[0] = {static_cast<const uint8_t*>(args.w_gate_up),
                   args.scale_gate_up,
                   hidden,
                   intermediate * hidden,
                   kHalf * hidden,
                   static_cast<int32_t>(intermediate / kHalf),
                   static_cast<int32_t>(hidden / kBlockK)};
  p.products[1] = {static_cast<const uint8_t*>(args.w_down),
                   args.scale_down,
                   intermediate,
                   kHalf * intermediate,
                   kMmaRows * intermediate,
                   static_cast<int32_t>(hidden / kMmaRows),
                   static_cast<int32_t>(intermediate / kBlockK)};
  p.out = static_cast<T*>(args.out);
  p.y = static_cast<float*>(args.workspace);
  p.amax = p.y + intermediate;
  p.grid = static_cast<GridState*>(args.state);
  p.intermediate = static_cast<int32_t>(intermediate);
  p.code_bytes = static_cast<int32_t>(hidden > intermediate ? hidden : intermediate);
  return p;
}

template <typename T, int kVectors>
Status launch_with(const DecodeMlpArgs& args, const Target& target, const Context& context) {
  const auto kernel = decode_mlp_kernel<T, kVectors>;
  MlpProblem<T> p = make_mlp_problem<T>(args);
  void* pointers[] = {&p};
  // Refused where not all workgroups would run at once: they wait for each other.
  const hipError_t error = hipLaunchCooperativeKernel(
      reinterpret_cast<const void*>(kernel), dim3(target.compute_units), dim3(kThreads), pointers,
      static_cast<unsigned>(lds_bytes_of(p.code_bytes)), stream_of(context));
  if (error != hipSuccess) static_cast<void>(hipGetLastError());
  if (error == hipErrorCooperativeLaunchTooLarge) {
    return "decode_mlp needs a workgroup on every compute unit at once, and the device does not "
           "hold them; run the ops one by one";
  }
  return status_of(error);
}

}  // namespace
}  // namespace rocm_kernels::cdna

namespace rocm_kernels {

Status decode_mlp_workspace_bytes(const DecodeMlpArgs& args, int64_t& bytes) {
  cdna::Target target;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  bytes = 4 * (args.intermediate + target.compute_units);
  return nullptr;
}

Status launch_decode_mlp(const DecodeMlpArgs& args, const Context& context) {
  cdna::Target target;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  if (const Status error = cdna::check(args, target)) return error;
  const bool two = args.hidden <= 2 * cdna::kHelperThreads * 8;
  if (args.dtype == DType::kBFloat16) {
    return two ? cdna::launch_with<bfloat16, 2>(args, target, context)
               : cdna::launch_with<bfloat16, 4>(args, target, context);
  }
  return two ? cdna::launch_with<float16, 2>(args, target, context)
             : cdna::launch_with<float16, 4>(args, target, context);
}

}  // namespace rocm_kernels
