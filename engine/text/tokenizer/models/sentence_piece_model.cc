#include "engine/text/tokenizer/models/sentence_piece_model.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <queue>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// How much worse than the worst piece an unknown character scores.
constexpr float kUnknownPiecePenalty = 10.0f;

// What a user-defined piece scores: more than other pieces, whose scores are negative in all models
// that SentencePiece trains. That is version 0.2.3; older ones add another number, which can decide
// between paths whose scores are equal but for rounding.
constexpr float kUserDefinedScore = 0.1f;

// The best path that ends at a position of the text.
struct PiecePathEnd {
  float score;
  uint32_t size;  // of the last piece, in bytes; 0: no path ends here
  TokenId id;
};

// A possible merge of two adjacent symbols, given by their indices.
struct Candidate {
  float score;
  int32_t left;
  int32_t right;
  uint32_t size;  // of the result, in bytes
  // Orders a max-heap so that the highest score is on top and, among equal ones, the leftmost pair.
  bool operator<(const Candidate& other) const {
    return score != other.score ? score < other.score : left > other.left;
  }
};

bool IsFoundInText(PieceType type) {
  return type == PieceType::kNormal || type == PieceType::kUserDefined ||
         type == PieceType::kUnused;
}

}  // namespace

// A symbol of BPE: an element of a doubly linked list, by index; -1 ends the list.
struct SentencePieceModel::Symbol {
  std::string_view text;  // empty: merged into another symbol
  int32_t previous;
  int32_t next;
  bool frozen;  // never merged
};

absl::StatusOr<std::unique_ptr<SentencePieceModel>> SentencePieceModel::Create(
    SentencePieceConfig config) {
  std::unique_ptr<SentencePieceModel> model(new SentencePieceModel);
  model->algorithm_ = config.algorithm;
  model->byte_fallback_ = config.byte_fallback;
  std::vector<std::pair<std::string, TokenId>> tokens;
  int unknown_pieces = 0;
  for (size_t i = 0; i < config.pieces.size(); ++i) {
    const SentencePiece& piece = config.pieces[i];
    if (piece.text.empty() || piece.text.size() > kMaxPieceBytes) {
      return absl::InvalidArgumentError(Concat("piece ", i, ": expected 1 to ", kMaxPieceBytes,
                                               " bytes, found ", piece.text.size()));
    }
    if (!std::isfinite(piece.score)) {
      return absl::InvalidArgumentError(
          Concat("piece ", i, " (", Quoted(piece.text), "): its score is not finite"));
    }
    if (piece.type == PieceType::kUnknown) {
      model->unk_id_ = static_cast<TokenId>(i);
      ++unknown_pieces;
    }
    if (IsFoundInText(piece.type)) {
      model->longest_piece_ = std::max(model->longest_piece_, piece.text.size());
    }
    model->types_.push_back(piece.type);
    model->scores_.push_back(piece.score);
    tokens.emplace_back(piece.text, static_cast<TokenId>(i));
  }
  if (unknown_pieces != 1) {
    return absl::InvalidArgumentError(
        Concat("expected one piece of type UNKNOWN, found ", unknown_pieces));
  }
  MOESERVE_ASSIGN_OR_RETURN(model->vocab_, Vocabulary::Create(std::move(tokens)));
  model->byte_ids_ = ByteTokens(model->vocab_);
  int byte_pieces = 0;
  for (const TokenId id : model->byte_ids_) {
    if (id >= 0 && model->types_[id] == PieceType::kByte) ++byte_pieces;
  }
  if (byte_pieces != std::count(model->types_.begin(), model->types_.end(), PieceType::kByte) ||
      byte_pieces != (config.byte_fallback ? 256 : 0)) {
    return absl::InvalidArgumentError(Concat("expected ", config.byte_fallback ? 256 : 0,
                                             " pieces of type BYTE, <0x00> to <0xFF>, found ",
                                             byte_pieces, " (byte_fallback is ",
                                             config.byte_fallback ? "true)" : "false)"));
  }
  model->lowest_score_ = FLT_MAX;
  for (const SentencePiece& piece : config.pieces) {
    if (piece.type == PieceType::kNormal) {
      model->lowest_score_ = std::min(model->lowest_score_, piece.score);
    }
  }
  std::vector<std::pair<std::string_view, TokenId>> found;
  std::vector<std::pair<std::string_view, TokenId>> user_defined;
  for (TokenId id = 0; id < model->vocab_.id_bound(); ++id) {
    const PieceType type = model->types_[id];
    if (IsFoundInText(type)) found.emplace_back(*model->vocab_.Token(id), id);
    if (type == PieceType::kUserDefined) user_defined.emplace_back(*model->vocab_.Token(id), id);
  }
  model->trie_ = PrefixTrie(std::move(found));
  model->user_defined_ = PrefixTrie(std::move(user_defined));
  return model;
}

absl::Status SentencePieceModel::Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                                          std::vector<TextSpan>* spans) const {
  if (piece.empty()) return absl::OkStatus();
  std::vector<Part> parts;
  if (algorithm_ == SentencePieceConfig::Algorithm::kUnigram) {
    SplitUnigram(piece, &parts);
  } else {
    SplitBpe(piece, &parts);
  }
  bool last_unknown = false;
  for (const Part& part : parts) {
    const bool unknown = part.id == unk_id_;
    if (spans != nullptr) {
      const size_t begin = static_cast<size_t>(part.text.data() - piece.data());
      const TextSpan span = {begin, begin + part.text.size()};
      if (unknown && byte_fallback_) {
        spans->insert(spans->end(), part.text.size(), span);
      } else if (unknown && last_unknown) {
        spans->back().end = span.end;
      } else {
        spans->push_back(span);
      }
    }
    if (unknown && byte_fallback_) {
      for (const char byte : part.text) ids->push_back(byte_ids_[static_cast<uint8_t>(byte)]);
    } else if (!(unknown && last_unknown)) {  // adjacent unknown parts become one
      ids->push_back(part.id);
    }
    last_unknown = unknown;
  }
  return absl::OkStatus();
}

void SentencePieceModel::SplitUnigram(std::string_view text, std::vector<Part>* parts) const {
  static thread_local std::vector<PiecePathEnd> ends;
  ends.assign(text.size() + 1, {0, 0, -1});
  const auto offer = [&](size_t begin, size_t size, TokenId id, float score) {
    PiecePathEnd& end = ends[begin + size];
    // Of paths with equal scores, the one that was found first is kept.
    if (end.size == 0 || score > end.score) end = {score, static_cast<uint32_t>(size), id};
  };
  const float unknown_score = lowest_score_ - kUnknownPiecePenalty;
  for (size_t begin = 0; begin < text.size();) {
    size_t next = begin;
    NextCodePoint(text, &next);
    const size_t character = next - begin;
    const float before = ends[begin].score;
    bool character_is_piece = false;
    trie_.ForEachPrefix(text.substr(begin), [&](size_t size, TokenId id) {
      if (types_[id] == PieceType::kUnused) return;
      const float score = types_[id] == PieceType::kUserDefined ? kUserDefinedScore : scores_[id];
      offer(begin, size, id, score + before);
      if (size == character) character_is_piece = true;
    });
    if (!character_is_piece) offer(begin, character, unk_id_, unknown_score + before);
    begin = next;
  }
  for (size_t end = text.size(); end > 0; end -= ends[end].size) {
    parts->push_back({text.substr(end - ends[end].size, ends[end].size), ends[end].id});
  }
  std::reverse(parts->begin(), parts->end());
  constexpr size_t kKeptEnds = 1 << 16;
  if (ends.capacity() > kKeptEnds) std::vector<PiecePathEnd>().swap(ends);
}

TokenId SentencePieceModel::FindMerged(std::string_view text) const {
  if (text.size() > longest_piece_) return -1;
  const std::optional<TokenId> id = vocab_.Find(text);
  return id.has_value() && IsFoundInText(types_[*id]) ? *id : -1;
}

std::vector<SentencePieceModel::Symbol> SentencePieceModel::InitialSymbols(
    std::string_view text) const {
  std::vector<Symbol> symbols;
  for (size_t begin = 0; begin < text.size();) {
    size_t size = 0;
    user_defined_.ForEachPrefix(text.substr(begin), [&](size_t found, TokenId) { size = found; });
    const bool frozen = size > 0;
    if (!frozen) {
      size_t next = begin;
      NextCodePoint(text, &next);
      size = next - begin;
    }
    const int32_t index = static_cast<int32_t>(symbols.size());
    symbols.push_back({text.substr(begin, size), index - 1, index + 1, frozen});
    begin += size;
  }
  symbols.back().next = -1;
  return symbols;
}

void SentencePieceModel::SplitBpe(std::string_view text, std::vector<Part>* parts) const {
  std::vector<Symbol> symbols = InitialSymbols(text);
  std::priority_queue<Candidate> queue;
  // How an unused piece was last made: the size of its left part. Such pieces are taken apart
  // again.
  StringMap<size_t> halves;
  const auto joined = [&](int32_t left, int32_t right) {
    return std::string_view(symbols[left].text.data(),
                            symbols[left].text.size() + symbols[right].text.size());
  };
  const auto add = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0 || symbols[left].frozen || symbols[right].frozen) return;
    const std::string_view merged = joined(left, right);
    const TokenId id = FindMerged(merged);
    if (id < 0) return;
    queue.push({scores_[id], left, right, static_cast<uint32_t>(merged.size())});
    if (types_[id] == PieceType::kUnused) halves[merged] = symbols[left].text.size();
  };
  for (size_t i = 1; i < symbols.size(); ++i) {
    add(static_cast<int32_t>(i) - 1, static_cast<int32_t>(i));
  }
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.left];
    Symbol& right = symbols[top.right];
    // Skips a candidate whose symbols have changed since.
    if (left.text.empty() || right.text.empty() ||
        left.text.size() + right.text.size() != top.size) {
      continue;
    }
    left.text = joined(top.left, top.right);
    left.next = right.next;
    if (right.next >= 0) symbols[right.next].previous = top.left;
    right.text = {};
    add(left.previous, top.left);
    add(top.left, left.next);
  }
  std::vector<std::string_view> waiting;  // parts of one symbol, the last one first
  for (int32_t i = 0; i >= 0; i = symbols[i].next) {
    waiting.assign(1, symbols[i].text);
    while (!waiting.empty()) {
      const std::string_view part = waiting.back();
      waiting.pop_back();
      const TokenId id = vocab_.Find(part).value_or(unk_id_);
      const bool unused = types_[id] == PieceType::kUnused;
      const auto half = unused ? halves.find(part) : halves.end();
      if (half == halves.end()) {
        parts->push_back({part, unused ? unk_id_ : id});
      } else {
        waiting.push_back(part.substr(half->second));
        waiting.push_back(part.substr(0, half->second));
      }
    }
  }
}

}  // namespace moeserve
