// Reads the text of a JSON schema.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/text/structured/constraint.h"

namespace moeserve::structured {

// Returns the schema, an object or a boolean. InvalidArgument if `text` is too long, nested too
// deep, or not valid JSON, or if a key stands twice in an object.
Result<nlohmann::json> ParseSchema(std::string_view text, const ConstraintLimits& limits);

// The order of the values in the text of a document. (The JSON library sorts the members of
// objects.)
class DocumentOrder {
 public:
  // `document` is what ParseSchema() returned for `text`.
  DocumentOrder(std::string_view text, const nlohmann::json& document);

  // Returns the place of a value in the document, from 1 on; 0 for the document and all values that
  // are not in it.
  int32_t PlaceOf(const nlohmann::json* value) const;
  // Returns the members of an object in the order of the text. Those of an object that is not in
  // the document are sorted by name.
  std::vector<std::pair<std::string, const nlohmann::json*>> Members(
      const nlohmann::json& object) const;

 private:
  std::unordered_map<const nlohmann::json*, int32_t> places_;
};

}  // namespace moeserve::structured
