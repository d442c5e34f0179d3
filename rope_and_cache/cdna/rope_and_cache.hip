// rope_and_cache for AMD GPUs.
#include "../gpu/heads.h"
