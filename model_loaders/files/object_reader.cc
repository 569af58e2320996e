#include "model_loaders/files/object_reader.h"

#include <limits>
#include <utility>

namespace moeserve {

namespace {
using Json = nlohmann::json;
}  // namespace

ObjectReader::ObjectReader(const Json& json, std::string path, Problems* problems)
    : json_(json), path_(std::move(path)), problems_(problems), valid_(json.is_object()) {
  if (valid_) return;
  const std::string fault = Concat("expected an object, found ", ShowJson(json));
  problems_->Add(path_.empty() ? fault : Concat(path_, ": ", fault));
}

std::string ObjectReader::PathOf(std::string_view key) const {
  return path_.empty() ? std::string(key) : Concat(path_, '.', key);
}

void ObjectReader::Fault(std::string_view key, std::string_view expected, std::string_view found) {
  problems_->Add(Concat(PathOf(key), ": expected ", expected, ", found ", found));
}

const Json* ObjectReader::Optional(std::string_view key) {
  known_.emplace(key);
  if (!valid_) return nullptr;
  const auto it = json_.find(key);
  return it == json_.end() ? nullptr : &*it;
}

const Json* ObjectReader::Required(std::string_view key, std::string_view expected) {
  const Json* value = Optional(key);
  if (value == nullptr && valid_) Fault(key, expected, "no such key, and it has no default");
  return value;
}

int ObjectReader::Int(std::string_view key, std::optional<int> fallback) {
  const Json* value = fallback.has_value() ? Optional(key) : Required(key, "an integer");
  if (value == nullptr) return fallback.value_or(0);
  if (const std::optional<int> number = IntFrom(*value)) return *number;
  Fault(key, value->is_number_integer() ? "an integer below 2^31" : "an integer", ShowJson(*value));
  return fallback.value_or(0);
}

double ObjectReader::Real(std::string_view key, std::optional<double> fallback) {
  const Json* value = fallback.has_value() ? Optional(key) : Required(key, "a number");
  if (value == nullptr) return fallback.value_or(0.0);
  if (value->is_number()) return value->get<double>();
  Fault(key, "a number", ShowJson(*value));
  return fallback.value_or(0.0);
}

bool ObjectReader::Bool(std::string_view key, bool fallback) {
  const Json* value = Optional(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Fault(key, "true or false", ShowJson(*value));
  return fallback;
}

std::vector<double> ObjectReader::Reals(std::string_view key) {
  constexpr std::string_view kExpected = "a list of numbers";
  const Json* value = Required(key, kExpected);
  if (value == nullptr) return {};
  // Each of many layers may get a copy of the list.
  constexpr size_t kMaxReals = 4096;
  if (value->is_array() && value->size() > kMaxReals) {
    Fault(key, Concat("at most ", kMaxReals, " numbers"), std::to_string(value->size()));
    return {};
  }
  std::vector<double> numbers;
  bool valid = value->is_array();
  for (size_t i = 0; valid && i < value->size(); ++i) {
    valid = (*value)[i].is_number();
    if (valid) numbers.push_back((*value)[i].get<double>());
  }
  if (valid) return numbers;
  Fault(key, kExpected, ShowJson(*value));
  return {};
}

std::vector<int> ObjectReader::Ints(std::string_view key, size_t most) {
  const std::string expected = Concat("a list of at most ", most, " integers");
  const Json* value = Required(key, expected);
  if (value == nullptr) return {};
  std::vector<int> numbers;
  bool valid = value->is_array() && value->size() <= most;
  for (size_t i = 0; valid && i < value->size(); ++i) {
    const std::optional<int> number = IntFrom((*value)[i]);
    valid = number.has_value();
    if (valid) numbers.push_back(*number);
  }
  if (valid) return numbers;
  Fault(key, expected, ShowJson(*value));
  return {};
}

std::vector<std::string> ObjectReader::Texts(std::string_view key) {
  constexpr std::string_view kExpected = "a list of texts";
  const Json* value = Required(key, kExpected);
  if (value == nullptr) return {};
  std::vector<std::string> texts;
  bool valid = value->is_array();
  for (size_t i = 0; valid && i < value->size(); ++i) {
    valid = (*value)[i].is_string();
    if (valid) texts.push_back((*value)[i].get<std::string>());
  }
  if (valid) return texts;
  Fault(key, kExpected, ShowJson(*value));
  return {};
}

std::vector<std::string> ObjectReader::Unread() const {
  std::vector<std::string> unread;
  if (!valid_) return unread;
  for (const auto& [key, unused] : json_.items()) {
    if (!known_.contains(key)) unread.push_back(key);
  }
  return unread;
}

void ObjectReader::RefuseOthers(std::string_view of) {
  if (!valid_) return;
  std::string expected;
  for (const std::string& key : known_) expected.append(Concat(expected.empty() ? "" : ", ", key));
  for (const std::string& key : Unread()) {
    problems_->Add(Concat(Printable(PathOf(key)), ": expected one of the keys ", expected, of,
                          ", found an unknown key (--ignore-config ", Printable(PathOf(key)),
                          " loads the model without it)"));
  }
}

std::optional<int> IntFrom(const Json& json) {
  if (!json.is_number_integer()) return std::nullopt;
  if (json.is_number_unsigned()) {
    const uint64_t number = json.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int>::max())) return std::nullopt;
    return static_cast<int>(number);
  }
  const int64_t number = json.get<int64_t>();
  if (number < std::numeric_limits<int>::min() || number > std::numeric_limits<int>::max()) {
    return std::nullopt;
  }
  return static_cast<int>(number);
}

}  // namespace moeserve
