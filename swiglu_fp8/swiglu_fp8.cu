// swiglu_fp8 for NVIDIA GPUs.
#include "swiglu_fp8_device.h"
