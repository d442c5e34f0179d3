// Code objects from files and memory: ELF, kernel metadata, fat binaries and source lines, all
// read with LLVM's libraries.
#include "codeobject.h"

#include <llvm/BinaryFormat/ELF.h>
#include <llvm/BinaryFormat/MsgPackDocument.h>
#include <llvm/DebugInfo/Symbolize/Symbolize.h>
#include <llvm/Object/ELFObjectFile.h>
#include <llvm/Object/OffloadBundle.h>
#include <llvm/Support/MemoryBuffer.h>

namespace sim {
namespace {

using llvm::object::ELF64LEObjectFile;
using Elf = llvm::object::ELF64LE;

std::string text(llvm::Error error) { return llvm::toString(std::move(error)); }

template <class T>
T check(llvm::Expected<T> value, const std::string& what) {
  if (!value) throw Error(what + ": " + text(value.takeError()));
  return std::move(*value);
}

llvm::StringRef asString(const std::vector<u8>& v) {
  return {reinterpret_cast<const char*>(v.data()), v.size()};
}

u64 asInteger(llvm::msgpack::DocNode node) {
  if (node.getKind() == llvm::msgpack::Type::UInt) return node.getUInt();
  if (node.getKind() == llvm::msgpack::Type::Int) return node.getInt();
  return 0;
}

struct MapReader {
  llvm::msgpack::MapDocNode map;
  u64 integer(const char* key) {
    auto it = map.find(key);
    return it == map.end() ? 0 : asInteger(it->second);
  }
  std::string string(const char* key) {
    auto it = map.find(key);
    return it == map.end() ? "" : it->second.getString().str();
  }
};

// Of amdgcn-amd-amdhsa--gfx942:sramecc+:xnack- or amdgpu9.42-amd-amdhsa-unknown-gfx942, as LLVM
// writes it from version 23 on: gfx942. Of amdgcn-amd-amdhsa--gfx9-4-generic: gfx9-4-generic.
std::string processor(std::string id) {
  id = id.substr(0, id.find(':'));
  size_t at = id.rfind("gfx");
  return at == std::string::npos ? id : id.substr(at);
}

void readMetadata(CodeObject& object, llvm::StringRef blob) {
  llvm::msgpack::Document document;
  if (!document.readFromBlob(blob, false)) throw Error("the metadata note is not MessagePack");
  MapReader root{document.getRoot().getMap(true)};
  std::string target = processor(root.string("amdhsa.target"));
  object.gpu = findGpu(target);
  if (!object.gpu) {
    throw Error(object.path + " is for " + target + "; the simulator runs " + knownTargets());
  }
  for (auto& node : root.map["amdhsa.kernels"].getArray(true)) {
    MapReader m{node.getMap()};
    Kernel k;
    k.name = m.string(".name");
    k.ldsBytes = m.integer(".group_segment_fixed_size");
    k.privateBytes = m.integer(".private_segment_fixed_size");
    k.kernargBytes = m.integer(".kernarg_segment_size");
    k.vgprs = m.integer(".vgpr_count");
    k.agprs = m.integer(".agpr_count");
    k.sgprs = m.integer(".sgpr_count");
    k.spills = m.integer(".vgpr_spill_count") + m.integer(".sgpr_spill_count");
    auto stack = m.map.find(".uses_dynamic_stack");
    k.dynamicStack = stack != m.map.end() &&
                     stack->second.getKind() == llvm::msgpack::Type::Boolean &&
                     stack->second.getBool();
    k.maxWorkgroup = m.integer(".max_flat_workgroup_size");
    if (m.map.find(".args") != m.map.end()) {
      for (auto& arg : m.map[".args"].getArray()) {
        MapReader a{arg.getMap()};
        k.args.push_back({a.string(".value_kind"), a.string(".name"),
                          static_cast<u32>(a.integer(".offset")),
                          static_cast<u32>(a.integer(".size")), ""});
      }
    }
    object.kernels[k.name] = k;
  }
}

void readDescriptor(CodeObject& object, Kernel& k, u64 address) {
  const u8* d = object.image.data() + address;
  auto word = [&](int at) {
    u32 x;
    std::memcpy(&x, d + at, 4);
    return x;
  };
  i64 entryOffset;
  std::memcpy(&entryOffset, d + 16, 8);
  k.descriptor = address;
  k.rsrc3 = word(44);
  k.rsrc1 = word(48);
  k.rsrc2 = word(52);
  k.properties = word(56) & 0xffff;
  k.preload = word(56) >> 16;
  u64 entry = address + entryOffset;
  // A kernel with preloaded arguments has a prologue of 256 bytes for firmware that cannot preload.
  if (k.preload & 127) entry += 256;
  i32 index = object.indexAt(entry);
  if (index < 0) throw Error("the entry point of kernel " + k.name + " is not an instruction");
  k.entry = index;
}

void relocate(CodeObject& object, const ELF64LEObjectFile& file) {
  for (const auto& section : file.sections()) {
    for (const auto& r : section.relocations()) {
      auto* target = object.image.data() + r.getOffset();
      u64 base = reinterpret_cast<u64>(object.image.data());
      llvm::object::ELFRelocationRef elf(r);
      i64 addend = elf.getAddend() ? *elf.getAddend() : 0;
      u64 value;
      if (r.getType() == llvm::ELF::R_AMDGPU_RELATIVE64) {
        value = base + addend;
      } else if (r.getType() == llvm::ELF::R_AMDGPU_ABS64) {
        value = base + check(r.getSymbol()->getAddress(), "relocation") + addend;
      } else {
        throw Error("relocation type " + std::to_string(r.getType()) + " is not implemented");
      }
      std::memcpy(target, &value, 8);
    }
  }
}

struct DebugFile {
  std::unique_ptr<llvm::MemoryBuffer> buffer;
  std::unique_ptr<llvm::object::ObjectFile> file;
  llvm::symbolize::LLVMSymbolizer symbolizer;
};

}  // namespace

std::shared_ptr<CodeObject> loadCodeObject(const void* data, size_t size, const std::string& path) {
  auto object = std::make_shared<CodeObject>();
  object->path = path;
  const u8* bytes = static_cast<const u8*>(data);
  object->elf.assign(bytes, bytes + size);
  auto buffer = llvm::MemoryBuffer::getMemBuffer(asString(object->elf), path, false);
  auto generic = check(llvm::object::ObjectFile::createELFObjectFile(*buffer), path);
  auto* file = llvm::dyn_cast<ELF64LEObjectFile>(generic.get());
  if (!file || file->getELFFile().getHeader().e_machine != llvm::ELF::EM_AMDGPU) {
    throw Error(path + ": required an AMDGPU code object, this ELF is for another machine");
  }
  const auto& elf = file->getELFFile();

  u64 top = 0;
  auto headers = check(elf.program_headers(), path);
  for (const auto& h : headers) {
    if (h.p_type == llvm::ELF::PT_LOAD) top = std::max<u64>(top, h.p_vaddr + h.p_memsz);
    if (h.p_type != llvm::ELF::PT_NOTE) continue;
    llvm::Error error = llvm::Error::success();
    for (const auto& note : elf.notes(h, error)) {
      if (note.getName() == "AMDGPU") readMetadata(*object, note.getDescAsStringRef(h.p_align));
    }
    if (error) throw Error(path + ": " + text(std::move(error)));
  }
  if (!object->gpu) throw Error(path + ": there is no AMDGPU metadata note in it");
  object->image.resize(top);
  for (const auto& h : headers) {
    if (h.p_type == llvm::ELF::PT_LOAD) {
      std::memcpy(object->image.data() + h.p_vaddr, object->elf.data() + h.p_offset, h.p_filesz);
    }
  }
  relocate(*object, *file);
  for (const auto& section : file->sections()) {
    if (check(section.getName(), path) == ".text") {
      decodeText(*object, object->image.data() + section.getAddress(), section.getAddress(),
                 section.getSize());
    }
  }
  for (const auto& symbol : file->symbols()) {
    std::string name = check(symbol.getName(), path).str();
    u64 address = check(symbol.getAddress(), path);
    if (name.size() > 3 && name.substr(name.size() - 3) == ".kd") {
      auto it = object->kernels.find(name.substr(0, name.size() - 3));
      if (it != object->kernels.end()) readDescriptor(*object, it->second, address);
    } else if (symbol.getELFType() == llvm::ELF::STT_OBJECT) {
      object->variables[name] = {address, symbol.getSize()};
    } else if (auto it = object->kernels.find(name); it != object->kernels.end()) {
      it->second.codeEnd = address + symbol.getSize();
    }
  }
  for (auto& [name, kernel] : object->kernels) noteAcquires(*object, kernel);
  readFrames(*object, *file);
  return object;
}

i32 CodeObject::indexAt(u64 address) const {
  if (address < textBase || address >= textEnd || address % 4) return -1;
  return indexOfWord[(address - textBase) / 4];
}

namespace {

// Under linesLock.
DebugFile& debugFile(const CodeObject& object) {
  if (!object.debug) {
    auto d = std::make_shared<DebugFile>();
    d->buffer = llvm::MemoryBuffer::getMemBuffer(asString(object.elf), object.path, false);
    d->file = check(llvm::object::ObjectFile::createELFObjectFile(*d->buffer), object.path);
    object.debug = d;
  }
  return *static_cast<DebugFile*>(object.debug.get());
}

llvm::object::SectionedAddress placeOf(const DebugFile& d, u32 address) {
  llvm::object::SectionedAddress where{address, llvm::object::SectionedAddress::UndefSection};
  for (const auto& section : d.file->sections()) {
    if (address >= section.getAddress() && address < section.getAddress() + section.getSize() &&
        section.isText()) {
      where.SectionIndex = section.getIndex();
    }
  }
  return where;
}

std::string lineOf(const llvm::DILineInfo& info) {
  if (!info.Line) return "no debug information";
  return info.FileName + ":" + std::to_string(info.Line);
}

}  // namespace

std::string CodeObject::source(u32 address) const {
  std::lock_guard guard(linesLock);
  auto it = lines.find(address);
  if (it != lines.end()) return it->second;
  DebugFile& d = debugFile(*this);
  std::string line = "no debug information";
  if (auto info = d.symbolizer.symbolizeCode(*d.file, placeOf(d, address))) {
    line = lineOf(*info);
  } else {
    llvm::consumeError(info.takeError());
  }
  return lines[address] = line;
}

std::vector<std::string> CodeObject::callers(u32 address) const {
  std::lock_guard guard(linesLock);
  DebugFile& d = debugFile(*this);
  std::vector<std::string> out;
  if (auto info = d.symbolizer.symbolizeInlinedCode(*d.file, placeOf(d, address))) {
    for (u32 n = 1; n < info->getNumberOfFrames(); ++n) out.push_back(lineOf(info->getFrame(n)));
  } else {
    llvm::consumeError(info.takeError());
  }
  return out;
}

bool CodeObject::inlinedFrom(u32 address, const char* word) const {
  std::lock_guard guard(linesLock);
  DebugFile& d = debugFile(*this);
  auto info = d.symbolizer.symbolizeInlinedCode(*d.file, placeOf(d, address));
  if (!info) {
    llvm::consumeError(info.takeError());
    return false;
  }
  for (u32 n = 0; n + 1 < info->getNumberOfFrames(); ++n) {
    if (info->getFrame(n).FunctionName.find(word) != std::string::npos) return true;
  }
  return false;
}

std::string CodeObject::disassembly(u32 index, int around) const {
  std::string out;
  char address[32];
  int first = std::max(0, static_cast<int>(index) - around);
  int last = std::min<int>(code.size() - 1, index + around);
  for (int n = first; n <= last; ++n) {
    std::snprintf(address, sizeof address, "%s %06x: ", n == static_cast<int>(index) ? "->" : "  ",
                  code[n].address);
    out += address + code[n].text + "\n";
  }
  return out;
}

namespace {

void openBundle(llvm::StringRef bytes, const std::string& path, std::vector<Bundled>& out) {
  std::unique_ptr<llvm::MemoryBuffer> plain;
  if (bytes.starts_with("CCOB")) {
    auto compressed = llvm::MemoryBuffer::getMemBuffer(bytes, path, false);
    plain = check(llvm::object::CompressedOffloadBundle::decompress(*compressed, nullptr), path);
  } else {
    plain = llvm::MemoryBuffer::getMemBuffer(bytes, path, false);
  }
  auto bundle =
      check(llvm::object::OffloadBundleFatBin::create(plain->getMemBufferRef(), 0, path), path);
  for (const auto& entry : bundle->getEntries()) {
    if (entry.ID.find("-amdhsa-") == std::string::npos || entry.Size == 0) continue;
    const char* start = plain->getBufferStart() + entry.Offset;
    out.push_back({processor(entry.ID), {start, start + entry.Size}});
  }
}

}  // namespace

std::vector<Bundled> openFile(const void* data, size_t size, const std::string& path) {
  llvm::StringRef bytes(static_cast<const char*>(data), size);
  std::vector<Bundled> out;
  if (bytes.starts_with("__CLANG_OFFLOAD_BUNDLE__") || bytes.starts_with("CCOB")) {
    openBundle(bytes, path, out);
    return out;
  }
  if (!bytes.starts_with("\x7f"
                         "ELF")) {
    throw Error(path + ": required an ELF file or an offload bundle, it is neither");
  }
  auto buffer = llvm::MemoryBuffer::getMemBuffer(bytes, path, false);
  auto generic = check(llvm::object::ObjectFile::createELFObjectFile(*buffer), path);
  auto* file = llvm::dyn_cast<ELF64LEObjectFile>(generic.get());
  if (file && file->getELFFile().getHeader().e_machine == llvm::ELF::EM_AMDGPU) {
    out.push_back({"", {bytes.begin(), bytes.end()}});
    return out;
  }
  for (const auto& section : generic->sections()) {
    if (check(section.getName(), path) != ".hip_fatbin") continue;
    llvm::StringRef contents = check(section.getContents(), path);
    // Several translation units put their bundles one after the other, on 4096-byte boundaries.
    for (size_t at = 0; at < contents.size(); at += 4096) {
      llvm::StringRef rest = contents.substr(at);
      if (rest.starts_with("__CLANG_OFFLOAD_BUNDLE__") || rest.starts_with("CCOB")) {
        openBundle(rest, path, out);
      }
    }
  }
  if (out.empty()) throw Error(path + ": there is no code object and no .hip_fatbin section in it");
  return out;
}

}  // namespace sim
