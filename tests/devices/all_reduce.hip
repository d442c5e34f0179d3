// The launcher of all_reduce on several simulated devices, a rank each: launches of all ranks are
// queued before any is waited for, so that ranks meet in whatever order the simulator takes.
//
//   all_reduce RANKS WHAT DTYPE EXCHANGES ELEMENTS...
//
// WHAT: 0 all_reduce, 1 reduce_scatter, 2 all_gather, 3 each in turn, 4 all_reduce where a kernel
// of some ranks has sent x, as products do, and of the others not, in whole vectors; 5 the same of
// rank 0 alone, which gives up the others. DTYPE: 0 float32, 1 bfloat16.
// Prints "wrong 0" where all results have the bits of the definition, and all mailboxes are empty;
// where rank 0 gives up, "failed F, reported R, written W": 1 + the rank that did not come, as its
// header and the host have it, and bytes of out that are not as they were.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../all_reduce/all_reduce.h"
#include "../../blocks/peers/gpu/mailbox.h"
#include "../../common/core/half.h"
#include "../../common/gpu/launch.h"

using namespace rocm_kernels;

#define CHECK(call)                                                             \
  do {                                                                          \
    const hipError_t error_ = (call);                                           \
    if (error_ != hipSuccess) {                                                 \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, hipGetErrorName(error_)); \
      std::_Exit(1);                                                            \
    }                                                                           \
  } while (0)

constexpr int64_t kDataBytes = 1 << 21;
constexpr int kGuard = 64;  // bytes before and behind each out

struct Exchange {
  ExchangeArgs args[kMostRanks];
  std::vector<char> x[kMostRanks];
  char* out[kMostRanks];
  int64_t out_bytes;
};

// The end of a product that sends its result, x.
__global__ void send_kernel(Group group, const Vector* x, int vectors) {
  const int64_t half = int64_t{group.own->epochs[0] & 1} * group.half_bytes;
  for (int v = blockIdx.x * blockDim.x + threadIdx.x; v < vectors; v += gridDim.x * blockDim.x) {
    for (int r = 0; r < group.ranks; ++r) {
      char* const mailbox = reinterpret_cast<char*>(group.own->peers[r]) + kPeerHeaderBytes + half;
      const int64_t place = int64_t{group.rank} * vectors + v;
      store_to_peer(mailbox + place * int64_t{sizeof(Vector)}, sendable(x[v]));
    }
  }
}

Status launch(const ExchangeArgs& args, bool asked_to_send) {
  Group group{};
  bool sends = false;
  if (const Status error = ask_whether_to_send(args, Context{}, group, sends)) return error;
  if (!asked_to_send || !sends) return launch_exchange(args, Context{});
  const int vectors = static_cast<int>(args.elements * size_of(args.dtype) / sizeof(Vector));
  const Launch launch{dim3(3), 64};
  if (const Status error =
          launch_kernel(send_kernel, launch, group, static_cast<const Vector*>(args.x), vectors)) {
    return error;
  }
  ExchangeArgs rest = args;
  rest.x = nullptr;
  return launch_exchange(rest, Context{});
}

float value(const std::vector<char>& x, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return reinterpret_cast<const float*>(x.data())[i];
  return to_float(reinterpret_cast<const BFloat16*>(x.data())[i]);
}

// Two exchanges of rank 0, to which no other comes.
void give_up(ExchangeArgs (&args)[2], char* memory, const char* out, int64_t out_bytes) {
  uint64_t* report = nullptr;
  CHECK(hipHostMalloc(reinterpret_cast<void**>(&report), sizeof(uint64_t), hipHostMallocDefault));
  *report = 0;
  const auto address = reinterpret_cast<uint64_t>(report);
  CHECK(hipMemcpy(memory + offsetof(PeerHeader, report), &address, 8, hipMemcpyHostToDevice));
  for (ExchangeArgs& of_one : args) {
    of_one.timeout = 1e-5;
    if (const Status error = launch(of_one, true)) {
      std::fprintf(stderr, "%s\n", error);
      std::_Exit(1);
    }
  }
  CHECK(hipDeviceSynchronize());
  PeerHeader header;
  CHECK(hipMemcpy(&header, memory, sizeof(header), hipMemcpyDeviceToHost));
  std::vector<char> got(out_bytes);
  CHECK(hipMemcpy(got.data(), out, out_bytes, hipMemcpyDeviceToHost));
  int written = 0;
  for (const char byte : got) written += byte != 0x5A;
  std::printf("failed %d, reported %d, written %d\n", static_cast<int>(header.failed),
              static_cast<int>(*report), written);
}

int main(int, char** argv) {
  const int ranks = std::atoi(argv[1]), what = std::atoi(argv[2]);
  const DType dtype = std::atoi(argv[3]) == 0 ? DType::kFloat32 : DType::kBFloat16;
  const int exchanges = std::atoi(argv[4]);
  const int64_t size = size_of(dtype);
  std::mt19937 random(exchanges * 8 + ranks);
  std::normal_distribution<float> normal;

  char* memory[kMostRanks];
  for (int r = 0; r < ranks; ++r) {
    CHECK(hipSetDevice(r));
    void* allocated = nullptr;
    CHECK(hipExtMallocWithFlags(&allocated, kPeerHeaderBytes + kDataBytes,
                                hipDeviceMallocFinegrained));
    memory[r] = static_cast<char*>(allocated);
    CHECK(hipMemset(memory[r] + kPeerHeaderBytes, 0xFF, kDataBytes));
  }
  for (int r = 0; r < ranks; ++r) {
    PeerHeader header{};
    header.magic = kPeerMagic, header.rank = r, header.ranks = ranks;
    header.data_bytes = kDataBytes;
    for (int p = 0; p < ranks; ++p) header.peers[p] = reinterpret_cast<uint64_t>(memory[p]);
    CHECK(hipMemcpy(memory[r], &header, sizeof(header), hipMemcpyHostToDevice));
  }

  std::vector<Exchange> all(exchanges);
  for (int e = 0; e < exchanges; ++e) {
    Exchange& exchange = all[e];
    const auto kind = static_cast<Exchanged>(what == 3 ? e % 3 : what > 3 ? 0 : what);
    int64_t elements = std::atoll(argv[5 + e % std::atoi(argv[4])]);
    if (kind == Exchanged::kReduceScatter) elements = elements * ranks;
    const int64_t out_elements = kind == Exchanged::kReduceScatter ? elements / ranks
                                 : kind == Exchanged::kAllGather   ? elements * ranks
                                                                   : elements;
    exchange.out_bytes = out_elements * size;
    for (int r = 0; r < ranks; ++r) {
      CHECK(hipSetDevice(r));
      exchange.x[r].resize(elements * size);
      for (int64_t i = 0; i < elements; ++i) {
        const float f = random() % 16 == 0 ? -0.0f : normal(random);
        if (dtype == DType::kFloat32) {
          reinterpret_cast<float*>(exchange.x[r].data())[i] = f;
        } else {
          reinterpret_cast<BFloat16*>(exchange.x[r].data())[i] = to_bfloat16(f);
        }
      }
      void *x = nullptr, *out = nullptr;
      CHECK(hipMalloc(&x, elements * size));
      CHECK(hipMemcpy(x, exchange.x[r].data(), elements * size, hipMemcpyHostToDevice));
      CHECK(hipMalloc(&out, exchange.out_bytes + 2 * kGuard));
      CHECK(hipMemset(out, 0x5A, exchange.out_bytes + 2 * kGuard));
      exchange.out[r] = static_cast<char*>(out);
      ExchangeArgs& args = exchange.args[r];
      args.what = kind, args.elements = elements, args.dtype = dtype;
      args.x = x, args.out = exchange.out[r] + kGuard;
      args.memory = memory[r], args.data_bytes = kDataBytes;
      args.rank = r, args.ranks = ranks, args.timeout = 1e6;
    }
  }

  if (what == 5) {
    CHECK(hipSetDevice(0));
    ExchangeArgs both[2] = {all[0].args[0], all[0].args[0]};
    give_up(both, memory[0], all[0].out[0], all[0].out_bytes + 2 * kGuard);
    return 0;
  }
  for (Exchange& exchange : all) {
    for (int r = 0; r < ranks; ++r) {
      CHECK(hipSetDevice(r));
      const bool sends = what == 4 && random() % 3 != 0;
      if (const Status error = launch(exchange.args[r], sends)) {
        std::fprintf(stderr, "%s\n", error);
        std::_Exit(1);
      }
    }
  }
  for (int r = 0; r < ranks; ++r) {
    CHECK(hipSetDevice(r));
    CHECK(hipDeviceSynchronize());
  }

  int64_t wrong = 0;
  for (Exchange& exchange : all) {
    for (int r = 0; r < ranks; ++r) {
      const ExchangeArgs& args = exchange.args[r];
      std::vector<char> got(exchange.out_bytes + 2 * kGuard);
      CHECK(hipMemcpy(got.data(), exchange.out[r], got.size(), hipMemcpyDeviceToHost));
      for (int i = 0; i < kGuard; ++i) {
        wrong += got[i] != 0x5A;
        wrong += got[got.size() - 1 - i] != 0x5A;
      }
      for (int64_t i = 0; i < exchange.out_bytes / size; ++i) {
        char wanted[4];
        if (args.what == Exchanged::kAllGather) {
          std::memcpy(wanted, exchange.x[i / args.elements].data() + i % args.elements * size,
                      size);
        } else {
          const bool scatters = args.what == Exchanged::kReduceScatter;
          const int64_t at = scatters ? r * (exchange.out_bytes / size) + i : i;
          float sum = 0.0f;
          for (int p = 0; p < ranks; ++p) sum += value(exchange.x[p], dtype, at);
          const BFloat16 rounded = to_bfloat16(sum);
          std::memcpy(
              wanted,
              dtype == DType::kFloat32 ? static_cast<void*>(&sum) : const_cast<BFloat16*>(&rounded),
              size);
        }
        wrong += std::memcmp(wanted, got.data() + kGuard + i * size, size) != 0;
      }
    }
  }
  std::vector<uint32_t> left(kDataBytes / 4);
  for (int r = 0; r < ranks; ++r) {
    CHECK(hipMemcpy(left.data(), memory[r] + kPeerHeaderBytes, kDataBytes, hipMemcpyDeviceToHost));
    for (const uint32_t word : left) wrong += word != 0xFFFFFFFFu;
  }
  std::printf("wrong %lld\n", static_cast<long long>(wrong));
  return 0;
}
