// Exchanges between NVIDIA GPUs.
#include "../gpu/exchange.h"
#include "../gpu/exchange_norm.h"
