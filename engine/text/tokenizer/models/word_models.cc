#include "engine/text/tokenizer/models/word_models.h"

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/byte_sources.h"

namespace moeserve {
namespace {

absl::Status AppendUnknown(std::optional<TokenId> unk_id, std::vector<TokenId>* ids) {
  if (!unk_id.has_value()) {
    return absl::InvalidArgumentError(
        "the text has a word that is not in the vocabulary, and the tokenizer has no token for "
        "unknown words");
  }
  ids->push_back(*unk_id);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<WordPieceModel>> WordPieceModel::Create(WordPieceConfig config) {
  std::unique_ptr<WordPieceModel> model(new WordPieceModel);
  for (const auto& [token, id] : config.vocab) {
    if (token.size() > kMaxTokenBytes) {
      return absl::InvalidArgumentError(Concat("vocab: expected tokens of at most ", kMaxTokenBytes,
                                               " bytes, found one of ", token.size()));
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(model->vocab_, Vocabulary::Create(std::move(config.vocab)));
  std::vector<std::pair<std::string_view, TokenId>> keys;
  for (TokenId id = 0; id < model->vocab_.id_bound(); ++id) {
    if (const auto token = model->vocab_.Token(id); token.has_value())
      keys.emplace_back(*token, id);
  }
  model->trie_ = PrefixTrie(std::move(keys));
  model->continuing_ = model->trie_.Follow(PrefixTrie::kRoot, config.continuing_subword_prefix);
  model->unk_id_ = model->vocab_.Find(config.unk_token);
  model->max_characters_ = config.max_input_chars_per_word;
  return model;
}

absl::Status WordPieceModel::Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                                      std::vector<TextSpan>* spans) const {
  const size_t old_size = ids->size();
  const size_t old_spans = spans == nullptr ? 0 : spans->size();
  const auto unknown = [&] {
    ids->resize(old_size);
    if (spans != nullptr) {
      spans->resize(old_spans);
      spans->push_back({0, piece.size()});
    }
    return AppendUnknown(unk_id_, ids);
  };
  if (CountCharacters(piece) > max_characters_) return unknown();
  for (size_t begin = 0; begin < piece.size();) {
    PrefixTrie::Node node = begin == 0 ? PrefixTrie::kRoot : continuing_;
    TokenId best = -1;
    size_t best_end = begin;
    for (size_t i = begin; i < piece.size() && node != PrefixTrie::kNone; ++i) {
      node = trie_.Next(node, static_cast<uint8_t>(piece[i]));
      if (node == PrefixTrie::kNone || trie_.TokenAt(node) < 0) continue;
      best = trie_.TokenAt(node);
      best_end = i + 1;
    }
    if (best < 0) return unknown();
    ids->push_back(best);
    if (spans != nullptr) spans->push_back({begin, best_end});
    begin = best_end;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<WordLevelModel>> WordLevelModel::Create(
    std::vector<std::pair<std::string, TokenId>> vocab, std::string_view unk_token) {
  std::unique_ptr<WordLevelModel> model(new WordLevelModel);
  MOESERVE_ASSIGN_OR_RETURN(model->vocab_, Vocabulary::Create(std::move(vocab)));
  model->unk_id_ = model->vocab_.Find(unk_token);
  return model;
}

absl::Status WordLevelModel::Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                                      std::vector<TextSpan>* spans) const {
  if (spans != nullptr) spans->push_back({0, piece.size()});
  if (const std::optional<TokenId> id = vocab_.Find(piece); id.has_value()) {
    ids->push_back(*id);
    return absl::OkStatus();
  }
  return AppendUnknown(unk_id_, ids);
}

}  // namespace moeserve
