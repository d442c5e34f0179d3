// Keys and values, FP8 or in pages, to rows of the queries' type, once, where prompts would look
// them up and widen them for each block of rows. What nobody sees is neither read nor written.
#pragma once

#include "../../common/cuda/widen.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/launch.h"
#include "config.h"
#include "pages.cuh"

namespace rocm_kernels {
namespace cuda {

constexpr int kGatherThreads = 256;

// A thread's part of a block's keys, or values: 8 elements of each row.
template <typename T, bool kFp8>
class GatheredPart {
 public:
  __device__ __forceinline__ GatheredPart(int64_t head_dim) {
    lanes_shift_ = head_dim <= 64 ? 3 : head_dim <= 128 ? 4 : 5;
    column_ = (static_cast<int>(threadIdx.x) & ((1 << lanes_shift_) - 1)) * 8;
    row_ = static_cast<int>(threadIdx.x) >> lanes_shift_;
    in_head_ = column_ < head_dim;
  }

  // row_of(key): where the row of a key is, for keys of `keys`, of the block's from `first` on.
  template <typename RowOf>
  __device__ __forceinline__ void load(const RowOf& row_of, KeyRange keys, int first) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int key = key_of(i, first);
      counts_[i] = in_head_ && key < first + kGatherKeys && key >= keys.begin && key < keys.end;
      if (counts_[i]) {
        loaded_[i] = *reinterpret_cast<const Loaded*>(row_of(key) + column_ * kBytes);
      }
    }
  }

  // Stores them at rows of `row` elements from `to`, which is key 0's, on.
  __device__ __forceinline__ void store(T* to, int64_t row, int first) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (counts_[i]) {
        *reinterpret_cast<uint4*>(to + key_of(i, first) * row + column_) = widened(loaded_[i]);
      }
    }
  }

 private:
  using Loaded = std::conditional_t<kFp8, uint2, uint4>;
  static constexpr int kBytes = kFp8 ? 1 : 2;
  static constexpr int kMost = kGatherKeys / (kGatherThreads / 32);

  static __device__ __forceinline__ uint4 widened(uint4 elements) { return elements; }
  static __device__ __forceinline__ uint4 widened(uint2 codes) {
    uint4 out;
    halves_from_fp8(codes.x, out.x, out.y);
    halves_from_fp8(codes.y, out.z, out.w);
    if constexpr (std::is_same<T, __nv_bfloat16>::value) {
      out = {bfloats_from_halves(out.x), bfloats_from_halves(out.y), bfloats_from_halves(out.z),
             bfloats_from_halves(out.w)};
    }
    return out;
  }

  __device__ __forceinline__ int key_of(int i, int first) const {
    return first + row_ + i * (kGatherThreads >> lanes_shift_);
  }

  Loaded loaded_[kMost];
  bool counts_[kMost];
  int lanes_shift_, column_, row_;
  bool in_head_;
};

template <typename T, bool kFp8>
__global__ void __launch_bounds__(kGatherThreads)
    gather_keys(const __grid_constant__ AttentionArgs args,
                const __grid_constant__ AttentionArgs gathered, const Window window,
                const PageSize page_size, int blocks_of_keys) {
  begin_after_previous_kernel();
  const int kv_heads = static_cast<int>(args.kv_heads);
  const int head = static_cast<int>(blockIdx.x) % kv_heads;
  const int of_head = static_cast<int>(blockIdx.x) / kv_heads;
  const int b = of_head / blocks_of_keys, first = of_head % blocks_of_keys * kGatherKeys;
  const Sequence s = sequence_of(args, b);
  if (s.q_count <= 0) return;
  const KeyRange keys = window.seen(s, 0, s.q_count - 1);
  if (first + kGatherKeys <= keys.begin || first >= keys.end) return;

  constexpr int kBytes = kFp8 ? 1 : 2;
  const auto rows_from = [&](const AttentionRows& rows, int64_t batch) {
    const char* const from =
        static_cast<const char*>(rows.data) +
        (batch + s.k_begin * rows.row_stride + head * rows.head_stride) * kBytes;
    return [=, &page_size, &rows](int key) {
      if (s.pages == nullptr) return from + key * rows.row_stride * kBytes;
      return from + (s.pages[page_size.page_of(key)] * rows.batch_stride +
                     page_size.row_of(key) * rows.row_stride) *
                        kBytes;
    };
  };
  const auto rows_to = [&](const AttentionRows& rows) {
    const int64_t batch = args.cu_seqlens_k == nullptr ? b * rows.batch_stride : 0;
    return static_cast<T*>(const_cast<void*>(rows.data)) + batch + s.k_begin * rows.row_stride +
           head * rows.head_stride;
  };
  GatheredPart<T, kFp8> k(args.head_dim), v(args.head_dim_v);
  k.load(rows_from(args.k, s.k_batch), keys, first);
  v.load(rows_from(args.v, s.v_batch), keys, first);
  k.store(rows_to(gathered.k), gathered.k.row_stride, first);
  v.store(rows_to(gathered.v), gathered.v.row_stride, first);
}

// `gathered`: gathered_args() of args. T: of the queries; any of 16 bits where nothing is widened.
template <typename T, bool kFp8>
Status launch_gather_keys(const AttentionArgs& args, const AttentionArgs& gathered, void* stream) {
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(gathered_blocks(args)));
  launch.block = kGatherThreads;
  launch.stream = static_cast<Stream>(stream);
  launch.early = true;
  if (launch.grid.x == 0) return nullptr;
  return launch_kernel(gather_keys<T, kFp8>, launch, args, gathered, Window::of(args),
                       PageSize::of(args),
                       static_cast<int>(ceil_div(args.max_seqlen_k, kGatherKeys)));
}

}  // namespace cuda
}  // namespace rocm_kernels
