// Which config NVIDIA's attention takes: of lines "sequences queries keys heads kv_heads head_size
// head_size_of_v rows_of_a_page bytes_of_an_element is_h100" one line each. 0 rows: no pages.
#include <iostream>

#include "attention/cuda/choose.h"

using namespace rocm_kernels;

int main() {
  cuda::AttentionDevice device;
  device.sm_count = 132;
  device.compute_capability = 90;
  device.shared_bytes_per_block = 227 << 10;
  device.most_cluster = 16;
  AttentionArgs args;
  const int32_t table = 0;
  int bytes;
  bool is_h100;
  while (std::cin >> args.batch >> args.max_seqlen_q >> args.max_seqlen_k >> args.heads >>
         args.kv_heads >> args.head_dim >> args.head_dim_v >> args.page_size >> bytes >> is_h100) {
    device.memory = is_h100 ? cuda::h100_memory() : cuda::MemoryRates{};
    args.block_table = args.page_size == 0 ? nullptr : &table;
    args.window_right = args.max_seqlen_q > 1 ? 0 : -1;
    args.total_q = args.batch * args.max_seqlen_q;
    args.kv_dtype = bytes == 1 ? DType::kFloat8E4M3FN : DType::kBFloat16;
    char text[kConfigTextBytes];
    write_config(cuda::choose_config(args, device), text);
    std::cout << text << "\n";
  }
}
