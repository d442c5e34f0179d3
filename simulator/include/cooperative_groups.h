// The name that CUDA programs know.
#pragma once
#include <hip/hip_runtime.h>
//
#include <hip/hip_cooperative_groups.h>
