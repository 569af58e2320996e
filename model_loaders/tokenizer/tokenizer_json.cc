#include "model_loaders/tokenizer/tokenizer_json.h"

#include <cfloat>
#include <charconv>
#include <cmath>
#include <iterator>
#include <set>
#include <string>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/models/bpe_model.h"
#include "engine/text/tokenizer/models/unigram_model.h"
#include "engine/text/tokenizer/models/word_models.h"
#include "engine/text/tokenizer/pipeline_tokenizer.h"
#include "model_loaders/tokenizer/json_reader.h"
#include "model_loaders/tokenizer/tokenizer_config.h"
#include "model_loaders/tokenizer/tokenizer_stages.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

void ReadMerges(JsonReader& reader, const Json& merges, BpeConfig* config) {
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

using Tokens = std::vector<std::pair<std::string, TokenId>>;

// Reads a vocabulary that maps tokens to ids.
Tokens ReadVocab(JsonReader& reader, const Json& model) {
  Tokens tokens;
  const Json& vocab = reader.Get(model, "vocab");
  if (!vocab.is_object()) reader.FailExpected("model.vocab", "an object", vocab);
  if (!reader.ok()) return tokens;
  tokens.reserve(vocab.size());
  for (const auto& [token, id] : vocab.items()) {
    tokens.emplace_back(token, reader.Id(id, "model.vocab[\"" + token + "\"]"));
  }
  return tokens;
}

// Returns `made`, or reports its error and returns null.
template <typename Model>
std::unique_ptr<TokenModel> Checked(JsonReader& reader,
                                    absl::StatusOr<std::unique_ptr<Model>> made) {
  if (made.ok()) return *std::move(made);
  reader.Fail("model", std::string(made.status().message()));
  return nullptr;
}

std::unique_ptr<TokenModel> ReadBpe(JsonReader& reader, const Json& model, bool byte_level) {
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
  config.vocab = ReadVocab(reader, model);
  if (!reader.ok()) return nullptr;
  ReadMerges(reader, reader.Array(model, "model", "merges"), &config);
  if (!reader.ok()) return nullptr;
  return Checked(reader, BpeModel::Create(std::move(config)));
}

// Returns the number that Hugging Face's library makes of a number in JSON text. Its JSON parser
// rounds twice, in the conversion of the digits and in the scaling by a power of ten, and the
// difference in the last bit can decide between two paths with nearly equal scores. `value` must be
// finite; its shortest decimal form stands for the text in the file.
double AsLibraryReads(double value) {
  char text[32];
  const auto [end, error] =
      std::to_chars(text, text + sizeof(text), std::fabs(value), std::chars_format::scientific);
  if (error != std::errc()) return value;
  uint64_t digits = 0;
  int exponent = 0;
  bool fraction = false;
  const char* at = text;
  for (; at < end && *at != 'e'; ++at) {
    if (*at == '.') {
      fraction = true;
    } else {
      digits = digits * 10 + static_cast<uint64_t>(*at - '0');
      if (fraction) --exponent;
    }
  }
  int scale = 0;
  if (at + 2 < end) std::from_chars(at + (at[1] == '+' ? 2 : 1), end, scale);
  exponent += scale;
  double result = static_cast<double>(digits);
  // Powers of ten up to 308 are rounded correctly by the compiler and the C library.
  const auto power_of_ten = [](int n) {
    char power[8] = "1e";
    const auto written = std::to_chars(power + 2, power + sizeof(power), n);
    double parsed = 0;
    std::from_chars(power, written.ptr, parsed);
    return parsed;
  };
  if (exponent >= 0) {
    result = exponent <= DBL_MAX_10_EXP ? result * power_of_ten(exponent) : std::fabs(value);
  } else {
    for (; exponent < -DBL_MAX_10_EXP && result != 0; exponent += DBL_MAX_10_EXP) result /= 1e308;
    result /= power_of_ten(-exponent);
  }
  return std::copysign(result, value);
}

std::unique_ptr<TokenModel> ReadUnigram(JsonReader& reader, const Json& model) {
  reader.CheckKeys(model, "model", {"type", "unk_id", "vocab", "byte_fallback"});
  UnigramConfig config;
  if (const Json& unk_id = reader.Get(model, "unk_id"); !unk_id.is_null()) {
    config.unk_id = reader.Id(unk_id, "model.unk_id");
  }
  config.byte_fallback = reader.Bool(model, "model", "byte_fallback", false);
  const Json& vocab = reader.Array(model, "model", "vocab");
  config.vocab.reserve(vocab.size());
  for (size_t i = 0; i < vocab.size() && reader.ok(); ++i) {
    const Json& entry = vocab[i];
    if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_number()) {
      config.vocab.emplace_back(entry[0].get<std::string>(),
                                AsLibraryReads(entry[1].get<double>()));
    } else {
      reader.FailExpected(Concat("model.vocab[", i, ']'), "a pair of a token and its score", entry);
    }
  }
  if (!reader.ok()) return nullptr;
  return Checked(reader, UnigramModel::Create(std::move(config)));
}

std::unique_ptr<TokenModel> ReadWordPiece(JsonReader& reader, const Json& model) {
  reader.CheckKeys(
      model, "model",
      {"type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"});
  WordPieceConfig config;
  config.unk_token = reader.String(model, "model", "unk_token");
  config.continuing_subword_prefix = reader.String(model, "model", "continuing_subword_prefix");
  config.max_input_chars_per_word =
      reader.Size(model, "model", "max_input_chars_per_word", 0, size_t{1} << 30);
  config.vocab = ReadVocab(reader, model);
  if (!reader.ok()) return nullptr;
  return Checked(reader, WordPieceModel::Create(std::move(config)));
}

std::unique_ptr<TokenModel> ReadWordLevel(JsonReader& reader, const Json& model) {
  reader.CheckKeys(model, "model", {"type", "unk_token", "vocab"});
  const std::string unk_token = reader.String(model, "model", "unk_token");
  Tokens vocab = ReadVocab(reader, model);
  if (!reader.ok()) return nullptr;
  return Checked(reader, WordLevelModel::Create(std::move(vocab), unk_token));
}

// `byte_level`: the pre-tokenizer has a ByteLevel stage.
std::unique_ptr<TokenModel> ReadModel(JsonReader& reader, const Json& model, bool byte_level) {
  const Json& type = reader.Get(model, "type");
  // Early files do not have this key. Only a BPE model has both vocab and merges.
  if (type.is_null() || type == "BPE") return ReadBpe(reader, model, byte_level);
  if (byte_level) {
    reader.FailExpected("model.type", "BPE after the pre-tokenizer ByteLevel", type);
    return nullptr;
  }
  if (type == "Unigram") return ReadUnigram(reader, model);
  if (type == "WordPiece") return ReadWordPiece(reader, model);
  if (type == "WordLevel") return ReadWordLevel(reader, model);
  reader.FailExpected("model.type", "BPE, Unigram, WordLevel or WordPiece", type);
  return nullptr;
}

std::vector<AddedToken> ReadAddedTokens(JsonReader& reader, const Json& root) {
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

// Returns the tokens of `more` that are to be added to those of the file, `known`.
std::vector<AddedToken> TokensToAdd(const MoreTokens& more, const std::vector<AddedToken>& known,
                                    const TokenModel& model) {
  std::set<std::string, std::less<>> contents;
  std::set<TokenId> ids;
  for (const AddedToken& token : known) {
    contents.insert(token.content);
    ids.insert(token.id);
  }
  std::vector<AddedToken> result;
  const auto add = [&](AddedToken token) {
    if (const std::optional<TokenId> id = model.TokenToId(token.content)) {
      token.id = *id;
    } else if (token.id < 0 || token.id >= more.id_limit ||
               model.TokenString(token.id).has_value()) {
      return;
    }
    if (token.content.empty() || contents.contains(token.content)) return;
    if (!ids.insert(token.id).second) return;
    contents.insert(token.content);
    result.push_back(std::move(token));
  };
  for (const AddedToken& token : more.added) add(token);
  for (const std::string& text : more.special) {
    AddedToken token;
    token.id = -1;
    token.content = text;
    token.special = true;
    add(std::move(token));
  }
  return result;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(std::string_view json,
                                                              std::string_view file_name,
                                                              const MoreTokens& more) {
  JsonReader reader(file_name);
  const Json root = reader.Parse(json);
  reader.CheckKeys(root, "",
                   {"version", "truncation", "padding", "added_tokens", "normalizer",
                    "pre_tokenizer", "post_processor", "decoder", "model"});
  if (!reader.ok()) return reader.status();
  if (const Json& version = reader.Get(root, "version"); !version.is_null() && version != "1.0") {
    reader.FailExpected("version", "\"1.0\"", version);
  }
  PipelineParts parts;
  NormalizerSection normalizer = ReadNormalizer(reader, reader.Get(root, "normalizer"));
  parts.normalizer = std::move(normalizer.normalizer);
  PreTokenizerSection pre_tokenizer =
      ReadPreTokenizer(reader, reader.Get(root, "pre_tokenizer"), normalizer.prepends);
  parts.pre_tokenizer = std::move(pre_tokenizer.pre_tokenizer);
  parts.decoder = ReadDecoder(reader, reader.Get(root, "decoder"));
  PostProcessorSection post_processor =
      ReadPostProcessor(reader, reader.Get(root, "post_processor"));
  parts.frames = std::move(post_processor.frames);
  parts.trims = std::move(post_processor.trims);
  std::vector<AddedToken> added = ReadAddedTokens(reader, root);
  if (reader.ok())
    parts.model = ReadModel(reader, reader.Get(root, "model"), pre_tokenizer.byte_level);
  if (!reader.ok()) return reader.status();
  std::vector<AddedToken> others = TokensToAdd(more, added, *parts.model);
  auto added_tokens = AddedTokens::Create(added, *parts.model, parts.normalizer.get());
  if (added_tokens.ok() && !others.empty()) {
    // The file's own ids have been checked.
    added.insert(added.end(), std::make_move_iterator(others.begin()),
                 std::make_move_iterator(others.end()));
    added_tokens = AddedTokens::Create(std::move(added), *parts.model, parts.normalizer.get(),
                                       /*any_new_ids=*/true);
  }
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

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizerJson(const std::filesystem::path& model_dir,
                                                             TokenId id_limit) {
  const std::filesystem::path path = model_dir / "tokenizer.json";
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadTokenizerFile(path));
  if (!text.has_value()) return absl::NotFoundError(path.string() + ": no such file");
  MOESERVE_ASSIGN_OR_RETURN(TokenizerDetails details, LoadTokenizerDetails(model_dir));
  return ParseTokenizerJson(*text, path.string(),
                            {.added = std::move(details.added_tokens),
                             .special = std::move(details.special_tokens),
                             .id_limit = id_limit});
}

}  // namespace moeserve
