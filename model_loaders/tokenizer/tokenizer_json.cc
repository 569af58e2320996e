#include "model_loaders/tokenizer/tokenizer_json.h"

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <string>
#include <system_error>
#include <unordered_set>

#include "base/message.h"
#include "engine/text/tokenizer/bpe_model.h"
#include "engine/text/tokenizer/pipeline_tokenizer.h"
#include "engine/text/tokenizer/regex_syntax.h"
#include "nlohmann/json.hpp"

namespace moeserve {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxFileBytes = size_t{128} << 20;  // the largest known file has about 35 MiB
constexpr int kMaxDepth = 32;
constexpr size_t kMaxPatternBytes = 64 * 1024;

std::string Describe(const Json& value) {
  std::string text = value.type_name();
  if (value.is_string()) {
    const std::string& content = value.get_ref<const std::string&>();
    size_t shown = std::min<size_t>(content.size(), 60);
    while (shown < content.size() && shown > 0 && (content[shown] & 0xC0) == 0x80) --shown;
    text.append(" \"").append(content, 0, shown).append(shown < content.size() ? "...\"" : "\"");
  } else if (value.is_number() || value.is_boolean()) {
    text.append(" ").append(value.dump());
  }
  return text;
}

// Reads values and keeps the first error. After an error every read returns an empty value, so that
// a caller may continue and check status() at the end.
class Reader {
 public:
  explicit Reader(std::string_view file_name) : file_name_(file_name) {}

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }

  void Fail(const std::string& where, const std::string& what) {
    if (ok()) {
      status_ = absl::InvalidArgumentError(file_name_ + ": " + (where.empty() ? "" : where + ": ") +
                                           what);
    }
  }
  void FailExpected(const std::string& where, const std::string& expected, const Json& found) {
    Fail(where, "expected " + expected + ", found " + Describe(found));
  }

  // Parses a JSON text. Fails and returns null if the text is not JSON, is nested too deep, or
  // repeats a key in an object.
  Json Parse(std::string_view text) {
    if (text.size() > kMaxFileBytes) {
      Fail("", Concat("expected at most ", kMaxFileBytes, " bytes, found ", text.size()));
      return nullptr;
    }
    std::vector<std::unordered_set<std::string>> keys;  // keys of each object that is open
    const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
      if (depth > kMaxDepth) Fail("", Concat("nested deeper than ", kMaxDepth, " levels"));
      if (event == Json::parse_event_t::object_start) keys.emplace_back();
      if (event == Json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
      if (event == Json::parse_event_t::key && !keys.empty() &&
          !keys.back().insert(parsed.get_ref<const std::string&>()).second) {
        Fail("", "key " + Describe(parsed) + " appears twice in one object");
      }
      return ok();
    };
    try {
      Json json = Json::parse(text.begin(), text.end(), watch);
      return ok() ? json : nullptr;
    } catch (const Json::exception& error) {
      Fail("", std::string("not valid JSON: ") + error.what());
      return nullptr;
    }
  }

  // The functions below read `object[key]`. `where` is the path of `object` in error messages.
  std::string Path(const std::string& where, std::string_view key) const {
    return where.empty() ? std::string(key) : where + "." + std::string(key);
  }

  void CheckKeys(const Json& object, const std::string& where,
                 std::initializer_list<std::string_view> known) {
    if (!object.is_object()) return FailExpected(where, "an object", object);
    for (const auto& [key, value] : object.items()) {
      if (std::find(known.begin(), known.end(), key) == known.end()) {
        Fail(Path(where, key), "this key is not supported");
      }
    }
  }

  // Returns a JSON null if the key is absent.
  const Json& Get(const Json& object, std::string_view key) const {
    static const Json null;
    if (!object.is_object()) return null;
    const auto it = object.find(key);
    return it == object.end() ? null : *it;
  }

  bool Bool(const Json& object, const std::string& where, std::string_view key,
            std::optional<bool> if_absent = std::nullopt) {
    const Json& value = Get(object, key);
    if (value.is_boolean()) return value.get<bool>();
    if (value.is_null() && if_absent.has_value()) return *if_absent;
    FailExpected(Path(where, key), "true or false", value);
    return false;
  }

  std::string String(const Json& object, const std::string& where, std::string_view key) {
    const Json& value = Get(object, key);
    if (value.is_string()) return value.get<std::string>();
    FailExpected(Path(where, key), "a string", value);
    return "";
  }

  std::optional<std::string> OptionalString(const Json& object, const std::string& where,
                                            std::string_view key) {
    if (Get(object, key).is_null()) return std::nullopt;
    return String(object, where, key);
  }

  const Json& Array(const Json& object, const std::string& where, std::string_view key) {
    static const Json empty = Json::array();
    const Json& value = Get(object, key);
    if (value.is_array()) return value;
    FailExpected(Path(where, key), "an array", value);
    return empty;
  }

  TokenId Id(const Json& value, const std::string& where) {
    if (value.is_number_unsigned() && value.get<uint64_t>() <= BpeModel::kMaxId) {
      return value.get<TokenId>();
    }
    FailExpected(where, Concat("an id from 0 to ", BpeModel::kMaxId), value);
    return 0;
  }

 private:
  std::string file_name_;
  absl::Status status_;
};

// A processing step of the tokenizer, such as one normalizer. Flatten() appends the steps of `json`
// to `steps`: `json` itself or, if it is a sequence, the steps of its members under `list_key`,
// which may be sequences, too. A JSON null has no steps.
struct Step {
  const Json* json;
  std::string where;
  std::string type;
};

void Flatten(Reader& reader, const Json& json, const std::string& where, std::string_view list_key,
             std::vector<Step>* steps) {
  if (json.is_null()) return;
  if (!json.is_object()) return reader.FailExpected(where, "an object or null", json);
  const std::string type = reader.String(json, where, "type");
  if (type != "Sequence") {
    steps->push_back({&json, where, type});
    return;
  }
  reader.CheckKeys(json, where, {"type", list_key});
  const Json& list = reader.Array(json, where, list_key);
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string member = Concat(reader.Path(where, list_key), '[', i, ']');
    if (!list[i].is_object()) return reader.FailExpected(member, "an object", list[i]);
    Flatten(reader, list[i], member, list_key, steps);
  }
}

void Unsupported(Reader& reader, const Step& step, const std::string& supported) {
  reader.Fail(step.where + ".type", "expected " + supported + ", found \"" + step.type + "\"");
}

std::unique_ptr<Normalizer> ReadNormalizer(Reader& reader, const Json& json) {
  std::vector<Step> steps;
  Flatten(reader, json, "normalizer", "normalizers", &steps);
  std::vector<std::unique_ptr<Normalizer>> normalizers;
  for (const Step& step : steps) {
    if (step.type == "NFC") {
      reader.CheckKeys(*step.json, step.where, {"type"});
      normalizers.push_back(std::make_unique<NfcNormalizer>());
    } else {
      Unsupported(reader, step, "NFC or Sequence");
    }
  }
  if (normalizers.empty()) return nullptr;
  if (normalizers.size() == 1) return std::move(normalizers[0]);
  return std::make_unique<SequenceNormalizer>(std::move(normalizers));
}

std::unique_ptr<PreTokenizer> MakeSplit(Reader& reader, const std::string& where,
                                        const absl::StatusOr<std::string>& pattern,
                                        SplitBehavior behavior, bool inverted) {
  absl::StatusOr<Regex> regex =
      pattern.ok() ? Regex::Compile(*pattern) : absl::StatusOr<Regex>(pattern.status());
  if (!regex.ok()) {
    reader.Fail(where, std::string(regex.status().message()));
    return nullptr;
  }
  return std::make_unique<SplitPreTokenizer>(std::move(*regex), behavior, inverted);
}

std::unique_ptr<PreTokenizer> ReadSplit(Reader& reader, const Step& step) {
  reader.CheckKeys(*step.json, step.where, {"type", "pattern", "behavior", "invert"});
  const bool inverted = reader.Bool(*step.json, step.where, "invert");
  const std::string behavior_name = reader.String(*step.json, step.where, "behavior");
  SplitBehavior behavior = SplitBehavior::kIsolated;
  if (behavior_name == "Removed") {
    behavior = SplitBehavior::kRemoved;
  } else if (behavior_name == "MergedWithPrevious") {
    behavior = SplitBehavior::kMergedWithPrevious;
  } else if (behavior_name == "MergedWithNext") {
    behavior = SplitBehavior::kMergedWithNext;
  } else if (behavior_name == "Contiguous") {
    behavior = SplitBehavior::kContiguous;
  } else if (behavior_name != "Isolated") {
    reader.Fail(step.where + ".behavior",
                "expected Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous, "
                "found \"" +
                    behavior_name + "\"");
  }
  const std::string where = step.where + ".pattern";
  const Json& pattern = reader.Get(*step.json, "pattern");
  reader.CheckKeys(pattern, where, {"Regex", "String"});
  if (!reader.ok()) return nullptr;
  if (pattern.size() != 1) {
    reader.Fail(where, Concat("expected one of Regex and String, found ", pattern.size(), " keys"));
    return nullptr;
  }
  const bool is_regex = pattern.contains("Regex");
  const std::string text = reader.String(pattern, where, is_regex ? "Regex" : "String");
  if (text.size() > kMaxPatternBytes) reader.Fail(where, "the pattern is too long");
  if (!reader.ok()) return nullptr;
  return MakeSplit(
      reader, where,
      is_regex ? TranslateRegex(text) : absl::StatusOr<std::string>(LiteralRegex(text)), behavior,
      inverted);
}

// Sets `byte_level` to whether there is a ByteLevel step, which makes the BPE model work on bytes.
std::unique_ptr<PreTokenizer> ReadPreTokenizer(Reader& reader, const Json& json, bool* byte_level) {
  *byte_level = false;
  std::vector<Step> steps;
  Flatten(reader, json, "pre_tokenizer", "pretokenizers", &steps);
  std::vector<std::unique_ptr<PreTokenizer>> pre_tokenizers;
  for (const Step& step : steps) {
    if (!reader.ok()) return nullptr;
    if (*byte_level) {
      reader.Fail(step.where,
                  "expected ByteLevel to be the last step, found " + step.type + " after it");
    } else if (step.type == "Split") {
      pre_tokenizers.push_back(ReadSplit(reader, step));
    } else if (step.type == "Digits") {
      reader.CheckKeys(*step.json, step.where, {"type", "individual_digits"});
      const bool individual = reader.Bool(*step.json, step.where, "individual_digits");
      pre_tokenizers.push_back(
          MakeSplit(reader, step.where, RustNumericClass(),
                    individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous, false));
    } else if (step.type == "ByteLevel") {
      reader.CheckKeys(*step.json, step.where,
                       {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      *byte_level = true;
      auto made =
          ByteLevelPreTokenizer::Create(reader.Bool(*step.json, step.where, "add_prefix_space"),
                                        reader.Bool(*step.json, step.where, "use_regex", true));
      reader.Bool(*step.json, step.where, "trim_offsets", true);
      if (made.ok()) {
        pre_tokenizers.push_back(std::move(*made));
      } else {
        reader.Fail(step.where, std::string(made.status().message()));
      }
    } else {
      Unsupported(reader, step, "ByteLevel, Split, Digits or Sequence");
    }
  }
  if (pre_tokenizers.empty()) return nullptr;
  if (pre_tokenizers.size() == 1) return std::move(pre_tokenizers[0]);
  return std::make_unique<SequencePreTokenizer>(std::move(pre_tokenizers));
}

using Frame = std::vector<std::optional<TokenId>>;

Frame ReadTemplate(Reader& reader, const Step& step) {
  Frame frame;
  reader.CheckKeys(*step.json, step.where, {"type", "single", "pair", "special_tokens"});
  const Json& special = reader.Get(*step.json, "special_tokens");
  if (!special.is_object()) {
    reader.FailExpected(step.where + ".special_tokens", "an object", special);
  }
  const Json& single = reader.Array(*step.json, step.where, "single");
  for (size_t i = 0; i < single.size() && reader.ok(); ++i) {
    const std::string where = Concat(step.where, ".single[", i, ']');
    reader.CheckKeys(single[i], where, {"Sequence", "SpecialToken"});
    if (!reader.ok()) break;
    if (single[i].size() != 1) {
      reader.Fail(where, "expected one of Sequence and SpecialToken");
      break;
    }
    const bool is_text = single[i].contains("Sequence");
    const std::string kind = is_text ? "Sequence" : "SpecialToken";
    const Json& piece = single[i][kind];
    const std::string piece_where = where + "." + kind;
    reader.CheckKeys(piece, piece_where, {"id", "type_id"});
    const std::string name = reader.String(piece, piece_where, "id");
    if (is_text) {
      if (name != "A") reader.Fail(piece_where + ".id", "expected \"A\", found \"" + name + "\"");
      frame.push_back(std::nullopt);
      continue;
    }
    const std::string token_where = step.where + ".special_tokens[\"" + name + "\"]";
    const Json& token = reader.Get(special, name);
    reader.CheckKeys(token, token_where, {"id", "ids", "tokens"});
    const Json& ids = reader.Array(token, token_where, "ids");
    for (size_t k = 0; k < ids.size(); ++k) {
      frame.push_back(reader.Id(ids[k], Concat(token_where, ".ids[", k, ']')));
    }
  }
  return frame;
}

Frame ReadPostProcessor(Reader& reader, const Json& json) {
  Frame frame = {std::nullopt};
  std::vector<Step> steps;
  Flatten(reader, json, "post_processor", "processors", &steps);
  bool has_template = false;
  for (const Step& step : steps) {
    if (step.type == "ByteLevel") {
      // As a post-processor, ByteLevel only changes offsets, which the server does not report.
      reader.CheckKeys(*step.json, step.where,
                       {"type", "add_prefix_space", "trim_offsets", "use_regex"});
    } else if (step.type == "TemplateProcessing" && !has_template) {
      frame = ReadTemplate(reader, step);
      has_template = true;
    } else {
      Unsupported(reader, step, "ByteLevel, Sequence or one TemplateProcessing");
    }
  }
  return frame;
}

std::unique_ptr<Decoder> ReadDecoder(Reader& reader, const Json& json) {
  if (json.is_null()) return std::make_unique<JoinDecoder>(" ");
  std::vector<Step> steps;
  Flatten(reader, json, "decoder", "decoders", &steps);
  bool byte_level = false;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].type == "ByteLevel" && i == 0) {
      reader.CheckKeys(*steps[i].json, steps[i].where,
                       {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      byte_level = true;
    } else if (steps[i].type == "Fuse") {
      reader.CheckKeys(*steps[i].json, steps[i].where, {"type"});
    } else {
      Unsupported(reader, steps[i], "ByteLevel first, Fuse or Sequence");
    }
  }
  if (byte_level) return std::make_unique<ByteLevelDecoder>();
  return std::make_unique<JoinDecoder>("");
}

void ReadMerges(Reader& reader, const Json& merges, BpeConfig* config) {
  config->merges.reserve(merges.size());
  const bool are_pairs = !merges.empty() && merges[0].is_array();
  for (size_t i = 0; i < merges.size() && reader.ok(); ++i) {
    const Json& merge = merges[i];
    const auto where = [&] { return Concat("model.merges[", i, ']'); };
    if (are_pairs) {
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        config->merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      } else {
        reader.FailExpected(where(), "a pair of strings", merge);
      }
      continue;
    }
    if (!merge.is_string()) {
      reader.FailExpected(where(), "a string", merge);
      continue;
    }
    const std::string& text = merge.get_ref<const std::string&>();
    if (text.starts_with("#version")) continue;
    const size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
      reader.FailExpected(where(), "two tokens with one space between them", merge);
      continue;
    }
    config->merges.emplace_back(text.substr(0, space), text.substr(space + 1));
  }
}

std::unique_ptr<TokenModel> ReadModel(Reader& reader, const Json& model, bool byte_level) {
  const Json& type = reader.Get(model, "type");
  // Early files do not have this key. Only a BPE model has both vocab and merges.
  if (!type.is_null() && type != "BPE") {
    reader.FailExpected("model.type", "BPE", type);
    return nullptr;
  }
  reader.CheckKeys(
      model, "model",
      {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
       "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  const Json& dropout = reader.Get(model, "dropout");
  if (!dropout.is_null() && !(dropout.is_number() && dropout == 0)) {
    reader.FailExpected("model.dropout", "null or 0", dropout);
  }
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!reader.OptionalString(model, "model", affix).value_or("").empty()) {
      reader.FailExpected(std::string("model.") + affix, "null or \"\"", model[affix]);
    }
  }
  BpeConfig config;
  config.byte_level = byte_level;
  config.unk_token = reader.OptionalString(model, "model", "unk_token");
  config.fuse_unk = reader.Bool(model, "model", "fuse_unk", false);
  config.byte_fallback = reader.Bool(model, "model", "byte_fallback", false);
  config.ignore_merges = reader.Bool(model, "model", "ignore_merges", false);
  const Json& vocab = reader.Get(model, "vocab");
  if (!vocab.is_object()) reader.FailExpected("model.vocab", "an object", vocab);
  if (!reader.ok()) return nullptr;
  config.vocab.reserve(vocab.size());
  for (const auto& [token, id] : vocab.items()) {
    config.vocab.emplace_back(token, reader.Id(id, "model.vocab[\"" + token + "\"]"));
  }
  ReadMerges(reader, reader.Array(model, "model", "merges"), &config);
  if (!reader.ok()) return nullptr;
  auto made = BpeModel::Create(std::move(config));
  if (!made.ok()) {
    reader.Fail("model", std::string(made.status().message()));
    return nullptr;
  }
  return std::move(*made);
}

std::vector<AddedToken> ReadAddedTokens(Reader& reader, const Json& root) {
  std::vector<AddedToken> tokens;
  if (reader.Get(root, "added_tokens").is_null()) return tokens;
  const Json& list = reader.Array(root, "", "added_tokens");
  for (size_t i = 0; i < list.size() && reader.ok(); ++i) {
    const std::string where = Concat("added_tokens[", i, ']');
    reader.CheckKeys(list[i], where,
                     {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token;
    token.id = reader.Id(reader.Get(list[i], "id"), where + ".id");
    token.content = reader.String(list[i], where, "content");
    token.single_word = reader.Bool(list[i], where, "single_word");
    token.lstrip = reader.Bool(list[i], where, "lstrip");
    token.rstrip = reader.Bool(list[i], where, "rstrip");
    token.normalized = reader.Bool(list[i], where, "normalized");
    token.special = reader.Bool(list[i], where, "special");
    tokens.push_back(std::move(token));
  }
  return tokens;
}

// Returns the contents of a file; nullopt if the file does not exist.
absl::StatusOr<std::optional<std::string>> ReadFile(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > kMaxFileBytes) {
    return absl::InvalidArgumentError(path.string() + ": expected a file of at most " +
                                      std::to_string(kMaxFileBytes) + " bytes, found " +
                                      (error ? error.message() : std::to_string(size)));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(size, '\0');
  file.read(text.data(), static_cast<std::streamsize>(size));
  if (!file) return absl::InvalidArgumentError(path.string() + ": cannot be read");
  return text;
}

// Reads a token, which is a string or an object with the string in `content`.
std::optional<std::string> ReadToken(Reader& reader, const Json& root, std::string_view key) {
  const Json& value = reader.Get(root, key);
  if (value.is_object()) return reader.String(value, std::string(key), "content");
  return reader.OptionalString(root, "", key);
}

std::optional<bool> ReadFlag(Reader& reader, const Json& root, std::string_view key) {
  if (reader.Get(root, key).is_null()) return std::nullopt;
  return reader.Bool(root, "", key);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(std::string_view json,
                                                              std::string_view file_name) {
  Reader reader(file_name);
  const Json root = reader.Parse(json);
  reader.CheckKeys(root, "",
                   {"version", "truncation", "padding", "added_tokens", "normalizer",
                    "pre_tokenizer", "post_processor", "decoder", "model"});
  if (!reader.ok()) return reader.status();
  if (const Json& version = reader.Get(root, "version"); !version.is_null() && version != "1.0") {
    reader.FailExpected("version", "\"1.0\"", version);
  }
  PipelineParts parts;
  bool byte_level = false;
  parts.normalizer = ReadNormalizer(reader, reader.Get(root, "normalizer"));
  parts.pre_tokenizer = ReadPreTokenizer(reader, reader.Get(root, "pre_tokenizer"), &byte_level);
  parts.decoder = ReadDecoder(reader, reader.Get(root, "decoder"));
  parts.frame = ReadPostProcessor(reader, reader.Get(root, "post_processor"));
  std::vector<AddedToken> added = ReadAddedTokens(reader, root);
  if (reader.ok()) parts.model = ReadModel(reader, reader.Get(root, "model"), byte_level);
  if (!reader.ok()) return reader.status();
  auto added_tokens = AddedTokens::Create(std::move(added), *parts.model, parts.normalizer.get());
  if (!added_tokens.ok()) {
    reader.Fail("added_tokens", std::string(added_tokens.status().message()));
    return reader.status();
  }
  parts.added_tokens = std::move(*added_tokens);
  auto tokenizer = PipelineTokenizer::Create(std::move(parts));
  if (!tokenizer.ok()) {
    reader.Fail("post_processor", std::string(tokenizer.status().message()));
    return reader.status();
  }
  return std::move(*tokenizer);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizerJson(
    const std::filesystem::path& model_dir) {
  const std::filesystem::path path = model_dir / "tokenizer.json";
  const absl::StatusOr<std::optional<std::string>> text = ReadFile(path);
  if (!text.ok()) return text.status();
  if (!text->has_value()) return absl::NotFoundError(path.string() + ": no such file");
  return ParseTokenizerJson(**text, path.string());
}

absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view json,
                                                     std::string_view file_name) {
  Reader reader(file_name);
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
  const absl::StatusOr<std::optional<std::string>> text = ReadFile(path);
  if (!text.ok()) return text.status();
  if (text->has_value()) {
    absl::StatusOr<TokenizerConfig> parsed = ParseTokenizerConfig(**text, path.string());
    if (!parsed.ok()) return parsed.status();
    config = std::move(*parsed);
  }
  absl::StatusOr<std::optional<std::string>> jinja = ReadFile(model_dir / "chat_template.jinja");
  if (!jinja.ok()) return jinja.status();
  if (jinja->has_value()) config.chat_template = std::move(**jinja);
  return config;
}

}  // namespace moeserve
