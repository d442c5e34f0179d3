// Feeds the CPU launchers with arguments decoded from bytes, under libFuzzer and a sanitizer.
//
// Every tensor is an allocation of its own that ends with its last element, at any element
// alignment and any row stride, so that one element read or written too far is seen. Each case runs
// on one thread and on several: the bits must agree, and what lies between rows must stay as it
// was.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "../../gemm/gemm.h"
#include "../../rmsnorm_fp8/rmsnorm_fp8.h"
#include "../../swiglu_fp8/swiglu_fp8.h"

namespace rocm_kernels {
namespace {

constexpr uint8_t kPoison = 0x5A;
constexpr int64_t kMaxElements = 1 << 15;

// Takes numbers from the input, zeros once it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  int64_t up_to(int64_t largest) {
    uint32_t value = 0;
    for (int i = 0; i < (largest > 255 ? 2 : 1); ++i) value = value << 8 | next();
    return value % (largest + 1);
  }
  bool flag() { return next() & 1; }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[up_to(static_cast<int64_t>(values.size()) - 1)];
  }
  uint64_t seed() { return static_cast<uint64_t>(next()) << 8 | next(); }

 private:
  uint8_t next() { return size_ > 0 ? (--size_, *data_++) : 0; }
  const uint8_t* data_;
  size_t size_;
};

// A matrix in an allocation that ends with its last element.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t columns, int64_t element, Input& input)
      : rows_(rows), row_bytes_(columns * element) {
    stride = columns + input.one_of<int64_t>({0, 0, 1, 7, 64});
    stride_bytes_ = stride * element;
    // malloc aligns to 16 bytes; what precedes the first element shifts it.
    const int64_t shift = input.up_to(3) * element;
    const int64_t bytes = shift + (rows - 1) * stride_bytes_ + row_bytes_;
    memory_.reset(static_cast<uint8_t*>(std::malloc(bytes)));
    std::memset(memory_.get(), kPoison, bytes);
    begin = memory_.get() + shift;
  }
  // Any bits at all: NaN, infinities and denormal numbers among them.
  void fill(uint64_t seed) {
    uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t i = 0; i < row_bytes_; ++i) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        begin[r * stride_bytes_ + i] = static_cast<uint8_t>(state >> 32);
      }
    }
  }
  void poison() {
    for (int64_t r = 0; r < rows_; ++r) std::memset(begin + r * stride_bytes_, kPoison, row_bytes_);
  }
  std::vector<uint8_t> contents() const {
    std::vector<uint8_t> bytes;
    for (int64_t r = 0; r < rows_; ++r) {
      const uint8_t* row = begin + r * stride_bytes_;
      bytes.insert(bytes.end(), row, row + row_bytes_);
      for (const uint8_t* gap = row + row_bytes_; r + 1 < rows_ && gap < row + stride_bytes_; ++gap)
        if (*gap != kPoison) std::abort();
    }
    return bytes;
  }
  uint8_t* begin;
  int64_t stride;

 private:
  struct Free {
    void operator()(uint8_t* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  int64_t rows_, row_bytes_, stride_bytes_;
};

int g_threads = 1;

void parallel_for(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*),
                  void* state) {
  const int64_t most = grain > 0 ? (count + grain - 1) / grain : count;
  const int64_t chunks = most < g_threads ? most : g_threads;
  if (chunks <= 1) {
    if (count > 0) body(0, count, state);
    return;
  }
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < chunks; ++i)
    threads.emplace_back(body, count * i / chunks, count * (i + 1) / chunks, state);
  for (std::thread& thread : threads) thread.join();
}

Context context_of(int threads) {
  g_threads = threads;
  Context context;
  context.parallel_for = parallel_for;
  return context;
}

// Runs on one thread, then on several; `written` must hold the same bits after both.
template <typename Prepare, typename Launch>
void run(Input& input, const std::vector<Matrix*>& written, Prepare prepare, Launch launch) {
  std::vector<uint8_t> first, again;
  for (const int threads : {1, static_cast<int>(2 + input.up_to(2))}) {
    prepare();
    if (const Status status = launch(context_of(threads))) {
      std::fprintf(stderr, "refused: %s\n", status);
      std::abort();
    }
    std::vector<uint8_t>& bits = threads == 1 ? first : again;
    for (const Matrix* matrix : written) {
      const std::vector<uint8_t> contents = matrix->contents();
      bits.insert(bits.end(), contents.begin(), contents.end());
    }
  }
  if (first != again) std::abort();
}

DType any_float(Input& input) {
  return input.one_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
}

DType any_fp8(Input& input) { return input.one_of({DType::kFloat8E4M3FN, DType::kFloat8E4M3FNUZ}); }

// Small sizes and those around vector lengths are as likely as any.
int64_t any_columns(Input& input, int64_t largest) {
  const int64_t columns =
      input.flag() ? 1 + input.up_to(largest - 1)
                   : input.one_of<int64_t>({1, 8, 16, 32, 64, 128, 256, 512}) + input.up_to(2) - 1;
  return columns < 1 ? 1 : columns > largest ? largest : columns;
}

int64_t any_rows(Input& input, int64_t columns, int64_t largest) {
  const int64_t rows = 1 + input.up_to(largest - 1);
  const int64_t fit = kMaxElements / columns;
  return rows < fit ? rows : fit < 1 ? 1 : fit;
}

void fuzz_rmsnorm_fp8(Input& input) {
  RmsnormFp8Args args;
  args.hidden = any_columns(input, 5200);
  args.rows = any_rows(input, args.hidden, 70);
  args.x_dtype = any_float(input);
  args.weight_dtype = input.flag() ? DType::kFloat32 : args.x_dtype;
  args.scaling =
      input.one_of({Scaling::kNone, Scaling::kStatic, Scaling::kPerToken, Scaling::kPerGroup});
  args.out_dtype = args.scaling == Scaling::kNone ? args.x_dtype : any_fp8(input);
  args.group_size = args.scaling == Scaling::kPerGroup ? 128 : 0;
  args.scale_ub = input.flag() ? 1200.0f : 0.0f;
  args.ue8m0 = input.flag();
  const int64_t element = size_of(args.x_dtype);
  Matrix x(args.rows, args.hidden, element, input),
      residual(args.rows, args.hidden, element, input);
  Matrix weight(1, args.hidden, size_of(args.weight_dtype), input);
  Matrix out(args.rows, args.hidden, size_of(args.out_dtype), input);
  const int64_t groups = args.scaling == Scaling::kPerGroup ? (args.hidden + 127) / 128 : 1;
  std::vector<float> scales(args.scaling >= Scaling::kPerToken ? args.rows * groups : 0);
  const float static_scale = 0.5f;
  const bool with_residual = input.flag();
  const uint64_t seed = input.seed();
  x.fill(seed);
  weight.fill(seed + 1);
  args.x = x.begin, args.x_stride = x.stride;
  args.weight = weight.begin;
  args.out = out.begin, args.out_stride = out.stride;
  args.static_scale = args.scaling == Scaling::kStatic ? &static_scale : nullptr;
  args.scales = scales.empty() ? nullptr : scales.data();
  if (with_residual) args.residual = residual.begin, args.residual_stride = residual.stride;
  run(
      input, {&out, &residual},
      [&] {
        out.poison();
        residual.fill(seed + 2);
      },
      [&](const Context& context) { return launch_rmsnorm_fp8(args, context); });
}

void fuzz_swiglu_fp8(Input& input) {
  SwigluFp8Args args;
  args.columns = any_columns(input, 5200);
  args.rows = any_rows(input, args.columns, 70);
  args.in_dtype = any_float(input);
  args.activation = input.one_of(
      {Activation::kIdentity, Activation::kSilu, Activation::kGelu, Activation::kGeluTanh});
  args.scaling =
      input.one_of({Scaling::kNone, Scaling::kStatic, Scaling::kPerToken, Scaling::kPerGroup});
  args.out_dtype = args.scaling == Scaling::kNone ? args.in_dtype : any_fp8(input);
  args.group_size = args.scaling == Scaling::kPerGroup ? 128 : 0;
  args.scale_ub = input.flag() ? 1200.0f : 0.0f;
  args.ue8m0 = input.flag();
  const int64_t element = size_of(args.in_dtype);
  Matrix gate(args.rows, args.columns, element, input), up(args.rows, args.columns, element, input);
  Matrix out(args.rows, args.columns, size_of(args.out_dtype), input);
  const int64_t groups = args.scaling == Scaling::kPerGroup ? (args.columns + 127) / 128 : 1;
  std::vector<float> scales(args.scaling >= Scaling::kPerToken ? args.rows * groups : 0);
  const float static_scale = 2.0f;
  const uint64_t seed = input.seed();
  gate.fill(seed);
  up.fill(seed + 1);
  args.gate = gate.begin, args.gate_stride = gate.stride;
  if (input.flag()) args.up = up.begin, args.up_stride = up.stride;
  args.out = out.begin, args.out_stride = out.stride;
  args.static_scale = args.scaling == Scaling::kStatic ? &static_scale : nullptr;
  args.scales = scales.empty() ? nullptr : scales.data();
  run(
      input, {&out}, [&] { out.poison(); },
      [&](const Context& context) { return launch_swiglu_fp8(args, context); });
}

// Scales in an allocation of their own, of the shape that `kind` asks for.
ScaleView any_scale(Input& input, std::vector<float>& memory, int64_t rows, int64_t row_block,
                    int64_t k) {
  ScaleView scale;
  scale.kind = input.one_of({ScaleView::Kind::kNone, ScaleView::Kind::kTensor,
                             ScaleView::Kind::kRow, ScaleView::Kind::kBlock});
  const int64_t blocks = (k + kScaleBlock - 1) / kScaleBlock;
  const int64_t steps = (rows + row_block - 1) / row_block;
  switch (scale.kind) {
    case ScaleView::Kind::kNone:
      return scale;
    case ScaleView::Kind::kTensor:
      memory.assign(1, 0.25f);
      break;
    case ScaleView::Kind::kRow:
      scale.row_stride = 1 + input.up_to(1);
      memory.assign((rows - 1) * scale.row_stride + 1, 0.25f);
      break;
    case ScaleView::Kind::kBlock:
      memory.assign(steps * blocks, 0.25f);
      scale.row_stride = input.flag() ? blocks : 1;
      scale.block_stride = scale.row_stride == blocks ? 1 : steps;
      break;
  }
  scale.data = memory.data();
  return scale;
}

void fuzz_gemm(Input& input) {
  GemmArgs args;
  args.k = input.up_to(15) == 0 ? 0 : any_columns(input, 2200);
  args.n = any_rows(input, args.k + 1, 700);
  args.m = 1 + input.up_to(input.flag() ? 600 : 63);
  const bool fp8_w = input.flag(), fp8_a = fp8_w && input.flag();
  const DType wide = input.one_of({DType::kFloat16, DType::kBFloat16});
  args.w_dtype = fp8_w ? any_fp8(input) : wide;
  args.a_dtype = fp8_a ? args.w_dtype : wide;
  args.out_dtype = any_float(input);
  args.bias_dtype = input.flag() ? DType::kFloat32 : args.out_dtype;
  Matrix a(args.m, args.k, size_of(args.a_dtype), input);
  Matrix w(args.n, args.k, size_of(args.w_dtype), input);
  Matrix out(args.m, args.n, size_of(args.out_dtype), input);
  Matrix bias(1, args.n, size_of(args.bias_dtype), input);
  std::vector<float> scale_a, scale_w;
  if (fp8_a) args.scale_a = any_scale(input, scale_a, args.m, 1, args.k);
  if (fp8_w) args.scale_w = any_scale(input, scale_w, args.n, kScaleBlock, args.k);
  const uint64_t seed = input.seed();
  a.fill(seed);
  w.fill(seed + 1);
  bias.fill(seed + 2);
  args.a = a.begin, args.a_stride = a.stride;
  args.w = w.begin, args.w_stride = w.stride;
  args.out = out.begin, args.out_stride = out.stride;
  if (input.flag()) args.bias = bias.begin;
  run(
      input, {&out}, [&] { out.poison(); },
      [&](const Context& context) {
        const int64_t bytes = gemm_workspace_bytes(args, context);
        // aligned_alloc takes multiples of the alignment, so the scratch may end a little late.
        void* workspace = bytes > 0 ? std::aligned_alloc(256, (bytes + 255) / 256 * 256) : nullptr;
        args.workspace = workspace;
        const Status status = launch_gemm(args, context);
        std::free(workspace);
        return status;
      });
}

}  // namespace
}  // namespace rocm_kernels

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  rocm_kernels::Input input(data, size);
  switch (input.up_to(2)) {
    case 0:
      rocm_kernels::fuzz_rmsnorm_fp8(input);
      break;
    case 1:
      rocm_kernels::fuzz_swiglu_fp8(input);
      break;
    default:
      rocm_kernels::fuzz_gemm(input);
  }
  return 0;
}
