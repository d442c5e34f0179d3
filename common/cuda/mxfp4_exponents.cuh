// One thread's walk along the MXFP4 scales (E8M0) of a row of w, two groups of 32 elements at a
// time. Rows of scales are short and lie at any byte: threads of neighbouring rows read other
// lines, so each keeps 16 bytes, and the next 16 are under way.
#pragma once

#include <cstdint>

namespace rocm_kernels {
namespace cuda {

class Mxfp4Exponents {
 public:
  // From group `first` of the row's `count` on; `row` may be nullptr, of which all scales are 1.
  // `even`: rows begin at even bytes, or each group is read by itself.
  __device__ __forceinline__ void begin(const uint8_t* row, int first, int count, bool even) {
    even_ = even;
    at_ = end_ = nullptr;
    if (row == nullptr) return;
    at_ = row + first;
    end_ = row + count;
    if (!even || at_ >= end_) return;
    window_ = reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(at_) & ~uintptr_t{15});
    now_ = load(window_);
    ask_next();
  }

  // The codes of the next two groups, the first in the lowest byte; 1 where there is none.
  __device__ __forceinline__ uint32_t take() {
    constexpr uint32_t kOne = 127;
    const int left = static_cast<int>(end_ - at_);
    if (left <= 0) return kOne << 8 | kOne;
    uint32_t codes;
    if (even_) {
      const int offset = static_cast<int>(at_ - window_);
      const uint32_t low = offset & 4 ? now_.y : now_.x, high = offset & 4 ? now_.w : now_.z;
      codes = (offset & 8 ? high : low) >> (offset & 2) * 8;
      if (offset == 14) {
        window_ += 16;
        now_ = next_;
        ask_next();
      }
    } else {
      codes = at_[0] | (left >= 2 ? at_[1] : kOne) << 8;
    }
    at_ += 2;
    return left >= 2 ? codes & 0xFFFF : kOne << 8 | (codes & 0xFF);
  }

 private:
  // 16 aligned bytes, one of which is the row's: they end in no other page than that one.
  __device__ __forceinline__ static uint4 load(const uint8_t* from) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }
  __device__ __forceinline__ void ask_next() {
    if (window_ + 16 < end_) next_ = load(window_ + 16);
  }

  const uint8_t *at_, *end_, *window_;
  uint4 now_, next_;
  bool even_;
};

}  // namespace cuda
}  // namespace rocm_kernels
