#include "model_loaders/tokenizer/tokenizer_config.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/status.h"
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
  config.cls_token = ReadToken(reader, root, "cls_token");
  config.sep_token = ReadToken(reader, root, "sep_token");
  config.mask_token = ReadToken(reader, root, "mask_token");
  config.tokenizer_class = reader.OptionalString(root, "", "tokenizer_class");
  config.add_bos_token = ReadFlag(reader, root, "add_bos_token");
  config.add_eos_token = ReadFlag(reader, root, "add_eos_token");
  for (const auto& [key, member] : {std::pair("src_lang", &TokenizerConfig::src_lang),
                                    {"tgt_lang", &TokenizerConfig::tgt_lang}}) {
    // Other tokenizers have codes of languages here, which this server does not need.
    if (const Json& value = reader.Get(root, key); value.is_string()) {
      config.*member = value.get<std::string>();
    }
  }
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

// The names of tokens that TokenizerConfig has.
struct NamedToken {
  std::string_view key;
  std::optional<std::string> TokenizerConfig::*member;
};
constexpr NamedToken kNamedTokens[] = {
    {"bos_token", &TokenizerConfig::bos_token},   {"eos_token", &TokenizerConfig::eos_token},
    {"pad_token", &TokenizerConfig::pad_token},   {"unk_token", &TokenizerConfig::unk_token},
    {"cls_token", &TokenizerConfig::cls_token},   {"sep_token", &TokenizerConfig::sep_token},
    {"mask_token", &TokenizerConfig::mask_token},
};
constexpr std::string_view kListsOfTokens[] = {"additional_special_tokens", "extra_special_tokens"};

// A file of the folder as JSON; null if there is none.
absl::StatusOr<Json> ReadObject(const std::filesystem::path& path) {
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadTokenizerFile(path));
  if (!text.has_value()) return Json();
  JsonReader reader(path.string());
  Json root = reader.Parse(*text);
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
  MOESERVE_ASSIGN_OR_RETURN(const Json root, ReadObject(path));
  std::vector<AddedToken> tokens;
  if (root.is_null()) return tokens;
  JsonReader reader(path.string());
  for (const auto& [text, id] : root.items()) {
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
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadTokenizerFile(path));
  Json config_json;
  if (text.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(config, ParseTokenizerConfig(*text, path.string()));
    config_json = JsonReader(path.string()).Parse(*text);
  }
  MOESERVE_ASSIGN_OR_RETURN(const Json map, ReadObject(model_dir / kSpecialTokensMap));
  MergeSpecialTokensMap(map, config_json, &config);
  MOESERVE_ASSIGN_OR_RETURN(std::optional<std::string> jinja,
                            ReadTokenizerFile(model_dir / "chat_template.jinja"));
  if (jinja.has_value()) config.chat_template = std::move(*jinja);
  return config;
}

std::optional<TokenId> MaskToken(const TokenizerConfig& config, const Tokenizer& tokenizer) {
  if (config.mask_token.has_value()) return tokenizer.TokenToId(*config.mask_token);
  for (const std::string_view name : {"<mask>", "[MASK]"}) {
    const std::optional<TokenId> id = tokenizer.TokenToId(name);
    if (id.has_value() && tokenizer.IsSpecial(*id)) return id;
  }
  return std::nullopt;
}

absl::StatusOr<TokenizerDetails> LoadTokenizerDetails(const std::filesystem::path& model_dir) {
  TokenizerDetails details;
  MOESERVE_ASSIGN_OR_RETURN(details.config, LoadTokenizerConfig(model_dir));
  const std::filesystem::path path = model_dir / kConfigName;
  MOESERVE_ASSIGN_OR_RETURN(const Json root, ReadObject(path));
  MOESERVE_ASSIGN_OR_RETURN(const Json map, ReadObject(model_dir / kSpecialTokensMap));
  for (const Json* file : {&root, &map}) AddNamedTokens(*file, &details.special_tokens);
  JsonReader reader(path.string());
  details.added_tokens = ReadAddedTokensDecoder(reader, root);
  details.pattern = reader.OptionalString(root, "", "pat_str");
  details.add_prefix_space = reader.Bool(root, "", "add_prefix_space", false);
  details.do_lower_case = reader.Bool(root, "", "do_lower_case", true);
  details.tokenize_chinese_chars = reader.Bool(root, "", "tokenize_chinese_chars", true);
  details.strip_accents = ReadFlag(reader, root, "strip_accents");
  if (!reader.ok()) return reader.status();
  if (reader.Get(root, "added_tokens_decoder").is_null()) {
    MOESERVE_ASSIGN_OR_RETURN(details.added_tokens, ReadAddedTokensFile(model_dir / kAddedTokens,
                                                                        details.special_tokens));
  }
  return details;
}

}  // namespace moeserve
