#include "server/keys/key_file.h"

#include <openssl/crypto.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/time/time.h"
#include "base/error_text.h"
#include "base/strict_json.h"
#include "engine/request.h"
#include "model_loaders/files/mapped_file.h"
#include "server/base/json.h"
#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

constexpr size_t kMaxFileBytes = size_t{4} << 20;
constexpr size_t kMaxKeys = 10'000;  // each key has series at /metrics
constexpr size_t kMaxNameBytes = 64;
constexpr size_t kMaxKeyBytes = 1024;
constexpr size_t kMaxModels = 1024;
constexpr int64_t kMostPerMinute = 1'000'000'000'000;
constexpr int64_t kMostConcurrent = 1'000'000;

bool IsName(std::string_view text) {
  if (text.empty() || text.size() > kMaxNameBytes) return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' ||
           c == '_' || c == '-';
  });
}

// Returns a word from the file for an error message. Only a text that looks like the name of a
// field or a scope is shown, because any other text could be a misplaced key.
std::string ShowWord(std::string_view text) {
  const bool plain = !text.empty() && text.size() <= 24 &&
                     std::all_of(text.begin(), text.end(),
                                 [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; });
  return plain ? Quoted(text) : std::string("another text (not shown)");
}

// Returns what kind of value was found, and the value itself only if it is a number.
std::string ShowKind(const Json& value) {
  if (value.is_number()) return ShowJson(value);
  if (value.is_string()) return "a string (not shown)";
  if (value.is_object()) return "an object";
  if (value.is_array()) return Concat("a list of ", value.size(), " values");
  return value.is_null() ? "null" : "a boolean";
}

std::string JoinNames(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

// Reads one object. Every error starts with the file, the entry and the field.
class ObjectReader {
 public:
  // Fields in errors are called `prefix` + name.
  ObjectReader(const Json& object, std::string place, std::string prefix)
      : object_(object), place_(std::move(place)), prefix_(std::move(prefix)) {}

  absl::Status Wrong(std::string_view field, std::string_view expected,
                     std::string_view found) const {
    return absl::InvalidArgumentError(
        Concat(place_, ", field '", prefix_, field, "': expected ", expected, ", found ", found));
  }

  absl::Status CheckFields(std::span<const std::string_view> allowed) const {
    for (const auto& [name, value] : object_.items()) {
      if (std::find(allowed.begin(), allowed.end(), name) != allowed.end()) continue;
      return absl::InvalidArgumentError(
          Concat(place_, ": expected the fields ",
                 prefix_.empty() ? "" : Concat("of '", prefix_.substr(0, prefix_.size() - 1), "' "),
                 JoinNames(allowed), "; found ", ShowWord(name)));
    }
    return absl::OkStatus();
  }

  const Json* Find(const char* field) const {
    const auto it = object_.find(field);
    return it == object_.end() ? nullptr : &*it;
  }

  // Returns nullptr if the field is absent.
  Result<const std::string*> Text(const char* field) const {
    const Json* value = Find(field);
    if (value == nullptr) return nullptr;
    if (!value->is_string()) return Wrong(field, "a string", ShowKind(*value));
    return value->get_ptr<const Json::string_t*>();
  }

  Result<std::string> NameField(const char* field, bool required) const {
    MOESERVE_ASSIGN_OR_RETURN(const std::string* text, Text(field));
    constexpr std::string_view kExpected = "1 to 64 letters, digits, '.', '_' or '-'";
    if (text == nullptr) {
      return required ? Result<std::string>(Wrong(field, kExpected, "nothing")) : std::string();
    }
    if (!IsName(*text)) return Wrong(field, kExpected, "another text (not shown)");
    return *text;
  }

  Result<std::optional<int64_t>> Integer(const char* field, int64_t min, int64_t max) const {
    const Json* value = Find(field);
    if (value == nullptr) return std::optional<int64_t>();
    const bool fits =
        value->is_number_integer() && (!value->is_number_unsigned() ||
                                       value->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
    const int64_t number = fits ? value->get<int64_t>() : 0;
    if (!fits || number < min || number > max) {
      return Wrong(field, Concat("an integer from ", min, " to ", max), ShowKind(*value));
    }
    return std::optional<int64_t>(number);
  }

 private:
  const Json& object_;
  const std::string place_;
  const std::string prefix_;
};

// Returns the digest that "key" or "sha256" gives.
Result<std::string> ReadDigest(const ObjectReader& entry) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string* key, entry.Text("key"));
  MOESERVE_ASSIGN_OR_RETURN(const std::string* hex, entry.Text("sha256"));
  if ((key != nullptr) == (hex != nullptr)) {
    return entry.Wrong("key", "either 'key' or 'sha256'", key == nullptr ? "neither" : "both");
  }
  if (key != nullptr) {
    const bool visible =
        std::all_of(key->begin(), key->end(), [](char c) { return c > ' ' && c < 0x7f; });
    if (key->empty() || key->size() > kMaxKeyBytes || !visible) {
      return entry.Wrong("key", Concat("1 to ", kMaxKeyBytes, " visible ASCII characters"),
                         Concat(key->size(), " bytes (not shown)"));
    }
    return KeyDigest(*key);
  }
  const bool digits = std::all_of(hex->begin(), hex->end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
  });
  if (hex->size() != 64 || !digits) {
    return entry.Wrong("sha256", "64 hexadecimal digits",
                       Concat(hex->size(), " characters (not shown)"));
  }
  return absl::HexStringToBytes(*hex);
}

Result<ScopeSet> ReadScopes(const ObjectReader& entry) {
  constexpr std::string_view kExpected =
      "a list of one or more of generate, statistics, routing, admin";
  const Json* list = entry.Find("scopes");
  if (list == nullptr) return entry.Wrong("scopes", kExpected, "nothing");
  if (!list->is_array() || list->empty()) {
    return entry.Wrong("scopes", kExpected, ShowKind(*list));
  }
  ScopeSet scopes;
  for (const Json& item : *list) {
    if (!item.is_string()) return entry.Wrong("scopes", kExpected, ShowKind(item));
    const std::string& name = *item.get_ptr<const Json::string_t*>();
    const std::optional<Scope> scope = ParseScope(name);
    if (!scope) return entry.Wrong("scopes", kExpected, ShowWord(name));
    scopes.Add(*scope);
  }
  return scopes;
}

Result<KeyLimits> ReadLimits(const ObjectReader& entry, const std::string& place) {
  KeyLimits limits;
  limits.min_priority = 0;
  const Json* object = entry.Find("limits");
  if (object == nullptr) return limits;
  if (!object->is_object()) return entry.Wrong("limits", "an object", ShowKind(*object));
  constexpr std::string_view kFields[] = {"requests_per_minute", "tokens_per_minute",
                                          "max_concurrent_requests", "min_priority", "models"};
  const ObjectReader reader(*object, place, "limits.");
  MOESERVE_RETURN_IF_ERROR(reader.CheckFields(kFields));
  MOESERVE_ASSIGN_OR_RETURN(limits.requests_per_minute,
                            reader.Integer("requests_per_minute", 1, kMostPerMinute));
  MOESERVE_ASSIGN_OR_RETURN(limits.tokens_per_minute,
                            reader.Integer("tokens_per_minute", 1, kMostPerMinute));
  MOESERVE_ASSIGN_OR_RETURN(limits.max_concurrent_requests,
                            reader.Integer("max_concurrent_requests", 1, kMostConcurrent));
  MOESERVE_ASSIGN_OR_RETURN(const auto priority,
                            reader.Integer("min_priority", -kMaxPriority, kMaxPriority));
  if (priority) limits.min_priority = static_cast<int>(*priority);
  if (const Json* models = reader.Find("models")) {
    const std::string expected = Concat("a list of 1 to ", kMaxModels, " names of models");
    if (!models->is_array() || models->empty() || models->size() > kMaxModels) {
      return reader.Wrong("models", expected, ShowKind(*models));
    }
    limits.models.emplace();
    for (const Json& model : *models) {
      if (!model.is_string()) return reader.Wrong("models", expected, ShowKind(model));
      limits.models->push_back(model.get<std::string>());
    }
  }
  return limits;
}

Result<KeySpec> ReadEntry(const Json& value, const std::string& place) {
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        Concat(place, ": expected an object, found ", ShowKind(value)));
  }
  constexpr std::string_view kFields[] = {"name",   "key",     "sha256",     "scopes",
                                          "limits", "expires", "cache_group"};
  const ObjectReader entry(value, place, "");
  MOESERVE_RETURN_IF_ERROR(entry.CheckFields(kFields));
  KeySpec spec;
  MOESERVE_ASSIGN_OR_RETURN(spec.name, entry.NameField("name", /*required=*/true));
  MOESERVE_ASSIGN_OR_RETURN(spec.digest, ReadDigest(entry));
  MOESERVE_ASSIGN_OR_RETURN(spec.scopes, ReadScopes(entry));
  MOESERVE_ASSIGN_OR_RETURN(spec.limits, ReadLimits(entry, place));
  MOESERVE_ASSIGN_OR_RETURN(spec.cache_group, entry.NameField("cache_group", /*required=*/false));
  MOESERVE_ASSIGN_OR_RETURN(const std::string* expires, entry.Text("expires"));
  if (expires != nullptr) {
    absl::Time time;
    if (!absl::ParseTime(absl::RFC3339_full, *expires, &time, nullptr)) {
      return entry.Wrong("expires", "a time such as \"2030-12-31T00:00:00Z\"",
                         "another text (not shown)");
    }
    spec.expires = time;
  }
  return spec;
}

absl::Status CheckUnique(const std::vector<KeySpec>& keys, std::string_view place) {
  std::map<std::string_view, size_t> names;
  std::map<std::string_view, size_t> digests;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (const auto [it, fresh] = names.emplace(keys[i].name, i); !fresh) {
      return absl::InvalidArgumentError(Concat(place, ", keys[", i,
                                               "], field 'name': expected another name than that "
                                               "of keys[",
                                               it->second, "], found ", Quoted(keys[i].name)));
    }
    if (const auto [it, fresh] = digests.emplace(keys[i].digest, i); !fresh) {
      return absl::InvalidArgumentError(Concat(place, ", keys[", i, "] (", keys[i].name,
                                               "): expected another key than that of keys[",
                                               it->second, "], found the same"));
    }
  }
  return absl::OkStatus();
}

Result<Json> ParseJson(std::string_view text, std::string_view place) {
  Result<Json> parsed = ParseStrictJson(text, {.max_bytes = kMaxFileBytes, .max_depth = 8});
  if (parsed.ok()) return parsed;
  // The end of some messages quotes the file, which may be a key.
  std::string message(parsed.status().message());
  message.resize(std::min(message.size(), message.find("; last read")));
  if (message.find(" appears twice") != std::string::npos) {
    message = "an object has two fields of the same name";
  }
  return absl::InvalidArgumentError(Concat(place, ": expected JSON, found an error: ", message));
}

Result<std::vector<KeySpec>> ParseEntries(std::string_view text, std::string_view place) {
  MOESERVE_ASSIGN_OR_RETURN(const Json root, ParseJson(text, place));
  const auto list = root.find("keys");
  if (list == root.end() || root.size() != 1) {
    return absl::InvalidArgumentError(
        Concat(place, ": expected an object with the one field 'keys', found ", root.size(),
               " fields", list == root.end() ? " without 'keys'" : ""));
  }
  if (!list->is_array() || list->empty() || list->size() > kMaxKeys) {
    return absl::InvalidArgumentError(Concat(place, ", field 'keys': expected a list of 1 to ",
                                             kMaxKeys, " keys, found ", ShowKind(*list)));
  }
  std::vector<KeySpec> keys;
  for (size_t i = 0; i < list->size(); ++i) {
    std::string where = Concat(place, ", keys[", i, ']');
    const Json& entry = (*list)[i];
    if (entry.is_object()) {
      const auto name = entry.find("name");
      if (name != entry.end() && name->is_string() && IsName(name->get<std::string>())) {
        where += Concat(" (", name->get<std::string>(), ')');
      }
    }
    MOESERVE_ASSIGN_OR_RETURN(KeySpec spec, ReadEntry(entry, where));
    keys.push_back(std::move(spec));
  }
  MOESERVE_RETURN_IF_ERROR(CheckUnique(keys, place));
  return keys;
}

// Calls `use` with each key of a list.
template <typename F>
void ForEachLine(std::string_view text, const F& use) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view key = Trimmed(text.substr(0, end), " \t\r");
    if (!key.empty() && key.front() != '#') use(key);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

bool IsJson(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] == '{';
}

// The text of a key file, which is erased from memory in the end.
class SecretText {
 public:
  static Result<SecretText> Read(const std::filesystem::path& file) {
    auto text = ReadTextFile(file, kMaxFileBytes);
    if (!text.ok()) {
      return Prefixed(Concat("cannot read the key file ", file.string(), ": "), text.status());
    }
    SecretText out;
    out.text_.assign(text->begin(), text->end());
    OPENSSL_cleanse(text->data(), text->size());
    return out;
  }
  SecretText(SecretText&&) = default;
  SecretText& operator=(SecretText&&) = default;
  ~SecretText() {
    if (!text_.empty()) OPENSSL_cleanse(text_.data(), text_.size());
  }

  std::string_view text() const { return std::string_view(text_.data(), text_.size()); }

 private:
  SecretText() = default;

  std::vector<char> text_;
};

}  // namespace

Result<std::vector<KeySpec>> ParseKeyFile(std::string_view text, std::string_view place) {
  if (IsJson(text)) return ParseEntries(text, place);
  std::vector<KeySpec> keys;
  std::map<std::string, size_t> digests;
  ForEachLine(text, [&](std::string_view key) {
    KeySpec spec;
    spec.digest = KeyDigest(key);
    if (digests.emplace(spec.digest, keys.size()).second) keys.push_back(std::move(spec));
  });
  if (keys.empty()) {
    return absl::InvalidArgumentError(Concat(place, ": expected a key, found none"));
  }
  if (keys.size() > kMaxKeys) {
    return absl::InvalidArgumentError(
        Concat(place, ": expected at most ", kMaxKeys, " keys, found ", keys.size()));
  }
  return keys;
}

Result<std::vector<KeySpec>> ReadKeyFile(const std::filesystem::path& file) {
  MOESERVE_ASSIGN_OR_RETURN(const SecretText secret, SecretText::Read(file));
  return ParseKeyFile(secret.text(), Concat("the key file ", file.string()));
}

Result<std::string> ReadFirstKey(const std::filesystem::path& file) {
  MOESERVE_ASSIGN_OR_RETURN(const SecretText secret, SecretText::Read(file));
  const std::string place = Concat("the key file ", file.string());
  MOESERVE_RETURN_IF_ERROR(ParseKeyFile(secret.text(), place).status());
  std::string first;
  if (IsJson(secret.text())) {
    MOESERVE_ASSIGN_OR_RETURN(const Json root, ParseJson(secret.text(), place));
    for (const Json& entry : root.at("keys")) {
      if (first.empty() && entry.contains("key")) first = entry.at("key").get<std::string>();
    }
  } else {
    ForEachLine(secret.text(), [&](std::string_view key) {
      if (first.empty()) first = std::string(key);
    });
  }
  if (!first.empty()) return first;
  return absl::InvalidArgumentError(
      Concat(place, ": expected an entry with 'key', found digests only"));
}

bool ReadableByOthers(const std::filesystem::path& file) {
  struct stat status {};
  return stat(file.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         (status.st_mode & S_IROTH) != 0;
}

}  // namespace moeserve::server
