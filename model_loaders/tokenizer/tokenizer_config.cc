#include "model_loaders/tokenizer/tokenizer_config.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "model_loaders/tokenizer/json_reader.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

// Reads a token, which is a string or an object with the string in `content`.
std::optional<std::string> ReadToken(JsonReader& reader, const Json& root, std::string_view key) {
  const Json& value = reader.Get(root, key);
  if (value.is_object()) return reader.String(value, std::string(key), "content");
  return reader.OptionalString(root, "", key);
}

std::optional<bool> ReadFlag(JsonReader& reader, const Json& root, std::string_view key) {
  if (reader.Get(root, key).is_null()) return std::nullopt;
  return reader.Bool(root, "", key);
}

std::vector<AddedToken> ReadAddedTokensDecoder(JsonReader& reader, const Json& root) {
  std::vector<AddedToken> tokens;
  const Json& json = reader.Get(root, "added_tokens_decoder");
  if (json.is_null()) return tokens;
  if (!json.is_object()) reader.FailExpected("added_tokens_decoder", "an object", json);
  if (!reader.ok()) return tokens;
  for (const auto& [key, value] : json.items()) {
    const std::string where = "added_tokens_decoder." + key;
    AddedToken token;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token.id);
    if (error != std::errc() || end != key.data() + key.size() || token.id < 0) {
      reader.Fail(where, "expected a token id as the key");
    }
    reader.CheckKeys(
        value, where,
        {"__type", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    token.content = reader.String(value, where, "content");
    token.single_word = reader.Bool(value, where, "single_word", false);
    token.lstrip = reader.Bool(value, where, "lstrip", false);
    token.rstrip = reader.Bool(value, where, "rstrip", false);
    token.normalized = reader.Bool(value, where, "normalized", false);
    token.special = reader.Bool(value, where, "special", false);
    if (!reader.ok()) break;
    tokens.push_back(std::move(token));
  }
  std::sort(tokens.begin(), tokens.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  return tokens;
}

}  // namespace

absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view json,
                                                     std::string_view file_name) {
  JsonReader reader(file_name);
  const Json root = reader.Parse(json);
  if (reader.ok() && !root.is_object()) reader.FailExpected("", "an object", root);
  TokenizerConfig config;
  config.bos_token = ReadToken(reader, root, "bos_token");
  config.eos_token = ReadToken(reader, root, "eos_token");
  config.pad_token = ReadToken(reader, root, "pad_token");
  config.unk_token = ReadToken(reader, root, "unk_token");
  config.tokenizer_class = reader.OptionalString(root, "", "tokenizer_class");
  config.add_bos_token = ReadFlag(reader, root, "add_bos_token");
  config.add_eos_token = ReadFlag(reader, root, "add_eos_token");
  if (const Json& value = reader.Get(root, "chat_template"); value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i) {
      const std::string where = Concat("chat_template[", i, ']');
      std::string name = reader.String(value[i], where, "name");
      std::string text = reader.String(value[i], where, "template");
      if (name == "default") config.chat_template = text;
      config.named_chat_templates.emplace_back(std::move(name), std::move(text));
    }
  } else {
    config.chat_template = reader.OptionalString(root, "", "chat_template");
  }
  if (!reader.ok()) return reader.status();
  return config;
}

namespace {

// The names of tokens that TokenizerConfig has, and the others that a configuration can have.
struct NamedToken {
  std::string_view key;
  std::optional<std::string> TokenizerConfig::*member;
};
constexpr NamedToken kNamedTokens[] = {
    {"bos_token", &TokenizerConfig::bos_token},
    {"eos_token", &TokenizerConfig::eos_token},
    {"pad_token", &TokenizerConfig::pad_token},
    {"unk_token", &TokenizerConfig::unk_token},
};
constexpr std::string_view kOtherNamedTokens[] = {"sep_token", "cls_token", "mask_token"};
constexpr std::string_view kListsOfTokens[] = {"additional_special_tokens", "extra_special_tokens"};

// A file of the folder as JSON; null if there is none.
absl::StatusOr<Json> ReadObject(const std::filesystem::path& path) {
  absl::StatusOr<std::optional<std::string>> text = ReadTokenizerFile(path);
  if (!text.ok()) return text.status();
  if (!text->has_value()) return Json();
  JsonReader reader(path.string());
  Json root = reader.Parse(**text);
  if (reader.ok() && !root.is_object()) reader.FailExpected("", "an object", root);
  if (!reader.ok()) return reader.status();
  return root;
}

// Returns the text of a token that is a string or an object with the string in `content`.
std::optional<std::string> TextOf(const Json& token) {
  const Json* const text = !token.is_object()          ? &token
                           : token.contains("content") ? &token["content"]
                                                       : nullptr;
  if (text == nullptr || !text->is_string()) return std::nullopt;
  return text->get<std::string>();
}

// Adds the tokens that a file names as special ones.
void AddNamedTokens(const Json& root, std::set<std::string>* names) {
  const auto add = [&](const Json& token) {
    if (std::optional<std::string> text = TextOf(token)) names->insert(*std::move(text));
  };
  const auto find = [&](std::string_view key) {
    static const Json none;
    const auto found = root.find(key);
    return root.is_object() && found != root.end() ? *found : none;
  };
  for (const NamedToken& named : kNamedTokens) add(find(named.key));
  for (const std::string_view key : kOtherNamedTokens) add(find(key));
  for (const std::string_view key : kListsOfTokens) {
    const Json list = find(key);  // an object of named tokens in newer files
    if (list.is_array() || list.is_object()) {
      for (const Json& token : list) add(token);
    }
  }
}

// Sets the names of tokens that special_tokens_map.json has. `config_json` is
// tokenizer_config.json.
void MergeSpecialTokensMap(const Json& map, const Json& config_json, TokenizerConfig* config) {
  if (!map.is_object()) return;
  const bool newer = config_json.is_object() && config_json.contains("added_tokens_decoder");
  for (const NamedToken& named : kNamedTokens) {
    const auto found = map.find(named.key);
    std::optional<std::string>& name = config->*named.member;
    if (found == map.end() || (newer && name.has_value())) continue;
    if (std::optional<std::string> text = TextOf(*found)) name = std::move(text);
  }
}

// Reads added_tokens.json, an object of texts and ids.
absl::StatusOr<std::vector<AddedToken>> ReadAddedTokensFile(
    const std::filesystem::path& path, const std::set<std::string>& special_tokens) {
  const absl::StatusOr<Json> root = ReadObject(path);
  if (!root.ok()) return root.status();
  std::vector<AddedToken> tokens;
  if (root->is_null()) return tokens;
  JsonReader reader(path.string());
  for (const auto& [text, id] : root->items()) {
    AddedToken token;
    token.content = text;
    token.id = reader.Id(id, text);
    token.special = special_tokens.contains(text);
    token.normalized = !token.special;
    tokens.push_back(std::move(token));
  }
  if (!reader.ok()) return reader.status();
  std::sort(tokens.begin(), tokens.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  return tokens;
}

constexpr char kConfigName[] = "tokenizer_config.json";
constexpr char kSpecialTokensMap[] = "special_tokens_map.json";
constexpr char kAddedTokens[] = "added_tokens.json";

}  // namespace

absl::StatusOr<TokenizerConfig> LoadTokenizerConfig(const std::filesystem::path& model_dir) {
  TokenizerConfig config;
  const std::filesystem::path path = model_dir / kConfigName;
  const absl::StatusOr<std::optional<std::string>> text = ReadTokenizerFile(path);
  if (!text.ok()) return text.status();
  Json config_json;
  if (text->has_value()) {
    absl::StatusOr<TokenizerConfig> parsed = ParseTokenizerConfig(**text, path.string());
    if (!parsed.ok()) return parsed.status();
    config = std::move(*parsed);
    config_json = JsonReader(path.string()).Parse(**text);
  }
  const absl::StatusOr<Json> map = ReadObject(model_dir / kSpecialTokensMap);
  if (!map.ok()) return map.status();
  MergeSpecialTokensMap(*map, config_json, &config);
  absl::StatusOr<std::optional<std::string>> jinja =
      ReadTokenizerFile(model_dir / "chat_template.jinja");
  if (!jinja.ok()) return jinja.status();
  if (jinja->has_value()) config.chat_template = std::move(**jinja);
  return config;
}

absl::StatusOr<TokenizerDetails> LoadTokenizerDetails(const std::filesystem::path& model_dir) {
  TokenizerDetails details;
  absl::StatusOr<TokenizerConfig> config = LoadTokenizerConfig(model_dir);
  if (!config.ok()) return config.status();
  details.config = *std::move(config);
  const std::filesystem::path path = model_dir / kConfigName;
  const absl::StatusOr<Json> root = ReadObject(path);
  const absl::StatusOr<Json> map = ReadObject(model_dir / kSpecialTokensMap);
  for (const absl::StatusOr<Json>* file : {&root, &map}) {
    if (!file->ok()) return file->status();
    AddNamedTokens(**file, &details.special_tokens);
  }
  JsonReader reader(path.string());
  details.added_tokens = ReadAddedTokensDecoder(reader, *root);
  details.pattern = reader.OptionalString(*root, "", "pat_str");
  details.add_prefix_space = reader.Bool(*root, "", "add_prefix_space", false);
  if (!reader.ok()) return reader.status();
  if (reader.Get(*root, "added_tokens_decoder").is_null()) {
    absl::StatusOr<std::vector<AddedToken>> added =
        ReadAddedTokensFile(model_dir / kAddedTokens, details.special_tokens);
    if (!added.ok()) return added.status();
    details.added_tokens = *std::move(added);
  }
  return details;
}

}  // namespace moeserve
