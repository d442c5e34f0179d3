// What the ops require of their tensors, with errors that name the requirement and what came.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "../../common/core/dtype.h"
#include "../../common/core/math.h"

namespace rocm_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Elements between the rows of a matrix. Where there is one row, torch's stride means nothing.
inline int64_t row_stride(const Tensor& tensor) {
  return tensor.size(0) > 1 ? tensor.stride(0) : tensor.size(1);
}

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  ((message << parts), ...);
  throw std::runtime_error(message.str());
}

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e5m2fnuz:
      return "float8_e5m2fnuz";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    default:
      return "another dtype";
  }
}

// Printed only where a check fails: a stream for each check costs more than a small kernel.
struct ShapeOf {
  const Tensor& tensor;
};
inline std::ostream& operator<<(std::ostream& text, const ShapeOf& shape) {
  text << "[";
  for (int64_t i = 0; i < shape.tensor.dim(); ++i) text << (i ? ", " : "") << shape.tensor.size(i);
  return text << "]";
}
inline ShapeOf shape_of(const Tensor& tensor) { return {tensor}; }

struct DeviceOf {
  const Tensor& tensor;
};
inline std::ostream& operator<<(std::ostream& text, const DeviceOf& device) {
  if (device.tensor.is_cpu()) return text << "cpu";
  return text << "gpu:" << device.tensor.get_device();
}

inline std::optional<DType> dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case ScalarType::Float8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    default:
      return std::nullopt;
  }
}

inline DType require_float(const Tensor& tensor, const char* name) {
  const auto dtype = dtype_of(tensor);
  require(dtype && !is_fp8(*dtype), name, " must be float32, float16 or bfloat16, got ",
          name_of(tensor.scalar_type()));
  return *dtype;
}

inline DType require_float_or_fp8(const Tensor& tensor, const char* name) {
  const auto dtype = dtype_of(tensor);
  require(dtype.has_value(), name,
          " must be float32, float16, bfloat16, float8_e4m3fn or float8_e4m3fnuz, got ",
          name_of(tensor.scalar_type()));
  return *dtype;
}

// The first operand decides the device; every other tensor of the call must be there too.
inline void require_device(const Tensor& tensor, const char* name, const Tensor& first,
                           const char* first_name) {
  require(tensor.is_cpu() == first.is_cpu() && tensor.get_device() == first.get_device(), name,
          " must be on the device of ", first_name, ", got ", DeviceOf{tensor}, " and ",
          DeviceOf{first});
}

inline void require_matrix(const Tensor& tensor, const char* name) {
  require(tensor.dim() == 2, name, " must have two dimensions, got ", shape_of(tensor));
  require(tensor.size(1) <= 1 || tensor.stride(1) == 1 || tensor.size(0) == 0, name,
          " must be contiguous in its last dimension, got a stride of ", tensor.stride(1),
          "; call .contiguous() first");
}

inline void require_shape(const Tensor& tensor, const char* name, int64_t rows, int64_t columns) {
  require_matrix(tensor, name);
  require(tensor.size(0) == rows && tensor.size(1) == columns, name, " must have shape [", rows,
          ", ", columns, "], got ", shape_of(tensor));
}

// A matrix that is written: its rows may not share memory (an expanded tensor, for one).
inline void require_writable(const Tensor& tensor, const char* name) {
  require(tensor.size(0) <= 1 || tensor.stride(0) >= tensor.size(1), name,
          " is written, so its rows must not overlap, got a row stride of ", tensor.stride(0),
          " for ", tensor.size(1), " columns");
}

inline void require_contiguous_vector(const Tensor& tensor, const char* name, int64_t length) {
  require(tensor.dim() == 1 && tensor.size(0) == length, name, " must have shape [", length,
          "], got ", shape_of(tensor));
  require(length <= 1 || tensor.stride(0) == 1, name, " must be contiguous, got a stride of ",
          tensor.dim() ? tensor.stride(0) : 0);
}

inline const float* require_static_scale(const Tensor& scale) {
  require(scale.scalar_type() == ScalarType::Float && scale.numel() == 1,
          "scale must be one float32 value, got ", name_of(scale.scalar_type()), " ",
          shape_of(scale));
  return static_cast<const float*>(scale.data_ptr());
}

// The pages of each of `batch` sequences, beside q.
inline const int32_t* require_block_table(const Tensor& block_table, int64_t batch,
                                          const Tensor& q) {
  require(block_table.scalar_type() == ScalarType::Int, "block_table must be int32, got ",
          name_of(block_table.scalar_type()));
  require_device(block_table, "block_table", q, "q");
  require(block_table.dim() == 2 && block_table.size(0) == batch &&
              (block_table.size(1) <= 1 || block_table.stride(1) == 1 || batch == 0),
          "block_table must be [", batch, ", pages] and contiguous in its last dimension, got ",
          shape_of(block_table), " with a last stride of ",
          block_table.dim() == 0 ? 1 : block_table.stride(block_table.dim() - 1));
  return static_cast<const int32_t*>(block_table.data_ptr());
}

// What memory a tensor takes: rows of bytes, `stride` apart. A row is as few of its dimensions,
// those of the smallest strides, as leave others that fold into rows which lie apart; else it is
// all from the first byte to the last. What lies between the elements of a strided row counts too.
struct Memory {
  intptr_t begin = 0;
  int64_t rows = 0, stride = 0, row_bytes = 0;  // no rows: no element

  intptr_t end() const { return begin + (rows - 1) * stride + row_bytes; }
};

inline Memory memory_of(const Tensor& tensor) {
  Memory memory;
  if (tensor.numel() == 0) return memory;
  memory.begin = reinterpret_cast<intptr_t>(tensor.data_ptr());
  const int64_t dims = tensor.dim(), bytes = static_cast<int64_t>(tensor.element_size());
  constexpr int64_t kMostDims = 8;
  int64_t sizes[kMostDims], steps[kMostDims];  // in elements, descending
  require(dims <= kMostDims, "tensors must have at most ", kMostDims, " dimensions, got ", dims);
  for (int64_t i = 0; i < dims; ++i) {
    int64_t at = i;
    for (; at > 0 && steps[at - 1] < tensor.stride(i); --at) {
      sizes[at] = sizes[at - 1];
      steps[at] = steps[at - 1];
    }
    sizes[at] = tensor.size(i);
    steps[at] = tensor.stride(i);
  }
  for (int64_t leading = dims - 1; leading >= 0; --leading) {
    memory.rows = 1;
    memory.stride = 0;
    bool folds = true;
    for (int64_t i = leading - 1; i >= 0; --i) {
      const int64_t size = sizes[i], step = steps[i] * bytes;
      if (size == 1) continue;
      folds = folds && (memory.rows == 1 || step == memory.stride * memory.rows);
      if (memory.rows == 1) memory.stride = step;
      memory.rows *= size;
    }
    int64_t last = 0;
    for (int64_t i = leading; i < dims; ++i) last += (sizes[i] - 1) * steps[i];
    memory.row_bytes = (last + 1) * bytes;
    if (folds && (memory.rows == 1 || memory.stride >= memory.row_bytes)) break;
  }
  if (dims == 0) memory.rows = 1, memory.row_bytes = bytes;
  if (memory.rows == 1) memory.stride = memory.row_bytes;
  return memory;
}

// Whether two tensors share a byte. Rows side by side in one buffer (equal row strides, disjoint
// columns) do not.
inline bool overlap(const Memory& a, const Memory& b) {
  if (a.rows == 0 || b.rows == 0) return false;
  if (a.end() <= b.begin || b.end() <= a.begin) return false;
  // One row is as good as a row of the other's.
  const int64_t stride = a.rows == 1 ? b.stride : a.stride;
  if ((b.rows > 1 && stride != b.stride) || stride <= 0) return true;
  if (a.row_bytes > stride || b.row_bytes > stride) return true;
  const int64_t offset = ((b.begin - a.begin) % stride + stride) % stride;
  return offset < a.row_bytes || offset + b.row_bytes > stride;
}

inline void require_no_overlap(const Tensor& written, const char* written_name, const Tensor& other,
                               const char* other_name) {
  require(!overlap(memory_of(written), memory_of(other)), written_name,
          " is written and must not share memory with ", other_name);
}

// What an op of many tensors is given, by name.
class Operands {
 public:
  // Those that are written come first.
  void add(const Tensor& tensor, const char* name) { given_[count_++] = {memory_of(tensor), name}; }
  void add(const std::optional<Tensor>& tensor, const char* name) {
    if (tensor) add(*tensor, name);
  }
  int count() const { return count_; }

  static bool no_pair(int, int) { return false; }

  // The first `written` share no memory with another, but for pairs that `may_share(i, j)`.
  template <typename MayShare = bool(int, int)>
  void require_apart(int written, const MayShare& may_share = no_pair) const {
    for (int i = 0; i < written; ++i) {
      for (int j = i + 1; j < count_; ++j) {
        require(may_share(i, j) || !overlap(given_[i].memory, given_[j].memory), given_[i].name,
                " is written and must not share memory with ", given_[j].name);
      }
    }
  }

 private:
  struct Named {
    Memory memory;
    const char* name;
  };
  static constexpr int kMost = 32;
  Named given_[kMost];
  int count_ = 0;
};

}  // namespace rocm_kernels
