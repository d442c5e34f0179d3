// Exchanges between AMD GPUs.
#include "../gpu/exchange.h"
#include "../gpu/exchange_norm.h"
