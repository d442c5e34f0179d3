// Weights that no kernel writes which may still run, as this thread was told (settle_weights), and
// the order in which its products read them (ask_ahead).
#pragma once

#include <unordered_set>
#include <vector>

#include "../../blocks/product/args.h"
#include "checks.h"

namespace rocm_kernels {

inline std::unordered_set<int64_t>& settled_weights() {
  thread_local std::unordered_set<int64_t> addresses;
  return addresses;
}

inline bool is_settled(const Tensor& weight) {
  return settled_weights().count(reinterpret_cast<int64_t>(weight.data_ptr())) > 0;
}

// The products of settled weights that this thread has launched since ask_ahead(places).
struct Order {
  struct Product {
    int64_t data, rows, row_bytes, row_stride;  // of w; bytes
    int64_t runs;                               // of rows, of each of which a block has some
    int64_t before;                             // bytes that other ops have read before
  };
  const WeightAhead* places = nullptr;  // in the device's memory; nullptr: nobody asks
  int64_t count = 0;
  int64_t between = 0;
  std::vector<Product> products;

  static Order& of_thread() {
    thread_local Order order;
    return order;
  }

  // Where a product finds what it is to ask for, if anywhere.
  const WeightAhead* place_of(const GemmArgs& args, int64_t runs = 1) {
    if (places == nullptr || !args.w_is_settled) return nullptr;
    const int64_t size = size_of(args.w_dtype), at = static_cast<int64_t>(products.size());
    products.push_back({reinterpret_cast<int64_t>(args.w), args.n, args.k * size,
                        args.w_stride * size, runs, between});
    between = 0;
    return at < count ? places + at : nullptr;
  }

  // Another op reads so much, which may drive out of L2 what was asked for.
  void pass(int64_t bytes) { between += bytes; }
};

}  // namespace rocm_kernels
