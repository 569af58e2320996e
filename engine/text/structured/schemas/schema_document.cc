#include "engine/text/structured/schemas/schema_document.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

// Numbers the values of a document while its text is read again.
class PlaceReader : public nlohmann::json_sax<nlohmann::json> {
  using json = nlohmann::json;

 public:
  PlaceReader(const json& document, std::unordered_map<const json*, int32_t>* places)
      : member_(&document), places_(*places) {}

  bool null() override { return Next(); }
  bool boolean(bool) override { return Next(); }
  bool number_integer(number_integer_t) override { return Next(); }
  bool number_unsigned(number_unsigned_t) override { return Next(); }
  bool number_float(number_float_t, const string_t&) override { return Next(); }
  bool string(string_t&) override { return Next(); }
  bool binary(binary_t&) override { return Next(); }
  bool start_object(std::size_t) override { return Next() && Open(); }
  bool start_array(std::size_t) override { return Next() && Open(); }
  bool key(string_t& name) override {
    const auto it = open_.back().value->find(name);
    if (it == open_.back().value->end()) return false;
    member_ = &*it;
    return true;
  }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override {
    return false;
  }

 private:
  struct Container {
    const json* value;
    size_t items;  // read so far, of an array
  };

  bool Next() {
    current_ = member_;
    if (!open_.empty() && open_.back().value->is_array()) {
      Container& array = open_.back();
      if (array.items >= array.value->size()) return false;
      current_ = &(*array.value)[array.items++];
    }
    if (!open_.empty()) places_.emplace(current_, static_cast<int32_t>(places_.size()) + 1);
    return true;
  }
  bool Open() {
    open_.push_back({current_, 0});
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  const json* member_;  // the value that follows in an object, or the document
  const json* current_ = nullptr;
  std::vector<Container> open_;
  std::unordered_map<const json*, int32_t>& places_;
};

}  // namespace

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

DocumentOrder::DocumentOrder(std::string_view text, const nlohmann::json& document) {
  PlaceReader reader(document, &places_);
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
}

int32_t DocumentOrder::PlaceOf(const nlohmann::json* value) const {
  const auto it = places_.find(value);
  return it == places_.end() ? 0 : it->second;
}

std::vector<std::pair<std::string, const nlohmann::json*>> DocumentOrder::Members(
    const nlohmann::json& object) const {
  std::vector<std::pair<std::string, const nlohmann::json*>> out;
  for (const auto& [name, value] : object.items()) out.push_back({name, &value});
  std::stable_sort(out.begin(), out.end(), [&](const auto& a, const auto& b) {
    return PlaceOf(a.second) < PlaceOf(b.second);
  });
  return out;
}

}  // namespace moeserve::structured
