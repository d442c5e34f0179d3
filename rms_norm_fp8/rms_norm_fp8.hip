// rms_norm_fp8 for AMD GPUs.
#include "rms_norm_fp8_device.h"
