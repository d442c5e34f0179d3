// What device code asks of the host: printf, and the text of a failed assert.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// The buffer of ROCm's host calls (hidden_hostcall_buffer): wave-sized packets, taken from a stack
// of free ones and put on a stack of ready ones; the host answers in place and clears `control`.
class Hostcalls {
 public:
  Hostcalls();
  Hostcalls(const Hostcalls&) = delete;

  // The memory that device code sees: one range.
  uint64_t address() const { return reinterpret_cast<uint64_t>(&memory_->buffer); }
  uint64_t bytes() const { return sizeof(Memory); }

  // Answers what is ready; true when there was something. Throws Error for services that are
  // missing.
  bool serve();

  // The last message to stderr: what a failed assert says before it traps.
  std::string complaint();

 private:
  static constexpr uint64_t kPackets = 64;  // a power of two
  struct Header {
    uint64_t next, activemask;
    uint32_t service;
    std::atomic<uint32_t> control;
  };
  struct Payload {
    uint64_t slots[64][8];
  };
  struct Signal {
    int64_t kind, value;
    uint64_t mailbox, event;
    uint64_t rest[4];
  };
  struct Buffer {
    Header* headers;
    Payload* payloads;
    Signal* doorbell;
    std::atomic<uint64_t> freeStack, readyStack;
    uint64_t indexMask;
  };
  struct Memory {
    Buffer buffer;
    alignas(64) Signal doorbell;
    Header headers[kPackets];
    Payload payloads[kPackets];
  };
  void message(uint64_t* slots);
  void print(const std::vector<uint64_t>& words);

  std::unique_ptr<Memory> memory_;
  std::mutex lock_;
  std::map<uint64_t, std::vector<uint64_t>> messages_;  // begun and not ended
  uint64_t lastMessage_ = 0;
  std::string complaint_;
};

}  // namespace sim
