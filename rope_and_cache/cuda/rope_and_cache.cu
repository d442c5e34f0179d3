// rope_and_cache for NVIDIA GPUs.
#include "../gpu/heads.h"
