// Exchanges between GPUs, for both families; all_reduce.h has the maths, blocks/peers/gpu/mailbox.h
// the protocol and its proof.
//
//   one shot   thread: x[v] ──▶ every other rank's mailbox    (stores, all under way at once)
//                      mailbox[r][v] of all r ──▶ sum ──▶ out[v]
//   two shots  thread: x[part r][v] ──▶ rank r's mailbox      v: of the part that a rank adds
//                      mailbox[r][v] ──▶ sum ──▶ out[own part][v] and every other rank's mailbox
//                      second mailbox[r][v] ──▶ out[part r][v]
//   scatter, gather      the first of these shots; all x to all ranks, without a sum
//
// Timeline of a thread, with every vector v of its own. Blocks and threads do not wait for each
// other, but for one barrier of a block; a thread waits for vectors of other ranks.
//
//   waits for                          does
//   the kernel before                  reads the epoch; stores all its x[v] to the other ranks
//   a barrier of the block             counts the epoch on, as all have read it
//   x[v] of every other rank, v by v   empties the places; adds, in the ranks' order; out, and the
//                                      sum to the other ranks if there is a second shot
//   sums of every other rank           empties the places; out
//
// A GPU stores into the memory of others and loads from its own alone: a load over a link would be
// a way there and back. A thread keeps to its v from x to out, so out may be x, and nothing needs a
// barrier of all blocks.
#pragma once

#include "../../blocks/peers/gpu/mailbox.h"
#include "../../common/gpu/barrier.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/launch.h"
#include "../all_reduce.h"
#include "choose.h"

namespace rocm_kernels {
namespace {

struct ExchangeParams {
  Group group;
  const void* x;
  void* out;
  int64_t part;         // elements of a part of x, or of all of it
  int64_t elements;     // of x
  int32_t vectors;      // of a part
  int32_t x_aligned;    // whole vectors may be loaded from each part of x
  int32_t out_aligned;  // and stored to each part of out
};

// Elements of part `r` that there are: the last ones of two shots may be short or empty.
ROCM_KERNELS_DEVICE int part_columns(const ExchangeParams& p, int r) {
  const int64_t left = p.elements - r * p.part;
  return static_cast<int>(left < 0 ? 0 : left < p.part ? left : p.part);
}

template <typename T>
ROCM_KERNELS_DEVICE Vector load_part(const ExchangeParams& p, int r, int v) {
  const T* const row = static_cast<const T*>(p.x) + r * p.part;
  return sendable(load_vector<Touch::kOnce, Fit::kRagged>(row, v * kVectorElements<T>,
                                                          part_columns(p, r), p.x_aligned));
}

// What a thread sends of vector v: x[v] to all; or, kParts, of each rank's part v to that rank, by
// other_rank().
template <typename T, bool kParts, int kCount>
ROCM_KERNELS_DEVICE void load_sent(const ExchangeParams& p, int v, Vector (&x)[kCount]) {
  if constexpr (!kParts) {
    x[0] = load_part<T>(p, 0, v);
  } else if (p.x_aligned != 0 &&
             (v + 1) * kVectorElements<T> <= part_columns(p, p.group.ranks - 1)) {
    // All are whole: no branch between these loads, or each would wait for the one before.
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const T* const part = static_cast<const T*>(p.x) + other_rank(p.group, i) * p.part;
      x[i] = load<Touch::kOnce, Vector>(at(part, v * int{kPeerVectorBytes}));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = load_part<T>(p, other_rank(p.group, i), v);
  }
}

template <typename T>
ROCM_KERNELS_DEVICE void store_part(const ExchangeParams& p, int r, int columns, int v,
                                    const Vector& value) {
  T* const row = static_cast<T*>(p.out) + r * p.part;
  const int column = v * kVectorElements<T>;
  if (p.out_aligned != 0 && column + kVectorElements<T> <= columns) {
    store_words<sizeof(T), Fit::kWhole>(row, column, columns, true, value.word);
  } else {
    // A copy: what is stored in pieces lies in memory, and not the vectors of all ranks with it.
    const Vector pieces = opaque(value);
    store_words<sizeof(T), Fit::kRagged>(row, column, columns, false, pieces.word);
  }
}

template <typename T, int kRanks, ExchangeDesign kDesign>
__global__ void __launch_bounds__(512) exchange_kernel(const ExchangeParams p) {
  begin_after_previous_kernel();
  const int rank = p.group.rank, ranks = p.group.ranks;
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  const int64_t stride = int64_t{p.vectors} * kPeerVectorBytes;  // a rank's part of a mailbox
  constexpr bool kParts =
      kDesign == ExchangeDesign::kTwoShot || kDesign == ExchangeDesign::kScatter;

  Vector x[kParts ? kRanks - 1 : 1];
  if (first < p.vectors) load_sent<T, kParts>(p, first, x);  // beside the header, see Mailboxes
  const Mailboxes<kRanks> boxes(p.group);
  if (boxes.failed) return;
  for (int v = first; v < p.vectors; v += step) {
    const int64_t place = rank * stride + v * kPeerVectorBytes;
    if (v != first) load_sent<T, kParts>(p, v, x);
    if constexpr (kParts) {
#pragma unroll
      for (int i = 0; i < kRanks - 1; ++i) {
        if (i < ranks - 1) store_to_peer(boxes.peers[i] + place, sendable(x[i]));
      }
    } else {
      boxes.send(place, x[0]);
    }
  }
  lds_barrier();  // all threads of the block have read the epoch
  boxes.count_epoch();

  for (int v = first; v < p.vectors; v += step) {
    Vector got[1][kRanks];
    const Vector own = load_part<T>(p, kParts ? rank : 0, v);
    if (!boxes.receive({v * kPeerVectorBytes}, stride, got)) return;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r == rank) got[0][r] = own;
    }
    if constexpr (kDesign == ExchangeDesign::kGather) {
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r < ranks) store_part<T>(p, r, static_cast<int>(p.part), v, got[0][r]);
      }
    } else {
      const Vector sum = sendable(sum_of_ranks<T>(got[0], ranks));
      if constexpr (kDesign == ExchangeDesign::kTwoShot) {
        boxes.send((ranks + rank) * stride + v * kPeerVectorBytes, sum);
      }
      constexpr bool kOwnPart = kDesign == ExchangeDesign::kTwoShot;
      store_part<T>(p, kOwnPart ? rank : 0, part_columns(p, kParts ? rank : 0), v, sum);
    }
  }
  if constexpr (kDesign == ExchangeDesign::kTwoShot) {
    for (int v = first; v < p.vectors; v += step) {
      Vector got[1][kRanks];
      if (!boxes.receive({ranks * stride + v * kPeerVectorBytes}, stride, got)) return;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (boxes.is_other(r)) store_part<T>(p, r, part_columns(p, r), v, got[0][r]);
      }
    }
  }
}

// The rest of one shot behind a product that has sent all ranks' x, this one's too: p.group is
// of_receivers(), p.x is not used.
//
// It never waits for the end of the product, which would come when the product's stores to other
// GPUs are answered, a way there and back after they were made. It begins when all blocks of the
// product have waited for what came before, so that this is done, and have read the epoch, which
// may so be counted. And it ends when all of this rank's vectors have come, too: then the product
// has read all that it reads, and who waits for this kernel may write it.
template <typename T, int kRanks>
__global__ void __launch_bounds__(512) sum_of_sent_kernel(const ExchangeParams p) {
  allow_next_kernel();
  const Mailboxes<kRanks> boxes(p.group);
  const int64_t stride = int64_t{p.vectors} * kPeerVectorBytes;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  bool came = !boxes.failed;
  for (int v = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); came && v < p.vectors;
       v += step) {
    Vector got[1][kRanks];
    came = boxes.receive({v * kPeerVectorBytes}, stride, got);
    if (came) {
      store_part<T>(p, 0, static_cast<int>(p.part), v,
                    sendable(sum_of_ranks<T>(got[0], p.group.ranks)));
    }
  }
  if (!came) wait_for_previous_kernel();
  lds_barrier();  // all threads of the block have read the epoch
  boxes.count_epoch();
}

// ---- Launcher ---------------------------------------------------------------------------------

template <typename T, int kRanks>
Status launch_designed(const ExchangeConfig& config, const ExchangeParams& p, bool early,
                       Stream stream) {
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(config.blocks));
  launch.block = config.threads;
  launch.stream = stream;
  launch.early = early;
  switch (config.design) {
    case ExchangeDesign::kOneShot:
      if (p.x == nullptr) return launch_kernel(sum_of_sent_kernel<T, kRanks>, launch, p);
      return launch_kernel(exchange_kernel<T, kRanks, ExchangeDesign::kOneShot>, launch, p);
    case ExchangeDesign::kTwoShot:
      return launch_kernel(exchange_kernel<T, kRanks, ExchangeDesign::kTwoShot>, launch, p);
    case ExchangeDesign::kScatter:
      return launch_kernel(exchange_kernel<T, kRanks, ExchangeDesign::kScatter>, launch, p);
    default:
      return launch_kernel(exchange_kernel<T, kRanks, ExchangeDesign::kGather>, launch, p);
  }
}

constexpr int64_t half_of(int64_t data_bytes) {
  return data_bytes / 2 / kPeerVectorBytes * kPeerVectorBytes;
}

inline Group make_group(const ExchangeArgs& args) {
  Group group{};
  group.own = static_cast<PeerHeader*>(args.memory);
  group.half_bytes = half_of(args.data_bytes);
  group.patience = static_cast<uint64_t>(args.timeout * kTicksPerSecond);
  group.rank = args.rank;
  group.ranks = args.ranks;
  return group;
}

inline ExchangeConfig choose(const ExchangeArgs& args, int64_t element_bytes,
                             const DeviceFacts& facts) {
  return choose_exchange(args.what, args.elements, element_bytes, args.ranks,
                         half_of(args.data_bytes), facts.compute_units, kNvidia ? kNvlink : kXgmi);
}

template <typename T>
Status launch_config(const ExchangeArgs& args, const ExchangeConfig& config, bool early,
                     Stream stream) {
  ExchangeParams p{};
  p.group = make_group(args);
  if (args.x == nullptr) p.group = of_receivers(p.group);
  p.x = args.x;
  p.out = args.out;
  p.elements = args.elements;
  p.part = args.elements;
  if (config.design == ExchangeDesign::kTwoShot) {
    p.part = two_shot_part(args.elements, sizeof(T), args.ranks);
  } else if (config.design == ExchangeDesign::kScatter) {
    p.part = args.elements / args.ranks;
  }
  p.vectors = static_cast<int32_t>(part_vectors(p.part, sizeof(T)));
  const auto aligned = [&](const void* data) {
    return !kNeedsAlignedVectors || rows_aligned(data, p.part, sizeof(T), kPeerVectorBytes);
  };
  p.x_aligned = aligned(args.x);
  p.out_aligned = aligned(args.out);
  if (args.ranks <= 2) return launch_designed<T, 2>(config, p, early, stream);
  if (args.ranks <= 4) return launch_designed<T, 4>(config, p, early, stream);
  return launch_designed<T, 8>(config, p, early, stream);
}

template <typename T>
Status launch_typed(const ExchangeArgs& args, const DeviceFacts& facts, Stream stream) {
  if (args.elements > int64_t{1} << 30) return "x must have at most 2^30 elements";
  const ExchangeConfig config = choose(args, sizeof(T), facts);
  if (config.blocks == 0) {
    return "the tensor has more bytes than the Communicator was made for: give it more max_bytes";
  }
  return launch_config<T>(args, config, facts.is_hopper_or_later(), stream);
}

}  // namespace

Status ask_whether_to_send(const ExchangeArgs& args, const Context&, Group& group, bool& sends) {
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  const ExchangeConfig config = choose(args, size_of(args.dtype), facts);
  sends = config.blocks > 0 && config.design == ExchangeDesign::kOneShot;
  group = make_group(args);
  return nullptr;
}

Status launch_exchange(const ExchangeArgs& args, const Context& context) {
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  const Stream stream = stream_of(context);
  switch (args.dtype) {
    case DType::kFloat32:
      return launch_typed<float>(args, facts, stream);
    case DType::kFloat16:
      return launch_typed<float16>(args, facts, stream);
    default:
      return launch_typed<bfloat16>(args, facts, stream);
  }
}

}  // namespace rocm_kernels
