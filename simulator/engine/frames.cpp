// A kernel's arguments and the arrays in its frame, from its debug information: where scratch has
// no variable, an access with a computed address has left its array.
#include <llvm/DebugInfo/DWARF/DWARFContext.h>
#include <llvm/DebugInfo/DWARF/DWARFDie.h>
#include <llvm/DebugInfo/DWARF/LowLevel/DWARFExpression.h>
#include <llvm/Object/ObjectFile.h>

#include <algorithm>
#include <functional>
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

std::string typeOf(const DWARFDie& parameter) {
  DWARFDie type = parameter.getAttributeValueAsReferencedDie(dwarf::DW_AT_type);
  if (!type) {
    DWARFDie origin = parameter.getAttributeValueAsReferencedDie(dwarf::DW_AT_abstract_origin);
    if (origin) type = origin.getAttributeValueAsReferencedDie(dwarf::DW_AT_type);
  }
  while (type &&
         (type.getTag() == dwarf::DW_TAG_typedef || type.getTag() == dwarf::DW_TAG_const_type ||
          type.getTag() == dwarf::DW_TAG_volatile_type ||
          type.getTag() == dwarf::DW_TAG_restrict_type)) {
    type = type.getAttributeValueAsReferencedDie(dwarf::DW_AT_type);
  }
  if (!type) return "";
  switch (type.getTag()) {
    case dwarf::DW_TAG_pointer_type:
    case dwarf::DW_TAG_reference_type:
      return "pointer";
    case dwarf::DW_TAG_structure_type:
    case dwarf::DW_TAG_class_type:
    case dwarf::DW_TAG_union_type:
    case dwarf::DW_TAG_array_type:
      return "structure";
    case dwarf::DW_TAG_enumeration_type:
      return "integer";
    case dwarf::DW_TAG_base_type: {
      auto encoding = dwarf::toUnsigned(type.find(dwarf::DW_AT_encoding), 0);
      return encoding == dwarf::DW_ATE_float ? "float" : "integer";
    }
    default:
      return "";
  }
}

// Types and names of the explicit arguments, so that a number of another type is told.
void readTypes(const DWARFDie& function, Kernel& kernel) {
  std::vector<std::pair<std::string, const char*>> types;
  for (const DWARFDie& child : function.children()) {
    if (child.getTag() == dwarf::DW_TAG_formal_parameter) {
      types.emplace_back(typeOf(child), child.getShortName());
    }
  }
  auto hidden = [](const KernelArg& a) { return a.kind.starts_with("hidden_"); };
  size_t given = std::count_if(kernel.args.begin(), kernel.args.end(), std::not_fn(hidden));
  if (types.size() != given) return;
  size_t n = 0;
  for (KernelArg& a : kernel.args) {
    if (hidden(a)) continue;
    const auto& [type, name] = types[n++];
    a.type = type;
    if (a.name.empty() && name) a.name = name;
  }
}

}  // namespace

void readFrames(CodeObject& object, const llvm::object::ObjectFile& file) {
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
      readTypes(die, k);
      if (!k.privateBytes || k.dynamicStack || !die.getLowAndHighPC(low, high, section)) continue;
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
