// Which config NVIDIA's attention takes for decode steps of 32 query and 8 KV heads of 128 on an
// H200: of lines "sequences keys bytes-of-an-element rows-of-a-page queries" one line each. 0 rows:
// no pages.
#include <iostream>

#include "attention/cuda/choose.h"

using namespace rocm_kernels;

int main() {
  cuda::AttentionDevice device;
  device.sm_count = 132;
  device.compute_capability = 90;
  device.shared_bytes_per_block = 227 << 10;
  AttentionArgs args;
  args.heads = 32, args.kv_heads = 8;
  args.head_dim = args.head_dim_v = 128;
  args.window_right = 0;
  const int32_t table = 0;
  int bytes;
  while (std::cin >> args.batch >> args.max_seqlen_k >> bytes >> args.page_size >>
         args.max_seqlen_q) {
    args.block_table = args.page_size == 0 ? nullptr : &table;
    args.total_q = args.batch * args.max_seqlen_q;
    args.kv_dtype = bytes == 1 ? DType::kFloat8E4M3FN : DType::kBFloat16;
    char text[kConfigTextBytes];
    write_config(cuda::choose_config(args, device), text);
    std::cout << text << "\n";
  }
}
