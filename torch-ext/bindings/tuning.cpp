#include "tuning.h"

#include <mutex>

namespace rocm_kernels {
namespace {

struct Table {
  std::mutex mutex;
  std::shared_ptr<const TunedConfigs> configs;  // never changed, only replaced; nullptr: empty
};

Table& table() {
  static Table instance;
  return instance;
}

}  // namespace

TunedConfig::TunedConfig(const TuningKey& key) {
  {
    const std::lock_guard<std::mutex> lock(table().mutex);
    configs_ = table().configs;
  }
  if (configs_ == nullptr) return;
  const auto found = configs_->find(key);
  if (found != configs_->end()) text_ = found->second.c_str();
}

void set_tuned_config(const TuningKey& key, const std::string& config) {
  const std::lock_guard<std::mutex> lock(table().mutex);
  auto& configs = table().configs;
  auto changed = std::make_shared<TunedConfigs>(configs ? *configs : TunedConfigs{});
  changed->erase(key);
  if (!config.empty()) changed->emplace(key, config);
  configs = changed->empty() ? nullptr : std::move(changed);
}

}  // namespace rocm_kernels
