#include "engine/text/tokenizer/models/unigram_model.h"

#include <algorithm>
#include <limits>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// How much worse than the worst token an unknown character scores.
constexpr double kUnknownTokenPenalty = 10.0;

// The best path that ends at a position of the text.
struct TokenPathEnd {
  double score;
  uint32_t size;  // of the last token, in bytes; 0: no path ends here
  TokenId id;
};

absl::Status NoUnknownToken() {
  return absl::InvalidArgumentError(
      "the text has a character that is not in the vocabulary, and the tokenizer has no token for "
      "unknown characters");
}

}  // namespace

absl::StatusOr<std::unique_ptr<UnigramModel>> UnigramModel::Create(UnigramConfig config) {
  std::unique_ptr<UnigramModel> model(new UnigramModel);
  if (config.vocab.size() > Vocabulary::kMaxId) {
    return absl::InvalidArgumentError(Concat("vocab: expected at most ", Vocabulary::kMaxId,
                                             " tokens, found ", config.vocab.size()));
  }
  std::vector<std::pair<std::string, TokenId>> tokens;
  double lowest = std::numeric_limits<double>::infinity();
  for (auto& [token, score] : config.vocab) {
    if (token.size() > kMaxTokenBytes) {
      return absl::InvalidArgumentError(Concat("vocab: expected tokens of at most ", kMaxTokenBytes,
                                               " bytes, found one of ", token.size()));
    }
    model->scores_.push_back(score);
    lowest = std::min(lowest, score);
    tokens.emplace_back(std::move(token), static_cast<TokenId>(tokens.size()));
  }
  MOESERVE_ASSIGN_OR_RETURN(model->vocab_, Vocabulary::Create(std::move(tokens)));
  std::vector<std::pair<std::string_view, TokenId>> keys;
  for (TokenId id = 0; id < model->vocab_.id_bound(); ++id) {
    keys.emplace_back(*model->vocab_.Token(id), id);
  }
  model->trie_ = PrefixTrie(std::move(keys));
  model->unknown_score_ = lowest - kUnknownTokenPenalty;
  if (config.unk_id.has_value() && !model->vocab_.Token(*config.unk_id).has_value()) {
    return absl::InvalidArgumentError(
        Concat("unk_id: expected an id of the vocabulary, found ", *config.unk_id));
  }
  model->unk_id_ = config.unk_id;
  model->byte_fallback_ = config.byte_fallback;
  model->byte_ids_ = ByteTokens(model->vocab_);
  return model;
}

absl::Status UnigramModel::Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                                    std::vector<TextSpan>* spans) const {
  const size_t old_size = ids->size();
  const size_t old_spans = spans == nullptr ? 0 : spans->size();
  static thread_local std::vector<TokenPathEnd> ends;
  ends.assign(piece.size() + 1, {0, 0, -1});
  const auto offer = [&](size_t begin, size_t size, TokenId id, double score) {
    TokenPathEnd& end = ends[begin + size];
    // Of paths with equal scores, the one that was found first is kept.
    if (end.size == 0 || score > end.score) end = {score, static_cast<uint32_t>(size), id};
  };
  for (size_t begin = 0; begin < piece.size();) {
    size_t next = begin;
    NextCodePoint(piece, &next);
    const size_t character = next - begin;
    const double before = ends[begin].score;
    bool character_is_token = false;
    trie_.ForEachPrefix(piece.substr(begin), [&](size_t size, TokenId id) {
      offer(begin, size, id, scores_[id] + before);
      if (size == character) character_is_token = true;
    });
    if (!character_is_token) {
      // As in Hugging Face's library, this is an error only if the path would be taken here.
      const TokenPathEnd& end = ends[next];
      if (!unk_id_.has_value()) {
        if (end.size == 0 || unknown_score_ + before > end.score) return NoUnknownToken();
      } else {
        offer(begin, character, *unk_id_, unknown_score_ + before);
      }
    }
    begin = next;
  }
  // Parts of the path from its end to its start; adjacent unknown parts become one.
  std::vector<std::string_view> parts;
  bool last_unknown = false;
  for (size_t end = piece.size(); end > 0; end -= ends[end].size) {
    const size_t size = ends[end].size;
    const bool unknown = unk_id_.has_value() && ends[end].id == *unk_id_;
    if (unknown && last_unknown) {
      parts.back() = piece.substr(end - size, size + parts.back().size());
    } else {
      parts.push_back(piece.substr(end - size, size));
    }
    last_unknown = unknown;
  }
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    MOESERVE_RETURN_IF_ERROR(AppendPart(*part, ids));
    if (spans == nullptr) continue;
    // The tokens of bytes all stand for the whole part.
    const size_t begin = static_cast<size_t>(part->data() - piece.data());
    spans->resize(old_spans + ids->size() - old_size, {begin, begin + part->size()});
  }
  constexpr size_t kKeptEnds = 1 << 16;
  if (ends.capacity() > kKeptEnds) std::vector<TokenPathEnd>().swap(ends);
  return absl::OkStatus();
}

absl::Status UnigramModel::AppendPart(std::string_view text, std::vector<TokenId>* ids) const {
  // Joined unknown parts may spell a token that was not on the path.
  if (const std::optional<TokenId> id = vocab_.Find(text); id.has_value()) {
    ids->push_back(*id);
    return absl::OkStatus();
  }
  const auto has_token = [&](char byte) { return byte_ids_[static_cast<uint8_t>(byte)] >= 0; };
  if (byte_fallback_ && std::all_of(text.begin(), text.end(), has_token)) {
    for (const char byte : text) ids->push_back(byte_ids_[static_cast<uint8_t>(byte)]);
    return absl::OkStatus();
  }
  if (!unk_id_.has_value()) return NoUnknownToken();
  ids->push_back(*unk_id_);
  return absl::OkStatus();
}

}  // namespace moeserve
