#include "model_loaders/tokenizer/sentence_piece_file.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/decoders/sentence_piece_decoder.h"
#include "engine/text/tokenizer/models/renumbered_model.h"
#include "engine/text/tokenizer/models/sentence_piece_model.h"
#include "engine/text/tokenizer/normalizers/sentence_piece_normalizer.h"
#include "engine/text/tokenizer/pipeline_tokenizer.h"
#include "engine/text/tokenizer/utf8.h"
#include "model_loaders/tokenizer/fairseq_dictionary.h"
#include "model_loaders/tokenizer/protobuf_reader.h"

namespace moeserve {
namespace {

using Field = ProtobufReader::Field;

// Numbers of fields in sentencepiece_model.proto.
constexpr uint32_t kPieces = 1;
constexpr uint32_t kTrainerSpec = 2;
constexpr uint32_t kNormalizerSpec = 3;
constexpr uint32_t kDenormalizerSpec = 5;
constexpr uint32_t kPieceText = 1;
constexpr uint32_t kPieceScore = 2;
constexpr uint32_t kPieceType = 3;
constexpr uint32_t kModelType = 3;
constexpr uint32_t kWhitespaceAsSuffix = 24;
constexpr uint32_t kByteFallback = 35;
constexpr uint32_t kUnknownSurface = 44;
constexpr uint32_t kBosPiece = 46;
constexpr uint32_t kEosPiece = 47;
constexpr uint32_t kCharacterMap = 2;
constexpr uint32_t kAddDummyPrefix = 3;
constexpr uint32_t kRemoveExtraWhitespaces = 4;
constexpr uint32_t kEscapeWhitespaces = 5;

struct ModelFile : SentencePieceFile {
  uint64_t model_type = 1;
};

absl::Status Invalid(std::string message) { return absl::InvalidArgumentError(message); }

absl::Status Damaged(std::string_view part) {
  return Invalid(Concat("expected a SentencePiece model, found damaged data in ", part));
}

absl::StatusOr<PieceType> TypeOf(uint64_t value) {
  switch (value) {
    case 1:
      return PieceType::kNormal;
    case 2:
      return PieceType::kUnknown;
    case 3:
      return PieceType::kControl;
    case 4:
      return PieceType::kUserDefined;
    case 5:
      return PieceType::kUnused;
    case 6:
      return PieceType::kByte;
    default:
      return Invalid(Concat("expected a piece type from 1 to 6, found ", value));
  }
}

absl::Status ReadPiece(std::string_view data, ModelFile* file) {
  SentencePiece piece;
  ProtobufReader reader(data);
  for (Field field; reader.Next(&field);) {
    if (field.number == kPieceText && field.kind == Field::Kind::kBytes) {
      piece.text = field.bytes;
    } else if (field.number == kPieceScore && field.kind == Field::Kind::kFixed32) {
      piece.score = std::bit_cast<float>(static_cast<uint32_t>(field.value));
    } else if (field.number == kPieceType && field.kind == Field::Kind::kVarint) {
      MOESERVE_ASSIGN_OR_RETURN(piece.type, TypeOf(field.value));
    }
  }
  if (reader.damaged()) return Damaged(Concat("piece ", file->model.pieces.size()));
  file->model.pieces.push_back(std::move(piece));
  if (file->model.pieces.size() > Vocabulary::kMaxId) {
    return Invalid(Concat("expected at most ", Vocabulary::kMaxId, " pieces"));
  }
  return absl::OkStatus();
}

absl::Status ReadTrainerSpec(std::string_view data, ModelFile* file) {
  ProtobufReader reader(data);
  for (Field field; reader.Next(&field);) {
    if (field.kind == Field::Kind::kVarint) {
      if (field.number == kModelType) file->model_type = field.value;
      if (field.number == kByteFallback) file->model.byte_fallback = field.value != 0;
      if (field.number == kWhitespaceAsSuffix) {
        file->rules.treat_whitespace_as_suffix = field.value != 0;
      }
    } else if (field.kind == Field::Kind::kBytes) {
      if (field.number == kUnknownSurface) file->unknown_surface = field.bytes;
      if (field.number == kBosPiece) file->bos_piece = field.bytes;
      if (field.number == kEosPiece) file->eos_piece = field.bytes;
    }
  }
  if (reader.damaged()) return Damaged("trainer_spec");
  if (!IsValidUtf8(file->unknown_surface)) return Invalid("unk_surface: expected UTF-8");
  return absl::OkStatus();
}

absl::Status ReadNormalizerSpec(std::string_view data, ModelFile* file) {
  ProtobufReader reader(data);
  for (Field field; reader.Next(&field);) {
    if (field.kind == Field::Kind::kVarint) {
      if (field.number == kAddDummyPrefix) file->rules.add_dummy_prefix = field.value != 0;
      if (field.number == kEscapeWhitespaces) file->rules.escape_whitespaces = field.value != 0;
      if (field.number == kRemoveExtraWhitespaces) {
        file->rules.remove_extra_whitespaces = field.value != 0;
      }
    } else if (field.number == kCharacterMap && field.kind == Field::Kind::kBytes) {
      file->rules.characters.reset();
      if (field.bytes.empty()) continue;
      absl::StatusOr<CharacterMap> map = CharacterMap::Create(field.bytes);
      if (!map.ok()) return Prefixed("precompiled_charsmap: ", map.status());
      file->rules.characters = *std::move(map);
    }
  }
  return reader.damaged() ? Damaged("normalizer_spec") : absl::OkStatus();
}

absl::Status CheckDenormalizerSpec(std::string_view data) {
  ProtobufReader reader(data);
  for (Field field; reader.Next(&field);) {
    if (field.number == kCharacterMap && !field.bytes.empty()) {
      return Invalid("denormalizer_spec: expected no rules, found some; they are not supported");
    }
  }
  return reader.damaged() ? Damaged("denormalizer_spec") : absl::OkStatus();
}

absl::StatusOr<ModelFile> ReadModelFile(std::string_view data) {
  ModelFile file;
  ProtobufReader reader(data);
  for (Field field; reader.Next(&field);) {
    if (field.kind != Field::Kind::kBytes) continue;
    if (field.number == kPieces) MOESERVE_RETURN_IF_ERROR(ReadPiece(field.bytes, &file));
    if (field.number == kTrainerSpec) MOESERVE_RETURN_IF_ERROR(ReadTrainerSpec(field.bytes, &file));
    if (field.number == kNormalizerSpec) {
      MOESERVE_RETURN_IF_ERROR(ReadNormalizerSpec(field.bytes, &file));
    }
    if (field.number == kDenormalizerSpec) {
      MOESERVE_RETURN_IF_ERROR(CheckDenormalizerSpec(field.bytes));
    }
  }
  if (reader.damaged() || file.model.pieces.empty()) return Damaged("the list of fields");
  if (file.model_type != 1 && file.model_type != 2) {
    return Invalid(Concat("model_type: expected UNIGRAM (1) or BPE (2), found ", file.model_type));
  }
  file.model.algorithm = file.model_type == 1 ? SentencePieceConfig::Algorithm::kUnigram
                                              : SentencePieceConfig::Algorithm::kBpe;
  return file;
}

AddedToken ControlToken(size_t id, std::string content) {
  AddedToken token;
  token.id = static_cast<TokenId>(id);
  token.content = std::move(content);
  token.special = true;
  token.trusted_only = true;
  return token;
}

// Returns the tokens that are searched for before SentencePiece sees the text. `names` has the
// token of each id of the model.
absl::StatusOr<std::vector<AddedToken>> AllAddedTokens(std::vector<AddedToken> control,
                                                       const std::vector<std::string>& names,
                                                       const std::vector<AddedToken>& added) {
  std::vector<AddedToken> tokens = std::move(control);
  for (AddedToken token : added) {
    const size_t id = static_cast<size_t>(token.id);
    if (id < names.size()) {
      if (names[id] == token.content) continue;
      return Invalid(Concat("expected the tokens of tokenizer_config.json, which has ",
                            Quoted(token.content), " as token ", id, ", found ",
                            Quoted(names[id])));
    }
    token.normalized = false;  // they are searched for in the text as it is
    tokens.push_back(std::move(token));
  }
  return tokens;
}

// The symbols with which each fairseq dictionary begins.
constexpr std::string_view kFairseqSymbols[] = {"<s>", "<pad>", "</s>", "<unk>"};
constexpr TokenId kFairseqUnknown = 3;
// CamemBERT's pieces <s> and </s> come after these.
constexpr std::string_view kCamembertSymbols[] = {"<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>",
                                                  "<unk>NOTUSED"};

// Returns the class without the ending that marks another implementation; "" if there is none.
std::string TokenizerClass(const TokenizerConfig& config) {
  std::string name = config.tokenizer_class.value_or("");
  if (name.ends_with("Fast")) name.resize(name.size() - 4);
  return name;
}

constexpr std::string_view kCamembertClass = "CamembertTokenizer";

bool IsRobertaClass(std::string_view name) {
  return name == "XLMRobertaTokenizer" || name == kCamembertClass;
}

// Returns the symbols of a fairseq dictionary in the order of their ids.
absl::StatusOr<std::vector<std::string>> FairseqSymbols(const SentencePieceConfig& model,
                                                        std::optional<std::string_view> dictionary,
                                                        std::string_view dictionary_name,
                                                        bool camembert) {
  std::vector<std::string> symbols(std::begin(kFairseqSymbols), std::end(kFairseqSymbols));
  if (!dictionary.has_value()) {
    if (camembert) symbols.assign(std::begin(kCamembertSymbols), std::end(kCamembertSymbols));
    const std::vector<std::string> first = symbols;
    for (const SentencePiece& piece : model.pieces) {
      if (std::find(first.begin(), first.end(), piece.text) == first.end()) {
        symbols.push_back(piece.text);
      }
    }
    return symbols;
  }
  return ReadDictionarySymbols(*dictionary, dictionary_name);
}

// Lets a text spell the mask, with spaces in front of it. With `may_add`, a vocabulary without it
// gets it as the last one.
void AddMaskToken(const std::string& mask, bool may_add, const std::vector<std::string>& names,
                  std::vector<AddedToken>* tokens) {
  const auto found = std::find_if(tokens->begin(), tokens->end(),
                                  [&](const AddedToken& token) { return token.content == mask; });
  if (found != tokens->end()) {
    found->trusted_only = false;
    found->lstrip = true;
  } else if (may_add) {
    const auto id = std::find(names.begin(), names.end(), mask) - names.begin();
    AddedToken token = ControlToken(static_cast<size_t>(id), mask);
    token.trusted_only = false;
    token.lstrip = true;
    tokens->push_back(std::move(token));
  }
}

// The tokens of a dictionary that was made after the model.
struct Dictionary {
  enum class Kind { kFairseq, kMarian };
  Kind kind = Kind::kFairseq;
  std::vector<std::string> symbols;  // by id
  TokenId unknown = kFairseqUnknown;
};

// Returns the tokens that a text may contain only where it is trusted, of fairseq, or those of
// Marian, of which languages may be anywhere.
std::vector<AddedToken> DictionaryControls(const Dictionary& dictionary,
                                           const TokenizerConfig& config) {
  std::vector<AddedToken> control;
  const bool marian = dictionary.kind == Dictionary::Kind::kMarian;
  std::vector<std::string> names(std::begin(kFairseqSymbols), kFairseqSymbols + kFairseqUnknown);
  if (marian) {
    names = {config.eos_token.value_or("</s>"), config.pad_token.value_or("<pad>"),
             config.unk_token.value_or("<unk>")};
  }
  for (size_t id = 0; id < dictionary.symbols.size(); ++id) {
    const std::string& symbol = dictionary.symbols[id];
    const bool language =
        marian && symbol.size() > 4 && symbol.starts_with(">>") && symbol.ends_with("<<");
    if (!language && std::find(names.begin(), names.end(), symbol) == names.end()) continue;
    control.push_back(ControlToken(id, symbol));
    control.back().trusted_only = !language;
  }
  return control;
}

struct Enclosing {
  bool bos = false;
  bool eos = false;
};

// Returns which tokens enclose a text: as the configuration says, otherwise as the tokenizer class
// of Hugging Face's library does, or as fairseq's documents begin and Marian's end.
Enclosing EnclosingTokens(const TokenizerConfig& config, bool is_fairseq, bool is_marian) {
  const std::string name = TokenizerClass(config);
  const bool bos = is_fairseq || name == "LlamaTokenizer" || name == "CodeLlamaTokenizer" ||
                   name == "GemmaTokenizer";
  return {.bos = config.add_bos_token.value_or(bos),
          .eos = config.add_eos_token.value_or(is_marian || name == "T5Tokenizer" ||
                                               IsRobertaClass(name))};
}

// Without `dictionary`, ids are those of SentencePiece.
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(SentencePieceFile file,
                                                         std::optional<Dictionary> dictionary,
                                                         const TokenizerDetails& details) {
  const TokenizerConfig& config = details.config;
  const bool is_marian = dictionary.has_value() && dictionary->kind == Dictionary::Kind::kMarian;
  const bool is_fairseq = dictionary.has_value() && !is_marian;
  PipelineParts parts;
  std::vector<AddedToken> control;
  std::vector<std::string> names;
  if (dictionary.has_value()) {
    names = dictionary->symbols;
    control = DictionaryControls(*dictionary, config);
  } else {
    for (const SentencePiece& piece : file.model.pieces) {
      if (piece.type == PieceType::kControl) {
        control.push_back(ControlToken(names.size(), piece.text));
      }
      names.push_back(piece.text);
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(std::vector<AddedToken> tokens,
                            AllAddedTokens(std::move(control), names, details.added_tokens));
  const bool is_roberta = IsRobertaClass(TokenizerClass(config));
  if (is_roberta || config.mask_token.has_value()) {
    AddMaskToken(config.mask_token.value_or("<mask>"), is_fairseq && is_roberta, names, &tokens);
  }
  std::vector<std::pair<std::string_view, TokenId>> user_defined;
  SentencePieceDecoding decoding;
  for (const SentencePiece& piece : file.model.pieces) {
    if (piece.type == PieceType::kUserDefined) user_defined.emplace_back(piece.text, 0);
    if (piece.type == PieceType::kUnknown) decoding.unknown_piece = piece.text;
  }
  decoding.unknown_surface = file.unknown_surface;
  decoding.byte_fallback = file.model.byte_fallback;
  decoding.removes_leading_spaces = file.rules.remove_extra_whitespaces;
  decoding.removes_first_space = file.rules.add_dummy_prefix || file.rules.remove_extra_whitespaces;
  parts.decoder = std::make_unique<SentencePieceDecoder>(std::move(decoding));
  parts.normalizer =
      std::make_unique<SentencePieceNormalizer>(std::move(file.rules), std::move(user_defined));
  MOESERVE_ASSIGN_OR_RETURN(parts.model, SentencePieceModel::Create(std::move(file.model)));
  if (dictionary.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(
        parts.model, RenumberedModel::Create(std::move(parts.model), std::move(dictionary->symbols),
                                             dictionary->unknown));
  }
  MOESERVE_ASSIGN_OR_RETURN(parts.added_tokens,
                            AddedTokens::Create(std::move(tokens), *parts.model, nullptr,
                                                /*any_new_ids=*/true));
  const auto id_of = [&](const std::string& token, const char* flag) -> absl::StatusOr<TokenId> {
    std::optional<TokenId> id = parts.added_tokens->TokenToId(token);
    if (!id.has_value()) id = parts.model->TokenToId(token);
    if (id.has_value()) return *id;
    return Invalid(
        Concat("tokenizer_config.json has ", flag, ", but there is no token ", Quoted(token)));
  };
  const Enclosing enclosing = EnclosingTokens(config, is_fairseq, is_marian);
  std::optional<TokenId> bos;
  std::optional<TokenId> eos;
  if (enclosing.bos) {
    MOESERVE_ASSIGN_OR_RETURN(bos,
                              id_of(config.bos_token.value_or(file.bos_piece), "add_bos_token"));
  }
  if (enclosing.eos) {
    MOESERVE_ASSIGN_OR_RETURN(eos,
                              id_of(config.eos_token.value_or(file.eos_piece), "add_eos_token"));
  }
  parts.frames = is_roberta && bos.has_value() && eos.has_value()
                     ? RobertaFrames(*bos, *eos)
                     : Enclosed(bos, eos, /*second_type=*/0);
  return PipelineTokenizer::Create(std::move(parts));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseModel(std::string_view data,
                                                      std::string_view file_name, bool fairseq,
                                                      std::optional<std::string_view> dictionary,
                                                      std::string_view dictionary_name,
                                                      const TokenizerDetails& details) {
  absl::StatusOr<ModelFile> file = ReadModelFile(data);
  if (!file.ok()) return Prefixed(Concat(file_name, ": "), file.status());
  std::optional<Dictionary> symbols;
  if (fairseq) {
    MOESERVE_ASSIGN_OR_RETURN(symbols.emplace().symbols,
                              FairseqSymbols(file->model, dictionary, dictionary_name,
                                             TokenizerClass(details.config) == kCamembertClass));
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      MakeTokenizer(*std::move(file), std::move(symbols), details);
  if (!tokenizer.ok()) return Prefixed(Concat(file_name, ": "), tokenizer.status());
  return tokenizer;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeSentencePieceTokenizer(
    SentencePieceFile file, const TokenizerDetails& details) {
  return MakeTokenizer(std::move(file), std::nullopt, details);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseSentencePieceModel(
    std::string_view data, std::string_view file_name, const TokenizerDetails& details) {
  return ParseModel(data, file_name, /*fairseq=*/false, std::nullopt, "", details);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseMarianModel(std::string_view data,
                                                            std::string_view file_name,
                                                            const std::vector<std::string>& symbols,
                                                            const TokenizerDetails& details) {
  absl::StatusOr<ModelFile> file = ReadModelFile(data);
  if (!file.ok()) return Prefixed(Concat(file_name, ": "), file.status());
  const std::string name = details.config.unk_token.value_or("<unk>");
  const auto unknown = std::find(symbols.begin(), symbols.end(), name);
  if (unknown == symbols.end()) {
    return Invalid(Concat("vocab.json: expected the token ", Quoted(name), ", found none"));
  }
  Dictionary dictionary{.kind = Dictionary::Kind::kMarian,
                        .symbols = symbols,
                        .unknown = static_cast<TokenId>(unknown - symbols.begin())};
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      MakeTokenizer(*std::move(file), std::move(dictionary), details);
  if (!tokenizer.ok()) return Prefixed(Concat(file_name, ": "), tokenizer.status());
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseFairseqModel(
    std::string_view data, std::string_view file_name, std::optional<std::string_view> dictionary,
    const TokenizerDetails& details, std::string_view dictionary_name) {
  return ParseModel(data, file_name, /*fairseq=*/true, dictionary, dictionary_name, details);
}

}  // namespace moeserve
