// Typed access to the fields of a JSON request. `null` means absent throughout.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/text/token_id.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

// Returns the value of a field; null if it is absent or JSON null.
const nlohmann::json* FindField(const nlohmann::json& object, const char* name);

// Each returns no value for an absent field. InvalidArgument, naming the field: a value of another
// type or outside [min, max]. A float with zero fraction counts as an integer.
Result<std::optional<int64_t>> IntField(const nlohmann::json& object, const char* name, int64_t min,
                                        int64_t max);
Result<std::optional<double>> NumberField(const nlohmann::json& object, const char* name,
                                          double min, double max, bool min_excluded = false);
Result<std::optional<bool>> BoolField(const nlohmann::json& object, const char* name);
Result<std::optional<std::string>> StringField(const nlohmann::json& object, const char* name);

// Returns the integer that a JSON number holds; none if it has a fraction or is no number.
std::optional<int64_t> AsInteger(const nlohmann::json& value);

// Reads a list of token ids in [0, vocab_size); `param` names it in errors.
Result<std::vector<TokenId>> TokenIdList(const nlohmann::json& list, const std::string& param,
                                         int vocab_size);

}  // namespace moeserve::server
