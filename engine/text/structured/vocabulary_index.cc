#include "engine/text/structured/vocabulary_index.h"

#include <algorithm>

#include "base/error_text.h"
#include "engine/text/structured/automata/pattern.h"
#include "engine/text/structured/compiled.h"

namespace moeserve {
namespace {

// Longer tokens are never allowed in constrained responses. Tokens of real vocabularies are
// shorter.
constexpr size_t kMaxTokenBytes = 1024;

Result<structured::DfaPtr> AnyStringDfa(const std::bitset<256>& spellable) {
  using namespace structured;
  CompileBudget budget(1000, std::chrono::seconds(10));
  MOESERVE_ASSIGN_OR_RETURN(const ByteDfa content, PatternDfa("[\\s\\S]*", MatchMode::kWholeText,
                                                              Encoding::kJsonString, &budget));
  MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, Quoted(content, &budget));
  MOESERVE_RETURN_IF_ERROR(dfa.Finish(spellable, &budget));
  return std::make_shared<const ByteDfa>(std::move(dfa));
}

}  // namespace

Result<std::shared_ptr<const VocabularyIndex>> VocabularyIndex::Build(const Tokenizer& tokenizer,
                                                                      std::vector<TokenId> eos_ids,
                                                                      int vocab_size) {
  if (vocab_size <= 0) {
    return absl::InvalidArgumentError(Concat("vocab_size must be positive, found ", vocab_size));
  }
  if (eos_ids.empty()) {
    return absl::InvalidArgumentError(
        "structured output needs an end-of-sequence token, and the model names none");
  }
  for (const TokenId id : eos_ids) {
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(
          Concat("end-of-sequence id ", id, " is outside the vocabulary of ", vocab_size));
    }
  }
  std::shared_ptr<VocabularyIndex> index(new VocabularyIndex());
  index->vocab_size_ = vocab_size;
  std::sort(eos_ids.begin(), eos_ids.end());
  eos_ids.erase(std::unique(eos_ids.begin(), eos_ids.end()), eos_ids.end());
  index->eos_ids_ = std::move(eos_ids);

  index->bytes_.resize(vocab_size);
  std::vector<TokenId> order;
  for (TokenId id = 0; id < std::min(vocab_size, tokenizer.vocab_size()); ++id) {
    if (index->IsEos(id)) continue;
    std::string bytes = tokenizer.TokenBytes(id);
    if (bytes.empty() || bytes.size() > kMaxTokenBytes) continue;
    if (tokenizer.IsSpecial(id)) {
      index->specials_.push_back({id, std::move(bytes)});
      continue;
    }
    if (bytes.size() == 1) index->spellable_.set(static_cast<uint8_t>(bytes[0]));
    index->bytes_[id] = std::move(bytes);
    order.push_back(id);
  }
  if (order.empty()) return absl::InvalidArgumentError("no token of the vocabulary has a text");
  const auto text = [&](TokenId id) -> const std::string& { return index->bytes_[id]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](TokenId a, TokenId b) { return text(a) < text(b); });

  std::vector<Node>& nodes = index->nodes_;
  nodes.push_back({0, 0, -1, 0, 0});
  std::vector<int32_t> path = {0};
  std::string_view previous;
  for (const TokenId id : order) {
    const std::string_view bytes = text(id);
    size_t shared = 0;
    while (shared < previous.size() && shared < bytes.size() && previous[shared] == bytes[shared]) {
      ++shared;
    }
    while (path.size() > shared + 1) {
      nodes[path.back()].end = static_cast<int32_t>(nodes.size());
      path.pop_back();
    }
    for (size_t i = shared; i < bytes.size(); ++i) {
      nodes.push_back({static_cast<uint8_t>(bytes[i]), static_cast<uint16_t>(i + 1), path.back(), 0,
                       static_cast<int32_t>(index->tokens_.size())});
      path.push_back(static_cast<int32_t>(nodes.size() - 1));
    }
    index->max_depth_ = std::max(index->max_depth_, static_cast<int>(bytes.size()));
    index->tokens_.push_back(id);
    previous = bytes;
  }
  for (const int32_t node : path) nodes[node].end = static_cast<int32_t>(nodes.size());

  MOESERVE_ASSIGN_OR_RETURN(structured::DfaPtr any_string, AnyStringDfa(index->spellable_));
  index->string_masks_ = std::make_shared<structured::StringMasks>(std::move(any_string));
  // Computes this mask now, because nearly every JSON response needs the mask inside a string.
  const structured::StringMasks& strings = *index->string_masks_;
  const int32_t inside = strings.dfa->Next(structured::ByteDfa::kStart, '"');
  strings.cache.Get(*index, *strings.dfa, 0, inside, /*at_root=*/false, structured::kNoLimit);
  return std::shared_ptr<const VocabularyIndex>(std::move(index));
}

bool VocabularyIndex::IsEos(TokenId id) const {
  return std::binary_search(eos_ids_.begin(), eos_ids_.end(), id);
}

std::string_view VocabularyIndex::Bytes(TokenId id) const {
  if (id < 0 || id >= vocab_size_) return {};
  return bytes_[id];
}

}  // namespace moeserve
