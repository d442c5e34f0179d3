// What every choice of a config has in common: configs of several families of kernels as one
// variant, the quickest of those offered, and the list of them for a tuner.
// No HIP header: tests and tools include it too.
#pragma once

#include <cmath>
#include <type_traits>
#include <variant>

#include "config_fields.h"

namespace rocm_kernels {

// An op with several families of kernels, whose configs have different fields, takes a variant of
// them. The first word of a text, the design, tells the family.

template <typename... Families>
bool equal_configs(const std::variant<Families...>& a, const std::variant<Families...>& b) {
  return a.index() == b.index() && std::visit(
                                       [&](const auto& config) {
                                         using Family = std::decay_t<decltype(config)>;
                                         return equal_configs(config, std::get<Family>(b));
                                       },
                                       a);
}

template <typename... Families>
bool write_config(const std::variant<Families...>& config, char (&text)[kConfigTextBytes]) {
  return std::visit([&](const auto& family) { return write_config(family, text); }, config);
}

template <typename First, typename... Others>
Status read_config(const char* text, std::variant<First, Others...>& config) {
  Status status = First::kMustRead;
  const auto read = [&](auto family) {
    if (!ConfigReader(text).has_design_of(family)) return false;
    status = read_config(text, family);
    config = family;
    return true;
  };
  static_cast<void>(read(First{}) || (read(Others{}) || ...));
  return status;
}

// The config of least time of those that are offered, the first of equals; `otherwise` if none is.
template <typename Config>
class Quickest {
 public:
  explicit Quickest(const Config& otherwise = {}) : config_(otherwise) {}
  void offer(const Config& config, double time) {
    if (time < time_) config_ = config, time_ = time;
  }
  const Config& config() const { return config_; }

 private:
  Config config_;
  double time_ = INFINITY;
};

// What visit_<op>_configs() does: tells visit(text, state) the first config, then those that
// for_each(tell) has, each once.
template <typename Config, typename ForEach>
void visit_texts(const Config& first, const ForEach& for_each,
                 void (*visit)(const char* config, void* state), void* state) {
  const auto tell = [&](const Config& config) {
    char text[kConfigTextBytes];
    if (write_config(config, text)) visit(text, state);
  };
  tell(first);
  for_each([&](const Config& config) {
    if (!equal_configs(config, first)) tell(config);
  });
}

}  // namespace rocm_kernels
