// swiglu_fp8 for AMD GPUs.
#include "swiglu_fp8_device.h"
