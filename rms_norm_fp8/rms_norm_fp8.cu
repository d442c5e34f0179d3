// rms_norm_fp8 for NVIDIA GPUs.
#include "rms_norm_fp8_device.h"
