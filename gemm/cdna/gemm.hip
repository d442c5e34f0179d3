// AMD backend of gemm: the kernel, checks, the choice of a config, the launch.
#include "../../blocks/product/cdna/main_loop.h"
#include "../../blocks/product/cdna/partial_sums.h"
#include "../../blocks/product/cdna/plain.h"
#include "../../blocks/product/cdna/target.h"
#include "../../common/cdna/arguments.h"
#include "../../skinny_gemm/cdna/skinny_gemm.h"
#include "../gemm.h"
#include "choose.h"
#include "tile_sink.h"

namespace rocm_kernels {
namespace cdna {
namespace {

// ---- The kernels that exist -------------------------------------------------------------------

#if ROCM_KERNELS_CDNA
// The same number, of which the compiler knows nothing: what a tile's begin and end need of it
// would otherwise be computed before the first tile, and kept or spilled.
ROCM_KERNELS_DEVICE int hidden(int lane) {
  asm volatile("" : "+v"(lane));
  return lane;
}

// Asks for a field of each of its cache lines together: else the scalar cache would miss them one
// after another as the first tile begins.
ROCM_KERNELS_DEVICE void fetch_arguments(const GemmProblem& p) {
  asm volatile("" ::"s"(p.m), "s"(p.scale_a.row_stride), "s"(p.scale_w.row_stride), "s"(p.k),
               "s"(p.schedule.k_blocks), "s"(p.order.tiles_m), "s"(p.launch));
}
#endif

// Grid: schedule.workgroups(). LDS: a line of the tile's rows.
template <MmaKind kKind, int kTile, bool kBlockScales>
__global__ void __launch_bounds__(kGemmTiles[kTile].threads(), 2)
    gemm_tiled([[maybe_unused]] const GemmProblem arguments) {
#if ROCM_KERNELS_CDNA
  using Product = TileProduct<kKind, GemmTileAt<kTile, kBlockScales>, kBlockScales>;
  using Sink = TileSink<kTile>;
  static_assert(kIsSinkOf<Sink, typename Product::Sums&>, "");
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  fetch_arguments(arguments);
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int worker = arguments.schedule.worker_of(blockIdx.x);
  const int rounds = arguments.schedule.whole_rounds;
  for (int round = 0; round <= rounds; ++round) {
    const Range units = arguments.schedule.units_of(worker, round);
    for (int unit = units.begin; unit < units.end;) {
      const GemmProblem& p = reread_problem<GemmProblem>();
      const WorkTile work = p.schedule.work_at(unit, units.end);
      typename Sink::Sums sums = {};
      const TileOrder::Place place = p.order.place_of(work.tile);
      Product product(DenseRows::of_a(p, place.m * kGemmTiles[kTile].block_m),
                      DenseRows::of_w(p, place.n * kGemmTiles[kTile].block_n), p.k, wave,
                      hidden(lane));
      product.run(work.k_begin, work.k_end, lds, sums);
      Sink(reread_problem<GemmProblem>(), work.tile, worker, wave, hidden(lane), lds).finish(sums);
      unit = work.next_unit;
      workgroup_barrier();
    }
  }
#endif
}

using Kernel = void (*)(GemmProblem);

template <MmaKind kKind, bool kBlockScales, size_t kTile = 0>
Kernel tiled_kernel(size_t tile) {
  if constexpr (kTile == kGemmTileCount) {
    return nullptr;
  } else if constexpr (kBlockScales && !kGemmTiles[kTile].block_scales) {
    return tiled_kernel<kKind, kBlockScales, kTile + 1>(tile);
  } else {
    return tile == kTile ? gemm_tiled<kKind, kTile, kBlockScales>
                         : tiled_kernel<kKind, kBlockScales, kTile + 1>(tile);
  }
}

Kernel tiled_kernel(MmaKind kind, bool block_scaled, int tile) {
  switch (kind) {
    case MmaKind::kFp8:
      return block_scaled ? tiled_kernel<MmaKind::kFp8, true>(tile)
                          : tiled_kernel<MmaKind::kFp8, false>(tile);
    case MmaKind::kFloat16:
      return tiled_kernel<MmaKind::kFloat16, false>(tile);
    case MmaKind::kBFloat16:
      return tiled_kernel<MmaKind::kBFloat16, false>(tile);
    case MmaKind::kFloat16Fp8:
      return block_scaled ? tiled_kernel<MmaKind::kFloat16Fp8, true>(tile)
                          : tiled_kernel<MmaKind::kFloat16Fp8, false>(tile);
    case MmaKind::kBFloat16Fp8:
      return block_scaled ? tiled_kernel<MmaKind::kBFloat16Fp8, true>(tile)
                          : tiled_kernel<MmaKind::kBFloat16Fp8, false>(tile);
    case MmaKind::kFp8Sparse:
      break;
  }
  return nullptr;
}

// ---- Checks and choice -------------------------------------------------------------------------

// Kernels count rows, columns and K in 31 bits, and offsets within a tile in as many bytes.
Status check_sizes(const GemmArgs& args) {
  constexpr int64_t kLimit = int64_t{1} << 31, kRows = 256;
  if (args.m >= kLimit - kRows || args.n >= kLimit - kRows) return "M and N must be below 2^31";
  if (args.k * size_of(args.a_dtype) >= kLimit / 2) return "a row of a must be below 1 GiB";
  if (kRows * args.a_stride * size_of(args.a_dtype) >= kLimit ||
      kRows * args.w_stride * size_of(args.w_dtype) >= kLimit) {
    return "256 rows of a, and of w, must span less than 2 GiB; make them contiguous";
  }
  if (kRows * args.scale_a.row_stride * 4 >= kLimit ||
      (args.k / kScaleBlock + 1) * args.scale_a.block_stride * 4 >= kLimit ||
      (args.n / kScaleBlock + 1) * args.scale_w.row_stride * 4 >= kLimit) {
    return "scales of a tile must span less than 2 GiB; make them contiguous";
  }
  return nullptr;
}

// The config of a call: the one that args name, or the chosen one. Matrix instructions know one
// dialect of FP8.
Status config_of(const GemmArgs& args, const Target& target, Config& config) {
  const bool other_dialect = is_fp8(args.w_dtype) && args.w_dtype != target.fp8;
  GemmConfig plain;
  plain.design = GemmConfig::Design::kPlain;
  if (args.config == nullptr) {
    config = other_dialect ? plain : cached_choice(shape_of(args), target);
  } else {
    if (Status error = read_config(args.config, config)) return error;
    const GemmConfig* const own = std::get_if<GemmConfig>(&config);
    if (own == nullptr || own->design != GemmConfig::Design::kPlain) {
      if (!target.matrix_instructions) return "gemm config: only the plain design runs here";
      if (other_dialect) {
        return "gemm config: w's FP8 dialect is not this GPU's; only the plain design takes it";
      }
    }
  }
  const GemmShape shape = shape_of(args);
  return std::visit([&](const auto& family) { return check_config(shape, family); }, config);
}

Kernel plain_kernel(DType a, DType w) {
  constexpr DType kHalf = DType::kFloat16, kBrain = DType::kBFloat16;
  constexpr DType kOcp = DType::kFloat8E4M3FN, kFnuz = DType::kFloat8E4M3FNUZ;
  if (a == kOcp) return gemm_plain<kOcp, kOcp>;
  if (a == kFnuz) return gemm_plain<kFnuz, kFnuz>;
  if (a == kHalf) {
    return w == kOcp    ? gemm_plain<kHalf, kOcp>
           : w == kFnuz ? gemm_plain<kHalf, kFnuz>
                        : gemm_plain<kHalf, kHalf>;
  }
  return w == kOcp    ? gemm_plain<kBrain, kOcp>
         : w == kFnuz ? gemm_plain<kBrain, kFnuz>
                      : gemm_plain<kBrain, kBrain>;
}

Status launch_tiled(const GemmArgs& args, const GemmConfig& config, const Context& context,
                    bool adds = false) {
  const GemmShape shape = shape_of(args);
  const int tile = find_gemm_tile(config.block_m, config.block_n, shape.block_scaled);
  const Kernel kernel = tiled_kernel(mma_kind_of(args), shape.block_scaled, tile);
  if (kernel == nullptr) return "no kernel was built for this config; report a defect";
  GemmProblem p = make_problem(args);
  p.adds = adds;
  p.order = order_of(shape, config);
  p.schedule = schedule_of(shape, config);
  if (p.schedule.slots() != 0) {
    if (args.workspace == nullptr) return "this config needs a workspace";
    p.tickets = static_cast<uint64_t*>(args.workspace);
    p.partials =
        reinterpret_cast<float*>(static_cast<uint8_t*>(args.workspace) + ticket_bytes(p.schedule));
    p.launch = next_ticket_name();
  }
  const Launch launch{dim3(p.schedule.workgroups()), kGemmTiles[tile].threads(), stream_of(context),
                      kGemmTiles[tile].lds_bytes()};
  return launch_kernel(kernel, launch, p);
}

// The config of the tiles where their kernel adds its results to out; nullptr: it does not.
const GemmConfig* adding_config(const GemmArgs& args, const Config& config) {
  const auto* const tiles = std::get_if<GemmConfig>(&config);
  const bool adds = tiles != nullptr && tiles->design == GemmConfig::Design::kTiled;
  return adds && make_problem(args).vector_rows ? tiles : nullptr;
}

// The grid counts rows of a along y, of which a launch has at most 65,535 groups.
Status launch_plain(const GemmArgs& args, int32_t wave_size, const Context& context) {
  constexpr int64_t kRows = int64_t{kPlainRows} * 32768;
  const Kernel kernel = plain_kernel(args.a_dtype, args.w_dtype);
  for (int64_t begin = 0; begin < args.m; begin += kRows) {
    const GemmArgs part = rows_of(args, begin, std::min(begin + kRows, args.m));
    const dim3 grid(static_cast<uint32_t>((part.n + kPlainWaves - 1) / kPlainWaves),
                    static_cast<uint32_t>((part.m + kPlainRows - 1) / kPlainRows));
    const Launch launch{grid, kPlainWaves * wave_size, stream_of(context)};
    if (Status error = launch_kernel(kernel, launch, make_problem(part))) return error;
  }
  return nullptr;
}

}  // namespace

// Beside skinny_gemm.h's, for either family of configs.
static int64_t workspace_bytes(const GemmArgs& args, const GemmConfig& config) {
  if (config.design == GemmConfig::Design::kPlain) return 0;
  const Schedule schedule = schedule_of(shape_of(args), config);
  if (schedule.slots() == 0) return 0;
  return ticket_bytes(schedule) + int64_t{schedule.slots()} * config.block_m * config.block_n * 4;
}

static Status launch(const GemmArgs& args, const GemmConfig& config, const Target& target,
                     const Context& context) {
  if (Status error = check_sizes(args)) return error;
  return config.design == GemmConfig::Design::kPlain ? launch_plain(args, target.wave_size, context)
                                                     : launch_tiled(args, config, context);
}

}  // namespace cdna

int64_t gemm_workspace_bytes(const GemmArgs& args, const Context&) {
  cdna::Target target;
  cdna::Config config;
  // What is wrong, the launch will say.
  if (!cdna::current_target(target) || cdna::config_of(args, target, config) != nullptr) return 0;
  return std::visit([&](const auto& family) { return workspace_bytes(args, family); }, config);
}

Status check_gemm_config(const GemmArgs& args, const Context&) {
  cdna::Target target;
  cdna::Config config;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  return cdna::config_of(args, target, config);
}

Status visit_gemm_configs(const GemmArgs& args, const Context&,
                          void (*visit)(const char* config, void* state), void* state) {
  cdna::Target target;
  cdna::Config first;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  if (Status error = cdna::config_of(args, target, first)) return error;
  const cdna::GemmConfig* const own = std::get_if<cdna::GemmConfig>(&first);
  const bool plain = own != nullptr && own->design == cdna::GemmConfig::Design::kPlain;
  const auto for_each = [&](const auto& tell) {
    if (!plain) cdna::for_each_config(cdna::shape_of(args), target, tell);
  };
  visit_texts(first, for_each, visit, state);
  return nullptr;
}

Status launch_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  cdna::Target target;
  cdna::Config config;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  if (Status error = cdna::check_dtypes(args)) return error;
  if (Status error = cdna::config_of(args, target, config)) return error;
  return std::visit([&](const auto& family) { return launch(args, family, target, context); },
                    config);
}

// Here a kernel begins when the one before has ended: the sum's sends as early as a product could.
Status ask_gemm_to_peers(const GemmArgs&, const Context&, bool& sends) {
  sends = false;
  return nullptr;
}

Status launch_gemm_to_peers(const GemmArgs&, const Group&, const Context&) {
  return "a product on AMD GPUs does not send its results";
}

// Of many rows, whose results are added. Few rows of a are a small part of what registers hold, and
// every workgroup would quantise them.
Status ask_joined_gemm(const JoinedGemmArgs& args, const Context&, bool& joins) {
  joins = false;
  if (!args.adds) return nullptr;
  cdna::Target target;
  cdna::Config config;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  if (Status error = cdna::check_dtypes(args)) return error;
  if (Status error = cdna::config_of(args, target, config)) return error;
  joins = cdna::check_sizes(args) == nullptr && cdna::adding_config(args, config) != nullptr;
  return nullptr;
}

Status launch_joined_gemm(const JoinedGemmArgs& args, const Context& context) {
  cdna::Target target;
  cdna::Config config;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  if (Status error = cdna::config_of(args, target, config)) return error;
  const cdna::GemmConfig* const tiles = cdna::adding_config(args, config);
  if (!args.adds || tiles == nullptr) return "this product on AMD GPUs does nothing else";
  return cdna::launch_tiled(args, *tiles, context, true);
}

// Nothing is measured on AMD GPUs.
Status choose_linear_limit(const GemmArgs&, int64_t& rows) {
  rows = kAnyRows;
  return nullptr;
}

}  // namespace rocm_kernels
