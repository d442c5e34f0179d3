// For benchmarks/gemm_schedules.py: the best config of each schedule, and the choice, by the time
// models that choose the configs of gemm.
//
//   gemm_schedules gfx942|gfx950|sm_90 [h100] < products
//
// sm_90 is an H200, or the H100 where that is named.
// A product is a line "m n k kind"; kind: row (FP8, scales of rows), block (FP8, 128 x 128) or
// bf16. Four lines answer it: "schedule, modelled us, config", with tabs between, of data_parallel,
// split_k, stream_k (all streamed, or the hybrid) and the choice, which is not always the least of
// the three: it may ask sharing for a margin. A schedule that no config of this product has is that
// of data_parallel: there is nothing to divide.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../gemm/cdna/choose.h"
#include "../gemm/cuda/choose.h"

using namespace rocm_kernels;

namespace {

constexpr const char* kSchedules[] = {"data_parallel", "split_k", "stream_k"};
enum Schedules : int { kDataParallel, kSplitK, kStreamK, kSchedulesCount };

struct Product {
  int m, n, k;
  bool fp8, blocks;
};

struct Best {
  double time = 0;
  char config[kConfigTextBytes] = "";
};

template <typename Config>
void take(Best& best, double time, const Config& config) {
  if (best.config[0] != '\0' && best.time <= time) return;
  best.time = time;
  if (!write_config(config, best.config)) std::strcpy(best.config, "?");
}

// A config that is weighed and cannot run must not go unseen.
void stop_at(Status error, const Product& product) {
  if (error == nullptr) return;
  std::fprintf(stderr, "%d %d %d: %s\n", product.m, product.n, product.k, error);
  std::exit(1);
}

constexpr Status kAnothers = "the choice that is kept for this product is another's";

// The best of each schedule; returns the choice.
Best visit_amd(const Product& product, const cdna::Target& target, Best (&best)[kSchedulesCount]) {
  const int bytes = product.fp8 ? 1 : 2;
  const cdna::GemmShape shape{product.m, product.n, product.k, bytes, bytes, product.blocks};
  cdna::for_each_tiled_config(shape, target, [&](const cdna::GemmConfig& config) {
    stop_at(cdna::check_config(shape, config), product);
    const int schedule = config.split_k == kStreamKSplit ? kStreamK
                         : config.split_k == 1           ? kDataParallel
                                                         : kSplitK;
    take(best[schedule], cdna::modelled_time(shape, config, target).total(), config);
  });
  Best choice;
  const cdna::GemmConfig chosen = cdna::choose_tiles(shape, target);
  if (!equal_configs(cdna::choose_config(shape, target), cdna::cached_choice(shape, target))) {
    stop_at(kAnothers, product);
  }
  take(choice, cdna::modelled_time(shape, chosen, target).total(), chosen);
  return choice;
}

Best visit_nvidia(const Product& product, const cuda::GemmDevice& device,
                  Best (&best)[kSchedulesCount]) {
  Best choice;
  alignas(256) static char aligned[256];
  GemmArgs args;
  args.m = product.m, args.n = product.n, args.k = product.k;
  args.a = args.w = aligned, args.out = aligned;
  args.a_stride = args.w_stride = product.k, args.out_stride = product.n;
  if (!product.fp8) args.a_dtype = args.w_dtype = DType::kBFloat16;
  if (product.blocks) args.scale_a.kind = args.scale_w.kind = ScaleView::Kind::kBlock;
  const cuda::GemmConfig chosen = cuda::choose_tiles(args, device);
  if (!equal_configs(cuda::choose_config(args, device), cuda::cached_choice(args, device))) {
    stop_at(kAnothers, product);
  }
  cuda::for_each_warpgroup_config(args, device, [&](const cuda::GemmConfig& config) {
    stop_at(cuda::check_config(args, config, device), product);
    const int schedule = config.schedule == cuda::GemmConfig::kDataParallel ? kDataParallel
                         : config.schedule == cuda::GemmConfig::kSplitK     ? kSplitK
                                                                            : kStreamK;
    const double time = cuda::modelled_time(args, config, device);
    take(best[schedule], time, config);
    if (equal_configs(config, chosen)) take(choice, time, config);
  });
  return choice;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string name = count >= 2 ? arguments[1] : "";
  if (name != "gfx942" && name != "gfx950" && name != "sm_90") {
    std::fprintf(stderr, "required: gfx942, gfx950 or sm_90; got '%s'\n", name.c_str());
    return 2;
  }
  cdna::Target target;
  if (name == "gfx950") target = cdna::mi355x();
  cuda::GemmDevice card;
  card.sm_count = 132, card.compute_capability = 90, card.shared_bytes_per_block = 232448;
  if (count == 3 && std::strcmp(arguments[2], "h100") == 0) card.memory = cuda::h100_memory();

  Product product;
  char kind[16];
  while (std::scanf("%d %d %d %15s", &product.m, &product.n, &product.k, kind) == 4) {
    product.fp8 = std::strcmp(kind, "bf16") != 0;
    product.blocks = std::strcmp(kind, "block") == 0;
    Best best[kSchedulesCount];
    const Best choice =
        name == "sm_90" ? visit_nvidia(product, card, best) : visit_amd(product, target, best);
    for (int i = 0; i < kSchedulesCount; ++i) {
      const Best& shown = best[i].config[0] != '\0' ? best[i] : best[kDataParallel];
      std::printf("%s\t%.3f\t%s\n", kSchedules[i], shown.time, shown.config);
    }
    std::printf("choice\t%.3f\t%s\n", choice.time, choice.config);
  }
}
