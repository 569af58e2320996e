#include "model_loaders/architectures/architecture.h"

#include <algorithm>
#include <charconv>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "engine/spec/spec_limits.h"

namespace moeserve {
namespace {

constexpr JsonLimits kArchitectureLimits = {
    .max_bytes = size_t{64} << 20, .max_depth = 16, .max_values = size_t{4} << 20};

// Returns the member "NAME" or "NAME[INDEX]" of an object; null if there is none.
template <typename Json>
Json* Member(Json& object, std::string_view name) {
  if (const auto found = object.find(name); found != object.end()) return &*found;
  const size_t bracket = name.find('[');
  if (bracket == std::string_view::npos || !name.ends_with(']')) return nullptr;
  size_t index = 0;
  const char* const end = name.data() + name.size() - 1;
  const auto [last, error] = std::from_chars(name.data() + bracket + 1, end, index);
  const auto list = object.find(name.substr(0, bracket));
  const bool found = error == std::errc() && last == end && list != object.end() &&
                     list->is_array() && index < list->size();
  return found ? &(*list)[index] : nullptr;
}

template <typename Json>
void RemoveFrom(const std::vector<std::string>& ignored, Json* config) {
  for (const std::string& key : ignored) {
    Json* object = config;
    std::string_view rest = key;
    while (object != nullptr && object->is_object() && object->erase(std::string(rest)) == 0) {
      const size_t dot = rest.find('.');
      if (dot == std::string_view::npos) break;
      object = Member(*object, rest.substr(0, dot));
      rest.remove_prefix(dot + 1);
    }
  }
}

// Returns the text with every bare Infinity in the list of the key "time_step_limit", which is not
// JSON, in the other spelling that files have for it.
std::string SpellInfinity(std::string_view text) {
  constexpr std::string_view kKey = "\"time_step_limit\"", kBare = "Infinity";
  constexpr std::string_view kSpaces = " \t\r\n";
  std::string out;
  for (;;) {
    const size_t key = text.find(kKey);
    if (key == text.npos) return out.append(text);
    size_t begin = text.find_first_not_of(kSpaces, key + kKey.size());
    if (begin != text.npos && text[begin] == ':')
      begin = text.find_first_not_of(kSpaces, begin + 1);
    const bool list = begin != text.npos && text[begin] == '[';
    const size_t end = list ? text.find_first_of("]{\"", begin) : begin;
    out.append(text.substr(0, std::min(begin, text.size())));
    if (begin == text.npos) return out;
    std::string_view inside = text.substr(begin, std::min(end, text.size()) - begin);
    for (size_t at; (at = inside.find(kBare)) != inside.npos;) {
      out.append(inside.substr(0, at)).append("{\"__float__\":\"Infinity\"}");
      inside.remove_prefix(at + kBare.size());
    }
    out.append(inside);
    text.remove_prefix(std::min(end, text.size()));
  }
}

}  // namespace

std::string ModelTypes(ArchitectureList architectures) {
  std::string types;
  for (size_t i = 0; i < architectures.size(); ++i) {
    if (i > 0) types.append(i + 1 == architectures.size() ? " or " : ", ");
    types.append(Quoted(architectures[i]->model_type));
  }
  return types;
}

Result<nlohmann::json> ParseConfigJson(std::string_view text) {
  const std::string spelled = SpellInfinity(text);
  Result<nlohmann::json> json = ParseStrictJson(spelled, kArchitectureLimits);
  if (!json.ok()) return Prefixed(Concat(kConfigFile, ": "), json.status());
  return json;
}

bool Architecture::Recognizes(const nlohmann::json& config) const {
  return recognizes == nullptr ? HasModelType(config, model_type) : recognizes(config);
}

bool HasModelType(const nlohmann::json& config, std::string_view model_type) {
  const auto it = config.find("model_type");
  return it != config.end() && it->is_string() && it->get_ref<const std::string&>() == model_type;
}

void RemoveKeys(const std::vector<std::string>& ignored, nlohmann::json* config) {
  RemoveFrom(ignored, config);
}

void RemoveKeys(const std::vector<std::string>& ignored, nlohmann::ordered_json* config) {
  RemoveFrom(ignored, config);
}

std::string IgnoreHint(std::string_view key) {
  return Concat(" (--ignore-config ", Printable(key), " loads the model without it)");
}

std::string UnknownKey(std::string_view key, std::string_view found, std::string_view what) {
  return Concat(Printable(key), ": expected no such ", what,
                ", because this server does not know whether it changes the "
                "model's answers; found ",
                found, IgnoreHint(key));
}

absl::Status CheckListLengths(const NamedCount& layers, const NamedCount& experts) {
  if (layers.value < 1 || layers.value > kMaxLayers) {
    return absl::InvalidArgumentError(Concat(kConfigFile, ": ", layers.key,
                                             ": expected an integer in [1, ", kMaxLayers,
                                             "], found ", layers.value));
  }
  const int64_t most = std::min<int64_t>(kMaxExperts, kMaxExpertsOfModel / layers.value);
  if (experts.value < 0 || experts.value > most) {
    return absl::InvalidArgumentError(
        Concat(kConfigFile, ": ", experts.key, ": expected an integer in [0, ", most, "] (",
               layers.key, " is ", layers.value, "), found ", experts.value));
  }
  return absl::OkStatus();
}

absl::Status ValidateConfig(const CheckpointConfig& config) {
  const absl::Status status = Validate(config.spec);
  if (status.ok()) return status;
  const absl::string_view message = status.message();
  return absl::Status(status.code(),
                      Concat(kConfigFile, ": ", config.AsInFile({message.data(), message.size()})));
}

}  // namespace moeserve
