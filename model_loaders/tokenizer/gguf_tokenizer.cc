#include "model_loaders/tokenizer/gguf_tokenizer.h"

#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/text/tokenizer/decoders/decoder_stages.h"
#include "engine/text/tokenizer/models/bpe_model.h"
#include "engine/text/tokenizer/normalizers/character_map.h"
#include "engine/text/tokenizer/normalizers/text_edits.h"
#include "engine/text/tokenizer/normalizers/unicode_form.h"
#include "engine/text/tokenizer/pipeline_tokenizer.h"
#include "engine/text/tokenizer/pre_tokenizer.h"
#include "engine/text/tokenizer/regex.h"
#include "engine/text/tokenizer/regex_syntax.h"
#include "engine/text/tokenizer/utf8.h"
#include "model_loaders/tokenizer/sentence_piece_file.h"
#include "model_loaders/tokenizer/split_patterns.h"
#include "model_loaders/tokenizer/vocab_files.h"

namespace moeserve {
namespace {

constexpr std::string_view kModel = "tokenizer.ggml.model";
constexpr std::string_view kPre = "tokenizer.ggml.pre";
constexpr std::string_view kTokens = "tokenizer.ggml.tokens";
constexpr std::string_view kGgufTokenTypes = "tokenizer.ggml.token_type";
constexpr std::string_view kScores = "tokenizer.ggml.scores";
constexpr std::string_view kMerges = "tokenizer.ggml.merges";
constexpr std::string_view kGgufCharacterMap = "tokenizer.ggml.precompiled_charsmap";
constexpr std::string_view kTemplate = "tokenizer.chat_template";
constexpr size_t kMaxTemplates = 64;
constexpr std::string_view kWordStart = "\xE2\x96\x81";  // U+2581, in front of a word

// The values of tokenizer.ggml.model: none, "llama", "t5", "gpt2", "bert" and "gemma4".
enum class GgufVocabulary : uint8_t {
  kNone,
  kSentencePieceBpe,
  kUnigram,
  kByteLevel,
  kWordPiece,
  kCharacters,
};

// How a byte-level tokenizer prepares and cuts a text.
struct PreTokenizerKind {
  enum class Digits : uint8_t {
    kTogether,     // the patterns decide
    kSingleFirst,  // before the patterns, every digit becomes a piece
    kSingleLast,   // after them
  };

  std::string_view name;                            // value of tokenizer.ggml.pre
  std::span<const std::string_view> patterns = {};  // applied in this order; none: GPT-2's
  Digits digits = Digits::kTogether;
  // Before the patterns, matches are cut into groups of three digits from their ends.
  std::string_view grouped = {};
  bool composes = false;       // the text is brought to NFC first
  bool ignore_merges = false;  // BpeConfig::ignore_merges
  bool add_bos = false;        // unless tokenizer.ggml.add_bos_token says otherwise
  bool add_eos = false;        // the same
  Frames (*frames)(TokenId bos,
                   TokenId eos) = nullptr;  // around texts with both tokens, if special
};

using Digits = PreTokenizerKind::Digits;

constexpr std::string_view kExaone[] = {kExaonePattern};
constexpr std::string_view kGpt4o[] = {kGpt4oPattern};
constexpr std::string_view kHorizon[] = {kHorizonPattern};
constexpr std::string_view kKimi[] = {kKimiPattern};
constexpr std::string_view kLlama3[] = {kLlama3Pattern};
constexpr std::string_view kQwen2[] = {kQwen2Pattern};
constexpr std::string_view kQwen35[] = {kQwen35Pattern};
constexpr std::string_view kTekken[] = {kTekkenPattern};

// The original of bailingmoe and bailingmoe2 is another pattern that matches the same.
constexpr PreTokenizerKind kKinds[] = {
    {.name = "afmoe", .patterns = kAfmoePatterns, .grouped = kAfmoeDigits},
    {.name = "bailingmoe", .patterns = kQwen2},
    {.name = "bailingmoe2", .patterns = kQwen2},
    {.name = "cohere2moe", .patterns = kGpt4o, .grouped = kCommandDigits, .composes = true},
    {.name = "dbrx", .patterns = kLlama3},
    {.name = "deepseek-llm", .patterns = kDeepSeek2Patterns, .digits = Digits::kSingleLast},
    {.name = "deepseek-v3", .patterns = kDeepSeek3Patterns},
    {.name = "exaone-moe", .patterns = kExaone, .composes = true},
    {.name = "glm4", .patterns = kLlama3},
    {.name = "gpt-2"},
    {.name = "gpt-4o", .patterns = kGpt4o},
    {.name = "hunyuan", .patterns = kQwen2, .composes = true},
    {.name = "k2-horizon", .patterns = kHorizon},
    {.name = "kimi-k2", .patterns = kKimi},
    {.name = "lfm2", .patterns = kLlama3, .ignore_merges = true, .add_bos = true},
    {.name = "llama-bpe", .patterns = kLlama3, .ignore_merges = true, .add_bos = true},
    {.name = "llama4", .patterns = kGpt4o, .ignore_merges = true, .add_bos = true},
    {.name = "mellum2", .digits = Digits::kSingleFirst},
    {.name = "minimax-m2", .patterns = kGpt4o},
    {.name = "modern-bert",
     .composes = true,
     .add_bos = true,
     .add_eos = true,
     .frames = BertFrames},
    {.name = "olmo", .composes = true},
    {.name = "pixtral", .patterns = kLlama3, .ignore_merges = true, .add_bos = true},
    {.name = "qwen2", .patterns = kQwen2, .composes = true},
    {.name = "qwen35", .patterns = kQwen35, .composes = true},
    {.name = "refact", .digits = Digits::kSingleFirst},
    {.name = "roberta-bpe", .add_bos = true, .add_eos = true, .frames = RobertaFrames},
    {.name = "smollm", .digits = Digits::kSingleFirst},
    {.name = "solar-open", .patterns = kQwen2},
    {.name = "starcoder", .digits = Digits::kSingleFirst},
    {.name = "tekken", .patterns = kTekken, .ignore_merges = true, .add_bos = true},
    {.name = "tiny_aya", .patterns = kGpt4o, .grouped = kCommandDigits, .composes = true},
};

// Returns a piece as SentencePiece's vocabulary has it. Converters write the spaces of user-defined
// pieces, such as Gemma's runs of spaces, as spaces.
std::string PieceText(std::string_view token, PieceType type) {
  if (type != PieceType::kUserDefined) return std::string(token);
  std::string text;
  for (const char c : token) {
    if (c == ' ') {
      text += kWordStart;
    } else {
      text += c;
    }
  }
  return text;
}

class GgufReader {
 public:
  explicit GgufReader(const GgufFile& file) : file_(file) {}

  absl::Status Fault(std::string_view key, std::string_view expected, std::string_view found) {
    return absl::InvalidArgumentError(Concat(Printable(file_.file_name()),
                                             ": metadata: ", Printable(key), ": expected ",
                                             expected, ", found ", found));
  }
  absl::Status Wrong(std::string_view key, std::string_view expected) {
    const GgufValue* value = file_.Find(key);
    return Fault(key, expected, value == nullptr ? "no such key" : ShowGguf(*value));
  }
  // Returns `status` with the file and the key in front of its message.
  absl::Status At(std::string_view key, const absl::Status& status) {
    return Prefixed(Concat(Printable(file_.file_name()), ": metadata: ", key, ": "), status);
  }

  Result<std::optional<std::string_view>> Text(std::string_view key) {
    const GgufValue* value = file_.Find(key);
    if (value == nullptr) return std::optional<std::string_view>();
    if (!value->String().has_value()) return Wrong(key, "a string");
    return value->String();
  }

  Result<std::optional<bool>> Bool(std::string_view key) {
    const GgufValue* value = file_.Find(key);
    if (value == nullptr) return std::optional<bool>();
    if (!value->Bool().has_value()) return Wrong(key, "a bool");
    return value->Bool();
  }

  Result<std::vector<std::string_view>> Tokens() {
    const GgufValue* value = file_.Find(kTokens);
    const std::string expected = Concat("an array of 1 to ", Vocabulary::kMaxId, " strings");
    if (value == nullptr || value->count < 1 || value->count > Vocabulary::kMaxId) {
      return Wrong(kTokens, expected);
    }
    std::optional<std::vector<std::string_view>> tokens = value->Strings();
    if (!tokens.has_value()) return Wrong(kTokens, expected);
    return *std::move(tokens);
  }

  // Returns the type of each token; without the key, all of them are normal.
  Result<std::vector<PieceType>> Types(size_t count) {
    const GgufValue* value = file_.Find(kGgufTokenTypes);
    if (value == nullptr) return std::vector<PieceType>(count, PieceType::kNormal);
    constexpr PieceType kByNumber[] = {PieceType::kNormal,  PieceType::kUnknown,
                                       PieceType::kControl, PieceType::kUserDefined,
                                       PieceType::kUnused,  PieceType::kByte};
    const std::optional<std::vector<int64_t>> numbers = value->Integers();
    if (!numbers.has_value() || numbers->size() != count) {
      return Wrong(kGgufTokenTypes, Concat("an array of ", count, " integers, one for each token"));
    }
    std::vector<PieceType> types;
    types.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const int64_t number = (*numbers)[i];
      if (number < 1 || number > static_cast<int64_t>(std::size(kByNumber))) {
        return Fault(Concat(kGgufTokenTypes, '[', i, ']'), "a type from 1 to 6",
                     std::to_string(number));
      }
      types.push_back(kByNumber[number - 1]);
    }
    return types;
  }

  // Returns the id that `key` has, or else `fallback`, which need not exist.
  Result<std::optional<TokenId>> Id(std::string_view key, size_t count,
                                    std::optional<TokenId> fallback = std::nullopt) {
    const GgufValue* value = file_.Find(key);
    if (value == nullptr) {
      const bool exists = fallback.has_value() && static_cast<size_t>(*fallback) < count;
      return exists ? fallback : std::nullopt;
    }
    const std::optional<int64_t> id = value->Integer();
    if (!id.has_value() || *id < 0 || *id >= static_cast<int64_t>(count)) {
      return Wrong(key, Concat("an id in [0, ", count - 1, "] (", kTokens, " has ", count, ')'));
    }
    return static_cast<TokenId>(*id);
  }

  Result<GgufVocabulary> VocabularyKind() {
    MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string_view> model, Text(kModel));
    if (!model.has_value() || *model == "none" || *model == "no_vocab") {
      return GgufVocabulary::kNone;
    }
    if (*model == "llama") return GgufVocabulary::kSentencePieceBpe;
    if (*model == "t5") return GgufVocabulary::kUnigram;
    if (*model == "gpt2") return GgufVocabulary::kByteLevel;
    if (*model == "bert") return GgufVocabulary::kWordPiece;
    if (*model == "gemma4") return GgufVocabulary::kCharacters;
    return Fault(kModel, R"("llama", "t5", "gpt2", "bert" or "gemma4")", Quoted(*model));
  }

  Result<const PreTokenizerKind*> Kind() {
    MOESERVE_ASSIGN_OR_RETURN(std::optional<std::string_view> name, Text(kPre));
    if (name == "llama3" || name == "llama-v3") name = "llama-bpe";  // other names of it
    std::string known;
    for (const PreTokenizerKind& kind : kKinds) {
      if (kind.name == name) return &kind;
      known += Concat(known.empty() ? "" : ", ", Quoted(kind.name));
    }
    return Fault(kPre, Concat("one of ", known),
                 name.has_value() ? Quoted(*name) : "none; it says how a text is cut into pieces");
  }

  Result<std::unique_ptr<Tokenizer>> SentencePiece(bool unigram);
  Result<std::unique_ptr<Tokenizer>> WordPiece();
  Result<std::unique_ptr<Tokenizer>> ByteLevel();
  Result<std::unique_ptr<Tokenizer>> Characters();
  Result<TokenizerConfig> Config();

 private:
  Result<std::optional<std::string>> TokenText(std::string_view key,
                                               const std::vector<std::string_view>& tokens,
                                               std::optional<TokenId> fallback) {
    MOESERVE_ASSIGN_OR_RETURN(const std::optional<TokenId> id, Id(key, tokens.size(), fallback));
    if (!id.has_value()) return std::optional<std::string>();
    return std::optional<std::string>(tokens[static_cast<size_t>(*id)]);
  }
  absl::Status ReadTemplates(TokenizerConfig* config);
  Result<BpeConfig> Bpe(const std::vector<std::string_view>& tokens,
                        const std::vector<PieceType>& types, bool ignore_merges,
                        std::vector<AddedToken>* added);
  // Completes a tokenizer that has all parts but the model, the added tokens and the frames.
  Result<std::unique_ptr<Tokenizer>> Finish(PipelineParts parts, BpeConfig bpe,
                                            std::vector<AddedToken> added, size_t count,
                                            const PreTokenizerKind& kind);

  const GgufFile& file_;
};

Result<std::unique_ptr<Tokenizer>> GgufReader::SentencePiece(bool unigram) {
  SentencePieceFile model;
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string_view> tokens, Tokens());
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<PieceType> types, Types(tokens.size()));
  const GgufValue* const value = file_.Find(kScores);
  const std::optional<std::vector<double>> scores =
      value == nullptr ? std::nullopt : value->Reals();
  if (!scores.has_value() || scores->size() != tokens.size()) {
    return Wrong(kScores, Concat("an array of ", tokens.size(), " numbers, one for each token"));
  }
  model.model.algorithm =
      unigram ? SentencePieceConfig::Algorithm::kUnigram : SentencePieceConfig::Algorithm::kBpe;
  model.model.pieces.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (types[i] == PieceType::kByte) model.model.byte_fallback = true;
    model.model.pieces.push_back(
        {PieceText(tokens[i], types[i]), static_cast<float>((*scores)[i]), types[i]});
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<bool> prefix,
                            Bool("tokenizer.ggml.add_space_prefix"));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<bool> extra,
                            Bool("tokenizer.ggml.remove_extra_whitespaces"));
  model.rules.add_dummy_prefix = prefix.value_or(true);
  model.rules.remove_extra_whitespaces = extra.value_or(unigram);
  if (const GgufValue* map = file_.Find(kGgufCharacterMap)) {
    const bool bytes =
        map->type == GgufValueType::kArray &&
        (map->item_type == GgufValueType::kU8 || map->item_type == GgufValueType::kI8);
    if (!bytes) return Wrong(kGgufCharacterMap, "an array of bytes");
    if (!map->bytes.empty()) {
      absl::StatusOr<CharacterMap> characters = CharacterMap::Create(map->bytes);
      if (!characters.ok()) return At(kGgufCharacterMap, characters.status());
      model.rules.characters = *std::move(characters);
    }
  }
  TokenizerDetails details;
  MOESERVE_ASSIGN_OR_RETURN(details.config, Config());
  // Only XLM-RoBERTa's files have both tokens; two texts are joined as it does.
  if (unigram && details.config.add_bos_token.value_or(false)) {
    details.config.tokenizer_class = "XLMRobertaTokenizer";
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      MakeSentencePieceTokenizer(std::move(model), details);
  if (!tokenizer.ok()) return At(kTokens, tokenizer.status());
  return tokenizer;
}

// Converters write "▁" in front of the tokens that start a word and remove "##" from the others.
Result<std::unique_ptr<Tokenizer>> GgufReader::WordPiece() {
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string_view> tokens, Tokens());
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<PieceType> types, Types(tokens.size()));
  std::vector<std::pair<std::string, TokenId>> vocab;
  TokenizerDetails details;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view token = tokens[i];
    const auto id = static_cast<TokenId>(i);
    if (types[i] == PieceType::kUnused) continue;  // fills up the ids
    const bool special = types[i] == PieceType::kControl || types[i] == PieceType::kUnknown;
    if (special || types[i] == PieceType::kUserDefined) {
      AddedToken added;
      added.id = id;
      added.content = token;
      added.special = special;
      details.added_tokens.push_back(std::move(added));
    }
    if (special || (token.starts_with('[') && token.ends_with(']'))) {
      vocab.emplace_back(token, id);
    } else if (token.starts_with(kWordStart)) {
      vocab.emplace_back(token.substr(kWordStart.size()), id);
    } else {
      vocab.emplace_back(Concat("##", token), id);
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(details.config, Config());
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      MakeBertTokenizer(std::move(vocab), std::move(details));
  if (!tokenizer.ok()) return At(kTokens, tokenizer.status());
  return tokenizer;
}

// Special and user-defined tokens are found before the model sees a text, and their texts are not
// in the byte-level alphabet. So they are not in the model's vocabulary, unless merges make them.
Result<BpeConfig> GgufReader::Bpe(const std::vector<std::string_view>& tokens,
                                  const std::vector<PieceType>& types, bool ignore_merges,
                                  std::vector<AddedToken>* added) {
  const GgufValue* const value = file_.Find(kMerges);
  const std::optional<std::vector<std::string_view>> merges =
      value == nullptr ? std::nullopt : value->Strings();
  if (!merges.has_value()) return Wrong(kMerges, "an array of strings");
  BpeConfig config;
  config.byte_level = true;
  config.ignore_merges = ignore_merges;
  config.merges.reserve(merges->size());
  std::unordered_set<std::string> made;
  for (size_t i = 0; i < merges->size(); ++i) {
    const std::string_view merge = (*merges)[i];
    const size_t space = merge.find(' ');
    if (space == merge.npos || merge.find(' ', space + 1) != merge.npos) {
      return Fault(Concat(kMerges, '[', i, ']'), "two tokens with one space between them",
                   Quoted(merge));
    }
    config.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
    made.insert(Concat(merge.substr(0, space), merge.substr(space + 1)));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto id = static_cast<TokenId>(i);
    const bool special = types[i] == PieceType::kControl || types[i] == PieceType::kUnknown;
    const bool searched = special || types[i] == PieceType::kUserDefined;
    if (types[i] == PieceType::kUnused) continue;  // fills up the ids
    std::string text(tokens[i]);
    if (searched) {
      AddedToken token;
      token.id = id;
      token.content = text;
      token.special = special;
      added->push_back(std::move(token));
      if (!made.contains(text)) continue;
    }
    config.vocab.emplace_back(std::move(text), id);
  }
  return config;
}

Result<std::unique_ptr<Tokenizer>> GgufReader::ByteLevel() {
  MOESERVE_ASSIGN_OR_RETURN(const PreTokenizerKind* const kind, Kind());
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string_view> tokens, Tokens());
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<PieceType> types, Types(tokens.size()));
  if (file_.Find(kGgufCharacterMap) != nullptr) return Wrong(kGgufCharacterMap, "no such key");
  PipelineParts parts;
  if (kind->composes) {
    parts.normalizer =
        std::make_unique<UnicodeFormNormalizer>(/*composes=*/true, /*compatible=*/false);
  }
  std::vector<std::unique_ptr<PreTokenizer>> stages;
  const auto split_at = [&](const absl::StatusOr<std::string>& pattern) -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(stages.emplace_back(), SplitAt(pattern));
    return absl::OkStatus();
  };
  if (kind->digits == Digits::kSingleFirst) MOESERVE_RETURN_IF_ERROR(split_at(RustNumericClass()));
  if (!kind->grouped.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(const std::string runs, TranslateRegex(kind->grouped));
    MOESERVE_ASSIGN_OR_RETURN(Regex regex, Regex::Compile(runs));
    stages.push_back(std::make_unique<GroupPreTokenizer>(std::move(regex), 3));
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<bool> prefix,
                            Bool("tokenizer.ggml.add_space_prefix"));
  if (kind->patterns.empty() || prefix.value_or(false)) {
    MOESERVE_ASSIGN_OR_RETURN(stages.emplace_back(),
                              ByteLevelPreTokenizer::Create(prefix.value_or(false),
                                                            /*use_regex=*/kind->patterns.empty()));
  }
  for (const std::string_view pattern : kind->patterns) {
    MOESERVE_RETURN_IF_ERROR(split_at(TranslateRegex(pattern)));
  }
  if (kind->digits == Digits::kSingleLast) MOESERVE_RETURN_IF_ERROR(split_at(RustNumericClass()));
  parts.pre_tokenizer = std::make_unique<SequencePreTokenizer>(std::move(stages));

  std::vector<AddedToken> added;
  MOESERVE_ASSIGN_OR_RETURN(BpeConfig bpe, Bpe(tokens, types, kind->ignore_merges, &added));
  std::vector<std::unique_ptr<DecoderStage>> decoder;
  decoder.push_back(std::make_unique<ByteLevelStage>());
  parts.decoder = std::make_unique<ChainDecoder>(std::move(decoder));
  return Finish(std::move(parts), std::move(bpe), std::move(added), tokens.size(), *kind);
}

// Gemma 4: merges of characters, with "▁" for spaces and one token for each byte of others. A text
// is one piece. Converters do not mark the tokens of several line ends, which the authors'
// tokenizer searches for before the merges.
Result<std::unique_ptr<Tokenizer>> GgufReader::Characters() {
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string_view> tokens, Tokens());
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<PieceType> types, Types(tokens.size()));
  std::vector<AddedToken> added;
  MOESERVE_ASSIGN_OR_RETURN(BpeConfig bpe, Bpe(tokens, types, /*ignore_merges=*/false, &added));
  bpe.byte_level = false;
  bpe.fuse_unk = true;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (types[i] == PieceType::kByte) bpe.byte_fallback = true;
    const bool line_ends = types[i] == PieceType::kNormal && tokens[i].size() > 1 &&
                           tokens[i].find_first_not_of('\n') == tokens[i].npos;
    if (!line_ends) continue;
    AddedToken& token = added.emplace_back();
    token.id = static_cast<TokenId>(i);
    token.content = tokens[i];
  }
  constexpr std::string_view kUnknown = "tokenizer.ggml.unknown_token_id";
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<TokenId> unknown, Id(kUnknown, tokens.size()));
  if (unknown.has_value()) {
    bpe.unk_token = tokens[static_cast<size_t>(*unknown)];
    bpe.vocab.emplace_back(*bpe.unk_token, *unknown);
  }
  PipelineParts parts;
  parts.normalizer = std::make_unique<ReplaceNormalizer>(" ", std::string(kWordStart));
  std::vector<std::unique_ptr<DecoderStage>> decoder;
  decoder.push_back(ReplaceStage(std::string(kWordStart), " "));
  decoder.push_back(std::make_unique<ByteFallbackStage>());
  parts.decoder = std::make_unique<ChainDecoder>(std::move(decoder));
  constexpr PreTokenizerKind kGemma = {.name = "gemma4", .add_bos = true};
  return Finish(std::move(parts), std::move(bpe), std::move(added), tokens.size(), kGemma);
}

Result<std::unique_ptr<Tokenizer>> GgufReader::Finish(PipelineParts parts, BpeConfig bpe,
                                                      std::vector<AddedToken> added, size_t count,
                                                      const PreTokenizerKind& kind) {
  absl::StatusOr<std::unique_ptr<BpeModel>> model = BpeModel::Create(std::move(bpe));
  if (!model.ok()) return At(kTokens, model.status());
  parts.model = *std::move(model);
  absl::StatusOr<std::unique_ptr<AddedTokens>> all = AddedTokens::Create(
      std::move(added), *parts.model, parts.normalizer.get(), /*any_new_ids=*/true);
  if (!all.ok()) return At(kTokens, all.status());
  parts.added_tokens = *std::move(all);

  MOESERVE_ASSIGN_OR_RETURN(const std::optional<bool> bos, Bool("tokenizer.ggml.add_bos_token"));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<bool> eos, Bool("tokenizer.ggml.add_eos_token"));
  const auto id_of = [&](bool adds, std::string_view key) -> Result<std::optional<TokenId>> {
    if (!adds) return std::optional<TokenId>();
    MOESERVE_ASSIGN_OR_RETURN(const std::optional<TokenId> id, Id(key, count));
    if (!id.has_value()) return Wrong(key, "the id of the token that encloses a text");
    return id;
  };
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<TokenId> before,
                            id_of(bos.value_or(kind.add_bos), "tokenizer.ggml.bos_token_id"));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<TokenId> after,
                            id_of(eos.value_or(kind.add_eos), "tokenizer.ggml.eos_token_id"));
  const bool both = before.has_value() && after.has_value() && kind.frames != nullptr;
  parts.frames = both ? kind.frames(*before, *after) : Enclosed(before, after);
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      PipelineTokenizer::Create(std::move(parts));
  if (!tokenizer.ok()) return At(kTokens, tokenizer.status());
  return tokenizer;
}

absl::Status GgufReader::ReadTemplates(TokenizerConfig* config) {
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string_view> single, Text(kTemplate));
  const auto read = [&](std::string_view key, std::string_view text) {
    if (IsValidUtf8(text)) return absl::OkStatus();
    return Fault(key, "a template in UTF-8", "other bytes");
  };
  if (single.has_value()) {
    MOESERVE_RETURN_IF_ERROR(read(kTemplate, *single));
    config->chat_template = std::string(*single);
  }
  const std::string prefix = Concat(kTemplate, '.');
  const auto& all = file_.metadata();
  for (auto it = all.lower_bound(prefix); it != all.end() && it->first.starts_with(prefix); ++it) {
    MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string_view> text, Text(it->first));
    MOESERVE_RETURN_IF_ERROR(read(it->first, *text));
    config->named_chat_templates.emplace_back(it->first.substr(prefix.size()), *text);
    if (config->named_chat_templates.size() > kMaxTemplates) {
      return Fault(kTemplate, Concat("at most ", kMaxTemplates, " named templates"), "more");
    }
  }
  return absl::OkStatus();
}

Result<TokenizerConfig> GgufReader::Config() {
  TokenizerConfig config;
  MOESERVE_RETURN_IF_ERROR(ReadTemplates(&config));
  MOESERVE_ASSIGN_OR_RETURN(const GgufVocabulary kind, VocabularyKind());
  if (kind == GgufVocabulary::kNone) return config;
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string_view> tokens, Tokens());
  // Where a file does not say them, the usual ids and settings of the kind count.
  const bool llama = kind == GgufVocabulary::kSentencePieceBpe;
  const bool t5 = kind == GgufVocabulary::kUnigram;
  const bool bert = kind == GgufVocabulary::kWordPiece;
  using Usual = std::optional<TokenId>;
  const auto read = [&](std::optional<std::string> TokenizerConfig::*name, std::string_view key,
                        Usual usual) -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(config.*name,
                              TokenText(Concat("tokenizer.ggml.", key), tokens, usual));
    return absl::OkStatus();
  };
  const auto of = [](bool is, TokenId id) { return is ? Usual(id) : std::nullopt; };
  using Config = TokenizerConfig;
  MOESERVE_RETURN_IF_ERROR(read(&Config::unk_token, "unknown_token_id",
                                bert ? Usual(100)
                                : t5 ? Usual(2)
                                     : of(llama, 0)));
  MOESERVE_RETURN_IF_ERROR(
      read(&Config::bos_token, "bos_token_id", bert ? Usual(101) : of(llama, 1)));
  MOESERVE_RETURN_IF_ERROR(read(&Config::eos_token, "eos_token_id", t5 ? Usual(1) : of(llama, 2)));
  MOESERVE_RETURN_IF_ERROR(read(&Config::pad_token, "padding_token_id", of(bert || t5, 0)));
  MOESERVE_RETURN_IF_ERROR(read(&Config::cls_token, "cls_token_id", std::nullopt));
  MOESERVE_RETURN_IF_ERROR(read(&Config::sep_token, "seperator_token_id", of(bert, 102)));
  MOESERVE_RETURN_IF_ERROR(read(&Config::mask_token, "mask_token_id", of(bert, 103)));
  if (bert && !config.cls_token.has_value()) config.cls_token = config.bos_token;
  MOESERVE_ASSIGN_OR_RETURN(config.add_bos_token, Bool("tokenizer.ggml.add_bos_token"));
  MOESERVE_ASSIGN_OR_RETURN(config.add_eos_token, Bool("tokenizer.ggml.add_eos_token"));
  if (llama && !config.add_bos_token.has_value()) config.add_bos_token = true;
  if (t5 && !config.add_eos_token.has_value()) config.add_eos_token = true;
  return config;
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> ReadGgufTokenizer(const GgufFile& file) {
  GgufReader reader(file);
  MOESERVE_ASSIGN_OR_RETURN(const GgufVocabulary kind, reader.VocabularyKind());
  switch (kind) {
    case GgufVocabulary::kNone:
      break;
    case GgufVocabulary::kSentencePieceBpe:
      return reader.SentencePiece(/*unigram=*/false);
    case GgufVocabulary::kUnigram:
      return reader.SentencePiece(/*unigram=*/true);
    case GgufVocabulary::kByteLevel:
      return reader.ByteLevel();
    case GgufVocabulary::kWordPiece:
      return reader.WordPiece();
    case GgufVocabulary::kCharacters:
      return reader.Characters();
  }
  return std::unique_ptr<Tokenizer>();
}

Result<TokenizerConfig> ReadGgufTokenizerConfig(const GgufFile& file) {
  return GgufReader(file).Config();
}

}  // namespace moeserve
