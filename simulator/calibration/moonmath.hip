// moonmath's attention with the headers of a distribution; the kernel comes from a checkout
// (calibrate.py), nothing of which is kept here.
#include "old_libraries.h"
#define BF16_ROUND RTZ
#include "csrc/attention_kernel.hip"
