#include "engine/text/tokenizer/models/subword_nmt_model.h"

#include <algorithm>
#include <cstdint>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

constexpr std::string_view kSubwordEnd = "</w>";

std::string MergeKey(std::string_view left, std::string_view right) {
  return Concat(left, ' ', right);
}

// Returns the characters of a word.
std::vector<std::string> CharactersOf(std::string_view word) {
  std::vector<std::string> characters;
  for (const char byte : word) {
    const bool continues = (static_cast<uint8_t>(byte) & 0xC0) == 0x80;
    if (!continues || characters.empty()) characters.emplace_back();
    characters.back().push_back(byte);
  }
  return characters;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SubwordNmtModel>> SubwordNmtModel::Create(SubwordNmtConfig config) {
  std::unique_ptr<SubwordNmtModel> model(new SubwordNmtModel);
  MOESERVE_ASSIGN_OR_RETURN(model->vocab_, Vocabulary::Create(std::move(config.vocab)));
  const std::optional<TokenId> unknown = model->vocab_.Find(config.unk_token);
  if (!unknown.has_value()) {
    return absl::InvalidArgumentError(
        Concat("expected the unknown token ", Quoted(config.unk_token), ", found none"));
  }
  model->unk_id_ = *unknown;
  for (size_t rank = 0; rank < config.merges.size(); ++rank) {
    const auto& [left, right] = config.merges[rank];
    model->ranks_.emplace(MergeKey(left, right), rank);  // the first of equal ones counts
  }
  return model;
}

size_t SubwordNmtModel::RankOf(std::string_view left, std::string_view right) const {
  const auto it = ranks_.find(MergeKey(left, right));
  return it == ranks_.end() ? SIZE_MAX : it->second;
}

absl::Status SubwordNmtModel::Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                                       std::vector<TextSpan>* spans) const {
  std::vector<std::string> symbols = CharactersOf(piece);
  if (symbols.empty() || symbols.size() > kMostCharacters) {
    if (symbols.empty()) return absl::OkStatus();
    ids->push_back(unk_id_);
    if (spans != nullptr) spans->push_back({0, piece.size()});
    return absl::OkStatus();
  }
  symbols.back().append(kSubwordEnd);
  while (symbols.size() > 1) {
    size_t best = SIZE_MAX, at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const size_t rank = RankOf(symbols[i], symbols[i + 1]);
      if (rank < best) best = rank, at = i;
    }
    if (best == SIZE_MAX) break;
    // All occurrences of the pair, from left to right.
    const std::string left = symbols[at], right = symbols[at + 1];
    std::vector<std::string> merged;
    for (size_t i = 0; i < symbols.size(); ++i) {
      if (i + 1 < symbols.size() && symbols[i] == left && symbols[i + 1] == right) {
        merged.push_back(left + right);
        ++i;
      } else {
        merged.push_back(std::move(symbols[i]));
      }
    }
    symbols = std::move(merged);
  }
  std::string& last = symbols.back();
  last.resize(last.size() - kSubwordEnd.size());
  size_t begin = 0;
  for (size_t i = 0; i < symbols.size(); ++i) {
    const size_t end = begin + symbols[i].size();
    if (i + 1 < symbols.size()) symbols[i].append(kSubwordMark);
    ids->push_back(vocab_.Find(symbols[i]).value_or(unk_id_));
    if (spans != nullptr) spans->push_back({begin, end});
    begin = end;
  }
  return absl::OkStatus();
}

}  // namespace moeserve
