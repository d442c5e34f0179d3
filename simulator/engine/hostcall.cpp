#include "hostcall.h"

#include <cstdio>
#include <cstring>

#include "core.h"

namespace sim {
namespace {

constexpr u32 kPrintf = 2;  // the service
constexpr u32 kReady = 1;   // bit of `control`

// Fields of a message's first word.
constexpr u64 kBegin = 1, kEnd = 2;
constexpr int kLengthAt = 5, kIdAt = 8;

// A C string in the words, and the word after it.
const u64* takeString(const u64* at, const u64* end, std::string& out) {
  const char* text = reinterpret_cast<const char*>(at);
  size_t room = (end - at) * 8, length = strnlen(text, room);
  out.assign(text, length);
  return at + std::min<size_t>(end - at, length / 8 + 1);
}

}  // namespace

Hostcalls::Hostcalls() : memory_(std::make_unique<Memory>()) {
  Memory& m = *memory_;
  m.doorbell.kind = 1;             // a signal that the host may read, without a mailbox
  u64 next = 0, index = kPackets;  // the first packet's reference has a tag, because 0 is none
  for (u64 n = 0; n < kPackets; ++n) {
    m.headers[n].next = next;
    next = n ? n : index;
  }
  m.buffer.headers = m.headers;
  m.buffer.payloads = m.payloads;
  m.buffer.doorbell = &m.doorbell;
  m.buffer.freeStack = next;
  m.buffer.readyStack = 0;
  m.buffer.indexMask = kPackets - 1;
}

bool Hostcalls::serve() {
  Buffer& b = memory_->buffer;
  if (!b.readyStack.load()) return false;
  std::lock_guard guard(lock_);
  for (u64 at = b.readyStack.exchange(0); at;) {
    u64 packet = at & b.indexMask;
    Header& header = b.headers[packet];
    at = header.next;
    if (header.service != kPrintf) {
      throw Error("device code calls the host for service " + std::to_string(header.service) +
                  "; the simulator knows printf only");
    }
    for (u64 lanes = header.activemask; lanes; lanes &= lanes - 1) {
      message(b.payloads[packet].slots[__builtin_ctzll(lanes)]);
    }
    header.control.fetch_and(~kReady);
  }
  return true;
}

std::string Hostcalls::complaint() {
  std::lock_guard guard(lock_);
  return complaint_;
}

// A message comes in parts of up to seven words; the first part gets the number that joins them.
void Hostcalls::message(u64* slots) {
  u64 description = slots[0], id = description >> kIdAt, length = description >> kLengthAt & 7;
  if (description & kBegin) id = ++lastMessage_;
  std::vector<u64>& words = messages_[id];
  words.insert(words.end(), slots + 1, slots + 1 + length);
  slots[0] = (description & ((1 << kIdAt) - 1) & ~kBegin) | id << kIdAt;
  if (!(description & kEnd)) return;
  print(words);
  messages_.erase(id);
}

// A word of flags (bit 0: stderr), the format, then arguments: numbers as words, strings in place.
void Hostcalls::print(const std::vector<u64>& words) {
  if (words.empty()) return;
  const u64 *at = words.data() + 1, *end = words.data() + words.size();
  std::string format, out;
  at = takeString(at, end, format);
  auto next = [&]() -> u64 { return at < end ? *at++ : 0; };
  for (size_t n = 0; n < format.size(); ++n) {
    if (format[n] != '%') {
      out += format[n];
      continue;
    }
    std::string spec = "%";
    for (++n; n < format.size() && std::strchr("-+ #0123456789.*", format[n]); ++n) {
      spec +=
          format[n] == '*' ? std::to_string(static_cast<int>(next())) : std::string(1, format[n]);
    }
    bool wide = false;
    for (; n < format.size() && std::strchr("hljzt", format[n]); ++n) {
      wide = wide || std::strchr("ljzt", format[n]);
      if (format[n] == 'h') spec += 'h';
    }
    char kind = n < format.size() ? format[n] : '%', text[512];
    if (kind == '%') {
      out += '%';
      continue;
    }
    if (kind == 's') {
      std::string value;
      at = takeString(at, end, value);
      std::snprintf(text, sizeof text, (spec + "s").c_str(), value.c_str());
    } else if (std::strchr("fFeEgGaA", kind)) {
      u64 bits = next();
      double value;
      std::memcpy(&value, &bits, 8);
      std::snprintf(text, sizeof text, (spec + kind).c_str(), value);
    } else if (kind == 'p' || kind == 'n') {
      std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(next()));
    } else if (wide) {
      std::snprintf(text, sizeof text, (spec + "ll" + kind).c_str(),
                    static_cast<long long>(next()));
    } else {
      std::snprintf(text, sizeof text, (spec + kind).c_str(), static_cast<int>(next()));
    }
    out += text;
  }
  bool error = words[0] & 1;
  if (error) complaint_ = out;
  std::FILE* stream = error ? stderr : stdout;
  std::fwrite(out.data(), 1, out.size(), stream);
  std::fflush(stream);
}

}  // namespace sim
