#include "server/http/openapi/schema_text.h"

#include <string>
#include <utility>
#include <vector>

#include "server/http/openapi/schema_builder.h"

namespace moeserve::server::http {
namespace {

// Splits at " | " outside brackets.
std::vector<std::string_view> Alternatives(std::string_view text) {
  std::vector<std::string_view> out;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '[') ++depth;
    if (text[i] == ']') --depth;
    if (depth > 0 || !text.substr(i).starts_with(" | ")) continue;
    out.push_back(text.substr(begin, i - begin));
    begin = i + 3;
  }
  out.push_back(text.substr(begin));
  return out;
}

OrderedJson ConstantsSchema(const std::vector<std::string_view>& constants) {
  OrderedJson values = OrderedJson::array();
  for (const std::string_view text : constants) {
    values.push_back(text == "null" ? OrderedJson(nullptr)
                                    : OrderedJson(text.substr(1, text.size() - 2)));
  }
  if (values.size() == 1) return {{"const", values[0]}};
  return {{"enum", std::move(values)}};
}

OrderedJson TextSchema(std::string_view text);

OrderedJson AlternativeSchema(std::string_view text) {
  if (text.starts_with('[')) return ListSchema(TextSchema(text.substr(1, text.size() - 2)));
  if (text[0] >= 'A' && text[0] <= 'Z') return RefSchema(text);
  if (text == "count") return {{"type", "integer"}, {"minimum", 0}};
  if (text == "time") return {{"type", "string"}, {"format", "date-time"}};
  if (text == "any") return true;
  if (text == "true" || text == "false") return {{"const", text == "true"}};
  constexpr std::string_view kBound = " >= ";
  const size_t bound = text.find(kBound);
  OrderedJson out = TypeSchema(text.substr(0, bound));
  if (bound != std::string_view::npos) {
    out["minimum"] = OrderedJson::parse(text.substr(bound + kBound.size()));
  }
  return out;
}

OrderedJson TextSchema(std::string_view text) {
  const std::vector<std::string_view> alternatives = Alternatives(text);
  if (text.starts_with('\'')) return ConstantsSchema(alternatives);
  if (alternatives.size() == 1) return AlternativeSchema(text);
  if (alternatives.size() == 2 && alternatives[1] == "null") {
    return OrNull(AlternativeSchema(alternatives[0]));
  }
  OrderedJson types = OrderedJson::array();
  OrderedJson others = OrderedJson::array();
  for (const std::string_view alternative : alternatives) {
    OrderedJson schema = AlternativeSchema(alternative);
    if (schema.size() == 1 && schema.contains("type")) {
      types.push_back(schema["type"]);
    } else {
      others.push_back(std::move(schema));
    }
  }
  OrderedJson plain = {{"type", types.size() == 1 ? types[0] : types}};
  if (others.empty()) return plain;
  others.insert(others.begin(), std::move(plain));
  return {{"anyOf", std::move(others)}};
}

OrderedJson SchemaOf(const OrderedJson& notation);

OrderedJson ObjectSchema(const OrderedJson& members) {
  OrderedJson out = {{"type", "object"}};
  for (const auto& [key, member] : members.items()) {
    if (key == "...") {
      out["additionalProperties"] = member == "none" ? OrderedJson(false) : SchemaOf(member);
      continue;
    }
    const bool optional = key.ends_with('?');
    const std::string name = key.substr(0, key.size() - (optional ? 1 : 0));
    if (!optional) out["required"].push_back(name);
    if (member != "any") out["properties"][name] = SchemaOf(member);
  }
  return out;
}

OrderedJson SchemaOf(const OrderedJson& notation) {
  if (notation.is_string()) return TextSchema(notation.get_ref<const std::string&>());
  if (notation.is_object()) return ObjectSchema(notation);
  OrderedJson out = SchemaOf(notation[0]);
  if (notation.size() == 1) return ListSchema(std::move(out));
  if (out.is_boolean()) out = OrderedJson::object();  // "any", to which keywords are added
  for (size_t i = 1; i < notation.size(); ++i) {
    const OrderedJson& addition = notation[i];
    if (addition.is_null()) {
      out = OrNull(std::move(out));
    } else if (addition.is_string()) {
      out["description"] = addition;
    } else {
      out.update(addition);
    }
  }
  return out;
}

}  // namespace

OrderedJson ParseSchemas(std::string_view text) {
  OrderedJson out = OrderedJson::object();
  const OrderedJson notations = OrderedJson::parse(text);
  for (const auto& [name, notation] : notations.items()) {
    out[name] = SchemaOf(notation);
  }
  return out;
}

}  // namespace moeserve::server::http
