#include "engine/text/structured/schema_reader.h"

#include <algorithm>
#include <string_view>

#include "base/message.h"
#include "engine/text/structured/automata/formats.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

constexpr size_t kMaxBranches = 512;
// Largest number of names, patterns and listed values in all branches of one schema; limits their
// memory.
constexpr int64_t kMaxBranchParts = 100000;
// Largest depth of nested subschemas ($ref, anyOf and the like) that all apply to one value; limits
// the use of the stack. Schemas of properties and items start a new count.
constexpr size_t kMaxChain = 100;
// Error messages cut each step of a JSON pointer to this number of bytes.
constexpr size_t kMaxStep = 64;

constexpr std::string_view kAnnotations[] = {
    "title",    "description",      "default",         "examples",     "$schema", "$id",
    "$comment", "deprecated",       "readOnly",        "writeOnly",    "$defs",   "definitions",
    "$anchor",  "contentMediaType", "contentEncoding", "contentSchema"};

// Keywords that restrict values and are not supported.
constexpr std::string_view kUnsupported[] = {"not",
                                             "if",
                                             "then",
                                             "else",
                                             "patternProperties",
                                             "propertyNames",
                                             "dependencies",
                                             "dependentRequired",
                                             "dependentSchemas",
                                             "contains",
                                             "minContains",
                                             "maxContains",
                                             "unevaluatedItems",
                                             "unevaluatedProperties",
                                             "additionalItems",
                                             "$dynamicRef",
                                             "$dynamicAnchor",
                                             "$recursiveRef",
                                             "$recursiveAnchor",
                                             "disallow",
                                             "extends",
                                             "divisibleBy"};

template <typename Range>
bool Contains(const Range& range, std::string_view key) {
  return std::find(std::begin(range), std::end(range), key) != std::end(range);
}

// Returns "/" and `step`, escaped as in a JSON pointer. A step of more than kMaxStep bytes is first
// cut to at most that many, in whole characters; "..." marks the cut.
std::string Escaped(std::string_view step) {
  std::string out = "/";
  if (step.size() > kMaxStep) {
    size_t end = kMaxStep;
    while ((step[end] & 0xC0) == 0x80) --end;
    return Escaped(step.substr(0, end)) + "...";
  }
  for (const char c : step) {
    if (c == '~') {
      out += "~0";
    } else if (c == '/') {
      out += "~1";
    } else {
      out += c;
    }
  }
  return out;
}

int64_t PartsOf(const Branch& branch) {
  return static_cast<int64_t>(branch.required.size() + branch.patterns.size() +
                              branch.objects.size() + branch.arrays.size() +
                              (branch.values ? branch.values->size() : 0));
}

}  // namespace

std::string SchemaReader::PathOf(const json* schema) const {
  const auto it = paths_.find(schema);
  return it == paths_.end() ? "#" : "#" + it->second.path;
}

Status SchemaReader::Error(const json* schema, const std::string& what) const {
  return absl::InvalidArgumentError("schema at " + PathOf(schema) + ": " + what);
}

Status SchemaReader::Enter(const json* parent, const std::string& step, const json* child) {
  if (!child->is_object() && !child->is_boolean()) {
    return Error(parent, step.substr(1) + " must be a schema (an object or a boolean)");
  }
  const Place& place = paths_[parent];
  const int depth = place.depth + 1;
  if (depth > limits_.schema_nesting) {
    return Error(parent, Concat("schemas are nested deeper than ", limits_.schema_nesting));
  }
  std::string path = place.path + step;
  paths_.try_emplace(child, Place{std::move(path), depth});
  return absl::OkStatus();
}

Result<Branches> SchemaReader::Read(const Conjunction& schemas) {
  Branches out(1);
  for (const json* schema : schemas) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches branches, ReadSchema(schema));
    MOESERVE_ASSIGN_OR_RETURN(out, Product(schema, out, branches));
  }
  return out;
}

Result<Branches> SchemaReader::Product(const json* schema, const Branches& a, const Branches& b) {
  Branches out;
  int64_t parts = 0;
  for (const Branch& x : a) {
    for (const Branch& y : b) {
      int64_t work = 64 + PartsOf(x) + PartsOf(y);
      if (x.values && y.values) work += static_cast<int64_t>(x.values->size() * y.values->size());
      MOESERVE_RETURN_IF_ERROR(budget_->Tick(work));
      if (std::optional<Branch> both = Meet(x, y)) {
        parts += PartsOf(*both);
        out.push_back(*std::move(both));
      }
      if (out.size() > kMaxBranches || (parts > kMaxBranchParts && out.size() > 1)) {
        return Error(schema, "too many combinations of alternatives");
      }
    }
  }
  return out;
}

Result<Branches> SchemaReader::ReadSchema(const json* schema) {
  if (schema->is_boolean()) return Branches(schema->get<bool>() ? 1 : 0);
  if (!in_progress_.insert(schema).second) {
    return Error(schema, "the schema refers to itself without a property or item in between");
  }
  if (in_progress_.size() > kMaxChain) {
    in_progress_.erase(schema);
    return Error(schema,
                 Concat("more than ", kMaxChain,
                        " schemas refer to each other without a property or item in between"));
  }
  Result<Branches> out = ReadKeywords(schema);
  in_progress_.erase(schema);
  return out;
}

Result<Branches> SchemaReader::ReadKeywords(const json* schema) {
  MOESERVE_RETURN_IF_ERROR(budget_->Tick(64));
  Branch own;
  ObjectPart object;
  ArrayPart array;
  for (const auto& [key, value] : schema->items()) {
    if (Contains(kUnsupported, key)) return Error(schema, "\"" + key + "\" is not supported");
    if (key == "properties" || key == "additionalProperties") {
      MOESERVE_RETURN_IF_ERROR(ReadProperties(schema, key, value, &object));
    } else if (key == "items" || key == "prefixItems") {
      MOESERVE_RETURN_IF_ERROR(ReadItems(schema, key, value, &array));
    } else if (key != "$ref" && key != "allOf" && key != "anyOf" && key != "oneOf" &&
               !Contains(kAnnotations, key)) {
      MOESERVE_RETURN_IF_ERROR(ReadBasics(schema, key, value, &own));
    }
  }
  if (object.properties != nullptr || object.additional != nullptr) own.objects.push_back(object);
  if (array.items != nullptr || !array.prefix.empty()) own.arrays.push_back(std::move(array));
  // ReadMultiple() accepts integers only, so no fraction is a multiple.
  if (schema->contains("multipleOf")) own.types &= ~kFractionType;
  MOESERVE_RETURN_IF_ERROR(CheckBranch(schema, own));
  // Meet() with an unrestricted branch removes listed values of the wrong types.
  Branches out;
  if (std::optional<Branch> kept = Meet(own, Branch())) out.push_back(*std::move(kept));

  if (const auto it = schema->find("$ref"); it != schema->end()) {
    MOESERVE_ASSIGN_OR_RETURN(const json* target, Resolve(schema, *it));
    MOESERVE_ASSIGN_OR_RETURN(const Branches branches, ReadSchema(target));
    MOESERVE_ASSIGN_OR_RETURN(out, Product(schema, out, branches));
  }
  for (const std::string key : {"allOf", "anyOf", "oneOf"}) {
    const auto it = schema->find(key);
    if (it == schema->end()) continue;
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<Branches> parts, ReadList(schema, key, *it));
    if (key == "allOf") {
      for (const Branches& part : parts) {
        MOESERVE_ASSIGN_OR_RETURN(out, Product(schema, out, part));
      }
      continue;
    }
    MOESERVE_ASSIGN_OR_RETURN(const Branches any, Union(schema, parts, key == "oneOf"));
    MOESERVE_ASSIGN_OR_RETURN(out, Product(schema, out, any));
  }
  return out;
}

Status SchemaReader::ReadProperties(const json* schema, const std::string& key, const json& value,
                                    ObjectPart* object) {
  if (key == "additionalProperties") {
    object->additional = &value;
    return Enter(schema, "/" + key, &value);
  }
  if (!value.is_object()) return Error(schema, "properties must be an object");
  for (const auto& [name, child] : value.items()) {
    MOESERVE_RETURN_IF_ERROR(Enter(schema, "/properties" + Escaped(name), &child));
  }
  object->properties = &value;
  return absl::OkStatus();
}

Status SchemaReader::ReadItems(const json* schema, const std::string& key, const json& value,
                               ArrayPart* array) {
  if (key == "items") {
    if (value.is_array()) {
      return Error(schema, "items must be one schema; use prefixItems for a list");
    }
    array->items = &value;
    return Enter(schema, "/" + key, &value);
  }
  if (!value.is_array()) return Error(schema, "prefixItems must be an array");
  for (size_t i = 0; i < value.size(); ++i) {
    MOESERVE_RETURN_IF_ERROR(Enter(schema, Concat("/prefixItems/", i), &value[i]));
    array->prefix.push_back(&value[i]);
  }
  return absl::OkStatus();
}

Result<std::vector<Branches>> SchemaReader::ReadList(const json* schema, const std::string& key,
                                                     const json& value) {
  if (!value.is_array() || value.empty()) return Error(schema, key + " must be a non-empty array");
  std::vector<Branches> parts;
  for (size_t i = 0; i < value.size(); ++i) {
    MOESERVE_RETURN_IF_ERROR(Enter(schema, Concat("/", key, "/", i), &value[i]));
    MOESERVE_ASSIGN_OR_RETURN(parts.emplace_back(), ReadSchema(&value[i]));
  }
  return parts;
}

Result<Branches> SchemaReader::Union(const json* schema, const std::vector<Branches>& parts,
                                     bool disjoint) {
  Branches any;
  for (size_t i = 0; i < parts.size(); ++i) {
    for (const Branch& branch : parts[i]) {
      for (size_t j = 0; disjoint && j < i; ++j) {
        for (const Branch& other : parts[j]) {
          MOESERVE_ASSIGN_OR_RETURN(const bool sure, Disjoint(branch, other, 0));
          if (sure) continue;
          return Error(schema, Concat("oneOf: values may match both alternative ", j, " and ", i,
                                      "; tell them apart by type or by a required constant, or use "
                                      "anyOf"));
        }
      }
      any.push_back(branch);
    }
    if (any.size() > kMaxBranches) return Error(schema, "too many alternatives");
  }
  return any;
}

Result<int64_t> SchemaReader::ReadCount(const json* schema, const std::string& key,
                                        const json& value) const {
  if (value.is_number()) {
    const Decimal number = DecimalOf(value);
    if (number.is_integer() && !number.negative) {
      return number.point > 12 ? kNoLimit : std::stoll(number.Plain());
    }
  }
  return Error(schema, key + " must be a non-negative integer");
}

Status SchemaReader::ReadTypes(const json* schema, const json& value, Branch* branch) {
  constexpr std::pair<std::string_view, uint32_t> kNames[] = {
      {"null", kNullType},      {"boolean", kBooleanType}, {"integer", kIntegerType},
      {"number", kNumberTypes}, {"string", kStringType},   {"array", kArrayType},
      {"object", kObjectType}};
  const json list = value.is_array() ? value : json::array({value});
  if (list.empty()) return Error(schema, "type must not be an empty list");
  branch->types = 0;
  for (const json& item : list) {
    uint32_t bits = 0;
    for (const auto& [name, type] : kNames) {
      if (item.is_string() && item.get_ref<const std::string&>() == name) bits = type;
    }
    if (bits == 0) {
      return Error(schema,
                   "type must be one of null, boolean, integer, number, string, array, "
                   "object, or a list of these");
    }
    branch->types |= bits;
  }
  return absl::OkStatus();
}

Status SchemaReader::ReadBound(const json* schema, const std::string& key, const json& value,
                               Branch* branch) {
  if (!value.is_number()) return Error(schema, key + " must be a number");
  const bool upper = key == "maximum" || key == "exclusiveMaximum";
  auto& bound = upper ? branch->number.max : branch->number.min;
  const NumberBound read{DecimalOf(value), key.starts_with("exclusive")};
  bound = Tighter(bound, read, upper);
  return absl::OkStatus();
}

Status SchemaReader::ReadValues(const json* schema, const std::string& key, const json& value,
                                Branch* branch) {
  Branch listed;
  listed.values.emplace();
  if (key == "const") {
    listed.values->push_back(&value);
  } else {
    if (!value.is_array() || value.empty()) {
      return Error(schema, "enum must be a non-empty array");
    }
    if (value.size() > static_cast<size_t>(limits_.enum_entries)) {
      return Error(schema,
                   Concat("enum has ", value.size(), " entries, more than ", limits_.enum_entries));
    }
    for (const json& entry : value) listed.values->push_back(&entry);
  }
  if (std::optional<Branch> both = Meet(*branch, listed)) {
    *branch = *std::move(both);
  } else {
    // Leaves an empty list of values, so that CheckBranch() reports that no value is left.
    branch->values.emplace();
    branch->types = 0;
  }
  return absl::OkStatus();
}

Status SchemaReader::ReadMultiple(const json* schema, const json& value, Branch* branch) {
  const Decimal number = value.is_number() ? DecimalOf(value) : Decimal();
  if (number.is_zero() || number.negative) {
    return Error(schema, "multipleOf must be a positive number");
  }
  if (!number.is_integer() || number.point > 4) {
    return Error(schema, "multipleOf is supported for integers up to 9999 only");
  }
  branch->number.multiple_of = std::stoll(number.Plain());
  return absl::OkStatus();
}

Status SchemaReader::ReadText(const json* schema, const std::string& key, const json& value,
                              Branch* branch) {
  if (key == "format") {
    if (!value.is_string() || !FormatPattern(value.get_ref<const std::string&>())) {
      return Error(schema,
                   "format is supported for date, time, date-time, uuid, email, hostname "
                   "and ipv4 only");
    }
    branch->formats.insert(value.get<std::string>());
    return absl::OkStatus();
  }
  if (!value.is_string()) return Error(schema, "pattern must be a string");
  if (value.get_ref<const std::string&>().size() > limits_.pattern_bytes) {
    return Error(schema, Concat("pattern is longer than ", limits_.pattern_bytes, " bytes"));
  }
  branch->patterns.insert(value.get<std::string>());
  return absl::OkStatus();
}

Status SchemaReader::ReadBasics(const json* schema, const std::string& key, const json& value,
                                Branch* branch) {
  const std::pair<std::string_view, int64_t*> counts[] = {
      {"minLength", &branch->min_chars},          {"maxLength", &branch->max_chars},
      {"minItems", &branch->min_items},           {"maxItems", &branch->max_items},
      {"minProperties", &branch->min_properties}, {"maxProperties", &branch->max_properties}};
  for (const auto& [name, target] : counts) {
    if (key != name) continue;
    MOESERVE_ASSIGN_OR_RETURN(*target, ReadCount(schema, key, value));
    return absl::OkStatus();
  }
  if (key == "type") return ReadTypes(schema, value, branch);
  if (key == "minimum" || key == "maximum" || key == "exclusiveMinimum" ||
      key == "exclusiveMaximum") {
    return ReadBound(schema, key, value, branch);
  }
  if (key == "enum" || key == "const") return ReadValues(schema, key, value, branch);
  if (key == "multipleOf") return ReadMultiple(schema, value, branch);
  if (key == "pattern" || key == "format") return ReadText(schema, key, value, branch);
  if (key == "required") {
    if (!value.is_array()) return Error(schema, "required must be an array of strings");
    for (const json& name : value) {
      if (!name.is_string()) return Error(schema, "required must be an array of strings");
      branch->required.insert(name.get<std::string>());
    }
    return absl::OkStatus();
  }
  if (key == "uniqueItems") {
    if (!value.is_boolean()) return Error(schema, "uniqueItems must be a boolean");
    branch->unique_items = value.get<bool>();
    return absl::OkStatus();
  }
  // By the rules of JSON Schema an unknown keyword restricts nothing.
  if (strict_) return Error(schema, Concat("unknown keyword \"", key.substr(0, 64), "\""));
  return absl::OkStatus();
}

Status SchemaReader::CheckBranch(const json* schema, const Branch& branch) const {
  const auto order = [&](int64_t min, int64_t max, const char* what) -> Status {
    if (min <= max) return absl::OkStatus();
    return Error(schema, std::string("the minimum of ") + what + " is above the maximum");
  };
  MOESERVE_RETURN_IF_ERROR(order(branch.min_chars, branch.max_chars, "characters"));
  MOESERVE_RETURN_IF_ERROR(order(branch.min_items, branch.max_items, "items"));
  MOESERVE_RETURN_IF_ERROR(order(branch.min_properties, branch.max_properties, "properties"));
  const auto& min = branch.number.min;
  const auto& max = branch.number.max;
  if (min && max &&
      (min->value > max->value ||
       (min->value == max->value && (min->exclusive || max->exclusive)))) {
    return Error(schema, "no number lies between minimum and maximum");
  }
  if (branch.types == 0) return Error(schema, "no value has one of the types and is listed");
  return absl::OkStatus();
}

Result<const json*> SchemaReader::Resolve(const json* schema, const json& reference) {
  if (!reference.is_string()) return Error(schema, "$ref must be a string");
  const std::string& text = reference.get_ref<const std::string&>();
  if (text.empty() || text[0] != '#' || (text.size() > 1 && text[1] != '/')) {
    return Error(schema, "$ref must point into this schema, as in #/$defs/name");
  }
  const json* at = &root_;
  int depth = 0;
  for (size_t pos = 1; pos < text.size();) {
    size_t end = std::min(text.find('/', pos + 1), text.size());
    std::string step;
    for (size_t i = pos + 1; i < end; ++i) {
      if (text[i] == '~' && i + 1 < end && (text[i + 1] == '0' || text[i + 1] == '1')) {
        step += text[++i] == '0' ? '~' : '/';
      } else if (text[i] == '%') {
        return Error(schema, "$ref with percent escapes is not supported");
      } else {
        step += text[i];
      }
    }
    pos = end;
    ++depth;
    const json* child = nullptr;
    if (at->is_object()) {
      const auto it = at->find(step);
      if (it != at->end()) child = &*it;
    } else if (at->is_array() && !step.empty() && step.size() < 6 &&
               std::all_of(step.begin(), step.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      const size_t index = std::stoul(step);
      if (index < at->size()) child = &(*at)[index];
    }
    if (child == nullptr) {
      return Error(schema, "$ref \"" + text.substr(0, 64) + "\" leads nowhere");
    }
    at = child;
  }
  if (!at->is_object() && !at->is_boolean()) {
    return Error(schema, "$ref \"" + text.substr(0, 64) + "\" does not lead to a schema");
  }
  // A definition is two steps below the root (#/$defs/name), which count as one level.
  paths_.try_emplace(at, Place{text.substr(1), (depth + 1) / 2});
  return at;
}

Result<bool> SchemaReader::Disjoint(const Branch& a, const Branch& b, int depth) {
  MOESERVE_RETURN_IF_ERROR(budget_->Tick(64));
  const std::optional<Branch> both = Meet(a, b);
  if (!both) return true;
  const uint32_t types = both->types;
  // Meet() has removed listed values that the other branch's list or types exclude.
  if (both->values && both->values->empty()) return true;
  if (types & (kNullType | kBooleanType | kArrayType)) return false;
  if (types & kNumberTypes) {
    const auto& min = both->number.min;
    const auto& max = both->number.max;
    const bool none = min && max &&
                      (min->value > max->value ||
                       (min->value == max->value && (min->exclusive || max->exclusive)));
    if (!none) return false;
  }
  if (types & kStringType) return false;
  if ((types & kObjectType) && depth < 3) {
    // Looks for a property that both branches require with values that cannot be equal.
    for (const std::string& name : both->required) {
      if (!a.required.contains(name) || !b.required.contains(name)) continue;
      // A property that refers back to this choice cannot be read at this point and is skipped.
      const Result<Branches> x = Read(a.PropertyNamed(name));
      const Result<Branches> y = Read(b.PropertyNamed(name));
      if (!x.ok() || !y.ok()) continue;
      bool differ = true;
      for (const Branch& one : *x) {
        for (const Branch& other : *y) {
          if (!differ) break;
          MOESERVE_ASSIGN_OR_RETURN(differ, Disjoint(one, other, depth + 1));
        }
      }
      if (differ) return true;
    }
    // Looks for a property that one branch requires and the other one forbids.
    const auto excludes = [&](const Branch& one, const Branch& other) {
      return std::any_of(one.required.begin(), one.required.end(), [&](const std::string& name) {
        const Result<Branches> values = Read(other.PropertyNamed(name));
        return values.ok() && values->empty();
      });
    };
    return excludes(a, b) || excludes(b, a);
  }
  return (types & kObjectType) == 0;
}

}  // namespace moeserve::structured
