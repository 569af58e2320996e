#include "model_loaders/tokenizer/vocab_files.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/decoders/decoder_stages.h"
#include "engine/text/tokenizer/models/bpe_model.h"
#include "engine/text/tokenizer/models/byte_level.h"
#include "engine/text/tokenizer/models/word_models.h"
#include "engine/text/tokenizer/normalizers/text_edits.h"
#include "engine/text/tokenizer/normalizers/unicode_form.h"
#include "engine/text/tokenizer/pipeline_tokenizer.h"
#include "engine/text/tokenizer/regex_syntax.h"
#include "engine/text/tokenizer/utf8.h"
#include "model_loaders/tokenizer/json_reader.h"
#include "model_loaders/tokenizer/split_patterns.h"

namespace moeserve {
namespace {

constexpr size_t kMaxTiktokenBytes = size_t{16} << 20;  // real files have less than 4 MiB
constexpr size_t kMaxTokenBytes = 512;
constexpr size_t kMaxVocabPatternBytes = 64 * 1024;

absl::Status InvalidFile(std::string message) { return absl::InvalidArgumentError(message); }

// Removes the next line from `text` and returns it without its end.
std::string_view TakeLine(std::string_view* text) {
  const size_t end = text->find('\n');
  std::string_view line = text->substr(0, end);
  text->remove_prefix(end == std::string_view::npos ? text->size() : end + 1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

struct TiktokenLine {
  std::string bytes;
  TokenId id = 0;
};

std::optional<TiktokenLine> ReadTiktokenLine(std::string_view line) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || space == 0) return std::nullopt;
  TiktokenLine result;
  const std::string_view number = line.substr(space + 1);
  const auto [end, error] =
      std::from_chars(number.data(), number.data() + number.size(), result.id);
  if (error != std::errc() || end != number.data() + number.size() || result.id < 0) {
    return std::nullopt;
  }
  if (!absl::Base64Unescape(absl::string_view(line.data(), space), &result.bytes)) {
    return std::nullopt;
  }
  return result;
}

std::string ByteLevelSpelling(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) text += ByteLevelChar(static_cast<uint8_t>(byte));
  return text;
}

// Returns the tokens that the configuration names, without a list of added tokens.
std::vector<AddedToken> NamedTokens(const TokenizerConfig& config, const TokenModel& model) {
  std::vector<AddedToken> added;
  for (const auto* name :
       {&config.bos_token, &config.eos_token, &config.unk_token, &config.pad_token,
        &config.cls_token, &config.sep_token, &config.mask_token}) {
    if (!name->has_value()) continue;
    const std::optional<TokenId> id = model.TokenToId(**name);
    const auto same = [&](const AddedToken& token) { return token.content == **name; };
    if (!id.has_value() || std::any_of(added.begin(), added.end(), same)) continue;
    AddedToken token;
    token.id = *id;
    token.content = **name;
    token.special = true;
    added.push_back(std::move(token));
  }
  return added;
}

// Sets the names of RoBERTa's special tokens where the configuration has none.
void NameRobertaTokens(TokenizerConfig& config) {
  using Member = std::optional<std::string> TokenizerConfig::*;
  constexpr std::pair<Member, const char*> kNames[] = {{&TokenizerConfig::cls_token, "<s>"},
                                                       {&TokenizerConfig::sep_token, "</s>"},
                                                       {&TokenizerConfig::unk_token, "<unk>"},
                                                       {&TokenizerConfig::pad_token, "<pad>"},
                                                       {&TokenizerConfig::mask_token, "<mask>"}};
  for (const auto& [member, name] : kNames) {
    if (!(config.*member).has_value()) config.*member = name;
  }
}

// Returns what RoBERTa puts around texts.
absl::StatusOr<Frames> RobertaFramesOf(const TokenizerConfig& config, const AddedTokens& tokens) {
  const std::optional<TokenId> cls = tokens.TokenToId(*config.cls_token);
  const std::optional<TokenId> sep = tokens.TokenToId(*config.sep_token);
  if (cls.has_value() && sep.has_value()) return RobertaFrames(*cls, *sep);
  return InvalidFile(Concat("expected the special token ",
                            Quoted(cls.has_value() ? *config.sep_token : *config.cls_token),
                            ", found none"));
}

// Adds the parts that all tokenizers on bytes share: added tokens, decoder and enclosing tokens.
// With `roberta`, these are RoBERTa's, of which `details` has the names.
absl::StatusOr<std::unique_ptr<Tokenizer>> Finish(PipelineParts parts, BpeConfig config,
                                                  const TokenizerDetails& details,
                                                  bool roberta = false) {
  MOESERVE_ASSIGN_OR_RETURN(parts.model, BpeModel::Create(std::move(config)));
  std::vector<AddedToken> added = details.added_tokens;
  if (added.empty()) {
    added = NamedTokens(details.config, *parts.model);
    for (AddedToken& token : added) {  // the mask takes the spaces in front of it
      if (roberta && token.content == details.config.mask_token) token.lstrip = true;
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(parts.added_tokens,
                            AddedTokens::Create(std::move(added), *parts.model,
                                                parts.normalizer.get(), /*any_new_ids=*/true));
  std::vector<std::unique_ptr<DecoderStage>> stages;
  stages.push_back(std::make_unique<ByteLevelStage>());
  parts.decoder = std::make_unique<ChainDecoder>(std::move(stages));
  if (roberta) {
    MOESERVE_ASSIGN_OR_RETURN(parts.frames, RobertaFramesOf(details.config, *parts.added_tokens));
    return PipelineTokenizer::Create(std::move(parts));
  }
  const auto id_of = [&](std::optional<bool> adds, const std::optional<std::string>& token,
                         const char* flag) -> absl::StatusOr<std::optional<TokenId>> {
    if (!adds.value_or(false)) return std::nullopt;
    const std::optional<TokenId> id =
        token.has_value() ? parts.added_tokens->TokenToId(*token) : std::nullopt;
    if (!id.has_value()) {
      return InvalidFile(Concat("tokenizer_config.json has ", flag,
                                ", but names no such token among its special tokens"));
    }
    return id;
  };
  const TokenizerConfig& config_file = details.config;
  MOESERVE_ASSIGN_OR_RETURN(
      const std::optional<TokenId> bos,
      id_of(config_file.add_bos_token, config_file.bos_token, "add_bos_token"));
  MOESERVE_ASSIGN_OR_RETURN(
      const std::optional<TokenId> eos,
      id_of(config_file.add_eos_token, config_file.eos_token, "add_eos_token"));
  parts.frames = Enclosed(bos, eos);
  return PipelineTokenizer::Create(std::move(parts));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTiktoken(std::string_view data,
                                                        const TokenizerDetails& details) {
  if (data.size() > kMaxTiktokenBytes) {
    return InvalidFile(
        Concat("expected at most ", kMaxTiktokenBytes, " bytes, found ", data.size()));
  }
  if (!details.pattern.has_value()) {
    return InvalidFile(
        "expected the pattern that cuts a text into pieces as \"pat_str\" in "
        "tokenizer_config.json, found none; a tiktoken vocabulary does not contain it");
  }
  if (details.added_tokens.empty()) {
    return InvalidFile(
        "expected the special tokens as \"added_tokens_decoder\" in tokenizer_config.json, found "
        "none; a tiktoken vocabulary does not contain them");
  }
  BpeConfig config;
  config.byte_level = true;
  config.ignore_merges = true;  // a piece that is a token becomes that token
  config.merges_by_id = true;
  int single_bytes = 0;
  for (size_t number = 1; !data.empty(); ++number) {
    const std::string_view line = TakeLine(&data);
    if (line.empty()) continue;
    std::optional<TiktokenLine> token = ReadTiktokenLine(line);
    if (!token.has_value() || token->bytes.empty() || token->bytes.size() > kMaxTokenBytes) {
      return InvalidFile(Concat("line ", number, ": expected 1 to ", kMaxTokenBytes,
                                " bytes in base64 and an id, found ", Quoted(line)));
    }
    if (token->bytes.size() == 1) ++single_bytes;
    config.vocab.emplace_back(ByteLevelSpelling(token->bytes), token->id);
  }
  if (single_bytes != 256) {
    return InvalidFile(Concat("expected a token for each of 256 bytes, found ", single_bytes));
  }
  absl::StatusOr<std::string> pattern = RubyPattern(*details.pattern);
  if (pattern.ok()) pattern = TranslateRegex(*pattern);
  PipelineParts parts;
  absl::StatusOr<std::unique_ptr<PreTokenizer>> split = SplitAt(pattern);
  if (!split.ok()) return Prefixed("pat_str of tokenizer_config.json: ", split.status());
  parts.pre_tokenizer = *std::move(split);
  return Finish(std::move(parts), std::move(config), details);
}

absl::Status ReadMerges(std::string_view text, BpeConfig* config) {
  for (size_t number = 1; !text.empty(); ++number) {
    const std::string_view line = TakeLine(&text);
    if (line.empty() || line.starts_with("#version")) continue;
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) {
      return InvalidFile(Concat("merges.txt: line ", number,
                                ": expected two tokens with one space between them, found ",
                                Quoted(line)));
    }
    config->merges.emplace_back(line.substr(0, space), line.substr(space + 1));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> RubyPattern(std::string_view pattern) {
  if (pattern.size() > kMaxVocabPatternBytes) return InvalidFile("the pattern is too long");
  std::string out;
  std::vector<size_t> groups;  // starts in `out` of the groups that are open
  size_t atom = 0;             // start in `out` of the last atom, which a quantifier repeats
  bool in_brackets = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const size_t begin = out.size();
      if (!in_brackets) atom = begin;
      out.append(pattern.substr(i++, 2));
      if ((pattern[i] == 'p' || pattern[i] == 'P' || pattern[i] == 'x') && i + 1 < pattern.size() &&
          pattern[i + 1] == '{') {
        const size_t end = pattern.find('}', i);
        if (end == std::string_view::npos) return InvalidFile("'{' without '}'");
        out.append(pattern.substr(i + 1, end - i));
        i = end;
      }
      continue;
    }
    if (in_brackets) {
      // Ruby's syntax and Rust's agree on brackets except for operations on sets.
      const bool twice = i + 1 < pattern.size() && pattern[i + 1] == c;
      if (c == '[' || (twice && (c == '&' || c == '-' || c == '~'))) {
        return InvalidFile(Concat("'", c, "' inside brackets is not supported"));
      }
      if (c == ']') in_brackets = false;
      out.push_back(c);
      continue;
    }
    switch (c) {
      case '$':
        out += "\\z";
        continue;
      case '^':
        out += "\\A";
        continue;
      case '{': {
        const size_t end = pattern.find('}', i);
        if (end == std::string_view::npos) return InvalidFile("'{' without '}'");
        out.append(pattern.substr(i, end - i + 1));
        i = end;
        if (end + 1 < pattern.size() && pattern[end + 1] == '+') {
          out.insert(atom, "(?>");
          out.push_back(')');
          ++i;
        }
        continue;
      }
      case '(': {
        const std::string_view rest = pattern.substr(i + 1, 3);
        const bool has_flags = rest.size() == 3 && rest[0] == '?' &&
                               ((rest[1] >= 'a' && rest[1] <= 'z') || rest[1] == '-');
        if (has_flags && rest != "?i:" && rest != "?i)") {
          return InvalidFile(Concat("the flags of '(", rest, "' are not supported"));
        }
        groups.push_back(out.size());
        break;
      }
      case ')':
        if (groups.empty()) return InvalidFile("')' without '('");
        atom = groups.back();
        groups.pop_back();
        break;
      case '[':
        atom = out.size();
        in_brackets = true;
        // A closing bracket that comes first is a member.
        if (i + 1 < pattern.size() && pattern[i + 1] == '^') out.push_back(pattern[i++]);
        if (i + 1 < pattern.size() && pattern[i + 1] == ']') return InvalidFile("empty brackets");
        break;
      case '*':
      case '+':
      case '?':
      case '|':
        break;
      default:
        if ((c & 0xC0) != 0x80) atom = out.size();
    }
    out.push_back(pattern[i]);
  }
  return out;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeBertTokenizer(
    std::vector<std::pair<std::string, TokenId>> vocab, TokenizerDetails details) {
  TokenizerConfig& names = details.config;
  if (!names.unk_token.has_value()) names.unk_token = "[UNK]";
  if (!names.cls_token.has_value()) names.cls_token = "[CLS]";
  if (!names.sep_token.has_value()) names.sep_token = "[SEP]";
  if (!names.pad_token.has_value()) names.pad_token = "[PAD]";
  if (!names.mask_token.has_value()) names.mask_token = "[MASK]";
  WordPieceConfig config;
  config.vocab = std::move(vocab);
  config.unk_token = *names.unk_token;
  PipelineParts parts;
  MOESERVE_ASSIGN_OR_RETURN(parts.model, WordPieceModel::Create(std::move(config)));
  TokenId ids[3];
  const std::string* const needed[3] = {&*names.unk_token, &*names.cls_token, &*names.sep_token};
  for (int i = 0; i < 3; ++i) {
    const std::optional<TokenId> id = parts.model->TokenToId(*needed[i]);
    if (!id.has_value()) {
      return InvalidFile(Concat("expected the token ", Quoted(*needed[i]), ", found none"));
    }
    ids[i] = *id;
  }
  parts.frames = BertFrames(ids[1], ids[2]);
  parts.normalizer =
      BertNormalizer({.handle_chinese_chars = details.tokenize_chinese_chars,
                      .strip_accents = details.strip_accents.value_or(details.do_lower_case),
                      .lowercase = details.do_lower_case});
  std::vector<std::unique_ptr<PreTokenizer>> stages;
  stages.push_back(
      std::make_unique<CharacterPreTokenizer>(&WhiteSpaceSet(), SplitBehavior::kRemoved));
  stages.push_back(
      std::make_unique<CharacterPreTokenizer>(&PunctuationSet(), SplitBehavior::kIsolated));
  parts.pre_tokenizer = std::make_unique<SequencePreTokenizer>(std::move(stages));
  std::vector<AddedToken> added = std::move(details.added_tokens);
  if (added.empty()) added = NamedTokens(names, *parts.model);
  MOESERVE_ASSIGN_OR_RETURN(parts.added_tokens,
                            AddedTokens::Create(std::move(added), *parts.model,
                                                parts.normalizer.get(), /*any_new_ids=*/true));
  std::vector<std::unique_ptr<DecoderStage>> decoder;
  decoder.push_back(WordPieceStage(WordPieceConfig().continuing_subword_prefix, /*cleanup=*/true));
  parts.decoder = std::make_unique<ChainDecoder>(std::move(decoder));
  return PipelineTokenizer::Create(std::move(parts));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseBertVocabulary(std::string_view text,
                                                               const TokenizerDetails& details) {
  constexpr std::string_view kClasses[] = {
      "BertTokenizer",     "ConvBertTokenizer",   "DistilBertTokenizer", "ElectraTokenizer",
      "LayoutLMTokenizer", "MobileBertTokenizer", "SqueezeBertTokenizer"};
  std::string name = details.config.tokenizer_class.value_or("BertTokenizer");
  if (name.ends_with("Fast")) name.resize(name.size() - 4);
  if (std::find(std::begin(kClasses), std::end(kClasses), name) == std::end(kClasses)) {
    return InvalidFile(
        Concat("vocab.txt: expected a tokenizer_class as BertTokenizer in "
               "tokenizer_config.json, found ",
               Quoted(name)));
  }
  std::map<std::string, TokenId, std::less<>> ids;
  TokenId id = 0;
  for (; !text.empty(); ++id) {
    if (id > Vocabulary::kMaxId) return InvalidFile("vocab.txt: too many lines");
    const std::string_view line = TakeLine(&text);
    // As in Hugging Face's library, the last of equal lines counts.
    if (!line.empty()) ids.insert_or_assign(std::string(line), id);
  }
  auto tokenizer = MakeBertTokenizer({ids.begin(), ids.end()}, details);
  if (!tokenizer.ok()) return Prefixed("vocab.txt: ", tokenizer.status());
  return tokenizer;
}

bool LooksLikeTiktoken(std::string_view data) {
  const std::string_view line = TakeLine(&data);
  return line.size() < 2 * kMaxTokenBytes && ReadTiktokenLine(line).has_value();
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTiktoken(std::string_view data,
                                                         std::string_view file_name,
                                                         const TokenizerDetails& details) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = MakeTiktoken(data, details);
  if (!tokenizer.ok()) return Prefixed(Concat(file_name, ": "), tokenizer.status());
  return tokenizer;
}

absl::StatusOr<std::vector<std::string>> ParseVocabJson(std::string_view text,
                                                        const std::string& file_name) {
  JsonReader reader(file_name);
  const nlohmann::json root = reader.Parse(text);
  if (reader.ok() && !root.is_object()) reader.FailExpected("", "an object", root);
  if (!reader.ok()) return reader.status();
  std::vector<std::optional<std::string>> slots(root.size());
  for (const auto& [token, value] : root.items()) {
    const TokenId id = reader.Id(value, "[\"" + token + "\"]");
    if (!reader.ok()) return reader.status();
    if (static_cast<size_t>(id) >= slots.size() || slots[static_cast<size_t>(id)].has_value()) {
      return InvalidFile(Concat(file_name, ": expected each id in [0, ", slots.size() - 1,
                                "] once, found ", id, " for ", Quoted(token)));
    }
    slots[static_cast<size_t>(id)] = token;
  }
  std::vector<std::string> tokens;
  tokens.reserve(slots.size());
  for (std::optional<std::string>& token : slots) tokens.push_back(*std::move(token));
  return tokens;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseVocabAndMerges(std::string_view vocab,
                                                               std::string_view merges,
                                                               const TokenizerDetails& given) {
  TokenizerDetails details = given;
  std::string name = details.config.tokenizer_class.value_or("");
  if (name.ends_with("Fast")) name.resize(name.size() - 4);
  const bool roberta = name == "RobertaTokenizer" || name == "BartTokenizer";
  if (roberta) NameRobertaTokens(details.config);
  PipelineParts parts;
  if (name == "GPT2Tokenizer" || roberta) {
    MOESERVE_ASSIGN_OR_RETURN(
        parts.pre_tokenizer,
        ByteLevelPreTokenizer::Create(details.add_prefix_space, /*use_regex=*/true));
  } else if (name == "Qwen2Tokenizer") {
    parts.normalizer =
        std::make_unique<UnicodeFormNormalizer>(/*composes=*/true, /*compatible=*/false);
    MOESERVE_ASSIGN_OR_RETURN(parts.pre_tokenizer, SplitAt(TranslateRegex(kQwen2Pattern)));
  } else {
    return InvalidFile(
        Concat("vocab.json and merges.txt: expected tokenizer_class GPT2Tokenizer, "
               "Qwen2Tokenizer, RobertaTokenizer or BartTokenizer in tokenizer_config.json, found ",
               name.empty() ? "none" : Quoted(name),
               "; without tokenizer.json the class says how a text is cut into pieces"));
  }
  JsonReader reader("vocab.json");
  const nlohmann::json root = reader.Parse(vocab);
  if (reader.ok() && !root.is_object()) reader.FailExpected("", "an object", root);
  BpeConfig config;
  config.byte_level = true;
  if (reader.ok()) {
    for (const auto& [token, id] : root.items()) {
      config.vocab.emplace_back(token, reader.Id(id, "[\"" + token + "\"]"));
    }
  }
  if (!reader.ok()) return reader.status();
  MOESERVE_RETURN_IF_ERROR(ReadMerges(merges, &config));
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      Finish(std::move(parts), std::move(config), details, roberta);
  if (!tokenizer.ok()) return Prefixed("vocab.json and merges.txt: ", tokenizer.status());
  return tokenizer;
}

}  // namespace moeserve
