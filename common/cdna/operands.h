// What hosts and devices know of the operands of a matrix product on CDNA3 and CDNA4: kinds, bytes
// and the steps that tiles are loaded in. No HIP header.
#pragma once

#include <cstdint>

namespace rocm_kernels::cdna {

// Types of a and w, and the matrix instruction that takes them: see Mma in mfma.h.
enum class MmaKind : int32_t {
  kFp8,        // FP8 x FP8, the target's dialect
  kFp8Sparse,  // the same for M <= 8: a is the 4:2 sparse operand, see mfma_sparse.h
  kFloat16,    // float16 x float16
  kBFloat16,
  kFloat16Fp8,  // float16 a, FP8 w decoded in registers
  kBFloat16Fp8,
};

// Bytes of an element.
constexpr int w_bytes(MmaKind kind) {
  return kind == MmaKind::kFloat16 || kind == MmaKind::kBFloat16 ? 2 : 1;
}
constexpr int a_bytes(MmaKind kind) {
  return kind == MmaKind::kFp8 || kind == MmaKind::kFp8Sparse ? 1 : 2;
}

constexpr int kMmaRows = 16;  // rows of w, and of a, that a matrix instruction takes

// A K block: the elements of K that are loaded, scaled and multiplied together.
constexpr int kBlockK = 128;
constexpr int32_t k_blocks_of(int32_t k) { return k <= kBlockK ? 1 : (k + kBlockK - 1) / kBlockK; }

// Matrix instructions side by side in a block of rows. 8 rows leave half of one's outputs unused.
constexpr int32_t mma_tiles_of(int32_t rows) { return rows < kMmaRows ? 1 : rows / kMmaRows; }

// LDS that 16 rows of a K block of a, or of w, pass through (lds_transpose.h).
constexpr int32_t transpose_bytes(int32_t bytes_a, int32_t bytes_w) {
  return kMmaRows * kBlockK * (bytes_a > bytes_w ? bytes_a : bytes_w);
}

}  // namespace rocm_kernels::cdna
