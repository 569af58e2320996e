#include "server/tools/tool_parameters.h"

#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

constexpr int kMaxReferences = 16;

unsigned TypeOf(const OrderedJson& value) {
  switch (value.type()) {
    case OrderedJson::value_t::null:
      return ParameterKind::kNull;
    case OrderedJson::value_t::boolean:
      return ParameterKind::kBoolean;
    case OrderedJson::value_t::number_integer:
    case OrderedJson::value_t::number_unsigned:
    case OrderedJson::value_t::binary:  // an integer of many digits (ParseOrdered())
      return ParameterKind::kInteger;
    case OrderedJson::value_t::number_float:
      return ParameterKind::kFraction;
    case OrderedJson::value_t::array:
      return ParameterKind::kArray;
    case OrderedJson::value_t::object:
      return ParameterKind::kObject;
    default:
      return ParameterKind::kString;
  }
}

// Returns the types that the keyword `type` names with one word.
ParameterKind KindNamed(const OrderedJson& type) {
  if (type == "string") return ParameterKind::kString;
  if (type == "null") return ParameterKind::kNull;
  if (type == "boolean") return ParameterKind::kBoolean;
  if (type == "integer") return ParameterKind::kInteger;
  if (type == "number") return ParameterKind::kInteger | ParameterKind::kFraction;
  if (type == "array") return ParameterKind::kArray;
  if (type == "object") return ParameterKind::kObject;
  return ParameterKind::kAll;
}

// Returns the schema that "#/a/b" points to; null if there is none.
const OrderedJson* Target(const OrderedJson& root, const std::string& reference) {
  if (!reference.starts_with("#/")) return nullptr;
  const OrderedJson* at = &root;
  size_t begin = 2;
  while (begin <= reference.size()) {
    const size_t end = std::min(reference.find('/', begin), reference.size());
    if (!at->is_object()) return nullptr;
    const auto member = at->find(reference.substr(begin, end - begin));
    if (member == at->end()) return nullptr;
    at = &*member;
    begin = end + 1;
  }
  return at;
}

ParameterKind KindWithin(const OrderedJson& schema, const OrderedJson& root, int depth) {
  const auto any_of = [](const OrderedJson& list, const auto& kind_of) {
    ParameterKind kind(0);
    for (const OrderedJson& one : list) kind = kind | kind_of(one);
    return kind;
  };
  if (!schema.is_object() || depth > kMaxReferences) return ParameterKind::kAll;
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (type->is_string()) return KindNamed(*type);
    if (!type->is_array() || type->empty()) return ParameterKind::kAll;
    return any_of(*type, KindNamed);
  }
  if (const auto value = schema.find("const"); value != schema.end()) return TypeOf(*value);
  if (const auto list = schema.find("enum");
      list != schema.end() && list->is_array() && !list->empty()) {
    return any_of(*list, [](const OrderedJson& value) { return ParameterKind(TypeOf(value)); });
  }
  if (const auto reference = schema.find("$ref");
      reference != schema.end() && reference->is_string()) {
    const OrderedJson* target = Target(root, reference->get<std::string>());
    return target == nullptr ? ParameterKind() : KindWithin(*target, root, depth + 1);
  }
  for (const char* key : {"anyOf", "oneOf"}) {
    const auto list = schema.find(key);
    if (list == schema.end() || !list->is_array() || list->empty()) continue;
    return any_of(*list, [&](const OrderedJson& one) { return KindWithin(one, root, depth + 1); });
  }
  if (const auto list = schema.find("allOf");
      list != schema.end() && list->is_array() && list->size() == 1) {
    return KindWithin((*list)[0], root, depth + 1);
  }
  return ParameterKind::kAll;
}

}  // namespace

ParameterKind KindOf(const OrderedJson& schema, const OrderedJson& root) {
  return KindWithin(schema, root, 0);
}

std::shared_ptr<const OfferedTools> Offered(const std::vector<Tool>& tools) {
  auto out = std::make_shared<OfferedTools>();
  for (const Tool& tool : tools) {
    OfferedTool& offered = out->emplace_back();
    offered.name = tool.name;
    if (tool.parameters.empty()) continue;
    const OrderedJson schema = ParseOrdered(tool.parameters);
    const auto properties = schema.is_object() ? schema.find("properties") : schema.end();
    if (properties == schema.end() || !properties->is_object()) continue;
    for (const auto& [name, value] : properties->items()) {
      offered.parameters[name] = KindOf(value, schema);
    }
  }
  return out;
}

std::string ParameterJson(ParameterKind kind, std::string_view text) {
  if (!kind.only_string()) {
    const size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
    const size_t end = text.find_last_not_of(" \t\r\n") + 1;
    const std::string_view value = begin < end ? text.substr(begin, end - begin) : "";
    const OrderedJson parsed = ParseOrdered(value);
    const bool json = !parsed.is_discarded();
    if (json && !kind.may_be_string()) return std::string(value);
    if (json && !parsed.is_string() && kind.Allows(TypeOf(parsed))) {
      return std::string(value);
    }
  }
  return '"' + EscapedPart(text) + '"';
}

std::string EscapedPart(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\r':
        out += "\\r";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += "\\u00";
          out += kDigits[static_cast<unsigned char>(c) / 16];
          out += kDigits[static_cast<unsigned char>(c) % 16];
        } else {
          out += c;
        }
    }
  }
  return out;
}

}  // namespace moeserve::server
