#include "engine/text/structured/schemas/schema_document.h"

#include <set>
#include <string>
#include <vector>

#include "base/message.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {

Result<nlohmann::json> ParseSchema(std::string_view schema, const ConstraintLimits& limits) {
  using nlohmann::json;
  if (schema.size() > limits.schema_bytes) {
    return absl::InvalidArgumentError(
        Concat("schema: ", schema.size(), " bytes, more than ", limits.schema_bytes));
  }
  if (!IsValidUtf8(schema)) return absl::InvalidArgumentError("schema: not UTF-8");
  // A schema inside another schema is at most three levels of JSON values deeper; listed values may
  // add some levels.
  const int max_depth = 3 * limits.schema_nesting + 32;
  bool too_deep = false;
  std::string duplicate;
  // Keys so far of each object that encloses the current value.
  std::vector<std::set<std::string>> keys;
  json document;
  try {
    document = json::parse(
        schema.begin(), schema.end(),
        [&](int depth, json::parse_event_t event, json& value) {
          too_deep |= depth > max_depth;
          if (event == json::parse_event_t::object_start) keys.emplace_back();
          if (event == json::parse_event_t::object_end) keys.pop_back();
          if (event == json::parse_event_t::key && duplicate.empty() &&
              !keys.back().insert(value.get<std::string>()).second) {
            duplicate = value.dump();
          }
          return !too_deep;
        },
        /*allow_exceptions=*/false);
  } catch (const std::exception&) {
    return absl::InvalidArgumentError("schema: not valid JSON");
  }
  if (too_deep) return absl::InvalidArgumentError("schema: values are nested too deep");
  if (!duplicate.empty()) {
    return absl::InvalidArgumentError("schema: the key " + duplicate.substr(0, 64) +
                                      " stands twice in one object");
  }
  if (document.is_discarded()) return absl::InvalidArgumentError("schema: not valid JSON");
  if (!document.is_object() && !document.is_boolean()) {
    return absl::InvalidArgumentError("schema: must be an object or a boolean");
  }
  return document;
}

}  // namespace moeserve::structured
