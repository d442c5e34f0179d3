// AMD backend of skinny_gemm: checks, the choice of a kernel, the launch.
#include <atomic>
#include <random>

#include "../../common/gpu/launch.h"
#include "portable.h"
#include "queue.h"
#include "stream.h"

namespace rocm_kernels {
namespace {

using Kernel = void (*)(SkinnyGemmProblem);

// ---- The kernels that exist -------------------------------------------------------------------

template <Operands kKind, int kRowTilesA, int kRowsW, bool kBlockScaled>
Kernel stream_kernel() {
  constexpr bool kPossible = kKind == Operands::kFp8Sparse ? kRowTilesA == 1 && !kBlockScaled
                                                           : !kBlockScaled || w_bytes(kKind) == 1;
  if constexpr (kPossible && tiles_fit(kRowTilesA, kRowsW, a_bytes(kKind))) {
    constexpr int kDepth = stream_depth(kRowTilesA, kRowsW, a_bytes(kKind), w_bytes(kKind));
    return skinny_gemm_stream<kKind, kRowTilesA, kRowsW, kDepth, kBlockScaled>;
  } else {
    return nullptr;
  }
}

template <Operands kKind, bool kBlockScaled>
Kernel stream_kernel(int a_tiles, int rows) {
  switch (100 * a_tiles + rows) {
    case 108:
      return stream_kernel<kKind, 1, 8, kBlockScaled>();
    case 208:
      return stream_kernel<kKind, 2, 8, kBlockScaled>();
    case 116:
      return stream_kernel<kKind, 1, 16, kBlockScaled>();
    case 132:
      return stream_kernel<kKind, 1, 32, kBlockScaled>();
    case 216:
      return stream_kernel<kKind, 2, 16, kBlockScaled>();
    case 232:
      return stream_kernel<kKind, 2, 32, kBlockScaled>();
    case 264:
      return stream_kernel<kKind, 2, 64, kBlockScaled>();
    case 416:
      return stream_kernel<kKind, 4, 16, kBlockScaled>();
    case 432:
      return stream_kernel<kKind, 4, 32, kBlockScaled>();
    default:
      return nullptr;
  }
}

Kernel stream_kernel(Operands kind, bool block_scaled, int a_tiles, int rows) {
  switch (kind) {
    case Operands::kFp8:
      return block_scaled ? stream_kernel<Operands::kFp8, true>(a_tiles, rows)
                          : stream_kernel<Operands::kFp8, false>(a_tiles, rows);
    case Operands::kFp8Sparse:
      return stream_kernel<Operands::kFp8Sparse, false>(a_tiles, rows);
    case Operands::kFloat16:
      return stream_kernel<Operands::kFloat16, false>(a_tiles, rows);
    case Operands::kBFloat16:
      return stream_kernel<Operands::kBFloat16, false>(a_tiles, rows);
    case Operands::kFloat16Fp8:
      return block_scaled ? stream_kernel<Operands::kFloat16Fp8, true>(a_tiles, rows)
                          : stream_kernel<Operands::kFloat16Fp8, false>(a_tiles, rows);
    case Operands::kBFloat16Fp8:
      return block_scaled ? stream_kernel<Operands::kBFloat16Fp8, true>(a_tiles, rows)
                          : stream_kernel<Operands::kBFloat16Fp8, false>(a_tiles, rows);
  }
  return nullptr;
}

template <Operands kKind, int kRowTilesA, int kRowsW>
constexpr Kernel queue_kernel() {
  return skinny_gemm_queue<kKind, kRowTilesA, kRowsW, stream_depth(kRowTilesA, kRowsW, 1, 1)>;
}

Kernel queue_kernel(Operands kind, int a_tiles, int rows) {
  const bool sparse = kind == Operands::kFp8Sparse;
  switch (100 * a_tiles + rows) {
    case 116:
      return sparse ? queue_kernel<Operands::kFp8Sparse, 1, 16>()
                    : queue_kernel<Operands::kFp8, 1, 16>();
    case 132:
      return sparse ? queue_kernel<Operands::kFp8Sparse, 1, 32>()
                    : queue_kernel<Operands::kFp8, 1, 32>();
    case 216:
      return queue_kernel<Operands::kFp8, 2, 16>();
    case 232:
      return queue_kernel<Operands::kFp8, 2, 32>();
    case 264:
      return queue_kernel<Operands::kFp8, 2, 64>();
    case 416:
      return queue_kernel<Operands::kFp8, 4, 16>();
    case 432:
      return queue_kernel<Operands::kFp8, 4, 32>();
    default:
      return nullptr;
  }
}

Kernel portable_kernel(DType a, DType w) {
  constexpr DType kHalf = DType::kFloat16, kBrain = DType::kBFloat16;
  constexpr DType kOcp = DType::kFloat8E4M3FN, kFnuz = DType::kFloat8E4M3FNUZ;
  if (a == kOcp) return skinny_gemm_portable<kOcp, kOcp>;
  if (a == kFnuz) return skinny_gemm_portable<kFnuz, kFnuz>;
  if (a == kHalf) {
    return w == kOcp    ? skinny_gemm_portable<kHalf, kOcp>
           : w == kFnuz ? skinny_gemm_portable<kHalf, kFnuz>
                        : skinny_gemm_portable<kHalf, kHalf>;
  }
  return w == kOcp    ? skinny_gemm_portable<kBrain, kOcp>
         : w == kFnuz ? skinny_gemm_portable<kBrain, kFnuz>
                      : skinny_gemm_portable<kBrain, kBrain>;
}

// ---- Device and operands ----------------------------------------------------------------------

constexpr Status kNoDevice = "skinny_gemm: the device's attributes cannot be read";

struct Target {
  SkinnyGemmDevice device;
  DType fp8;  // the dialect of its matrix instructions
  int32_t wave_size;
};

bool current_target(Target& target) {
  DeviceFacts facts;
  int id = 0, major = 0, minor = 0, lds = 0;
  if (current_device(facts) != nullptr || hipGetDevice(&id) != hipSuccess ||
      hipDeviceGetAttribute(&major, hipDeviceAttributeComputeCapabilityMajor, id) != hipSuccess ||
      hipDeviceGetAttribute(&minor, hipDeviceAttributeComputeCapabilityMinor, id) != hipSuccess ||
      hipDeviceGetAttribute(&lds, hipDeviceAttributeMaxSharedMemoryPerBlock, id) != hipSuccess) {
    return false;
  }
  const bool gfx942 = major == 9 && minor == 4, gfx950 = major == 9 && minor == 5;
  target.device.compute_units = facts.compute_units;
  target.device.lds_bytes = lds;
  target.device.matrix_instructions = gfx942 || gfx950;
  if (gfx950) {
    target.device.terabytes_per_s = 6.1f;
    target.device.gigahertz = 2.4f;
  }
  target.wave_size = facts.wave_size;
  target.fp8 = gfx942 ? DType::kFloat8E4M3FNUZ : DType::kFloat8E4M3FN;
  return true;
}

Status check_dtypes(const GemmArgs& args) {
  if (args.a_dtype == DType::kFloat32) return "skinny_gemm: a must be float16, bfloat16 or FP8";
  if (args.a_dtype != args.w_dtype && (is_fp8(args.a_dtype) || !is_fp8(args.w_dtype))) {
    return "skinny_gemm: w must have a's dtype, or be FP8 with 16-bit a";
  }
  return nullptr;
}

Operands operands_of(const GemmArgs& args, bool sparse) {
  if (is_fp8(args.a_dtype)) return sparse ? Operands::kFp8Sparse : Operands::kFp8;
  if (args.a_dtype == DType::kFloat16) {
    return is_fp8(args.w_dtype) ? Operands::kFloat16Fp8 : Operands::kFloat16;
  }
  return is_fp8(args.w_dtype) ? Operands::kBFloat16Fp8 : Operands::kBFloat16;
}

SkinnyGemmShape shape_of(const GemmArgs& args) {
  return {static_cast<int32_t>(args.m),
          static_cast<int32_t>(args.n),
          static_cast<int32_t>(args.k),
          static_cast<int32_t>(size_of(args.a_dtype)),
          static_cast<int32_t>(size_of(args.w_dtype)),
          is_block_scaled(args)};
}

// Tickets first, one for each tile, then the slots.
int64_t ticket_bytes(const Schedule& schedule) {
  return (schedule.tiles * static_cast<int64_t>(sizeof(uint64_t)) + 255) / 256 * 256;
}

// A name that no earlier launch left in memory: see arrives_last().
uint64_t next_launch_name() {
  static std::atomic<uint64_t> names{std::random_device{}() |
                                     static_cast<uint64_t>(std::random_device{}()) << 32};
  // An odd constant walks through all 2^64 values before it repeats one.
  return names.fetch_add(0x9E3779B97F4A7C15ull, std::memory_order_relaxed) >> 8;
}

// The loops compute offsets within a tile, and within a, in 31 bits.
Status check_offsets(const GemmArgs& args) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  constexpr int64_t kTileRows = 64;
  const auto reach = [](int64_t rows, int64_t stride, int64_t last) {
    return (rows - 1) * stride + last;
  };
  if (args.k >= (1 << 29)) return "skinny_gemm: K must be below 2^29";
  if (args.n >= (1 << 30)) return "skinny_gemm: N must be below 2^30";
  if (reach(args.m, args.a_stride, args.k) * size_of(args.a_dtype) + 4096 >= kLimit) {
    return "skinny_gemm: a must span less than 2 GiB; make it contiguous";
  }
  if (reach(kTileRows, args.w_stride, args.k) * size_of(args.w_dtype) + 4096 >= kLimit) {
    return "skinny_gemm: 64 rows of w must span less than 2 GiB; make w contiguous";
  }
  const auto scale_reach = [&](const ScaleView& scale, int64_t rows) {
    if (scale.kind == ScaleView::Kind::kRow) return 4 * reach(rows, scale.row_stride, 1);
    if (scale.kind != ScaleView::Kind::kBlock) return int64_t{0};
    const int64_t columns = (args.k + kScaleBlock - 1) / kScaleBlock;
    return 4 * (reach(rows, scale.row_stride, 0) + columns * scale.block_stride);
  };
  const bool w_blocks = args.scale_w.kind == ScaleView::Kind::kBlock;
  if (scale_reach(args.scale_a, args.m) >= kLimit ||
      scale_reach(args.scale_w, w_blocks ? (args.n + kScaleBlock - 1) / kScaleBlock : args.n) >=
          kLimit) {
    return "skinny_gemm: scales must span less than 2 GiB; make them contiguous";
  }
  return nullptr;
}

SkinnyGemmConfig chosen_config(const GemmArgs& args, const Target& target) {
  // The choice weighs some 100 cuts, 7 us of a host thread: kept for the shapes of a model's
  // layers.
  struct Choice {
    SkinnyGemmShape shape = {};
    int32_t compute_units = 0;
    SkinnyGemmConfig config;
  };
  constexpr size_t kChoices = 64;
  thread_local Choice choices[kChoices];
  const SkinnyGemmShape shape = class_of(shape_of(args));
  const size_t mixed = static_cast<size_t>(shape.n) * 31 + static_cast<size_t>(shape.k) * 17 +
                       static_cast<size_t>(shape.m) * 5 + shape.w_bytes;
  Choice& choice = choices[mixed % kChoices];
  const SkinnyGemmShape& known = choice.shape;
  if (choice.compute_units != target.device.compute_units || known.m != shape.m ||
      known.n != shape.n || known.k != shape.k || known.a_bytes != shape.a_bytes ||
      known.w_bytes != shape.w_bytes || known.block_scaled != shape.block_scaled) {
    choice = {shape, target.device.compute_units, choose_config(shape, target.device)};
  }
  return choice.config;
}

// The config of a call: the one that args name, or the chosen one.
Status config_of(const GemmArgs& args, const Target& target, SkinnyGemmConfig& config) {
  if (args.config == nullptr) {
    config = chosen_config(args, target);
    return nullptr;
  }
  if (!ConfigReader(args.config).read(config)) {
    return "skinny_gemm config: it must read like 'stream rows=16 waves=4 split=2 blocks=0 "
           "xcds=8 producers=0'";
  }
  if (!target.device.matrix_instructions && config.design != SkinnyGemmConfig::Design::kPortable) {
    return "skinny_gemm config: only the portable design runs on this GPU";
  }
  return check_config(shape_of(args), config);
}

}  // namespace

int64_t skinny_gemm_workspace_bytes(const GemmArgs& args, const Context&) {
  Target target;
  SkinnyGemmConfig config;
  // What is wrong, the launch will say.
  if (!current_target(target) || config_of(args, target, config) != nullptr) return 0;
  if (config.design == SkinnyGemmConfig::Design::kPortable) return 0;
  const Schedule schedule = schedule_of(shape_of(args), config);
  if (schedule.slots() == 0) return 0;
  return ticket_bytes(schedule) + static_cast<int64_t>(schedule.slots()) * args.m * config.rows * 4;
}

Status visit_skinny_gemm_configs(const GemmArgs& args, const Context&,
                                 void (*visit)(const char* config, void* state), void* state) {
  Target target;
  SkinnyGemmConfig first;
  if (!current_target(target)) return kNoDevice;
  if (Status error = config_of(args, target, first)) return error;
  if (Status error = check_config(class_of(shape_of(args)), first)) return error;
  const auto tell = [&](const SkinnyGemmConfig& config) {
    char text[kConfigTextBytes];
    describe(config, text, sizeof text);
    visit(text, state);
  };
  tell(first);
  for_each_config(shape_of(args), target.device, [&](const SkinnyGemmConfig& config) {
    if (!(config == first)) tell(config);
  });
  return nullptr;
}

Status launch_skinny_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  Target target;
  SkinnyGemmConfig config;
  if (!current_target(target)) return kNoDevice;
  if (Status error = check_dtypes(args)) return error;
  if (Status error = check_offsets(args)) return error;
  if (Status error = config_of(args, target, config)) return error;
  const SkinnyGemmShape shape = shape_of(args);

  SkinnyGemmProblem p = {};
  p.a = static_cast<const uint8_t*>(args.a);
  p.w = static_cast<const uint8_t*>(args.w);
  p.out = args.out;
  p.bias = args.bias;
  p.a_stride = args.a_stride * size_of(args.a_dtype);
  p.w_stride = args.w_stride * size_of(args.w_dtype);
  p.out_stride = args.out_stride;
  p.scale_a = args.scale_a;
  p.scale_w = args.scale_w;
  p.m = shape.m;
  p.n = shape.n;
  p.k = shape.k;
  p.out_dtype = args.out_dtype;
  p.bias_dtype = args.bias_dtype;
  const int64_t four = 4 * size_of(args.out_dtype);
  p.wide_stores = reinterpret_cast<uintptr_t>(args.out) % four == 0 && args.out_stride % 4 == 0;

  if (config.design == SkinnyGemmConfig::Design::kPortable) {
    const dim3 grid((shape.n + kPortableWaves - 1) / kPortableWaves,
                    (shape.m + kPortableRows - 1) / kPortableRows);
    const Launch launch{grid, kPortableWaves * target.wave_size, stream_of(context)};
    return launch_kernel(portable_kernel(args.a_dtype, args.w_dtype), launch, p);
  }

  if (is_fp8(args.w_dtype) && args.w_dtype != target.fp8) {
    return "skinny_gemm: w's FP8 dialect is not this GPU's (float8_e4m3fnuz on gfx942, "
           "float8_e4m3fn on gfx950); convert w and its scale with to_native_fp8";
  }
  const Operands kind = operands_of(args, config.sparse);
  const int a_tiles = a_tiles_of(shape.m);
  const Kernel kernel = config.design == SkinnyGemmConfig::Design::kQueue
                            ? queue_kernel(kind, a_tiles, config.rows)
                            : stream_kernel(kind, shape.block_scaled, a_tiles, config.rows);
  if (kernel == nullptr) return "skinny_gemm: block scales need FP8 w";
  p.waves = config.waves;
  p.producers = config.producers;
  p.slots = queue_slots(shape, config);
  p.schedule = schedule_of(shape, config);
  p.tickets = static_cast<uint64_t*>(args.workspace);
  if (p.schedule.slots() != 0) {
    if (args.workspace == nullptr) return "skinny_gemm: this config needs a workspace";
    p.partials =
        reinterpret_cast<float*>(static_cast<uint8_t*>(args.workspace) + ticket_bytes(p.schedule));
    p.launch = next_launch_name();
  }
  const Launch launch{dim3(p.schedule.blocks()), config.waves * 64, stream_of(context),
                      lds_bytes_of(shape, config)};
  return launch_kernel(kernel, launch, p);
}

}  // namespace rocm_kernels
