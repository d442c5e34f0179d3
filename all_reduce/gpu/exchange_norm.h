// all_reduce, residual, RMSNorm and FP8 quantisation in one kernel, one shot:
//
//   thread: x[v] ──▶ every other rank's mailbox;  residual[v], weight[v] asked for
//           mailbox[r][v] of all r ──▶ sum, rounded ──▶ h = sum + residual ──▶ norm, scale ──▶ FP8
//
// Timeline of a block, which has one row:
//
//   waits for                          does
//   the kernel before                  reads the epoch; stores x to the other ranks; asks for
//                                      residual and weight
//   a barrier of the block             counts the epoch on
//   x of every other rank              empties the places; adds; h, to memory; squares
//   its other waves                    1 / rms (and, of a scale a token, once more: the scale)
//                                      y, codes, stores
//
// Teams hold rows as in rmsnorm_fp8 (blocks/rows/gpu/row.h), so the bits are those of all_reduce
// and that op after it. Every rank has every row: at the sizes of a decode step the rows' norms are
// hidden behind the links, and dividing them among ranks would take a second way over these.
#pragma once

#include "../../blocks/rows/gpu/norm.h"
#include "../../blocks/rows/gpu/row_launch.h"
#include "exchange.h"

namespace rocm_kernels {
namespace {

template <typename T>
struct ExchangeNormParams {
  Group group;
  RmsnormParams<T> norm;
};

// Vectors of a thread that are waited for at once. Of two ranks all: 1 x 4096 takes 0.2 us less. Of
// more, a look at all of them takes longer than a second wait (docs/kernels/all_reduce_journal.md).
template <typename Team, int kRanks>
constexpr int kVectorsAtOnce = kRanks == 2 ? Team::kVectors : 1;

// A row for each team. Grid: at most kMostPeerBlocks blocks.
template <typename T, typename Team, int kRanks>
__global__ void __launch_bounds__(Team::kBlockThreads)
    exchange_norm_kernel(const ExchangeNormParams<T> params) {
  begin_after_previous_kernel();
  const RmsnormParams<T>& p = params.norm;
  constexpr int kVectors = Team::kVectors;
  __shared__ TeamScratch scratch;
  int slot = 0;

  TeamThread<Team> here;
  const auto column_of = [&](int v) { return here.template column<T>(v); };
  const int row = here.first_row() + here.team;
  Vector x[kVectors], residual[kVectors], weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {  // beside the header, see Mailboxes
    x[v] = load_vector<Touch::kOnce, Fit::kWhole>(p.x + int64_t{row} * p.x_stride, column_of(v),
                                                  row < p.rows ? p.hidden : 0, p.aligned);
  }
  const Mailboxes<kRanks> boxes(params.group);
  // Teams without a row keep to the block's barriers: their row has no columns.
  const int columns = row < p.rows && !boxes.failed ? p.hidden : 0;
  const int64_t row_bytes = int64_t{p.hidden} * sizeof(T);
  const int64_t stride = p.rows * row_bytes;
  const auto place_of = [&](int v) { return row * row_bytes + column_of(v) * int64_t{sizeof(T)}; };

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    x[v] = sendable(x[v]);
    if (column_of(v) < columns) {
      boxes.send(params.group.rank * stride + place_of(v), x[v]);
    }
  }
  const float zeros[2] = {-0.0f, -0.0f};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int w = 0; w < 4; ++w) residual[v].word[w] = opaque(Word<T>::pack(zeros));
    if (p.residual != nullptr) {
      residual[v] = load_vector<Touch::kOnce, Fit::kWhole>(
          p.addend + int64_t{row} * p.addend_stride, column_of(v), columns, p.aligned);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weight[v] = load_vector<Touch::kAgain, Fit::kWhole>(static_cast<const T*>(p.weight),
                                                        column_of(v), p.hidden, p.aligned);
  }
  float inverse = 1.0f / (p.output.scaling == Scaling::kStatic ? *p.output.scale : 1.0f);
  lds_barrier();  // all threads of the block have read the epoch
  boxes.count_epoch();

  Vector h[kVectors];
  float squares = 0.0f;
  constexpr int kStep = kVectorsAtOnce<Team, kRanks>;
#pragma unroll
  for (int begin = 0; begin < kVectors; begin += kStep) {
    int64_t places[kStep];
    Vector got[kStep][kRanks];
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const bool there = column_of(begin + i) < columns;
      places[i] = there ? place_of(begin + i) : Mailboxes<kRanks>::kNoVector;
    }
    boxes.receive(places, stride, got);  // if not, the host is told: go on with anything
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int v = begin + i;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r == params.group.rank) got[i][r] = x[v];
      }
      h[v] = add<T>(sendable(sum_of_ranks<T>(got[i], params.group.ranks)), residual[v]);
      squares += sum_of_squares<T>(h[v], column_of(v), columns);
      if (p.residual != nullptr) {
        store_words<sizeof(T), Fit::kWhole>(p.residual + int64_t{row} * p.residual_stride,
                                            column_of(v), columns, p.aligned, h[v].word);
      }
    }
  }
  const float sum = reduce_team<Team>(squares, Sum{}, scratch, slot);
  store_norm<T, Team>(h, weight, sum, row, columns, here, p, scratch, slot, inverse);
}

// ---- Launcher ---------------------------------------------------------------------------------

template <typename T, int kRanks>
Status launch_exchange_norm(const ExchangeArgs& exchange, const RmsnormFp8Args& norm,
                            const DeviceFacts& facts, Stream stream, bool& fused) {
  constexpr int kCount = kVectorElements<T>;
  ExchangeNormParams<T> p{};
  p.group = make_group(exchange);
  p.norm = make_norm_params<T>(norm);
  const bool whole = norm.hidden % kCount == 0 && p.norm.aligned && !p.norm.float_weight &&
                     fits(p.norm.output, facts);
  if (!whole) return nullptr;
  Status status = nullptr;
  const auto launch_held = [&](auto team) {
    // A block a row, whatever the norm alone would take: the links hold up the row, and a cluster
    // starts later. Two H100, 8 rows of 8192: 5.1 us, by clusters of 2, 4 and 8 blocks 5.7 to 5.8.
    using Team = RowTeam<decltype(team)::kThreads, decltype(team)::kVectors>;
    // Rows of models: 1024 columns and more, of which a thread has registers for x, residual,
    // weight and the ranks' vectors.
    if constexpr (Team::kThreads >= 256 && Team::kVectors <= 2) {
      const int64_t blocks = norm.rows;  // as teams of 256 threads and more are blocks
      if (blocks > kMostPeerBlocks) return;
      fused = true;
      status = launch_kernel(exchange_norm_kernel<T, Team, kRanks>,
                             row_launch(blocks, Team::kBlockThreads, facts, stream), p);
    }
  };
  with_row_team(norm.hidden / kCount, norm.rows, facts, launch_held);
  return status;
}

template <typename T>
Status launch_exchange_norm(const ExchangeArgs& exchange, const RmsnormFp8Args& norm,
                            const DeviceFacts& facts, Stream stream, bool& fused) {
  const ExchangeConfig config = choose(exchange, sizeof(T), facts);
  if (config.blocks == 0 || config.design != ExchangeDesign::kOneShot) return nullptr;
  if (exchange.ranks <= 2) return launch_exchange_norm<T, 2>(exchange, norm, facts, stream, fused);
  if (exchange.ranks <= 4) return launch_exchange_norm<T, 4>(exchange, norm, facts, stream, fused);
  return launch_exchange_norm<T, 8>(exchange, norm, facts, stream, fused);
}

}  // namespace

Status launch_all_reduce_rmsnorm_fp8(const ExchangeArgs& exchange, const RmsnormFp8Args& norm,
                                     const Context& context, bool& fused) {
  fused = false;
  const auto launch = [&](auto element, const DeviceFacts& facts, Stream stream) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 2) {  // what models have
      return launch_exchange_norm<T>(exchange, norm, facts, stream, fused);
    } else {
      return Status{nullptr};
    }
  };
  return launch_rows(norm, norm.x_dtype, norm.hidden,
                     {norm.x_stride, norm.residual_stride, norm.addend_stride, norm.out_stride},
                     context, launch);
}

}  // namespace rocm_kernels
