// Opening files that hold code objects.
#pragma once

#include "core.h"

namespace llvm::object {
class ObjectFile;
}

namespace sim {

struct Bundled {
  std::string target;  // empty when the file is a bare code object
  std::string elf;
};

// Code objects in a file image: a bare code object, an offload bundle (compressed or not), or a
// host ELF with a .hip_fatbin section.
std::vector<Bundled> openFile(const void* data, size_t size, const std::string& path);

// Fills in Kernel::frame (frames.cpp).
void readFrames(CodeObject& object, const llvm::object::ObjectFile& file);

}  // namespace sim
