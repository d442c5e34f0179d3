// Matrix product of any number of rows. ../blocks/product/args.h has the maths and the arguments.
// This folder has the kernels that make tiles, ../skinny_gemm/ the designs for few rows, which read
// w once; the choice takes the quicker.
#pragma once

#include "../blocks/peers/memory.h"
#include "../blocks/product/args.h"

namespace rocm_kernels {

constexpr int64_t kSkinnyGemmMaxRows = 64;  // of the designs for few rows

// Classes of M, each named by its last row: 16, and powers of two, up to twice as many rows as the
// last of the class before. The last class has no end. Tuned configs are for a class; of up to 64
// rows the choice is, too, so that the bits of a row are the same for every M of its class.
constexpr int64_t kLastClass = 16384;
constexpr int64_t last_row_of_class(int64_t m) {
  int64_t last = 16;
  while (last < m && last < kLastClass) last *= 2;
  return last;
}
// The M by which a config is chosen.
constexpr int64_t judged_rows(int64_t m) {
  return m <= kSkinnyGemmMaxRows ? last_row_of_class(m) : m;
}

// Bytes of scratch that launch_gemm needs for these sizes; pointers in args are not read.
int64_t gemm_workspace_bytes(const GemmArgs& args, const Context& context);

// Caller's duty: m, n, k >= 0 and dtypes as above. Any M, N, K, stride and element alignment is
// served; rows that are 16-byte aligned are quickest.
Status launch_gemm(const GemmArgs& args, const Context& context);

// The same product, its rounded results sent as vectors of 16 bytes to the mailboxes of all ranks
// of a group (blocks/peers/gpu/mailbox.h) and not stored to out: element [m, n] of this rank lies
// at its place in x of all_reduce. Where a kernel here does that for these operands: `sends`.
Status ask_gemm_to_peers(const GemmArgs& args, const Context& context, bool& sends);
Status launch_gemm_to_peers(const GemmArgs& args, const Group& group, const Context& context);

// A product that does in its own kernel what stands before it or behind it.
struct JoinedGemmArgs : GemmArgs {
  // a of float32 or 16 bits beside an FP8 w: its rows are quantised to w's type, each with the
  // scale that swiglu_fp8 gives it; there is no scale_a. GemmArgs alone would multiply them as they
  // are.

  // Else, if this is not kIdentity: w has the rows of gate, then those of up. out [M, N / 2] is
  // float32: act(gate) * up of the two, which are rounded to out_dtype, a 16-bit type, first.
  Activation activation = Activation::kIdentity;

  // Else, if this: out holds an addend of each result. The results are rounded to its 16-bit type,
  // and the sums once more.
  bool adds = false;

  bool quantizes() const { return !adds && !is_fp8(a_dtype); }
  bool gates() const { return activation != Activation::kIdentity; }
};

// Whether a kernel does that for these operands, and more quickly than kernels apart; and that
// kernel, for such operands alone.
Status ask_joined_gemm(const JoinedGemmArgs& args, const Context& context, bool& joins);
Status launch_joined_gemm(const JoinedGemmArgs& args, const Context& context);

// nullptr where args.config can serve args on the current device, else why it cannot.
Status check_gemm_config(const GemmArgs& args, const Context& context);

// Tells visit(text, state) every config that can serve args on the current device: first the one
// that launch_gemm(args) takes, then the others that are worth timing, each once. Nothing that args
// point to is read, but the addresses' alignment counts.
Status visit_gemm_configs(const GemmArgs& args, const Context& context,
                          void (*visit)(const char* config, void* state), void* state);

// The most rows for which gemm is the quickest way through a linear layer; beyond, it is the
// product of torch's own library. On the current device for args.n, args.k, the operands' types (of
// a 16-bit a the library takes w unpacked) and the kinds of scales; nothing else of args is read.
constexpr int64_t kAnyRows = INT64_MAX;
Status choose_linear_limit(const GemmArgs& args, int64_t& rows);

// Whether torch._scaled_mm takes such a product.
inline bool fits_scaled_mm(const GemmArgs& args) {
  return !is_block_scaled(args) && args.n % 16 == 0 && args.k % 16 == 0;
}

}  // namespace rocm_kernels
