// What the HIP stand-in does not have: _build.py makes a function for each name of HIP's headers
// that no file here defines, so that a program links, and is told when it calls one.
#include "hip_state.h"

extern "C" hipError_t sim_missing(const char* name) {
  std::fprintf(stderr,
               "simulator: the program calls %s, which the HIP stand-in does not have; it returns "
               "hipErrorNotSupported\n",
               name);
  return sim::hip::result(hipErrorNotSupported);
}
