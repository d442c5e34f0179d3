// What moe/config.h and moe/gpu/ ask of a GPU backend. products.hip has it.
#pragma once

#include "../gpu/product.h"
#include "config.h"

namespace rocm_kernels::cdna::moe {

Status choose_config(const MoeShape& shape, MoeConfig& config);
Status check_config(const MoeShape& shape, const MoeConfig& config);
Status visit_configs(const MoeShape& shape, void (*visit)(const MoeConfig& config, void* state),
                     void* state);
Status launch_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                      int64_t most_tiles, const SlotIds& slots, const DeviceFacts& facts,
                      Stream stream);

}  // namespace rocm_kernels::cdna::moe
