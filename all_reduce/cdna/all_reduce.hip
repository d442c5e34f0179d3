// Exchanges between AMD GPUs.
#include "../gpu/exchange.h"
