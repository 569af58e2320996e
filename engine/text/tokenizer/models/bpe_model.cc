#include "engine/text/tokenizer/models/bpe_model.h"

#include <algorithm>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/models/byte_level.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// For pieces of up to this many symbols, scanning for the best pair is faster than a heap.
constexpr size_t kShortPiece = 48;
constexpr uint32_t kNoRank = UINT32_MAX;

// A possible merge of the symbol at `position` with its successor.
struct MergeCandidate {
  uint32_t rank;
  int32_t position;
  TokenId result;
  // Orders a max-heap so that the lowest rank is on top and, among equal ranks, the leftmost
  // position.
  bool operator<(const MergeCandidate& other) const {
    return rank != other.rank ? rank > other.rank : position > other.position;
  }
};

}  // namespace

// A symbol of a long piece: an element of a doubly linked list, by position; -1 ends the list.
struct BpeModel::Symbol {
  SizedToken token;
  int32_t previous;
  int32_t next;
  bool merged_away;
};

// Scratch memory of one thread. It grows to the longest piece and is freed when it is large.
struct BpeModel::Scratch {
  std::vector<SizedToken> tokens;
  std::vector<uint32_t> ranks;
  std::vector<Symbol> symbols;
  std::vector<MergeCandidate> heap;
};

absl::StatusOr<std::unique_ptr<BpeModel>> BpeModel::Create(BpeConfig config) {
  std::unique_ptr<BpeModel> model(new BpeModel);
  model->byte_level_ = config.byte_level;
  model->fuse_unk_ = config.fuse_unk;
  model->byte_fallback_ = config.byte_fallback;
  model->ignore_merges_ = config.ignore_merges;
  MOESERVE_ASSIGN_OR_RETURN(model->vocab_, Vocabulary::Create(std::move(config.vocab)));
  if (config.merges_by_id) {
    MOESERVE_RETURN_IF_ERROR(model->AddMergesById());
  } else {
    MOESERVE_RETURN_IF_ERROR(model->AddMerges(config.merges));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const std::string_view symbol = ByteLevelChar(static_cast<uint8_t>(byte));
    model->byte_ids_[byte] = model->TokenToId(symbol).value_or(-1);
  }
  model->fallback_ids_ = ByteTokens(model->vocab_);
  if (config.unk_token.has_value()) {
    model->unk_id_ = model->TokenToId(*config.unk_token).value_or(-1);
    // Some files name an unk_token that is not in the vocabulary. That is accepted if byte-level
    // symbols cover every byte, because then no symbol is unknown.
    const bool needed = !model->byte_level_ ||
                        std::count(model->byte_ids_.begin(), model->byte_ids_.end(), -1) != 0;
    if (model->unk_id_ < 0 && needed) {
      return absl::InvalidArgumentError("unk_token: expected a token of the vocabulary, found " +
                                        Quoted(*config.unk_token));
    }
  }
  if (model->byte_level_) model->FindWholeWords();
  return model;
}

absl::Status BpeModel::AddMergesById() {
  for (TokenId id = 0; id < vocab_.id_bound(); ++id) {
    const std::optional<std::string_view> token = vocab_.Token(id);
    if (!token.has_value()) continue;
    if (token->size() > kMaxSplitToken) {
      return absl::InvalidArgumentError(Concat("vocab: expected tokens of at most ", kMaxSplitToken,
                                               " bytes, found one of ", token->size()));
    }
    for (size_t pos = 0; pos < token->size();) {
      NextCodePoint(*token, &pos);
      const std::optional<TokenId> left = TokenToId(token->substr(0, pos));
      if (pos == token->size() || !left.has_value()) continue;
      const std::optional<TokenId> right = TokenToId(token->substr(pos));
      if (right.has_value()) merges_[PairKey(*left, *right)] = {static_cast<uint32_t>(id), id};
    }
  }
  return absl::OkStatus();
}

absl::Status BpeModel::AddMerges(const std::vector<std::pair<std::string, std::string>>& merges) {
  merges_.reserve(merges.size());
  std::string joined;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const std::string where = Concat("merges[", rank, "]: ");
    // MergeShort() and MergeLong() agree only if every merge makes its symbol longer.
    if (left.empty() || right.empty()) {
      return absl::InvalidArgumentError(where + "one half is empty");
    }
    joined = left + right;
    TokenId ids[3];
    const std::string* const parts[3] = {&left, &right, &joined};
    for (int i = 0; i < 3; ++i) {
      const std::optional<TokenId> id = TokenToId(*parts[i]);
      if (!id.has_value()) {
        return absl::InvalidArgumentError(where + "expected tokens of the vocabulary, found " +
                                          Quoted(*parts[i]));
      }
      ids[i] = *id;
    }
    // As in Hugging Face's library, the last merge rule for a pair wins.
    merges_[PairKey(ids[0], ids[1])] = {static_cast<uint32_t>(rank), ids[2]};
  }
  return absl::OkStatus();
}

void BpeModel::FindWholeWords() {
  std::vector<std::pair<size_t, TokenId>> found;  // end of the word in whole_word_text_, id
  std::vector<TokenId> merged;
  for (TokenId id = 0; id < id_bound(); ++id) {
    const std::optional<std::string_view> token = vocab_.Token(id);
    if (!token.has_value()) continue;
    const size_t begin = whole_word_text_.size();
    if (!AppendByteLevelBytes(*token, &whole_word_text_)) continue;
    bool whole = whole_word_text_.size() > begin;
    if (whole && !ignore_merges_) {
      merged.clear();
      MergePiece(std::string_view(whole_word_text_).substr(begin), &merged, nullptr);
      whole = merged.size() == 1 && merged[0] == id;
    }
    if (whole) {
      found.emplace_back(whole_word_text_.size(), id);
    } else {
      whole_word_text_.resize(begin);
    }
  }
  whole_word_text_.shrink_to_fit();
  whole_words_.reserve(found.size());
  size_t begin = 0;
  for (const auto& [end, id] : found) {
    whole_words_.emplace(std::string_view(whole_word_text_).substr(begin, end - begin), id);
    begin = end;
  }
}

absl::Status BpeModel::Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                                std::vector<TextSpan>* spans) const {
  if (piece.empty()) return absl::OkStatus();
  const auto add_whole = [&](TokenId id) {
    ids->push_back(id);
    if (spans != nullptr) spans->push_back({0, piece.size()});
    return absl::OkStatus();
  };
  if (byte_level_) {
    if (const auto it = whole_words_.find(piece); it != whole_words_.end()) {
      return add_whole(it->second);
    }
  } else if (ignore_merges_) {
    if (const std::optional<TokenId> id = TokenToId(piece); id.has_value()) {
      return add_whole(*id);
    }
  }
  MergePiece(piece, ids, spans);
  return absl::OkStatus();
}

void BpeModel::AppendSymbols(std::string_view piece, std::vector<SizedToken>* symbols) const {
  uint32_t unknown_size = 0;  // of an unknown symbol that waits
  const auto flush_unknown = [&] {
    if (unknown_size > 0) symbols->push_back({unk_id_, unknown_size});
    unknown_size = 0;
  };
  // `size` is that of the symbol in the piece.
  const auto add_missing = [&](std::string_view symbol, uint32_t size) {
    if (byte_fallback_ && std::all_of(symbol.begin(), symbol.end(), [&](char byte) {
          return fallback_ids_[static_cast<uint8_t>(byte)] >= 0;
        })) {
      // Hugging Face's library does not flush a pending unknown symbol here, so that symbol comes
      // after these tokens.
      for (const char byte : symbol) {
        // A byte of the piece can have two tokens; then the second one has no size.
        symbols->push_back({fallback_ids_[static_cast<uint8_t>(byte)], size > 0 ? 1u : 0u});
        if (size > 0) --size;
      }
      return;
    }
    if (unk_id_ < 0) return;
    if (!fuse_unk_) flush_unknown();
    unknown_size += size;
  };
  for (size_t pos = 0; pos < piece.size();) {
    const size_t begin = pos;
    TokenId id = -1;
    if (byte_level_) {
      id = byte_ids_[static_cast<uint8_t>(piece[pos++])];
    } else {
      NextCodePoint(piece, &pos);
      id = TokenToId(piece.substr(begin, pos - begin)).value_or(-1);
    }
    const auto size = static_cast<uint32_t>(pos - begin);
    if (id >= 0) {
      flush_unknown();
      symbols->push_back({id, size});
    } else if (byte_level_) {
      add_missing(ByteLevelChar(static_cast<uint8_t>(piece[begin])), size);
    } else {
      add_missing(piece.substr(begin, size), size);
    }
  }
  flush_unknown();
}

void BpeModel::MergePiece(std::string_view piece, std::vector<TokenId>* ids,
                          std::vector<TextSpan>* spans) const {
  static thread_local Scratch scratch;
  scratch.tokens.clear();
  AppendSymbols(piece, &scratch.tokens);
  if (scratch.tokens.size() <= kShortPiece) {
    MergeShort(&scratch);
  } else {
    MergeLong(&scratch);
  }
  size_t begin = 0;
  for (const SizedToken& token : scratch.tokens) {
    ids->push_back(token.id);
    if (spans == nullptr) continue;
    const size_t end = begin + token.size;
    spans->push_back({token.size > 0 || begin == 0 ? begin : begin - 1, end});
    begin = end;
  }
  constexpr size_t kKeptSymbols = 1 << 16;
  if (scratch.tokens.capacity() > kKeptSymbols) scratch = Scratch();
}

// MergeShort() and MergeLong() produce the same ids: both apply the pair with the lowest rank first
// and, among equal ranks, the leftmost pair.
void BpeModel::MergeShort(Scratch* scratch) const {
  std::vector<SizedToken>& tokens = scratch->tokens;
  std::vector<uint32_t>& ranks = scratch->ranks;  // ranks[i] is the rank of the pair (i, i + 1)
  const auto rank_at = [&](size_t i) {
    const Merge* merge = FindMerge(tokens[i].id, tokens[i + 1].id);
    return merge == nullptr ? kNoRank : merge->rank;
  };
  ranks.clear();
  for (size_t i = 0; i + 1 < tokens.size(); ++i) ranks.push_back(rank_at(i));
  while (!ranks.empty()) {
    const size_t best = std::min_element(ranks.begin(), ranks.end()) - ranks.begin();
    if (ranks[best] == kNoRank) break;
    tokens[best] = {FindMerge(tokens[best].id, tokens[best + 1].id)->result,
                    tokens[best].size + tokens[best + 1].size};
    tokens.erase(tokens.begin() + best + 1);
    ranks.erase(ranks.begin() + best);
    if (best < ranks.size()) ranks[best] = rank_at(best);
    if (best > 0) ranks[best - 1] = rank_at(best - 1);
  }
}

void BpeModel::MergeLong(Scratch* scratch) const {
  std::vector<Symbol>& symbols = scratch->symbols;
  std::vector<MergeCandidate>& heap = scratch->heap;
  const int32_t count = static_cast<int32_t>(scratch->tokens.size());
  symbols.clear();
  heap.clear();
  for (int32_t i = 0; i < count; ++i) {
    symbols.push_back({scratch->tokens[i], i - 1, i + 1 < count ? i + 1 : -1, false});
  }
  const auto candidate_at = [&](int32_t position) -> std::optional<MergeCandidate> {
    if (position < 0 || symbols[position].next < 0) return std::nullopt;
    const Merge* merge =
        FindMerge(symbols[position].token.id, symbols[symbols[position].next].token.id);
    if (merge == nullptr) return std::nullopt;
    return MergeCandidate{merge->rank, position, merge->result};
  };
  const auto push = [&](int32_t position) {
    if (const std::optional<MergeCandidate> candidate = candidate_at(position);
        candidate.has_value()) {
      heap.push_back(*candidate);
      std::push_heap(heap.begin(), heap.end());
    }
  };
  for (int32_t i = 0; i < count; ++i) {
    if (const std::optional<MergeCandidate> candidate = candidate_at(i); candidate.has_value()) {
      heap.push_back(*candidate);
    }
  }
  std::make_heap(heap.begin(), heap.end());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const MergeCandidate top = heap.back();
    heap.pop_back();
    // Either symbol may have been merged since the entry was pushed: skips an entry whose result
    // has changed.
    Symbol& left = symbols[top.position];
    if (left.merged_away) continue;
    const std::optional<MergeCandidate> now = candidate_at(top.position);
    if (!now.has_value() || now->result != top.result) continue;

    Symbol& right = symbols[left.next];
    left.token = {top.result, left.token.size + right.token.size};
    left.next = right.next;
    right.merged_away = true;
    if (left.next >= 0) symbols[left.next].previous = top.position;
    push(left.previous);
    push(top.position);
  }
  scratch->tokens.clear();
  for (int32_t i = 0; i >= 0; i = symbols[i].next) scratch->tokens.push_back(symbols[i].token);
}

}  // namespace moeserve
