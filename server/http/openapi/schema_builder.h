// Functions that build schemas (JSON Schema, draft 2020-12) of OpenAPI 3.1.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "server/base/json.h"

namespace moeserve::server::http {

using SchemaJson = OrderedJson;

inline SchemaJson Described(SchemaJson schema, std::string_view meaning) {
  if (!meaning.empty()) schema["description"] = meaning;
  return schema;
}

inline SchemaJson TypeSchema(std::string_view type, std::string_view meaning = {}) {
  return Described({{"type", type}}, meaning);
}

template <typename Number>
SchemaJson RangeSchema(std::string_view type, Number min, Number max,
                       std::string_view meaning = {}) {
  return Described({{"type", type}, {"minimum", min}, {"maximum", max}}, meaning);
}

inline SchemaJson RefSchema(std::string_view name) {
  return {{"$ref", "#/components/schemas/" + std::string(name)}};
}

inline SchemaJson ListSchema(SchemaJson items, std::string_view meaning = {}) {
  SchemaJson out = {{"type", "array"}};
  out["items"] = std::move(items);
  return Described(std::move(out), meaning);
}

// Returns the schema of values that may also be null.
inline SchemaJson OrNull(SchemaJson schema) {
  const auto type = schema.find("type");
  if (type != schema.end() && type->is_string() && !schema.contains("enum")) {
    schema["type"] = SchemaJson::array({*type, "null"});
    return schema;
  }
  SchemaJson out;
  if (schema.contains("description")) {
    out["description"] = schema["description"];
    schema.erase("description");
  }
  out["anyOf"] = SchemaJson::array({std::move(schema), TypeSchema("null")});
  return out;
}

// Collects the fields of a request. Optional ones may be null, which means that they are absent.
class RequestSchema {
 public:
  RequestSchema& Required(std::string_view name, SchemaJson schema) {
    required_.push_back(name);
    properties_[std::string(name)] = std::move(schema);
    return *this;
  }
  RequestSchema& Optional(std::string_view name, SchemaJson schema) {
    properties_[std::string(name)] = OrNull(std::move(schema));
    return *this;
  }
  SchemaJson Take() {
    SchemaJson out = {{"type", "object"}};
    out["properties"] = std::move(properties_);
    if (!required_.empty()) out["required"] = std::move(required_);
    return out;
  }

 private:
  SchemaJson properties_ = SchemaJson::object();
  SchemaJson required_ = SchemaJson::array();
};

}  // namespace moeserve::server::http
