// skinny_gemm/cuda/sent_outputs.cuh, compiled for the host: the blocks of products of chance sizes
// send, clusters that share the end of a tile too, and every mailbox has each output once, where
// all_reduce of the product would put it; none if the group has failed.
//
// Prints "tiles N, wrong M".
#include "host.h"

static thread_local struct {
  int x;
} threadIdx, blockDim;
static thread_local std::barrier<>* this_block;
#define __syncthreads() this_block->arrive_and_wait()

#include "skinny_gemm/cuda/sent_outputs.cuh"

using namespace rocm_kernels;
using namespace rocm_kernels::cuda::skinny;

// Outputs that are not what they should be, after a product in blocks of `block_n` columns, whose
// clusters of `split` blocks finish a share each.
static int64_t wrong_after(int ranks, int m, int n, int block_n, int split) {
  const int64_t part = int64_t{m} * n, half = ranks * part * 2 + 16 * below(4);
  std::vector<std::vector<uint64_t>> memory(ranks);
  const int rank = below(ranks);
  const bool failed = below(8) == 0, half_floats = below(2) == 0;
  for (auto& of_rank : memory) of_rank.resize((kPeerHeaderBytes + 2 * half) / 8 + 1, ~0ull);
  PeerHeader header{};
  header.failed = failed;
  const uint32_t epoch = header.epochs[0] = chance();
  for (int r = 0; r < ranks; ++r) header.peers[r] = reinterpret_cast<uint64_t>(memory[r].data());
  std::memcpy(memory[rank].data(), &header, sizeof header);

  SentOutputs::Args args{};
  args.m = m, args.n = n;
  args.out_dtype = half_floats ? DType::kFloat16 : DType::kBFloat16;
  args.group = {reinterpret_cast<PeerHeader*>(memory[rank].data()), half, 0, rank, ranks};
  std::normal_distribution<float> normal;
  std::vector<float> values(part);
  for (float& value : values) value = below(50) == 0 ? NAN : normal(chance);

  SkinnyGemmConfig config;
  config.design = Design::kWarpgroup, config.block_n = block_n, config.split_k = split;
  const int share = warpgroup_share(config) * kWarpRows;
  uint8_t* const collected = emulated_shared + sizeof emulated_shared - sent_bytes(config, m);
  constexpr int kThreads = 9;
  for (int block = 0; block * block_n < n; ++block) {
    for (int of_cluster = 0; of_cluster < split; ++of_cluster) {
      const int first = block * block_n + of_cluster * share;
      const int columns = min(share, block_n - of_cluster * share);
      SentOutputs::Shared shared;
      std::barrier together(kThreads);
      const bool pairs = below(2) == 0;
      const auto run = [&](int thread) {
        threadIdx.x = thread, blockDim.x = kThreads, this_block = &together;
        const SentOutputs outputs(args, shared, collected, first, columns);
        if (thread == 0) outputs.begin_next();
        const int there = min(columns, n - first);
        for (int i = thread * 2; i < m * there; i += kThreads * 2) {
          const int row = i / there, column = first + i % there;
          const float* const two = &values[int64_t{row} * n + column];
          if (pairs) {
            outputs.put_pair(row, column, two[0], two[1]);
          } else {
            outputs.put(row, column, two[0]), outputs.put(row, column + 1, two[1]);
          }
        }
        outputs.send();
      };
      std::vector<std::thread> threads;
      for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(run, thread);
      for (std::thread& thread : threads) thread.join();
    }
  }

  int64_t wrong = 0;
  for (int r = 0; r < ranks; ++r) {
    const auto* const data = reinterpret_cast<const uint16_t*>(
        reinterpret_cast<const char*>(memory[r].data()) + kPeerHeaderBytes);
    for (int64_t i = 0; i < half; ++i) {  // 16-bit places of both halves
      const int64_t at = i - (epoch & 1) * (half / 2) - rank * part;
      uint16_t wanted = 0xFFFF;
      if (!failed && at >= 0 && at < part) {
        wanted = static_cast<uint16_t>(round_pair(args.out_dtype, values[at], 0.0f));
      }
      wrong += data[i] != wanted;
    }
  }
  return wrong;
}

int main() {
  int tiles = 0;
  int64_t wrong = 0;
  for (; tiles < 60; ++tiles) {
    const int split = 1 << below(3);
    wrong += wrong_after(2 + below(7), 1 + below(64), 8 * (1 + below(90)),
                         8 * (1 + below(split == 1 ? 32 : 16)), split);
  }
  std::printf("tiles %d, wrong %lld\n", tiles, static_cast<long long>(wrong));
  return 0;
}
