// Functions that build schemas (JSON Schema, draft 2020-12) of OpenAPI 3.1.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "server/base/json.h"

namespace moeserve::server::http {

inline OrderedJson Described(OrderedJson schema, std::string_view meaning) {
  if (!meaning.empty()) schema["description"] = meaning;
  return schema;
}

inline OrderedJson TypeSchema(std::string_view type, std::string_view meaning = {}) {
  return Described({{"type", type}}, meaning);
}

template <typename Number>
OrderedJson RangeSchema(std::string_view type, Number min, Number max,
                        std::string_view meaning = {}) {
  return Described({{"type", type}, {"minimum", min}, {"maximum", max}}, meaning);
}

inline OrderedJson RefSchema(std::string_view name) {
  return {{"$ref", "#/components/schemas/" + std::string(name)}};
}

inline OrderedJson ListSchema(OrderedJson items, std::string_view meaning = {}) {
  OrderedJson out = {{"type", "array"}};
  out["items"] = std::move(items);
  return Described(std::move(out), meaning);
}

// Returns the schema of values that may also be null.
inline OrderedJson OrNull(OrderedJson schema) {
  const auto type = schema.find("type");
  if (type != schema.end() && type->is_string() && !schema.contains("enum")) {
    schema["type"] = OrderedJson::array({*type, "null"});
    return schema;
  }
  OrderedJson out;
  if (schema.contains("description")) {
    out["description"] = schema["description"];
    schema.erase("description");
  }
  out["anyOf"] = OrderedJson::array({std::move(schema), TypeSchema("null")});
  return out;
}

// Collects the fields of a request. Optional ones may be null, which means that they are absent.
class RequestSchema {
 public:
  RequestSchema& Required(std::string_view name, OrderedJson schema) {
    required_.push_back(name);
    properties_[std::string(name)] = std::move(schema);
    return *this;
  }
  RequestSchema& Optional(std::string_view name, OrderedJson schema) {
    properties_[std::string(name)] = OrNull(std::move(schema));
    return *this;
  }
  OrderedJson Take() {
    OrderedJson out = {{"type", "object"}};
    out["properties"] = std::move(properties_);
    if (!required_.empty()) out["required"] = std::move(required_);
    return out;
  }

 private:
  OrderedJson properties_ = OrderedJson::object();
  OrderedJson required_ = OrderedJson::array();
};

}  // namespace moeserve::server::http
