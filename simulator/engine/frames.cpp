// The arrays in a kernel's frame, from its debug information: where scratch has no variable, an
// access with a computed address has left its array.
#include <llvm/DebugInfo/DWARF/DWARFContext.h>
#include <llvm/DebugInfo/DWARF/DWARFDie.h>
#include <llvm/DebugInfo/DWARF/LowLevel/DWARFExpression.h>
#include <llvm/Object/ObjectFile.h>

#include <algorithm>
#include <optional>

#include "codeobject.h"

namespace sim {
namespace {

using llvm::DWARFDie;
namespace dwarf = llvm::dwarf;

// Adds what lies below `die`; false when some variable's place is not a plain offset in the frame.
bool collect(const DWARFDie& die, std::vector<FrameVariable>& out) {
  for (const DWARFDie& child : die.children()) {
    if (child.getTag() == dwarf::DW_TAG_variable ||
        child.getTag() == dwarf::DW_TAG_formal_parameter) {
      auto location = child.find(dwarf::DW_AT_location);
      if (!location) continue;
      auto block = location->getAsBlock();
      if (!block) continue;  // a list: it lives in registers
      llvm::DataExtractor data(*block, true, 8);
      llvm::DWARFExpression expression(data, 8);
      std::optional<i64> offset;
      for (const auto& op : expression) {
        if (op.getCode() == dwarf::DW_OP_fbreg) offset = static_cast<i64>(op.getRawOperand(0));
        if (op.getCode() == dwarf::DW_OP_piece) return false;
      }
      if (!offset) continue;
      auto type = child.getAttributeValueAsReferencedDie(dwarf::DW_AT_type);
      if (!type) {
        auto origin = child.getAttributeValueAsReferencedDie(dwarf::DW_AT_abstract_origin);
        if (origin) type = origin.getAttributeValueAsReferencedDie(dwarf::DW_AT_type);
      }
      auto bytes = type ? type.getTypeSize(8) : std::nullopt;
      if (!bytes || *offset < 0) return false;
      const char* name = child.getShortName();
      out.push_back(
          {name ? name : "a variable", static_cast<u32>(*offset), static_cast<u32>(*bytes)});
    } else if (!collect(child, out)) {
      return false;
    }
  }
  return true;
}

}  // namespace

void readFrames(CodeObject& object, const llvm::object::ObjectFile& file) {
  bool any = std::any_of(object.kernels.begin(), object.kernels.end(),
                         [](const auto& k) { return k.second.privateBytes > 0; });
  if (!any) return;
  auto context = llvm::DWARFContext::create(file);
  for (const auto& unit : context->compile_units()) {
    for (const DWARFDie& die : unit->getUnitDIE(false).children()) {
      if (die.getTag() != dwarf::DW_TAG_subprogram) continue;
      const char* name = die.getLinkageName();  // extern "C" has none
      if (!name) name = die.getShortName();
      auto it = object.kernels.find(name ? name : "");
      if (it == object.kernels.end()) continue;
      u64 low, high, section;
      Kernel& k = it->second;
      if (k.dynamicStack || !die.getLowAndHighPC(low, high, section)) continue;
      std::vector<FrameVariable> frame;
      if (!collect(die, frame)) continue;
      std::sort(frame.begin(), frame.end(),
                [](const auto& a, const auto& b) { return a.offset < b.offset; });
      k.frame = std::move(frame);
      k.low = low;
      k.high = high;
    }
  }
}

}  // namespace sim
