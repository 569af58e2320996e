#include "server/base/json_fields.h"

#include <cmath>
#include <limits>
#include <sstream>

#include "base/message.h"
#include "model_loaders/files/strict_json.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

// Formats a wrong value for an error message. Truncates and escapes the text, so that whole prompts
// do not end up in messages and logs.
std::string Shown(const nlohmann::json& value) {
  std::string text = ShowJson(value);
  constexpr size_t kMaxBytes = 64;
  if (text.size() > kMaxBytes) text = Concat(text.substr(0, kMaxBytes), "...");
  return text;
}

std::string NumberText(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

absl::Status WrongType(const char* name, const char* expected, const nlohmann::json& found) {
  return InvalidValue(name, Concat("'", name, "': expected ", expected, ", found ", Shown(found)));
}

}  // namespace

const nlohmann::json* FindField(const nlohmann::json& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end() || it->is_null()) return nullptr;
  return &*it;
}

const std::string* FindText(const nlohmann::json& object, const char* name) {
  const nlohmann::json* value = object.is_object() ? FindField(object, name) : nullptr;
  return value != nullptr && value->is_string() ? &value->get_ref<const std::string&>() : nullptr;
}

std::optional<int64_t> AsInteger(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t u = value.get<uint64_t>();
    if (u > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(u);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const double d = value.get<double>();
    // 2^63 is the smallest double above the range of int64_t.
    if (std::trunc(d) == d && d >= -0x1p63 && d < 0x1p63) return static_cast<int64_t>(d);
  }
  return std::nullopt;
}

Result<std::optional<int64_t>> IntField(const nlohmann::json& object, const char* name, int64_t min,
                                        int64_t max) {
  const nlohmann::json* field = FindField(object, name);
  if (field == nullptr) return std::optional<int64_t>();
  const std::optional<int64_t> value = AsInteger(*field);
  if (!value || *value < min || *value > max) {
    const bool whole_range = min == std::numeric_limits<int64_t>::min();
    return InvalidValue(
        name, whole_range
                  ? Concat("'", name, "': expected a signed 64-bit integer, found ", Shown(*field))
                  : Concat("'", name, "': expected an integer from ", min, " to ", max, ", found ",
                           Shown(*field)));
  }
  return std::optional<int64_t>(*value);
}

Result<std::optional<double>> NumberField(const nlohmann::json& object, const char* name,
                                          double min, double max, bool min_excluded) {
  const nlohmann::json* field = FindField(object, name);
  if (field == nullptr) return std::optional<double>();
  if (field->is_number()) {
    const double value = field->get<double>();
    if (value >= min && value <= max && !(min_excluded && value == min)) {
      return std::optional<double>(value);
    }
  }
  return InvalidValue(name,
                      Concat("'", name, "': expected a number ", min_excluded ? "above " : "from ",
                             NumberText(min), " to ", NumberText(max), ", found ", Shown(*field)));
}

Result<std::optional<bool>> BoolField(const nlohmann::json& object, const char* name) {
  const nlohmann::json* field = FindField(object, name);
  if (field == nullptr) return std::optional<bool>();
  if (!field->is_boolean()) return WrongType(name, "true or false", *field);
  return std::optional<bool>(field->get<bool>());
}

Result<std::optional<std::string>> StringField(const nlohmann::json& object, const char* name) {
  const nlohmann::json* field = FindField(object, name);
  if (field == nullptr) return std::optional<std::string>();
  if (!field->is_string()) return WrongType(name, "a string", *field);
  return std::optional<std::string>(field->get<std::string>());
}

Result<std::vector<TokenId>> TokenIdList(const nlohmann::json& list, const std::string& param,
                                         int vocab_size) {
  if (!list.is_array()) {
    return InvalidValue(param,
                        Concat("'", param, "': expected a list of token ids, found ", Shown(list)));
  }
  std::vector<TokenId> ids;
  ids.reserve(list.size());
  for (const nlohmann::json& item : list) {
    const std::optional<int64_t> id = AsInteger(item);
    if (!id || *id < 0 || *id >= vocab_size) {
      return InvalidValue(param, Concat("'", param, "': expected token ids from 0 to ",
                                        vocab_size - 1, ", found ", Shown(item)));
    }
    ids.push_back(static_cast<TokenId>(*id));
  }
  return ids;
}

}  // namespace moeserve::server
