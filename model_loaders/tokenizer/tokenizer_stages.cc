#include "model_loaders/tokenizer/tokenizer_stages.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "engine/text/tokenizer/decoders/decoder_stages.h"
#include "engine/text/tokenizer/normalizers/character_map.h"
#include "engine/text/tokenizer/normalizers/text_edits.h"
#include "engine/text/tokenizer/normalizers/unicode_form.h"
#include "engine/text/tokenizer/regex_syntax.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxPatternBytes = 64 * 1024;
constexpr size_t kMaxLiteralBytes = 1024;  // limits the work of a search at each position
constexpr size_t kMaxFrame = 1024;
constexpr int kMaxTexts = 16;  // how often a frame may contain texts
constexpr size_t kMaxStages = 256;
constexpr size_t kMaxTokenGrowth = 1024;  // of a token by the Replace stages of a decoder
constexpr size_t kMaxStripped = 1 << 20;

// A processing stage of the tokenizer, such as one normalizer. Flatten() appends the stages of
// `json` to `stages`: `json` itself or, if it is a sequence, the stages of its members under
// `list_key`, which may be sequences, too. A JSON null has no stages.
struct Stage {
  const Json* json;
  std::string where;
  std::string type;
};

void Flatten(JsonReader& reader, const Json& json, const std::string& where,
             std::string_view list_key, std::vector<Stage>* stages) {
  if (json.is_null()) return;
  if (!json.is_object()) return reader.FailExpected(where, "an object or null", json);
  const std::string type = reader.String(json, where, "type");
  if (type != "Sequence") {
    if (stages->size() == kMaxStages) {
      return reader.Fail(where, Concat("expected at most ", kMaxStages, " stages"));
    }
    stages->push_back({&json, where, type});
    return;
  }
  reader.CheckKeys(json, where, {"type", list_key});
  const Json& list = reader.Array(json, where, list_key);
  for (size_t i = 0; i < list.size() && reader.ok(); ++i) {
    const std::string member = Concat(reader.Path(where, list_key), '[', i, ']');
    if (!list[i].is_object()) return reader.FailExpected(member, "an object", list[i]);
    Flatten(reader, list[i], member, list_key, stages);
  }
}

void Unsupported(JsonReader& reader, const Stage& stage, const std::string& supported) {
  reader.Fail(stage.where + ".type", "expected " + supported + ", found \"" + stage.type + "\"");
}

// Fails with the message of `status`.
void FailStatus(JsonReader& reader, const std::string& where, const absl::Status& status) {
  reader.Fail(where, std::string(status.message()));
}

// A search pattern: {"Regex": ...} or {"String": ...}.
struct Pattern {
  bool is_regex = false;
  std::string text;
};

Pattern ReadPattern(JsonReader& reader, const Stage& stage) {
  Pattern pattern;
  const std::string where = stage.where + ".pattern";
  const Json& json = reader.Get(*stage.json, "pattern");
  reader.CheckKeys(json, where, {"Regex", "String"});
  if (!reader.ok()) return pattern;
  if (json.size() != 1) {
    reader.Fail(where, Concat("expected one of Regex and String, found ", json.size(), " keys"));
    return pattern;
  }
  pattern.is_regex = json.contains("Regex");
  pattern.text = reader.String(json, where, pattern.is_regex ? "Regex" : "String");
  if (pattern.text.size() > kMaxPatternBytes) reader.Fail(where, "the pattern is too long");
  return pattern;
}

// Reads the pattern of a Replace stage that is not a regular expression.
std::string ReadLiteral(JsonReader& reader, const std::string& where, std::string text) {
  if (text.empty() || text.size() > kMaxLiteralBytes) {
    reader.Fail(where, Concat("expected 1 to ", kMaxLiteralBytes, " bytes, found ", text.size()));
  }
  return text;
}

std::optional<Regex> CompilePattern(JsonReader& reader, const std::string& where,
                                    const absl::StatusOr<std::string>& pattern) {
  absl::StatusOr<Regex> regex =
      pattern.ok() ? Regex::Compile(*pattern) : absl::StatusOr<Regex>(pattern.status());
  if (regex.ok()) return *std::move(regex);
  FailStatus(reader, where, regex.status());
  return std::nullopt;
}

// ---- normalizers

std::unique_ptr<Normalizer> ReadReplace(JsonReader& reader, const Stage& stage) {
  reader.CheckKeys(*stage.json, stage.where, {"type", "pattern", "content"});
  Pattern pattern = ReadPattern(reader, stage);
  std::string content = reader.String(*stage.json, stage.where, "content");
  if (!reader.ok()) return nullptr;
  const std::string where = stage.where + ".pattern";
  if (!pattern.is_regex) {
    return std::make_unique<ReplaceNormalizer>(ReadLiteral(reader, where, std::move(pattern.text)),
                                               std::move(content));
  }
  std::optional<Regex> regex = CompilePattern(reader, where, TranslateRegex(pattern.text));
  if (!regex.has_value()) return nullptr;
  return std::make_unique<ReplaceNormalizer>(*std::move(regex), std::move(content));
}

std::unique_ptr<Normalizer> ReadPrecompiled(JsonReader& reader, const Stage& stage) {
  reader.CheckKeys(*stage.json, stage.where, {"type", "precompiled_charsmap"});
  const std::string text = reader.String(*stage.json, stage.where, "precompiled_charsmap");
  if (!reader.ok()) return nullptr;
  const std::string where = stage.where + ".precompiled_charsmap";
  std::string data;
  if (!absl::Base64Unescape(text, &data)) {
    reader.Fail(where, "expected base64");
    return nullptr;
  }
  absl::StatusOr<CharacterMap> map = CharacterMap::Create(data);
  if (!map.ok()) {
    FailStatus(reader, where, map.status());
    return nullptr;
  }
  return std::make_unique<PrecompiledNormalizer>(*std::move(map));
}

std::unique_ptr<Normalizer> ReadBert(JsonReader& reader, const Stage& stage) {
  reader.CheckKeys(*stage.json, stage.where,
                   {"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"});
  BertNormalizerOptions options;
  options.clean_text = reader.Bool(*stage.json, stage.where, "clean_text");
  options.handle_chinese_chars = reader.Bool(*stage.json, stage.where, "handle_chinese_chars");
  options.lowercase = reader.Bool(*stage.json, stage.where, "lowercase");
  options.strip_accents = reader.Bool(*stage.json, stage.where, "strip_accents", options.lowercase);
  return BertNormalizer(options);
}

std::unique_ptr<Normalizer> ReadNormalizerStage(JsonReader& reader, const Stage& stage) {
  const Json& json = *stage.json;
  if (stage.type == "Replace") return ReadReplace(reader, stage);
  if (stage.type == "Precompiled") return ReadPrecompiled(reader, stage);
  if (stage.type == "BertNormalizer") return ReadBert(reader, stage);
  if (stage.type == "Prepend") {
    reader.CheckKeys(json, stage.where, {"type", "prepend"});
    return std::make_unique<PrependNormalizer>(reader.String(json, stage.where, "prepend"));
  }
  if (stage.type == "Strip") {
    reader.CheckKeys(json, stage.where, {"type", "strip_left", "strip_right"});
    const bool left = reader.Bool(json, stage.where, "strip_left");
    return std::make_unique<StripNormalizer>(left, reader.Bool(json, stage.where, "strip_right"));
  }
  const bool composes = stage.type == "NFC" || stage.type == "NFKC";
  const bool compatible = stage.type == "NFKC" || stage.type == "NFKD";
  std::unique_ptr<Normalizer> normalizer;
  if (composes || compatible || stage.type == "NFD") {
    normalizer = std::make_unique<UnicodeFormNormalizer>(composes, compatible);
  } else if (stage.type == "Lowercase") {
    normalizer = std::make_unique<LowercaseNormalizer>();
  } else if (stage.type == "StripAccents") {
    normalizer = StripAccentsNormalizer();
  } else if (stage.type == "Nmt") {
    normalizer = NmtNormalizer();
  } else {
    Unsupported(reader, stage,
                "BertNormalizer, Lowercase, NFC, NFD, NFKC, NFKD, Nmt, Precompiled, Prepend, "
                "Replace, Sequence, Strip or StripAccents");
    return nullptr;
  }
  reader.CheckKeys(json, stage.where, {"type"});
  return normalizer;
}

// ---- pre-tokenizers

SplitBehavior ReadBehavior(JsonReader& reader, const Stage& stage) {
  const std::string name = reader.String(*stage.json, stage.where, "behavior");
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  if (name != "Isolated") {
    reader.Fail(stage.where + ".behavior",
                "expected Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous, "
                "found \"" +
                    name + "\"");
  }
  return SplitBehavior::kIsolated;
}

std::unique_ptr<PreTokenizer> MakeSplit(JsonReader& reader, const std::string& where,
                                        const absl::StatusOr<std::string>& pattern,
                                        SplitBehavior behavior, bool inverted) {
  std::optional<Regex> regex = CompilePattern(reader, where, pattern);
  if (!regex.has_value()) return nullptr;
  return std::make_unique<SplitPreTokenizer>(*std::move(regex), behavior, inverted);
}

std::unique_ptr<PreTokenizer> ReadSplit(JsonReader& reader, const Stage& stage) {
  reader.CheckKeys(*stage.json, stage.where, {"type", "pattern", "behavior", "invert"});
  const bool inverted = reader.Bool(*stage.json, stage.where, "invert");
  const SplitBehavior behavior = ReadBehavior(reader, stage);
  const Pattern pattern = ReadPattern(reader, stage);
  if (!reader.ok()) return nullptr;
  return MakeSplit(reader, stage.where + ".pattern",
                   pattern.is_regex ? TranslateRegex(pattern.text)
                                    : absl::StatusOr<std::string>(LiteralRegex(pattern.text)),
                   behavior, inverted);
}

// Runs of word characters and runs of characters that are neither those nor white space.
std::unique_ptr<PreTokenizer> MakeWhitespace(JsonReader& reader, const Stage& stage) {
  constexpr std::string_view kWhiteSpace =
      R"([\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}])";
  const std::string word = RustWordClass();
  return MakeSplit(reader, stage.where, Concat(word, "+|(?:(?!", word, '|', kWhiteSpace, ").)+"),
                   SplitBehavior::kRemoved, /*inverted=*/true);
}

std::unique_ptr<PreTokenizer> ReadMetaspace(JsonReader& reader, const Stage& stage) {
  using Prepend = MetaspacePreTokenizer::Prepend;
  const Json& json = *stage.json;
  reader.CheckKeys(
      json, stage.where,
      {"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"});
  const std::string replacement = reader.Character(json, stage.where, "replacement");
  const bool adds = reader.Bool(json, stage.where, "add_prefix_space", true);
  const bool split = reader.Bool(json, stage.where, "split", true);
  const std::string scheme =
      reader.OptionalString(json, stage.where, "prepend_scheme").value_or("always");
  Prepend prepend = Prepend::kAlways;
  if (scheme == "never") {
    prepend = Prepend::kNever;
  } else if (scheme == "first") {
    prepend = Prepend::kFirst;
  } else if (scheme != "always") {
    reader.Fail(stage.where + ".prepend_scheme",
                "expected always, never or first, found \"" + scheme + "\"");
  }
  if (!adds && prepend != Prepend::kNever) {
    reader.Fail(stage.where, "expected prepend_scheme never with add_prefix_space false, found \"" +
                                 scheme + "\"");
  }
  return std::make_unique<MetaspacePreTokenizer>(replacement, prepend, split);
}

std::unique_ptr<PreTokenizer> ReadByteLevel(JsonReader& reader, const Stage& stage) {
  reader.CheckKeys(*stage.json, stage.where,
                   {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  auto made =
      ByteLevelPreTokenizer::Create(reader.Bool(*stage.json, stage.where, "add_prefix_space"),
                                    reader.Bool(*stage.json, stage.where, "use_regex", true));
  reader.Bool(*stage.json, stage.where, "trim_offsets", true);
  if (made.ok()) return *std::move(made);
  FailStatus(reader, stage.where, made.status());
  return nullptr;
}

// Appends the pre-tokenizers of one stage.
void ReadPreTokenizerStage(JsonReader& reader, const Stage& stage,
                           std::vector<std::unique_ptr<PreTokenizer>>* out) {
  const Json& json = *stage.json;
  const auto split_at = [&](const CodePointSet& set, SplitBehavior behavior) {
    out->push_back(std::make_unique<CharacterPreTokenizer>(&set, behavior));
  };
  if (stage.type == "Split") {
    out->push_back(ReadSplit(reader, stage));
  } else if (stage.type == "ByteLevel") {
    out->push_back(ReadByteLevel(reader, stage));
  } else if (stage.type == "Metaspace") {
    out->push_back(ReadMetaspace(reader, stage));
  } else if (stage.type == "Digits") {
    reader.CheckKeys(json, stage.where, {"type", "individual_digits"});
    const bool individual = reader.Bool(json, stage.where, "individual_digits");
    out->push_back(MakeSplit(reader, stage.where, RustNumericClass(),
                             individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous,
                             false));
  } else if (stage.type == "Punctuation") {
    reader.CheckKeys(json, stage.where, {"type", "behavior"});
    split_at(PunctuationSet(), reader.Get(json, "behavior").is_null()
                                   ? SplitBehavior::kIsolated
                                   : ReadBehavior(reader, stage));
  } else if (stage.type == "CharDelimiterSplit") {
    reader.CheckKeys(json, stage.where, {"type", "delimiter"});
    const std::string delimiter = reader.Character(json, stage.where, "delimiter");
    if (!reader.ok()) return;
    size_t pos = 0;
    auto set = std::make_unique<CodePointSet>(std::span<const CodePointRange>());
    set->Add(NextCodePoint(delimiter, &pos));
    out->push_back(
        std::make_unique<CharacterPreTokenizer>(std::move(set), SplitBehavior::kRemoved));
  } else if (stage.type == "FixedLength") {
    reader.CheckKeys(json, stage.where, {"type", "length"});
    constexpr size_t kDefaultLength = 5;
    out->push_back(std::make_unique<FixedLengthPreTokenizer>(
        reader.Get(json, "length").is_null()
            ? kDefaultLength
            : reader.Size(json, stage.where, "length", 1, size_t{1} << 30)));
  } else if (stage.type == "BertPreTokenizer" || stage.type == "WhitespaceSplit") {
    reader.CheckKeys(json, stage.where, {"type"});
    split_at(WhiteSpaceSet(), SplitBehavior::kRemoved);
    if (stage.type == "BertPreTokenizer") split_at(PunctuationSet(), SplitBehavior::kIsolated);
  } else if (stage.type == "Whitespace") {
    reader.CheckKeys(json, stage.where, {"type"});
    out->push_back(MakeWhitespace(reader, stage));
  } else {
    Unsupported(reader, stage,
                "BertPreTokenizer, ByteLevel, CharDelimiterSplit, Digits, FixedLength, Metaspace, "
                "Punctuation, Sequence, Split, Whitespace or WhitespaceSplit");
  }
}

// ---- post-processors

// Returns whether `frame` is short enough; if not, `reader` fails.
bool CheckFrame(JsonReader& reader, const Stage& stage, const Frame& frame) {
  const auto texts = std::count_if(frame.begin(), frame.end(),
                                   [](const FramePart& part) { return !part.token.has_value(); });
  if (texts > kMaxTexts) {
    reader.Fail(stage.where, Concat("expected the text at most ", kMaxTexts, " times"));
    return false;
  }
  if (frame.size() <= kMaxFrame) return true;
  reader.Fail(stage.where, Concat("expected at most ", kMaxFrame, " tokens around a text"));
  return false;
}

// Reads `single` or `pair` of TemplateProcessing; `special` is its `special_tokens`.
Frame ReadTemplate(JsonReader& reader, const Stage& stage, const char* key, const Json& special) {
  Frame frame;
  const bool pair = key == std::string_view("pair");
  const Json& list = reader.Array(*stage.json, stage.where, key);
  for (size_t i = 0; i < list.size() && reader.ok() && CheckFrame(reader, stage, frame); ++i) {
    const std::string where = Concat(stage.where, '.', key, '[', i, ']');
    reader.CheckKeys(list[i], where, {"Sequence", "SpecialToken"});
    if (!reader.ok()) break;
    if (list[i].size() != 1) {
      reader.Fail(where, "expected one of Sequence and SpecialToken");
      break;
    }
    const bool is_text = list[i].contains("Sequence");
    const std::string kind = is_text ? "Sequence" : "SpecialToken";
    const Json& piece = list[i][kind];
    const std::string piece_where = where + "." + kind;
    reader.CheckKeys(piece, piece_where, {"id", "type_id"});
    const std::string name = reader.String(piece, piece_where, "id");
    FramePart part;
    if (!reader.Get(piece, "type_id").is_null()) {
      part.type = static_cast<uint8_t>(reader.Size(piece, piece_where, "type_id", 0, UINT8_MAX));
    }
    if (is_text) {
      if (name != "A" && !(pair && name == "B")) {
        reader.Fail(piece_where + ".id", Concat("expected ", pair ? "\"A\" or \"B\"" : "\"A\"",
                                                ", found \"", name, "\""));
      }
      part.second = name == "B";
      frame.push_back(part);
      continue;
    }
    const std::string token_where = stage.where + ".special_tokens[\"" + name + "\"]";
    const Json& token = reader.Get(special, name);
    reader.CheckKeys(token, token_where, {"id", "ids", "tokens"});
    const Json& ids = reader.Array(token, token_where, "ids");
    for (size_t k = 0; k < ids.size() && CheckFrame(reader, stage, frame); ++k) {
      part.token = reader.Id(ids[k], Concat(token_where, ".ids[", k, ']'));
      frame.push_back(part);
    }
  }
  return frame;
}

Frames ReadTemplates(JsonReader& reader, const Stage& stage) {
  reader.CheckKeys(*stage.json, stage.where, {"type", "single", "pair", "special_tokens"});
  const Json& special = reader.Get(*stage.json, "special_tokens");
  if (!special.is_object()) {
    reader.FailExpected(stage.where + ".special_tokens", "an object", special);
  }
  Frames frames;
  frames.single = ReadTemplate(reader, stage, "single", special);
  if (!reader.Get(*stage.json, "pair").is_null()) {
    frames.pair = ReadTemplate(reader, stage, "pair", special);
  }
  return frames;
}

// Reads the frames of BertProcessing and RobertaProcessing, whose tokens are given as [token, id].
Frames ReadClassifierFrames(JsonReader& reader, const Stage& stage, bool roberta) {
  const auto id_of = [&](const char* key) {
    const Json& pair = reader.Array(*stage.json, stage.where, key);
    const std::string where = reader.Path(stage.where, key);
    if (pair.size() == 2 && pair[0].is_string()) return reader.Id(pair[1], where + "[1]");
    reader.FailExpected(where, "a pair of a token and its id", pair);
    return TokenId{0};
  };
  const TokenId cls = id_of("cls");
  const TokenId sep = id_of("sep");
  return roberta ? RobertaFrames(cls, sep) : BertFrames(cls, sep);
}

// Returns `outer` with `inner`, the frames of the processors before, in place of the text. Only one
// processor may have a rule for two texts.
Frames Nested(JsonReader& reader, const Stage& stage, Frames outer, const Frames& inner) {
  if (inner.single.size() == 1 && !inner.single[0].token.has_value()) return outer;
  Frames frames{.single = {}, .pair = std::nullopt};
  for (const FramePart& part : outer.single) {
    if (part.token.has_value()) {
      frames.single.push_back(part);
    } else {
      frames.single.insert(frames.single.end(), inner.single.begin(), inner.single.end());
    }
    if (!CheckFrame(reader, stage, frames.single)) break;
  }
  return frames;
}

// Reads the options of ByteLevel and RobertaProcessing that change spans.
void ReadTrim(JsonReader& reader, const Stage& stage, std::vector<SpanTrim>* trims) {
  const bool adds = reader.Bool(*stage.json, stage.where, "add_prefix_space", true);
  if (reader.Bool(*stage.json, stage.where, "trim_offsets", true)) trims->push_back({adds});
}

// ---- decoders

std::unique_ptr<DecoderStage> ReadDecoderStage(JsonReader& reader, const Stage& stage, bool fused) {
  const Json& json = *stage.json;
  if (stage.type == "Strip") {
    reader.CheckKeys(json, stage.where, {"type", "content", "start", "stop"});
    const std::string content = reader.Character(json, stage.where, "content");
    const size_t start = reader.Size(json, stage.where, "start", 0, kMaxStripped);
    const size_t stop = reader.Size(json, stage.where, "stop", 0, kMaxStripped);
    return StripStage(content, start, stop, fused);
  }
  if (fused) {
    reader.Fail(stage.where + ".type",
                "expected Strip or Fuse after a decoder that joins all tokens, found \"" +
                    stage.type + "\"");
    return nullptr;
  }
  if (stage.type == "ByteFallback") {
    reader.CheckKeys(json, stage.where, {"type"});
    return std::make_unique<ByteFallbackStage>();
  }
  if (stage.type == "Replace") {
    reader.CheckKeys(json, stage.where, {"type", "pattern", "content"});
    Pattern pattern = ReadPattern(reader, stage);
    const std::string where = stage.where + ".pattern";
    if (reader.ok() && pattern.is_regex) reader.Fail(where, "expected String, found Regex");
    if (!reader.ok()) return nullptr;
    return ReplaceStage(ReadLiteral(reader, where, std::move(pattern.text)),
                        reader.String(json, stage.where, "content"));
  }
  if (stage.type == "Metaspace") {
    reader.CheckKeys(
        json, stage.where,
        {"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"});
    const std::string scheme =
        reader.OptionalString(json, stage.where, "prepend_scheme").value_or("always");
    if (scheme != "always" && scheme != "first" && scheme != "never") {
      reader.Fail(stage.where + ".prepend_scheme",
                  "expected always, never or first, found \"" + scheme + "\"");
    }
    reader.Bool(json, stage.where, "add_prefix_space", true);
    return MetaspaceStage(reader.Character(json, stage.where, "replacement"), scheme != "never");
  }
  if (stage.type == "WordPiece") {
    reader.CheckKeys(json, stage.where, {"type", "prefix", "cleanup"});
    const bool cleanup = reader.Bool(json, stage.where, "cleanup");
    return WordPieceStage(reader.String(json, stage.where, "prefix"), cleanup);
  }
  if (stage.type == "BPEDecoder") {
    reader.CheckKeys(json, stage.where, {"type", "suffix"});
    const std::string suffix = reader.String(json, stage.where, "suffix");
    return std::make_unique<WordEndStage>(ReadLiteral(reader, stage.where + ".suffix", suffix));
  }
  Unsupported(reader, stage,
              "BPEDecoder, ByteFallback, ByteLevel first, Fuse, Metaspace, Replace, Sequence, "
              "Strip or WordPiece");
  return nullptr;
}

}  // namespace

NormalizerSection ReadNormalizer(JsonReader& reader, const Json& json) {
  std::vector<Stage> stages;
  Flatten(reader, json, "normalizer", "normalizers", &stages);
  NormalizerSection section;
  std::vector<std::unique_ptr<Normalizer>> normalizers;
  for (const Stage& stage : stages) {
    if (!reader.ok()) return section;
    normalizers.push_back(ReadNormalizerStage(reader, stage));
    if (stage.type == "Prepend") section.prepends = true;
  }
  if (normalizers.size() == 1) {
    section.normalizer = std::move(normalizers[0]);
  } else if (!normalizers.empty()) {
    section.normalizer = std::make_unique<SequenceNormalizer>(std::move(normalizers));
  }
  return section;
}

PreTokenizerSection ReadPreTokenizer(JsonReader& reader, const Json& json, bool prepends) {
  std::vector<Stage> stages;
  Flatten(reader, json, "pre_tokenizer", "pretokenizers", &stages);
  PreTokenizerSection section;
  std::vector<std::unique_ptr<PreTokenizer>> pre_tokenizers;
  for (const Stage& stage : stages) {
    if (!reader.ok()) return section;
    if (section.byte_level) {
      reader.Fail(stage.where,
                  "expected ByteLevel to be the last stage, found " + stage.type + " after it");
    }
    // Hugging Face's library takes every piece of inserted text for the start of the text.
    if (stage.type == "Metaspace" && prepends && &stage != &stages[0] &&
        reader.Get(*stage.json, "prepend_scheme") == "first") {
      reader.Fail(stage.where,
                  "prepend_scheme first is supported only as the first stage if the "
                  "normalizer has Prepend");
    }
    section.byte_level = stage.type == "ByteLevel";
    ReadPreTokenizerStage(reader, stage, &pre_tokenizers);
  }
  if (pre_tokenizers.size() == 1) {
    section.pre_tokenizer = std::move(pre_tokenizers[0]);
  } else if (!pre_tokenizers.empty()) {
    section.pre_tokenizer = std::make_unique<SequencePreTokenizer>(std::move(pre_tokenizers));
  }
  return section;
}

PostProcessorSection ReadPostProcessor(JsonReader& reader, const Json& json) {
  PostProcessorSection section;
  std::vector<Stage> stages;
  Flatten(reader, json, "post_processor", "processors", &stages);
  for (const Stage& stage : stages) {
    if (stage.type == "ByteLevel") {
      reader.CheckKeys(*stage.json, stage.where,
                       {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      ReadTrim(reader, stage, &section.trims);
    } else if (stage.type == "TemplateProcessing") {
      section.frames = Nested(reader, stage, ReadTemplates(reader, stage), section.frames);
    } else if (stage.type == "BertProcessing") {
      reader.CheckKeys(*stage.json, stage.where, {"type", "sep", "cls"});
      section.frames =
          Nested(reader, stage, ReadClassifierFrames(reader, stage, false), section.frames);
    } else if (stage.type == "RobertaProcessing") {
      reader.CheckKeys(*stage.json, stage.where,
                       {"type", "sep", "cls", "trim_offsets", "add_prefix_space"});
      ReadTrim(reader, stage, &section.trims);
      section.frames =
          Nested(reader, stage, ReadClassifierFrames(reader, stage, true), section.frames);
    } else {
      Unsupported(reader, stage,
                  "BertProcessing, ByteLevel, RobertaProcessing, Sequence or TemplateProcessing");
    }
    if (!reader.ok()) break;
  }
  return section;
}

std::unique_ptr<Decoder> ReadDecoder(JsonReader& reader, const Json& json) {
  std::vector<std::unique_ptr<DecoderStage>> chain;
  if (json.is_null()) return std::make_unique<ChainDecoder>(std::move(chain), " ");
  std::vector<Stage> stages;
  Flatten(reader, json, "decoder", "decoders", &stages);
  bool fused = false;  // the stages before have joined all tokens to one
  size_t growth = 1;
  for (size_t i = 0; i < stages.size() && reader.ok(); ++i) {
    if (stages[i].type == "ByteLevel" && i == 0) {
      reader.CheckKeys(*stages[i].json, stages[i].where,
                       {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      chain.push_back(std::make_unique<ByteLevelStage>());
      fused = true;
    } else if (stages[i].type == "Fuse") {
      reader.CheckKeys(*stages[i].json, stages[i].where, {"type"});
      fused = true;
    } else {
      chain.push_back(ReadDecoderStage(reader, stages[i], fused));
      if (reader.ok() && stages[i].type == "Replace") {
        const Json& json_step = *stages[i].json;
        const size_t literal = json_step["pattern"]["String"].get_ref<const std::string&>().size();
        const size_t content = json_step["content"].get_ref<const std::string&>().size();
        growth *= std::max<size_t>(1, (content + literal - 1) / literal);
        if (growth > kMaxTokenGrowth) {
          reader.Fail(stages[i].where, Concat("the decoder makes a token more than ",
                                              kMaxTokenGrowth, " times as long"));
        }
      }
    }
  }
  return std::make_unique<ChainDecoder>(std::move(chain));
}

}  // namespace moeserve
