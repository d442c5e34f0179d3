// The configs that a tuner has put in the place of the backends' own choices, for all ops.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>

namespace rocm_kernels {

// What an op's choice depends on besides the device, as numbers; the op says which. The rest is 0.
using Problem = std::array<int64_t, 8>;

// The op's name (a literal), the device's index (-1: the CPU), the problem.
using TuningKey = std::tuple<std::string_view, int64_t, Problem>;
using TunedConfigs = std::map<TuningKey, std::string>;

// A config in force, or none. It stays as it is while this lives, so that a call's workspace and
// its launch go by one config, whatever other threads set meanwhile.
class TunedConfig {
 public:
  explicit TunedConfig(const TuningKey& key);
  const char* text() const { return text_; }  // nullptr: none

 private:
  std::shared_ptr<const TunedConfigs> configs_;
  const char* text_ = nullptr;
};

// From now on `config` is in force for the key; an empty one: none is.
void set_tuned_config(const TuningKey& key, const std::string& config);

}  // namespace rocm_kernels
