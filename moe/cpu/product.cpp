// Products of experts on the CPU. An expert's rows are one product of few rows
// (blocks/product/cpu/few_rows.h tells how it reads w once), or several of up to kFewRows each:
// slices. Where the processor has tiles, slices of more than one row are theirs
// (blocks/product/cpu/amx.h), and longer.
//   * All slices' columns are one range of work, which threads divide evenly: a column of a slice
//     counts for its bytes of w and for its rows. So one expert with all rows and many experts with
//     one row each keep all threads busy, without a meeting between experts.
//   * MXFP4 is decoded to bfloat16 by groups of columns, in a buffer that each thread keeps.
#include "product.h"

#include <memory>

#include "../../blocks/product/cpu/amx.h"
#include "../../blocks/product/cpu/few_rows.h"

#define ROCM_KERNELS_CPU_BODY "../../moe/cpu/product_body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {
namespace cpu {
namespace {

// Rows [begin, end) of one expert, and where its work lies in the range of all.
struct Slice {
  int64_t begin, end;
  int64_t first_tick;
  int32_t expert;

  int64_t rows() const { return end - begin; }
};

// How a slice is multiplied: the columns of a unit, and what a unit counts for. A tick is the time
// to read two columns of w, in which vectors multiply two columns by a row; tiles multiply by 48
// rows in the time that reading takes.
struct Kernel {
  bool by_tiles;

  int64_t columns() const { return by_tiles ? kAmxColumns : kUnit; }
  int64_t ticks(const Slice& slice) const {
    return by_tiles ? kAmxColumns / 2 + slice.rows() / 3 : slice.rows() + 1;
  }
};

Kernel kernel_of(const ExpertProduct& product, int64_t rows) {
  return {rows >= kAmxMinRows && amx_serves(product.a_dtype, product.w->dtype)};
}

int64_t max_slices(const ExpertProduct& product) {
  const int64_t touched = product.rows < product.experts ? product.rows : product.experts;
  return touched + product.rows / kFewRows;
}

// Fills slices, returns how many there are. The one after the last has the end of all ticks.
int64_t make_slices(const ExpertProduct& product, Slice* slices) {
  int64_t count = 0, begin = 0, tick = 0;
  for (int32_t expert = 0; expert < product.experts; ++expert) {
    const int64_t rows = product.ends[expert] - begin;
    const Kernel kernel = kernel_of(product, rows);
    const int64_t parts = ceil_div(rows, kernel.by_tiles ? kAmxMaxBlockRows : kFewRows);
    for (int64_t part = 0; part < parts; ++part) {
      Slice& slice = slices[count++];
      slice = {begin + rows * part / parts, begin + rows * (part + 1) / parts, tick, expert};
      tick += ceil_div(product.n, kernel.columns()) * kernel.ticks(slice);
    }
    begin += rows;
  }
  slices[count].first_tick = tick;
  return count;
}

// Room for the slices, and the rest is packed rows.
int64_t slices_bytes(const ExpertProduct& product) {
  return ceil_div((max_slices(product) + 1) * static_cast<int64_t>(sizeof(Slice)), 64) * 64;
}

// The slice's own product. MXFP4 gets its w later, in bfloat16.
GemmArgs args_of(const ExpertProduct& product, const Slice& slice) {
  const ExpertWeights& w = *product.w;
  GemmArgs args;
  args.m = product.rows;
  args.n = product.n;
  args.k = product.k;
  args.a = product.a;
  args.a_stride = product.a_stride;
  args.a_dtype = product.a_dtype;
  args.scale_a = product.scale_a;
  args.out = product.out;
  args.out_stride = product.out_stride;
  args.out_dtype = product.out_dtype;
  args = rows_of(args, slice.begin, slice.end);
  args.w_dtype = w.dtype;
  if (w.dtype == DType::kFloat4E2M1x2) {
    args.w_dtype = DType::kBFloat16;
  } else {
    args.w = static_cast<const char*>(w.data) + slice.expert * w.expert_stride * size_of(w.dtype);
    args.w_stride = w.row_stride;
    args.scale_w = w.scale_of(slice.expert);
  }
  const int64_t packed_row = ceil_div(product.k, kScaleBlock) * kScaleBlock * sizeof(float);
  args.workspace =
      static_cast<char*>(product.workspace) + slices_bytes(product) + slice.begin * packed_row;
  return args;
}

void pack_slice(const ExpertProduct& product, const Slice& slice) {
  if (kernel_of(product, slice.rows()).by_tiles) {
    const AmxJob job(args_of(product, slice));
    return amx_pack(job, 0, job.pack_units());
  }
  const GemmJob job(args_of(product, slice), kPanelDepth, kFewRows);
  ROCM_KERNELS_CPU_SELECT(pack)(job, 0, job.panel_rows());
}

// Units [begin, end) of columns of a slice.
void multiply_units(Kernel kernel, const GemmArgs& args, int64_t begin, int64_t end) {
  if (kernel.by_tiles) return amx_multiply(AmxJob(args), begin, end);
  ROCM_KERNELS_CPU_SELECT(multiply)(GemmJob(args, kPanelDepth, kFewRows), begin, end);
}

// At least `count` values; what an earlier call left there.
BFloat16* thread_buffer(int64_t count) {
  static thread_local std::unique_ptr<BFloat16[]> buffer;
  static thread_local int64_t size = 0;
  if (count > size) {
    buffer.reset(new BFloat16[count]);
    size = count;
  }
  return buffer.get();
}

// The same where w is MXFP4.
void multiply_mx(const ExpertProduct& product, const Slice& slice, int64_t begin, int64_t end) {
  static_assert(kGroup % kUnit == 0, "units do not reach across groups");
  const auto decode_row = ROCM_KERNELS_CPU_SELECT(decode_mx_row);
  const ExpertWeights& w = *product.w;
  const Kernel kernel = kernel_of(product, slice.rows());
  const int64_t group = kernel.by_tiles ? kAmxColumns : kGroup;
  const GemmArgs whole = args_of(product, slice);
  BFloat16* const rows = thread_buffer(group * product.k);
  const int64_t stop = end * kernel.columns(), last = stop < product.n ? stop : product.n;
  for (int64_t n = begin * kernel.columns(), next; n < last; n = next) {
    next = n / group * group + group < last ? n / group * group + group : last;
    for (int64_t i = n; i < next; ++i) {
      decode_row(
          static_cast<const uint8_t*>(w.data) + slice.expert * w.expert_stride + i * w.row_stride,
          w.mx_scales + slice.expert * w.mx_expert_stride + i * w.mx_row_stride, product.k,
          rows + (i - n) * product.k);
    }
    GemmArgs args = whole;
    args.n = next - n;
    args.w = rows;
    args.w_stride = product.k;
    args.out = static_cast<char*>(whole.out) + n * size_of(whole.out_dtype);
    multiply_units(kernel, args, 0, ceil_div(args.n, kernel.columns()));
  }
}

// Those units of a slice whose first tick lies in [begin, end).
void multiply_ticks(const ExpertProduct& product, const Slice& slice, int64_t begin, int64_t end) {
  const Kernel kernel = kernel_of(product, slice.rows());
  const int64_t units = ceil_div(product.n, kernel.columns());
  const auto unit_at = [&](int64_t tick) {
    const int64_t unit = ceil_div(tick - slice.first_tick, kernel.ticks(slice));
    return unit < units ? unit : units;
  };
  const int64_t first = begin <= slice.first_tick ? 0 : unit_at(begin), last = unit_at(end);
  if (first >= last) return;
  if (product.w->dtype == DType::kFloat4E2M1x2) return multiply_mx(product, slice, first, last);
  multiply_units(kernel, args_of(product, slice), first, last);
}

}  // namespace

int64_t product_workspace_bytes(const ExpertProduct& product) {
  GemmArgs args;
  args.m = product.rows;
  args.k = product.k;
  return slices_bytes(product) + packed_bytes(args);
}

void multiply_experts(const ExpertProduct& product, const Context& context) {
  if (product.rows == 0 || product.n == 0) return;
  Slice* const slices = static_cast<Slice*>(product.workspace);
  const int64_t count = make_slices(product, slices);
  if (count == 0) return;
  const int64_t panels = ceil_div(product.k, kPanelDepth);
  const int64_t rows_a_slice = ceil_div(slices[count - 1].end, count);
  parallel_for(context, count, ceil_div(128, rows_a_slice * panels + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) pack_slice(product, slices[i]);
               });
  // As unit_bytes has it.
  const int64_t tick_bytes = kUnit * (product.k + 1) * size_of(product.w->dtype) / 2;
  parallel_for(context, slices[count].first_tick, ceil_div(kGrainBytes, tick_bytes),
               [&](int64_t begin, int64_t end) {
                 int64_t i = 0, beyond = count;  // the last slice that begins at `begin` or before
                 while (beyond - i > 1) {
                   const int64_t middle = (i + beyond) / 2;
                   (slices[middle].first_tick <= begin ? i : beyond) = middle;
                 }
                 for (; i < count && slices[i].first_tick < end; ++i) {
                   multiply_ticks(product, slices[i], begin, end);
                 }
               });
}

}  // namespace cpu
}  // namespace rocm_kernels
