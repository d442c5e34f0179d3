// The fused all_reduce_rmsnorm_fp8 on several simulated devices, beside all_reduce and rmsnorm_fp8:
// all of them queued before any is waited for.
//
//   all_reduce_norm RANKS SCALING [ROWS HIDDEN]...
//
// SCALING as the enum: 1 given, 2 by row, 3 by 128 columns. bfloat16. Prints "wrong 0" where both
// give the same bytes, guards included, and each call was one kernel.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../all_reduce/all_reduce.h"
#include "../../blocks/peers/memory.h"
#include "../../common/core/half.h"
#include "../../rmsnorm_fp8/rmsnorm_fp8.h"

using namespace rocm_kernels;

#define CHECK(call)                                                             \
  do {                                                                          \
    const hipError_t error_ = (call);                                           \
    if (error_ != hipSuccess) {                                                 \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, hipGetErrorName(error_)); \
      std::_Exit(1);                                                            \
    }                                                                           \
  } while (0)

namespace {

constexpr int64_t kDataBytes = 1 << 21;
constexpr int64_t kGuard = 64;
std::mt19937 generator(5);

char* bytes_on_device(int64_t bytes, int fill) {
  void* p = nullptr;
  CHECK(hipMalloc(&p, bytes + 2 * kGuard));
  CHECK(hipMemset(p, fill, bytes + 2 * kGuard));
  return static_cast<char*>(p) + kGuard;
}

std::vector<BFloat16> random_values(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<BFloat16> values(count);
  for (BFloat16& v : values) v = to_bfloat16(normal(generator));
  return values;
}

char* on_device(const std::vector<BFloat16>& values) {
  const int64_t bytes = static_cast<int64_t>(values.size()) * 2;
  char* const p = bytes_on_device(bytes, 0x5A);
  CHECK(hipMemcpy(p, values.data(), bytes, hipMemcpyHostToDevice));
  return p;
}

struct Results {
  char *out, *scales, *residual;
};

struct Call {
  int64_t rows, hidden;
  Results fused[kMostRanks], apart[kMostRanks];
  int64_t scales_bytes;
};

struct Launched {
  ExchangeArgs exchange;
  RmsnormFp8Args norm;
  bool fuse;
};

bool differ(const char* a, const char* b, int64_t bytes) {
  std::vector<char> x(bytes + 2 * kGuard), y(bytes + 2 * kGuard);
  CHECK(hipMemcpy(x.data(), a - kGuard, x.size(), hipMemcpyDeviceToHost));
  CHECK(hipMemcpy(y.data(), b - kGuard, y.size(), hipMemcpyDeviceToHost));
  return x != y;
}

}  // namespace

int main(int count, char** argv) {
  const int ranks = std::atoi(argv[1]);
  const auto scaling = static_cast<Scaling>(std::atoi(argv[2]));
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
    for (int p = 0; p < ranks; ++p) header.peers[p] = reinterpret_cast<uint64_t>(memory[p]);
    CHECK(hipMemcpy(memory[r], &header, sizeof(header), hipMemcpyHostToDevice));
  }

  int64_t wrong = 0;
  std::vector<Call> calls;
  std::vector<Launched> launches;  // all memory is there before the first: a copy would wait
  for (int i = 3; i + 1 < count; i += 2) {
    Call call{};
    call.rows = std::atoll(argv[i]), call.hidden = std::atoll(argv[i + 1]);
    const int64_t elements = call.rows * call.hidden;
    const int64_t groups = scaling == Scaling::kPerGroup ? (call.hidden + 127) / 128 : 1;
    call.scales_bytes = call.rows * groups * 4;
    const std::vector<BFloat16> residual = random_values(elements);
    const std::vector<BFloat16> weight = random_values(call.hidden);
    for (int r = 0; r < ranks; ++r) {
      CHECK(hipSetDevice(r));
      const float given = 0.03f;
      char* const scale = bytes_on_device(4, 0);
      CHECK(hipMemcpy(scale, &given, 4, hipMemcpyHostToDevice));
      ExchangeArgs exchange;
      exchange.elements = elements;
      exchange.x = on_device(random_values(elements));
      exchange.memory = memory[r], exchange.data_bytes = kDataBytes;
      exchange.rank = r, exchange.ranks = ranks, exchange.timeout = 1e6;
      RmsnormFp8Args norm;
      norm.rows = call.rows, norm.hidden = call.hidden;
      norm.weight = on_device(weight);
      norm.x_stride = norm.residual_stride = norm.out_stride = call.hidden;
      norm.out_dtype = FNUZ ? DType::kFloat8E4M3FNUZ : DType::kFloat8E4M3FN;
      norm.scaling = scaling, norm.group_size = 128;
      if (scaling == Scaling::kStatic) norm.static_scale = reinterpret_cast<float*>(scale);
      for (const bool fuse : {true, false}) {
        Results& results = fuse ? call.fused[r] : call.apart[r];
        results = {bytes_on_device(elements, 0x5A), bytes_on_device(call.scales_bytes, 0x5A),
                   on_device(residual)};
        norm.out = results.out, norm.residual = results.residual;
        if (scaling != Scaling::kStatic) norm.scales = reinterpret_cast<float*>(results.scales);
        norm.x = exchange.x;
        exchange.out = bytes_on_device(elements * 2, 0x5A);
        launches.push_back({exchange, norm, fuse});
      }
    }
    calls.push_back(call);
  }
  for (Launched& launch : launches) {
    CHECK(hipSetDevice(launch.exchange.rank));
    Status status = nullptr;
    if (launch.fuse) {
      bool fused = false;
      status = launch_all_reduce_rmsnorm_fp8(launch.exchange, launch.norm, Context{}, fused);
      wrong += !fused;
    } else {
      status = launch_exchange(launch.exchange, Context{});
      launch.norm.x = launch.exchange.out;
      if (status == nullptr) status = launch_rmsnorm_fp8(launch.norm, Context{});
    }
    if (status != nullptr) {
      std::fprintf(stderr, "%s\n", status);
      std::_Exit(1);
    }
  }
  for (int r = 0; r < ranks; ++r) {
    CHECK(hipSetDevice(r));
    CHECK(hipDeviceSynchronize());
  }
  for (const Call& call : calls) {
    for (int r = 0; r < ranks; ++r) {
      const Results &a = call.fused[r], &b = call.apart[r];
      wrong += differ(a.out, b.out, call.rows * call.hidden);
      wrong += differ(a.scales, b.scales, call.scales_bytes);
      wrong += differ(a.residual, b.residual, call.rows * call.hidden * 2);
      // Every rank has the same, and something.
      wrong += differ(a.out, call.fused[0].out, call.rows * call.hidden);
      char* const poison = bytes_on_device(call.rows * call.hidden, 0x5A);
      wrong += !differ(a.out, poison, call.rows * call.hidden);
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
