// What all_reduce's model says: for each line of "RANKS BYTES", the design and the microseconds on
// NVLink, and on xGMI; at last xGMI's with three ways over a link for one.
#include <cstdio>
#include <initializer_list>

#include "../../all_reduce/gpu/choose.h"

using namespace rocm_kernels;

int main() {
  long long ranks, bytes;
  while (std::scanf("%lld %lld", &ranks, &bytes) == 2) {
    for (const LinkRates& links : {kNvlink, kXgmi}) {
      const ExchangeConfig config =
          choose_exchange(Exchanged::kAllReduce, bytes / 2, 2, ranks, int64_t{1} << 40, 132, links);
      std::printf("%d %.3f ", config.design == ExchangeDesign::kTwoShot ? 2 : 1,
                  modelled_time(config.design, bytes, ranks, links));
    }
    std::printf("%.3f\n",
                modelled_time(ExchangeDesign::kOneShot, bytes, ranks, kXgmi) + 2 * kXgmi.hop_us);
  }
}
