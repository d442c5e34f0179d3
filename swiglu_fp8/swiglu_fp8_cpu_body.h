// A piece of swiglu_fp8 on a CPU; compiled once for each instruction set (common/cpu/isa.h).
//
// A piece is read once, a tile at a time: `activate` computes the tile's y in float32 into a buffer
// in the first level cache and takes its amax, `write` rounds it from there. A dynamic scale needs
// the amax of all its columns first, so their y are kept, up to kKeptColumns of them; the tiles of
// a row that is longer than that are computed twice.

#include "../blocks/rows/cpu/activation.h"

constexpr int64_t kTileColumns = 1024;
constexpr int64_t kKeptColumns = 16 * kTileColumns;
static_assert(kTileColumns % kBlock == 0, "tiles are kept as whole blocks");

template <Activation kActivation, bool kGated, bool kWhole, class In>
ROCM_KERNELS_VECTOR Block activated(const In* gate, const In* up, int n) {
  const Block y = activation<kActivation>(kWhole ? load_block<In>(gate) : load_block<In>(gate, n));
  if constexpr (kGated) return y * (kWhole ? load_block<In>(up) : load_block<In>(up, n));
  return y;
}

// y of `columns` columns, and their amax.
template <Activation kActivation, bool kGated, class In>
float activate(const In* gate, const In* up, Block* y, int64_t columns) {
  Block amax = all(0.0f);
  int64_t c = 0;
  for (; c + kBlock <= columns; c += kBlock, ++y) {
    *y = activated<kActivation, kGated, true>(gate + c, kGated ? up + c : up, kBlock);
    amax = max_magnitude(*y, amax);
  }
  if (c < columns) {
    const int n = static_cast<int>(columns - c);
    *y = activated<kActivation, kGated, false>(gate + c, kGated ? up + c : up, n);
    amax = max_magnitude(*y, amax);
  }
  return largest(amax);
}

template <class In>
using Activate = float (*)(const In* gate, const In* up, Block* y, int64_t columns);

template <bool kGated, class In>
Activate<In> activate_for(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return &activate<Activation::kSilu, kGated, In>;
    case Activation::kGelu:
      return &activate<Activation::kGelu, kGated, In>;
    case Activation::kGeluTanh:
      return &activate<Activation::kGeluTanh, kGated, In>;
    default:
      return &activate<Activation::kIdentity, kGated, In>;
  }
}

template <class In, class Out>
void write(const Block* y, float inverse_scale, Out* out, int64_t columns) {
  const Block inverse = all(inverse_scale);
  int64_t c = 0;
  for (; c + kBlock <= columns; c += kBlock, ++y) store_block<In>(out + c, *y * inverse);
  if (c < columns) store_block<In>(out + c, *y * inverse, static_cast<int>(columns - c));
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The scales of a whole batch of groups come before the first is used: one group's two divisions
// would hold up the next.
template <class In, class Out>
void run_small_groups(const DynamicScale& scale_for, Activate<In> activate, const In* gate,
                      const In* up, Out* out, float* scales, int64_t columns, int64_t group) {
  Block kept[kTileColumns / kBlock];
  const int64_t blocks = (group + kBlock - 1) / kBlock;
  const int64_t batch = kTileColumns / kBlock / blocks * group;
  for (int64_t first = 0; first < columns; first += batch) {
    const int64_t last = smaller(first + batch, columns);
    Block* y = kept;
    for (int64_t c = first; c < last; c += group, y += blocks) {
      const int64_t n = smaller(group, last - c);
      scales[c / group] = scale_for(activate(gate + c, up == nullptr ? up : up + c, y, n));
    }
    y = kept;
    for (int64_t c = first; c < last; c += group, y += blocks) {
      write<In>(y, 1.0f / scales[c / group], out + c, smaller(group, last - c));
    }
  }
}

// A group that may be longer than the buffer, a whole row for one.
template <class In, class Out>
void run_group(const DynamicScale& scale_for, Activate<In> activate, const In* gate, const In* up,
               Out* out, float* scale, int64_t columns) {
  Block kept[(kKeptColumns + kTileColumns) / kBlock];
  float amax = 0.0f;
  for (int64_t c = 0; c < columns; c += kTileColumns) {
    Block* const y = kept + smaller(c, kKeptColumns) / kBlock;
    const int64_t n = smaller(kTileColumns, columns - c);
    const float tile_amax = activate(gate + c, up == nullptr ? up : up + c, y, n);
    if (tile_amax > amax) amax = tile_amax;
  }
  *scale = scale_for(amax);
  const float inverse = 1.0f / *scale;
  write<In>(kept, inverse, out, smaller(columns, kKeptColumns));
  for (int64_t c = kKeptColumns; c < columns; c += kTileColumns) {
    const int64_t n = smaller(kTileColumns, columns - c);
    activate(gate + c, up == nullptr ? up : up + c, kept, n);
    write<In>(kept, inverse, out + c, n);
  }
}

template <class In, class Out>
void run_tiles(float inverse_scale, Activate<In> activate, const In* gate, const In* up, Out* out,
               int64_t columns) {
  Block y[kTileColumns / kBlock];
  for (int64_t c = 0; c < columns; c += kTileColumns) {
    const int64_t n = smaller(kTileColumns, columns - c);
    activate(gate + c, up == nullptr ? up : up + c, y, n);
    write<In>(y, inverse_scale, out + c, n);
  }
}

template <class In, class Out>
void run_piece(const SwigluFp8Args& args, Activate<In> activate, const In* gate, const In* up,
               Out* out, float* scales, int64_t columns) {
  const DynamicScale scale_for{fp8_max(args.out_dtype), args.scale_ub,
                               ScaleRounding::of(args.ue8m0)};
  switch (args.scaling) {
    case Scaling::kNone:
      return run_tiles(1.0f, activate, gate, up, out, columns);
    case Scaling::kStatic:
      return run_tiles(1.0f / *args.static_scale, activate, gate, up, out, columns);
    case Scaling::kPerToken:
      return run_group(scale_for, activate, gate, up, out, scales, columns);
    case Scaling::kPerGroup:
      break;
  }
  const int64_t group = args.group_size;
  if (group <= kTileColumns) {
    return run_small_groups(scale_for, activate, gate, up, out, scales, columns, group);
  }
  for (int64_t c = 0; c < columns; c += group) {
    run_group(scale_for, activate, gate + c, up == nullptr ? up : up + c, out + c,
              scales + c / group, smaller(group, columns - c));
  }
}

template <class In, class Out>
void run_pieces(const SwigluFp8Args& args, const Pieces& pieces, int64_t begin, int64_t end) {
  const Activate<In> activate = args.up == nullptr ? activate_for<false, In>(args.activation)
                                                   : activate_for<true, In>(args.activation);
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / pieces.per_row;
    const int64_t c = piece % pieces.per_row * pieces.columns;
    const In* const gate = static_cast<const In*>(args.gate) + row * args.gate_stride + c;
    const In* const up =
        args.up == nullptr ? nullptr : static_cast<const In*>(args.up) + row * args.up_stride + c;
    Out* const out = static_cast<Out*>(args.out) + row * args.out_stride + c;
    float* const scales = args.scales == nullptr
                              ? nullptr
                              : args.scales + row * pieces.scales_per_row + c / pieces.group;
    run_piece(args, activate, gate, up, out, scales, smaller(pieces.columns, args.columns - c));
  }
}

template <class In>
void run_pieces(const SwigluFp8Args& args, const Pieces& pieces, int64_t begin, int64_t end) {
  switch (args.out_dtype) {
    case DType::kFloat8E4M3FN:
      return run_pieces<In, Float8E4M3<false>>(args, pieces, begin, end);
    case DType::kFloat8E4M3FNUZ:
      return run_pieces<In, Float8E4M3<true>>(args, pieces, begin, end);
    default:
      return run_pieces<In, In>(args, pieces, begin, end);
  }
}

inline void swiglu_fp8_pieces(const SwigluFp8Args& args, const Pieces& pieces, int64_t begin,
                              int64_t end) {
  switch (args.in_dtype) {
    case DType::kFloat32:
      return run_pieces<float>(args, pieces, begin, end);
    case DType::kFloat16:
      return run_pieces<Float16>(args, pieces, begin, end);
    default:
      return run_pieces<BFloat16>(args, pieces, begin, end);
  }
}
