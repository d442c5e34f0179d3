// The name without its folder.
#pragma once
#include <hip/hip_bf16.h>
