// The LDS that Sinks take (waves_sink.h), for hosts too.
#pragma once

#include <cstdint>

namespace rocm_kernels::cdna {

constexpr int kWavesAtOnce = 4;  // the waves that have sums are a multiple of it
constexpr int kSumPad = 4;       // floats; keeps the rows of a tile on different banks

// Sums of `adders` waves, [adders][rows][block_n + kSumPad], then factors of columns, biases and
// factors of rows.
constexpr int32_t waves_sink_bytes(int32_t adders, int32_t rows, int32_t block_n) {
  return 4 * (adders * rows * (block_n + kSumPad) + rows + 2 * block_n);
}

}  // namespace rocm_kernels::cdna
