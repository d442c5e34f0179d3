// A config's field list: one list from which come equality, text and its reading.
//
//   struct Config {
//     enum class Design : int32_t { kTiled, kPlain };
//     Design design = Design::kTiled;
//     int32_t block_n = 16, waves = 4;
//
//     static constexpr const char* kDesigns[] = {"tiled", "plain"};
//     static constexpr ConfigField<Config> kFields[] = {{"block_n", &Config::block_n}, ...};
//     static constexpr Status kMustRead = "op config: it must read like 'tiled block_n=16 ...'";
//   };
//
// A config reads "<design> block_n=16 waves=4 ...": the name of its design, then all fields in the
// order of the list. A field whose values have names is written with them: schedule=split_k. No HIP
// header: tests and tools include it too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../../common/core/context.h"

namespace rocm_kernels {

template <typename Struct>
struct ConfigField {
  const char* name;
  int32_t Struct::* value;
  const char* const* names = nullptr;  // of the values 0, 1, ...; nullptr: it is a number
  int32_t name_count = 0;
};

// `Fields`: the struct, or a base of it.
template <typename Fields, size_t kCount, typename Struct>
bool equal_fields(const ConfigField<Fields> (&fields)[kCount], const Struct& a, const Struct& b) {
  for (const ConfigField<Fields>& field : fields) {
    if (a.*field.value != b.*field.value) return false;
  }
  return true;
}

// For a table of what is kept by these fields.
template <typename Struct, size_t kCount>
size_t hash_fields(const ConfigField<Struct> (&fields)[kCount], const Struct& a) {
  uint64_t hash = 0;
  for (const ConfigField<Struct>& field : fields) {
    hash = (hash ^ static_cast<uint32_t>(a.*field.value)) * 0x9E3779B97F4A7C15ull;
  }
  return hash >> 32;  // sizes are multiples of large powers of two: their low bits say little
}

// choose(), the choice of a config for `shape` on the current device, kept by this thread for the
// shapes of a model's layers. `fields`: all that a shape has; `device`: the current one's number.
// (GPUs that have as many multiprocessors can differ in what they can run.)
template <typename Config, typename Shape, size_t kCount, typename Choose>
Config kept_choice(const ConfigField<Shape> (&fields)[kCount], const Shape& shape, int32_t device,
                   const Choose& choose) {
  static_assert(sizeof(Shape) == kCount * sizeof(int32_t), "a shape's field is not in the list");
  struct Choice {
    Shape shape;
    int32_t device;
    bool is_there;
    Config config;
  };
  constexpr size_t kChoices = 256;
  thread_local Choice choices[kChoices] = {};
  Choice& choice = choices[hash_fields(fields, shape) % kChoices];
  if (!choice.is_there || choice.device != device || !equal_fields(fields, choice.shape, shape)) {
    choice = {shape, device, true, choose()};
  }
  return choice.config;
}

template <typename Config>
bool equal_configs(const Config& a, const Config& b) {
  return a.design == b.design && equal_fields(Config::kFields, a, b);
}

constexpr size_t kConfigTextBytes = 192;

// Writes the config's text; false if it does not fit.
template <typename Config>
bool write_config(const Config& config, char (&text)[kConfigTextBytes]) {
  size_t used = 0;
  const auto advance = [&](int count) {
    used += static_cast<size_t>(count);
    return count >= 0 && used < kConfigTextBytes;
  };
  const char* const design = Config::kDesigns[static_cast<size_t>(config.design)];
  if (!advance(std::snprintf(text, kConfigTextBytes, "%s", design))) return false;
  for (const auto& field : Config::kFields) {
    const int32_t value = config.*field.value;
    char* const at = text + used;
    const size_t left = kConfigTextBytes - used;
    const int count = field.names != nullptr
                          ? std::snprintf(at, left, " %s=%s", field.name, field.names[value])
                          : std::snprintf(at, left, " %s=%d", field.name, value);
    if (!advance(count)) return false;
  }
  return true;
}

// Reads what write_config() writes, and nothing else.
class ConfigReader {
 public:
  explicit ConfigReader(const char* text) : rest_(text) {}

  // Whether the text begins with the name of one, which is then read.
  template <typename Config>
  bool has_design_of(Config& config) {
    size_t design = 0;
    for (const char* const name : Config::kDesigns) {
      if (whole_word(name)) {
        config.design = static_cast<decltype(config.design)>(design);
        return true;
      }
      ++design;
    }
    return false;
  }

  template <typename Config>
  bool read(Config& config) {
    if (!has_design_of(config)) return false;
    for (const auto& field : Config::kFields) {
      if (!(word(" ") && word(field.name) && word("="))) return false;
      int32_t& value = config.*field.value;
      if (!(field.names != nullptr ? name(field, value) : number(value))) return false;
    }
    return *rest_ == '\0';
  }

 private:
  // A name is not another that begins with it.
  bool whole_word(const char* expected) {
    const char* const begin = rest_;
    if (word(expected) && *rest_ == ' ') return true;
    rest_ = begin;
    return false;
  }
  bool word(const char* expected) {
    const size_t length = std::strlen(expected);
    if (std::strncmp(rest_, expected, length) != 0) return false;
    rest_ += length;
    return true;
  }
  template <typename Struct>
  bool name(const ConfigField<Struct>& field, int32_t& value) {
    for (value = 0; value < field.name_count; ++value) {
      if (word(field.names[value])) return true;
    }
    return false;
  }
  bool number(int32_t& value) {
    constexpr int kDigits = 8;
    const char* const begin = rest_;
    value = 0;
    while (*rest_ >= '0' && *rest_ <= '9' && rest_ - begin < kDigits) {
      value = 10 * value + (*rest_++ - '0');
    }
    return rest_ > begin;
  }
  const char* rest_;
};

// nullptr, or what is wrong with the text.
template <typename Config>
Status read_config(const char* text, Config& config) {
  return ConfigReader(text).read(config) ? nullptr : Config::kMustRead;
}

}  // namespace rocm_kernels
