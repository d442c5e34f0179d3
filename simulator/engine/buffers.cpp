// What a launch may touch. Arguments may overlap (a tensor and a slice of it): what overlaps is one
// range, and a byte of it is initialised when one of its buffers says so.
#include <algorithm>

#include "memory.h"

namespace sim {

void addBuffers(Launch& launch, const std::vector<BufferSpec>& given) {
  std::vector<const BufferSpec*> sorted;
  for (const BufferSpec& b : given) {
    if (b.bytes) sorted.push_back(&b);
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const BufferSpec* a, const BufferSpec* b) { return a->begin < b->begin; });
  for (size_t first = 0; first < sorted.size();) {
    u64 begin = sorted[first]->begin, end = begin + sorted[first]->bytes;
    size_t last = first + 1;
    while (last < sorted.size() && sorted[last]->begin < end) {
      end = std::max(end, sorted[last]->begin + sorted[last]->bytes);
      ++last;
    }
    Buffer& buffer = launch.ownBuffers.emplace_back();
    buffer.begin = begin;
    buffer.end = end;
    bool track = false, known = false;  // known: one buffer says so of all bytes
    buffer.readOnly = true;
    for (size_t n = first; n < last; ++n) {
      const BufferSpec& b = *sorted[n];
      if (buffer.name.find(b.name) == std::string::npos) {
        buffer.name += (buffer.name.empty() ? "" : " with ") + b.name;
      }
      buffer.readOnly = buffer.readOnly && b.readOnly;
      track = track || b.written || (!b.initialised && launch.options.uninit);
      known = known || (!b.written && b.initialised && b.begin == begin && b.bytes == end - begin);
    }
    track = track && !known;
    if (track && last == first + 1 && sorted[first]->written) {
      buffer.written = sorted[first]->written;
    } else if (track) {
      buffer.flags.assign(end - begin, 0);
      buffer.written = buffer.flags.data();
      for (size_t n = first; n < last; ++n) {
        const BufferSpec& b = *sorted[n];
        for (u64 at = 0; at < b.bytes; ++at) {
          bool known = b.written ? b.written[at] != 0 : b.initialised;
          buffer.flags[b.begin - begin + at] |= known;
        }
      }
    }
    launch.buffers.push_back(&buffer);
    first = last;
  }
}

void returnFlags(const Launch& launch, const std::vector<BufferSpec>& given) {
  for (const Buffer& buffer : launch.ownBuffers) {
    if (buffer.flags.empty()) continue;
    for (const BufferSpec& b : given) {
      if (!b.written || b.begin < buffer.begin || b.begin >= buffer.end) continue;
      std::copy_n(buffer.flags.begin() + (b.begin - buffer.begin), b.bytes, b.written);
    }
  }
}

}  // namespace sim
