#include "server/tools/tool_parameters.h"

#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int kMaxReferences = 16;

ParameterKind Both(ParameterKind a, ParameterKind b) { return a == b ? a : ParameterKind::kAny; }

ParameterKind KindOfValue(const OrderedJson& value) {
  return value.is_string() ? ParameterKind::kString : ParameterKind::kJson;
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
  const auto is_text = [](const OrderedJson& type) {
    return type == "string" ? ParameterKind::kString : ParameterKind::kJson;
  };
  if (!schema.is_object() || depth > kMaxReferences) return ParameterKind::kAny;
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (type->is_string()) return is_text(*type);
    if (!type->is_array() || type->empty()) return ParameterKind::kAny;
    ParameterKind kind = is_text((*type)[0]);
    for (const OrderedJson& one : *type) kind = Both(kind, is_text(one));
    return kind;
  }
  if (const auto value = schema.find("const"); value != schema.end()) return KindOfValue(*value);
  if (const auto list = schema.find("enum");
      list != schema.end() && list->is_array() && !list->empty()) {
    ParameterKind kind = KindOfValue((*list)[0]);
    for (const OrderedJson& value : *list) kind = Both(kind, KindOfValue(value));
    return kind;
  }
  if (const auto reference = schema.find("$ref");
      reference != schema.end() && reference->is_string()) {
    const OrderedJson* target = Target(root, reference->get<std::string>());
    return target == nullptr ? ParameterKind::kAny : KindWithin(*target, root, depth + 1);
  }
  for (const char* key : {"anyOf", "oneOf"}) {
    const auto list = schema.find(key);
    if (list == schema.end() || !list->is_array() || list->empty()) continue;
    ParameterKind kind = KindWithin((*list)[0], root, depth + 1);
    for (const OrderedJson& one : *list) kind = Both(kind, KindWithin(one, root, depth + 1));
    return kind;
  }
  if (const auto list = schema.find("allOf");
      list != schema.end() && list->is_array() && list->size() == 1) {
    return KindWithin((*list)[0], root, depth + 1);
  }
  return ParameterKind::kAny;
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
  if (kind != ParameterKind::kString) {
    const size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
    const size_t end = text.find_last_not_of(" \t\r\n") + 1;
    const std::string_view value = begin < end ? text.substr(begin, end - begin) : "";
    const OrderedJson parsed = ParseOrdered(value);
    if (!parsed.is_discarded() && !(kind == ParameterKind::kAny && parsed.is_string())) {
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
