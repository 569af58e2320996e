// The values that a schema does not match.
#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "engine/text/structured/schemas/schema_reader.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Returns a branch for the values of those of `types` that `branch` allows.
Branch OfTypes(const Branch& branch, uint32_t types) {
  Branch out;
  out.types = branch.types & types;
  return out;
}

std::optional<NumberBound> Opposite(const std::optional<NumberBound>& bound) {
  return NumberBound{bound->value, !bound->exclusive};
}

}  // namespace

Result<Branches> SchemaReader::Complement(const json* schema, const Branches& branches) {
  Branches out(1);
  for (const Branch& branch : branches) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches others, ComplementOf(schema, branch));
    MOESERVE_ASSIGN_OR_RETURN(out, Product(schema, out, others));
  }
  return out;
}

Result<Branches> SchemaReader::ComplementOf(const json* schema, const Branch& branch) {
  Branches out;
  if (branch.types != kAllTypes) {
    Branch others;
    others.types = kAllTypes & ~branch.types;
    out.push_back(std::move(others));
  }
  if (branch.values) {
    static const json kBooleans[] = {false, true};
    Branch rest = OfTypes(branch, kAllTypes & ~(kNullType | kBooleanType));
    std::vector<const json*> booleans;
    for (const json& value : kBooleans) {
      const bool listed = std::any_of(branch.values->begin(), branch.values->end(),
                                      [&](const json* other) { return *other == value; });
      if (!listed) booleans.push_back(&value);
    }
    for (const json* value : *branch.values) {
      if (value->is_structured()) {
        return Error(schema,
                     "listed arrays and objects inside of not, if or oneOf are not "
                     "supported");
      }
      if (value->is_number() || value->is_string()) rest.excluded.push_back(value);
    }
    if (rest.types != 0) out.push_back(std::move(rest));
    if ((branch.types & kBooleanType) && !booleans.empty()) {
      Branch other = OfTypes(branch, kBooleanType);
      other.values = booleans;
      out.push_back(std::move(other));
    }
  }
  ComplementScalars(branch, &out);
  if (!branch.formats.empty() && (branch.types & kStringType)) {
    return Error(schema, "\"format\" inside of not, if or oneOf is not supported");
  }
  if (branch.types & kArrayType) {
    MOESERVE_RETURN_IF_ERROR(ComplementArrays(schema, branch, &out));
  }
  if (branch.types & kObjectType) {
    MOESERVE_RETURN_IF_ERROR(ComplementObjects(schema, branch, &out));
  }
  return out;
}

void SchemaReader::ComplementScalars(const Branch& branch, Branches* out) {
  const auto add = [&](uint32_t types, const auto& change) {
    Branch other = OfTypes(branch, types);
    if (other.types == 0) return;
    change(&other);
    out->push_back(std::move(other));
  };
  const NumberRange& number = branch.number;
  if (number.min) add(kNumberTypes, [&](Branch* b) { b->number.max = Opposite(number.min); });
  if (number.max) add(kNumberTypes, [&](Branch* b) { b->number.min = Opposite(number.max); });
  std::set<Decimal> multiples = branch.multiples;
  if (number.multiple_of > 1) {
    multiples.insert(Decimal::Parse(std::to_string(number.multiple_of)));
  }
  for (const Decimal& multiple : multiples) {
    add(kNumberTypes, [&](Branch* b) { b->not_multiples.insert(multiple); });
  }
  for (const Decimal& multiple : branch.not_multiples) {
    add(kNumberTypes, [&](Branch* b) { b->multiples.insert(multiple); });
  }
  for (const json* value : branch.excluded) {
    add(TypeOf(*value), [&](Branch* b) { b->values = {value}; });
  }
  if (branch.min_chars > 0) {
    add(kStringType, [&](Branch* b) { b->max_chars = branch.min_chars - 1; });
  }
  if (branch.max_chars < kNoLimit) {
    add(kStringType, [&](Branch* b) { b->min_chars = branch.max_chars + 1; });
  }
  for (const std::string& pattern : branch.patterns) {
    add(kStringType, [&](Branch* b) { b->not_patterns.insert(pattern); });
  }
  for (const std::string& pattern : branch.not_patterns) {
    add(kStringType, [&](Branch* b) { b->patterns.insert(pattern); });
  }
}

Status SchemaReader::ComplementArrays(const json* schema, const Branch& branch, Branches* out) {
  static const json kTrue = true;
  if (branch.unique_items) {
    return Error(schema, "\"uniqueItems\" inside of not, if or oneOf is not supported");
  }
  const auto add = [&](const auto& change) {
    Branch other = OfTypes(branch, kArrayType);
    change(&other);
    out->push_back(std::move(other));
  };
  if (branch.min_items > 0) add([&](Branch* b) { b->max_items = branch.min_items - 1; });
  if (branch.max_items < kNoLimit) add([&](Branch* b) { b->min_items = branch.max_items + 1; });
  for (const ArrayPart& part : branch.arrays) {
    // An item that does not match its schema.
    for (size_t i = 0; i < part.prefix.size(); ++i) {
      if (out->size() > kMaxBranches) return Error(schema, "too many alternatives");
      add([&](Branch* b) {
        ArrayPart other;
        other.prefix.assign(i, &kTrue);
        other.prefix.push_back(Not(part.prefix[i]));
        b->arrays.push_back(std::move(other));
        b->min_items = static_cast<int64_t>(i) + 1;
      });
    }
    if (part.items == nullptr) continue;
    if (part.prefix.empty()) {
      add([&](Branch* b) { b->contains.push_back({Not(part.items), 1, kNoLimit}); });
    } else if (part.items->is_boolean()) {
      if (part.items->get<bool>()) continue;
      add([&](Branch* b) { b->min_items = static_cast<int64_t>(part.prefix.size()) + 1; });
    } else {
      return Error(schema,
                   "\"items\" beside \"prefixItems\" inside of not, if or oneOf is not "
                   "supported");
    }
  }
  for (const ContainsPart& part : branch.contains) {
    if (part.min == 1) {
      add([&](Branch* b) { b->arrays.push_back({{}, Not(part.schema)}); });
    } else if (part.min > 1) {
      add([&](Branch* b) { b->contains.push_back({part.schema, 0, part.min - 1}); });
    }
    if (part.max < kNoLimit) {
      add([&](Branch* b) { b->contains.push_back({part.schema, part.max + 1, kNoLimit}); });
    }
  }
  return absl::OkStatus();
}

Status SchemaReader::ComplementObjects(const json* schema, const Branch& branch, Branches* out) {
  static const json kFalse = false;
  const auto unsupported = [&](const char* keyword) {
    return Error(schema, Concat("\"", keyword, "\" inside of not, if or oneOf is not supported"));
  };
  if (!branch.names.empty()) return unsupported("propertyNames");
  const auto add = [&](const auto& change) {
    Branch other = OfTypes(branch, kObjectType);
    change(&other);
    out->push_back(std::move(other));
  };
  if (branch.min_properties > 0) {
    add([&](Branch* b) { b->max_properties = branch.min_properties - 1; });
  }
  if (branch.max_properties < kNoLimit) {
    add([&](Branch* b) { b->min_properties = branch.max_properties + 1; });
  }
  for (const std::string& name : branch.required) {
    add([&](Branch* b) {
      b->objects.emplace_back();
      b->objects.back().more.push_back({name, &kFalse});
    });
  }
  for (const ObjectPart& part : branch.objects) {
    if (part.patterns != nullptr && !part.patterns->empty()) {
      return unsupported("patternProperties");
    }
    if (part.additional != nullptr && *part.additional != json(true)) {
      return unsupported("additionalProperties");
    }
    std::vector<std::pair<std::string, const json*>> named = part.more;
    if (part.properties != nullptr) {
      for (const auto& [name, value] : part.properties->items()) named.push_back({name, &value});
    }
    MOESERVE_RETURN_IF_ERROR(budget_->Tick(16 * static_cast<int64_t>(named.size())));
    for (const auto& property : named) {
      if (*property.second == json(true)) continue;
      // The property is present and does not match its schema.
      add([&](Branch* b) {
        b->required.insert(property.first);
        b->objects.emplace_back();
        b->objects.back().more.push_back({property.first, Not(property.second)});
      });
    }
  }
  return absl::OkStatus();
}

}  // namespace moeserve::structured
