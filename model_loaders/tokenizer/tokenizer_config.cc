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
    reader.CheckKeys(value, where,
                     {"content", "single_word", "lstrip", "rstrip", "normalized", "special"});
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

absl::StatusOr<TokenizerConfig> LoadTokenizerConfig(const std::filesystem::path& model_dir) {
  TokenizerConfig config;
  const std::filesystem::path path = model_dir / "tokenizer_config.json";
  const absl::StatusOr<std::optional<std::string>> text = ReadTokenizerFile(path);
  if (!text.ok()) return text.status();
  if (text->has_value()) {
    absl::StatusOr<TokenizerConfig> parsed = ParseTokenizerConfig(**text, path.string());
    if (!parsed.ok()) return parsed.status();
    config = std::move(*parsed);
  }
  absl::StatusOr<std::optional<std::string>> jinja =
      ReadTokenizerFile(model_dir / "chat_template.jinja");
  if (!jinja.ok()) return jinja.status();
  if (jinja->has_value()) config.chat_template = std::move(**jinja);
  return config;
}

absl::StatusOr<TokenizerDetails> LoadTokenizerDetails(const std::filesystem::path& model_dir) {
  TokenizerDetails details;
  const std::filesystem::path path = model_dir / "tokenizer_config.json";
  absl::StatusOr<std::optional<std::string>> text = ReadTokenizerFile(path);
  if (!text.ok()) return text.status();
  if (!text->has_value()) return details;
  absl::StatusOr<TokenizerConfig> config = ParseTokenizerConfig(**text, path.string());
  if (!config.ok()) return config.status();
  details.config = *std::move(config);
  JsonReader reader(path.string());
  const Json root = reader.Parse(**text);
  details.added_tokens = ReadAddedTokensDecoder(reader, root);
  details.pattern = reader.OptionalString(root, "", "pat_str");
  details.add_prefix_space = reader.Bool(root, "", "add_prefix_space", false);
  if (!reader.ok()) return reader.status();
  return details;
}

}  // namespace moeserve
