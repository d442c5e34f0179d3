// rmsnorm_fp8 for NVIDIA GPUs.
#include "rmsnorm_fp8_device.h"
