// A config's field list: one list from which come equality, text and its reading.
//
//   struct Config { int32_t block_n = 16, waves = 4; };
//   constexpr ConfigField<Config> kFields[] = {{"block_n", &Config::block_n}, ...};
//
// A config reads "<design> block_n=16 waves=4 ...": the name of its design, then all fields in the
// order of the list. A field whose values have names is written with them: schedule=split_k. No HIP
// header: tests and tools include it too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace rocm_kernels {

template <typename Struct>
struct ConfigField {
  const char* name;
  int32_t Struct::* value;
  const char* const* names = nullptr;  // of the values 0, 1, ...; nullptr: it is a number
  int32_t name_count = 0;
};

template <typename Struct, size_t kCount>
bool equal_fields(const ConfigField<Struct> (&fields)[kCount], const Struct& a, const Struct& b) {
  for (const ConfigField<Struct>& field : fields) {
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

// Writes "<design> name=value ..."; false if it does not fit.
template <typename Struct, size_t kCount>
bool write_config(const char* design, const ConfigField<Struct> (&fields)[kCount], const Struct& a,
                  char* text, size_t size) {
  size_t used = 0;
  const auto advance = [&](int count) {
    used += static_cast<size_t>(count);
    return count >= 0 && used < size;
  };
  if (!advance(std::snprintf(text, size, "%s", design))) return false;
  for (const ConfigField<Struct>& field : fields) {
    const int32_t value = a.*field.value;
    const int count =
        field.names != nullptr
            ? std::snprintf(text + used, size - used, " %s=%s", field.name, field.names[value])
            : std::snprintf(text + used, size - used, " %s=%d", field.name, value);
    if (!advance(count)) return false;
  }
  return true;
}

// Reads what write_config() writes, and nothing else. `design`: the number of the design's name.
class ConfigReader {
 public:
  explicit ConfigReader(const char* text) : rest_(text) {}

  template <typename Struct, size_t kDesigns, size_t kCount>
  bool read(const char* const (&designs)[kDesigns], const ConfigField<Struct> (&fields)[kCount],
            size_t& design, Struct& config) {
    for (design = 0; !word(designs[design]);) {
      if (++design == kDesigns) return false;
    }
    for (const ConfigField<Struct>& field : fields) {
      if (!(word(" ") && word(field.name) && word("="))) return false;
      int32_t& value = config.*field.value;
      if (!(field.names != nullptr ? name(field, value) : number(value))) return false;
    }
    return *rest_ == '\0';
  }

 private:
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

}  // namespace rocm_kernels
