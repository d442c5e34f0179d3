// The kernels for few rows that quantise these rows themselves, or gate their outputs: FP8 weights
// and scales of whole rows (choose_joined(), choose.h).
#include "gated_outputs.cuh"
#include "launch_tiles.cuh"
#include "skinny_gemm.h"

namespace rocm_kernels {
namespace cuda::skinny {
namespace {

constexpr int kRows = 8;  // that registers are held for
using Types = MmaTypes<DType::kFloat8E4M3FN, DType::kFloat8E4M3FN>;

template <class Outputs, class Rows>
Status launch_by(const JoinedGemmArgs& args, const SkinnyGemmConfig& config, void* stream) {
  return launch_tma_pipeline<Types, kRows, false, Outputs, Rows>(
      Call<Outputs>{args, config, static_cast<Stream>(stream), true});
}

}  // namespace

Status launch_joined(const JoinedGemmArgs& args, const SkinnyGemmConfig& config, void* stream) {
  switch (args.activation) {
    case Activation::kSilu:
      return launch_by<GatedOutputs<Activation::kSilu>, FetchedRows>(args, config, stream);
    case Activation::kGelu:
      return launch_by<GatedOutputs<Activation::kGelu>, FetchedRows>(args, config, stream);
    case Activation::kGeluTanh:
      return launch_by<GatedOutputs<Activation::kGeluTanh>, FetchedRows>(args, config, stream);
    default:
      break;
  }
  switch (args.a_dtype) {
    case DType::kFloat32:
      return launch_by<StoredOutputs, QuantizedRows<float>>(args, config, stream);
    case DType::kFloat16:
      return launch_by<StoredOutputs, QuantizedRows<float16>>(args, config, stream);
    default:
      return launch_by<StoredOutputs, QuantizedRows<bfloat16>>(args, config, stream);
  }
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
