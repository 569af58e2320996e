// The keywords of JSON Schema that restrict a value by themselves.
#include <absl/algorithm/container.h>

#include <algorithm>
#include <string_view>

#include "base/error_text.h"
#include "engine/text/structured/automata/formats.h"
#include "engine/text/structured/schemas/schema_reader.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Error messages cut each step of a JSON pointer to this number of bytes.
constexpr size_t kMaxStep = 64;
// Largest number of places after the point of multipleOf.
constexpr int kMaxDecimals = 12;

constexpr std::string_view kAnnotations[] = {
    "title",    "description",      "default",         "examples",     "$schema", "$id",
    "$comment", "deprecated",       "readOnly",        "writeOnly",    "$defs",   "definitions",
    "$anchor",  "contentMediaType", "contentEncoding", "contentSchema"};

// Keywords that other functions of SchemaReader read.
constexpr std::string_view kRead[] = {"$ref",
                                      "allOf",
                                      "anyOf",
                                      "oneOf",
                                      "not",
                                      "if",
                                      "then",
                                      "else",
                                      "dependencies",
                                      "dependentRequired",
                                      "dependentSchemas",
                                      "properties",
                                      "additionalProperties",
                                      "patternProperties",
                                      "propertyNames",
                                      "items",
                                      "prefixItems",
                                      "additionalItems",
                                      "contains",
                                      "minContains",
                                      "maxContains"};

// Keywords that restrict values and are not supported.
constexpr std::string_view kUnsupported[] = {
    "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor",
    "$recursiveRef",    "$recursiveAnchor",      "disallow",    "extends",
    "divisibleBy"};

// Formats of JSON Schema that are not supported.
constexpr std::string_view kUnsupportedFormats[] = {"uri-template"};

}  // namespace

// Returns "/" and `step`, escaped as in a JSON pointer. A step of more than kMaxStep bytes is first
// cut to at most that many, in whole characters; "..." marks the cut.
std::string EscapedStep(std::string_view step) {
  std::string out = "/";
  if (step.size() > kMaxStep) {
    size_t end = kMaxStep;
    while ((step[end] & 0xC0) == 0x80) --end;
    return EscapedStep(step.substr(0, end)) + "...";
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

Status SchemaReader::ReadProperties(const json* schema, const std::string& key, const json& value,
                                    ObjectPart* object, Branch* own) {
  if (key == "additionalProperties") {
    object->additional = &value;
    return Enter(schema, "/" + key, &value);
  }
  if (key == "propertyNames") {
    own->names.push_back(&value);
    return Enter(schema, "/" + key, &value);
  }
  if (key != "properties" && key != "patternProperties") return absl::OkStatus();
  if (!value.is_object()) return Error(schema, key + " must be an object");
  for (const auto& [name, child] : value.items()) {
    MOESERVE_RETURN_IF_ERROR(Enter(schema, "/" + key + EscapedStep(name), &child));
    if (key == "patternProperties" && name.size() > limits_.pattern_bytes) {
      return Error(schema, Concat("a pattern is longer than ", limits_.pattern_bytes, " bytes"));
    }
  }
  (key == "properties" ? object->properties : object->patterns) = &value;
  return absl::OkStatus();
}

Status SchemaReader::ReadItems(const json* schema, const std::string& key, const json& value,
                               ArrayPart* array, Branch* own) {
  // Up to draft 2019-09, a list under "items" is what "prefixItems" is now, and "additionalItems"
  // is the schema of the other items.
  const auto items = schema->find("items");
  const bool old_list = items != schema->end() && items->is_array();
  if ((key == "items" && !old_list) || (key == "additionalItems" && old_list)) {
    array->items = &value;
    return Enter(schema, "/" + key, &value);
  }
  if (key == "prefixItems" || key == "items") {
    if (!value.is_array()) return Error(schema, "prefixItems must be an array");
    if (key == "prefixItems" && old_list) {
      return Error(schema, "items must be one schema beside prefixItems");
    }
    for (size_t i = 0; i < value.size(); ++i) {
      MOESERVE_RETURN_IF_ERROR(Enter(schema, Concat("/", key, "/", i), &value[i]));
      array->prefix.push_back(&value[i]);
    }
    return absl::OkStatus();
  }
  if (key != "contains") return absl::OkStatus();
  MOESERVE_RETURN_IF_ERROR(Enter(schema, "/" + key, &value));
  ContainsPart part;
  part.schema = &value;
  for (const auto& [name, target] :
       {std::pair("minContains", &part.min), std::pair("maxContains", &part.max)}) {
    const auto it = schema->find(name);
    if (it == schema->end()) continue;
    MOESERVE_ASSIGN_OR_RETURN(*target, ReadCount(schema, name, *it));
  }
  if (part.min > 0 || part.max < kNoLimit) own->contains.push_back(part);
  return absl::OkStatus();
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
  const bool upper = key == "maximum" || key == "exclusiveMaximum";
  bool exclusive = key.starts_with("exclusive");
  // In draft 4 and OpenAPI 3.0, "exclusiveMinimum" is a boolean that tells about "minimum".
  if (exclusive && value.is_boolean()) return absl::OkStatus();
  if (!value.is_number()) return Error(schema, key + " must be a number");
  if (!exclusive) {
    const auto it = schema->find(upper ? "exclusiveMaximum" : "exclusiveMinimum");
    exclusive = it != schema->end() && *it == json(true);
  }
  auto& bound = upper ? branch->number.max : branch->number.min;
  const NumberBound read{DecimalOf(value), exclusive};
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
  const int64_t digits = static_cast<int64_t>(number.digits.size());
  if (std::max(number.point, digits) > 4 || number.point < -kMaxDecimals) {
    return Error(
        schema, Concat("multipleOf is supported for numbers of at most 4 digits only, and at most ",
                       kMaxDecimals, " places after the point"));
  }
  if (number.is_integer()) {
    branch->number.multiple_of = std::stoll(number.Plain());
  } else {
    branch->multiples.insert(number);
  }
  return absl::OkStatus();
}

Status SchemaReader::ReadText(const json* schema, const std::string& key, const json& value,
                              Branch* branch) {
  if (key == "format") {
    if (!value.is_string()) return Error(schema, "format must be a string");
    const auto& format = value.get_ref<const std::string&>();
    if (FormatPattern(format)) {
      branch->formats.insert(format);
    } else if (strict_ || absl::c_linear_search(kUnsupportedFormats, format)) {
      return Error(schema, Concat("format is supported for ", SupportedFormats(), " only"));
    }
    // By the rules of JSON Schema an unknown format, such as OpenAPI's "int64", restricts nothing.
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
  if (absl::c_linear_search(kUnsupported, key)) {
    return Error(schema, "\"" + key + "\" is not supported");
  }
  if (absl::c_linear_search(kRead, key) || absl::c_linear_search(kAnnotations, key)) {
    return absl::OkStatus();
  }
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

}  // namespace moeserve::structured
