// Attention's choices of a config that are kept, beside those made anew, over calls that differ
// from each other in one thing. No GPU, no CUDA or HIP header. Prints "calls N, stale M".
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "attention/cdna/choose.h"
#include "attention/cuda/choose.h"

using namespace rocm_kernels;

int main() {
  std::mt19937 random(20261126);
  const auto one_of = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  const int32_t table = 0;
  AttentionArgs step;
  step.batch = 1, step.heads = 32, step.kv_heads = 8, step.head_dim = step.head_dim_v = 128;
  step.max_seqlen_q = step.total_q = 1, step.max_seqlen_k = 1024;
  AttentionArgs args = step;
  using Change = std::function<void()>;
  const std::vector<Change> changes = {
      [&] { args.batch = one_of({1, 2, 8, 32, 64, 200, 65536}); },
      [&] { args.heads = args.kv_heads * one_of({1, 4, 8, 32}); },
      [&] {
        const int64_t group = args.heads / args.kv_heads;
        args.kv_heads = one_of({1, 2, 8, 32});
        args.heads = group * args.kv_heads;
      },
      [&] { args.head_dim = one_of({33, 64, 72, 128, 192, 256, 512}); },
      [&] { args.head_dim_v = one_of({33, 64, 128, 192, 256, 512}); },
      [&] { args.max_seqlen_q = one_of({1, 2, 8, 64, 500, 4096, int64_t{1} << 33}); },
      [&] { args.max_seqlen_k = one_of({1, 100, 512, 1024, 8192, 65536, 1 << 23}); },
      [&] { args.total_q = args.batch * args.max_seqlen_q / one_of({1, 1, 2, 50}); },
      [&] { args.window_left = one_of({-1, 0, 100, 1000, int64_t{1} << 40}); },
      [&] { args.window_right = one_of({-1, 0, 5}); },
      [&] { args.q_dtype = static_cast<DType>(random() % 3); },
      [&] { args.kv_dtype = static_cast<DType>(random() % 5); },
      [&] { args.block_table = random() % 2 ? &table : nullptr; },
      [&] { args.page_size = one_of({0, 1, 16, 1568}); },
      [&] { args.q.row_stride = one_of({0, 4096, 4097, 4098}); },
      [&] { args.k.head_stride = one_of({0, 128, 132, 136}); },
      [&] { args.v.data = reinterpret_cast<const void*>(one_of({0, 4096, 4104})); },
      [&] { args.out_row_stride = one_of({0, 4096, 4100}); },
  };
  cuda::AttentionDevice hopper[2];
  for (int i = 0; i < 2; ++i) {
    hopper[i].id = i;
    hopper[i].sm_count = 132;
    hopper[i].compute_capability = i == 0 ? 90 : 80;
    hopper[i].shared_bytes_per_block = (i == 0 ? 227 : 163) << 10;
    hopper[i].most_cluster = i == 0 ? 16 : 1;
  }
  cdna::Target cdna[2] = {{}, cdna::mi355x()};
  cdna[1].id = 1;
  int calls = 0, stale = 0;
  for (int i = 0; i < 100000; ++i) {
    if (i % 40 == 0) args = step;
    if (i % 4 == 0) changes[random() % changes.size()]();
    const auto& gpu = hopper[random() % 2];
    const auto& target = cdna[random() % 2];
    calls += 2;
    stale += !equal_configs(cuda::cached_choice(args, gpu), cuda::choose_config(args, gpu));
    stale += !equal_configs(cdna::cached_choice(args, target), cdna::choose_config(args, target));
  }
  std::printf("calls %d, stale %d\n", calls, stale);
}
