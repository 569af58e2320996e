#include "server/base/json_fields.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "server/base/api_error.h"
#include "server/base/json_text.h"

namespace moeserve::server {
namespace {

// Builds the value of a text that the JSON library reads. The library's own builder searches all
// members of an object before it adds one.
class OrderedBuilder final : public nlohmann::json_sax<OrderedJson> {
 public:
  explicit OrderedBuilder(int max_depth) : max_depth_(max_depth) {}

  OrderedJson& root() { return root_; }

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t& text) override {
    if (text.find_first_not_of("-0123456789") != std::string::npos) return Add(value);
    return Add(OrderedJson::binary({text.begin(), text.end()}));
  }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return Open(OrderedJson::object()); }
  bool start_array(size_t) override { return Open(OrderedJson::array()); }
  bool key(string_t& name) override {
    name_ = std::move(name);
    return true;
  }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  // Adds a value to the innermost container. Pointers to open containers stay valid, because
  // nothing is added to the containers around them.
  OrderedJson* Place(OrderedJson value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    OrderedJson& inner = *open_.back();
    if (inner.is_array()) {
      inner.push_back(std::move(value));
      return &inner.back();
    }
    AppendMember(inner, std::move(name_), std::move(value));
    return &inner.get_ref<OrderedJson::object_t&>().back().second;
  }
  bool Add(OrderedJson value) {
    Place(std::move(value));
    return true;
  }
  bool Open(OrderedJson container) {
    if (static_cast<int>(open_.size()) >= max_depth_) return false;
    open_.push_back(Place(std::move(container)));
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  const int max_depth_;
  OrderedJson root_;
  std::vector<OrderedJson*> open_;
  std::string name_;
};

// Formats a wrong value for an error message. Truncates and escapes the text, so that whole prompts
// do not end up in messages and logs.
std::string Shown(const Json& value) {
  std::string text = ShowJson(value);
  constexpr size_t kMaxBytes = 64;
  if (text.size() > kMaxBytes) text = Concat(text.substr(0, kMaxBytes), "...");
  return text;
}

bool HasBigInteger(const OrderedJson& value) {
  if (value.is_binary()) return true;
  return value.is_structured() && std::any_of(value.begin(), value.end(), HasBigInteger);
}

std::string Dump(const OrderedJson& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace);
}

void DumpWithDigits(const OrderedJson& value, std::string& out) {
  const char* before = "";
  if (value.is_binary()) {
    out.append(value.get_binary().begin(), value.get_binary().end());
  } else if (value.is_object()) {
    out += '{';
    for (const auto& [name, item] : value.items()) {
      out += std::exchange(before, ",") + Dump(name) + ':';
      DumpWithDigits(item, out);
    }
    out += '}';
  } else if (value.is_array()) {
    out += '[';
    for (const OrderedJson& item : value) {
      out += std::exchange(before, ",");
      DumpWithDigits(item, out);
    }
    out += ']';
  } else {
    out += Dump(value);
  }
}

std::string NumberText(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

absl::Status WrongType(const char* name, const char* expected, const Json& found) {
  return InvalidValue(name, Concat("'", name, "': expected ", expected, ", found ", Shown(found)));
}

}  // namespace

const Json* FindField(const Json& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end() || it->is_null()) return nullptr;
  return &*it;
}

const std::string* FindText(const Json& object, const char* name) {
  const Json* value = object.is_object() ? FindField(object, name) : nullptr;
  return value != nullptr && value->is_string() ? &value->get_ref<const std::string&>() : nullptr;
}

std::optional<int64_t> AsInteger(const Json& value) {
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

Result<std::optional<int64_t>> IntField(const Json& object, const char* name, int64_t min,
                                        int64_t max) {
  const Json* field = FindField(object, name);
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

Result<std::optional<double>> NumberField(const Json& object, const char* name, double min,
                                          double max, bool min_excluded) {
  const Json* field = FindField(object, name);
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

Result<std::optional<bool>> BoolField(const Json& object, const char* name) {
  const Json* field = FindField(object, name);
  if (field == nullptr) return std::optional<bool>();
  if (!field->is_boolean()) return WrongType(name, "true or false", *field);
  return std::optional<bool>(field->get<bool>());
}

Result<std::optional<std::string>> StringField(const Json& object, const char* name) {
  const Json* field = FindField(object, name);
  if (field == nullptr) return std::optional<std::string>();
  if (!field->is_string()) return WrongType(name, "a string", *field);
  return std::optional<std::string>(field->get<std::string>());
}

Result<std::vector<TokenId>> TokenIdList(const Json& list, const std::string& param,
                                         int vocab_size) {
  if (!list.is_array()) {
    return InvalidValue(param,
                        Concat("'", param, "': expected a list of token ids, found ", Shown(list)));
  }
  std::vector<TokenId> ids;
  ids.reserve(list.size());
  for (const Json& item : list) {
    const std::optional<int64_t> id = AsInteger(item);
    if (!id || *id < 0 || *id >= vocab_size) {
      return InvalidValue(param, Concat("'", param, "': expected token ids from 0 to ",
                                        vocab_size - 1, ", found ", Shown(item)));
    }
    ids.push_back(static_cast<TokenId>(*id));
  }
  return ids;
}

OrderedJson OrderedMember(const Json& body, std::string_view text, const std::string& name) {
  const Json* value = FindField(body, name.c_str());
  if (value == nullptr) return nullptr;
  const auto part = value->is_structured() ? MemberText(text, name) : std::nullopt;
  return part ? ParseOrdered(*part) : OrderedJson(*value);
}

std::string DumpOrdered(const OrderedJson& value) {
  if (!HasBigInteger(value)) return Dump(value);
  std::string out;
  DumpWithDigits(value, out);
  return out;
}

OrderedJson ParseOrdered(std::string_view text, int max_depth) {
  OrderedBuilder builder(max_depth);
  if (!OrderedJson::sax_parse(text, &builder)) return OrderedJson(OrderedJson::value_t::discarded);
  return std::move(builder.root());
}

void AppendMember(OrderedJson& object, std::string name, OrderedJson value) {
  object.get_ref<OrderedJson::object_t&>().emplace_back(std::move(name), std::move(value));
}

}  // namespace moeserve::server
