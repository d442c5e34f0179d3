// rmsnorm_fp8 for AMD GPUs.
#include "rmsnorm_fp8_device.h"
