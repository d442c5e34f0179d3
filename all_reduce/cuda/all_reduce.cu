// Exchanges between NVIDIA GPUs.
#include "../gpu/exchange.h"
