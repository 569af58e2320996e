#include "engine/text/tokenizer/added_tokens.h"

#include <algorithm>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/models/vocabulary.h"
#include "engine/text/tokenizer/regex_syntax.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

// Limits the work of the search at each position; real tokens are shorter than 100 bytes.
constexpr size_t kMaxContentBytes = 4096;

absl::Status Invalid(const AddedToken& token, const std::string& message) {
  return absl::InvalidArgumentError("token \"" + token.content + "\": " + message);
}

}  // namespace

bool AddedTokens::Matcher::Add(std::string_view text, TokenId id) {
  starts_[static_cast<uint8_t>(text[0])] = true;
  uint32_t node = 0;
  for (const char byte : text) {
    const uint64_t key = static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(byte);
    const auto [it, is_new] = children_.emplace(key, static_cast<uint32_t>(ids_.size()));
    if (is_new) ids_.push_back(-1);
    node = it->second;
  }
  if (ids_[node] >= 0) return false;
  ids_[node] = id;
  return true;
}

template <typename Accepts>
bool AddedTokens::Matcher::Next(std::string_view text, const Accepts& accepts, size_t* begin,
                                size_t* end, TokenId* id) const {
  if (empty()) return false;
  for (size_t start = *begin; start < text.size(); ++start) {
    if (!starts_[static_cast<uint8_t>(text[start])]) continue;
    uint32_t node = 0;
    *id = -1;
    for (size_t i = start; i < text.size(); ++i) {
      const auto it =
          children_.find(static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(text[i]));
      if (it == children_.end()) break;
      node = it->second;
      if (ids_[node] >= 0 && accepts(start, i + 1, ids_[node])) {
        *id = ids_[node];
        *end = i + 1;
      }
    }
    if (*id >= 0) {
      *begin = start;
      return true;
    }
  }
  return false;
}

absl::StatusOr<std::unique_ptr<AddedTokens>> AddedTokens::Create(std::vector<AddedToken> tokens,
                                                                 const TokenModel& model,
                                                                 const Normalizer* normalizer,
                                                                 bool any_new_ids) {
  std::unique_ptr<AddedTokens> added(new AddedTokens);
  TokenId next_id = static_cast<TokenId>(model.token_count());
  for (AddedToken& given : tokens) {
    added->tokens_.push_back(std::make_unique<AddedToken>(std::move(given)));
    const AddedToken& token = *added->tokens_.back();
    if (token.content.empty() || token.content.size() > kMaxContentBytes) {
      return Invalid(token, Concat("expected 1 to ", kMaxContentBytes, " bytes of content, found ",
                                   token.content.size()));
    }
    if (!IsValidUtf8(token.content)) return Invalid(token, "its content is not UTF-8");
    const std::optional<TokenId> model_id = model.TokenToId(token.content);
    const TokenId expected_id =
        model_id.has_value() ? *model_id : (any_new_ids ? token.id : next_id++);
    if (token.id < 0 || token.id > Vocabulary::kMaxId) {
      return Invalid(token,
                     Concat("expected an id from 0 to ", Vocabulary::kMaxId, ", found ", token.id));
    }
    if (token.id != expected_id) {
      return Invalid(token, Concat("expected id ", expected_id, " (",
                                   model_id.has_value() ? "the model's" : "the next one free",
                                   "), found ", token.id));
    }
    if (!model_id.has_value() && model.TokenString(token.id).has_value()) {
      return Invalid(token, Concat("its id ", token.id, " is the model's token \"",
                                   *model.TokenString(token.id), "\""));
    }
    if (!added->by_content_.emplace(token.content, token.id).second) {
      return Invalid(token, "it is listed twice");
    }
    if (const auto [it, is_new] = added->by_id_.emplace(token.id, &token); !is_new) {
      return Invalid(token,
                     Concat("its id ", token.id, " is that of \"", it->second->content, "\""));
    }
    added->id_bound_ = std::max(added->id_bound_, token.id + 1);
    if (token.special) added->special_.insert(token.content);
    if (token.single_word && !added->word_.has_value()) {
      MOESERVE_ASSIGN_OR_RETURN(added->word_, Regex::Compile(RustWordClass()));
    }
    std::string_view searched = token.content;
    if (token.normalized && normalizer != nullptr) {
      MOESERVE_ASSIGN_OR_RETURN(std::string form, normalizer->Normalize(token.content));
      if (form.empty()) return Invalid(token, "nothing is left of it when normalized");
      if (form.size() > kMaxContentBytes) {
        return Invalid(token, Concat("expected at most ", kMaxContentBytes,
                                     " bytes when it is normalized, found ", form.size()));
      }
      if (form != token.content) {
        searched = added->normalized_forms_.emplace(token.id, std::move(form)).first->second;
      }
    }
    Matcher& matcher = token.normalized ? added->normalized_ : added->raw_;
    if (!matcher.Add(searched, token.id)) {
      return Invalid(token, "its normalized form is that of another added token");
    }
  }
  return added;
}

SpecialRule SpecialRule::Within(std::span<const TextSpan> spans) {
  SpecialRule rule;
  rule.by_place_ = true;
  rule.spans_.assign(spans.begin(), spans.end());
  return rule;
}

bool SpecialRule::Allows(size_t begin, size_t end) const {
  if (!by_place_) return everywhere_;
  const auto it = std::upper_bound(spans_.begin(), spans_.end(), begin,
                                   [](size_t v, const TextSpan& s) { return v < s.begin; });
  return it != spans_.begin() && end <= std::prev(it)->end;
}

SpecialRule SpecialRule::Part(size_t begin, size_t size) const {
  if (!by_place_) return *this;
  SpecialRule part = Within({});
  const size_t end = begin + size;
  auto it = std::upper_bound(spans_.begin(), spans_.end(), begin,
                             [](size_t v, const TextSpan& s) { return v < s.end; });
  for (; it != spans_.end() && it->begin < end; ++it) {
    part.spans_.push_back({std::max(it->begin, begin) - begin, std::min(it->end, end) - begin});
  }
  return part;
}

SpecialRule SpecialRule::Normalized(std::string_view text, std::string_view normalized,
                                    const Normalizer& normalizer) const {
  if (!by_place_) return *this;
  // Normalises the trusted parts of the text and the parts between them one by one. If the
  // concatenated results equal `normalized`, each result's position is that of its part in
  // `normalized`; otherwise no special token is allowed.
  SpecialRule out = Within({});
  std::string joined;
  size_t done = 0;
  const auto append = [&](size_t end) {
    const std::string_view part = text.substr(done, end - done);
    NormalizeContext context(part);
    context.continued = done > 0;
    joined += normalizer.Apply(part, &context).value_or("");
    done = end;
  };
  for (const TextSpan& span : spans_) {
    append(span.begin);
    const size_t begin = joined.size();
    append(span.end);
    out.spans_.push_back({begin, joined.size()});
  }
  append(text.size());
  return joined == normalized ? out : Within({});
}

void AddedTokens::SplitRaw(std::string_view text, const SpecialRule& special,
                           std::vector<TextPart>* parts) const {
  Split(raw_, text, special, parts);
}

void AddedTokens::SplitNormalized(std::string_view text, const SpecialRule& special,
                                  std::vector<TextPart>* parts) const {
  Split(normalized_, text, special, parts);
}

void AddedTokens::Split(const Matcher& matcher, std::string_view text, const SpecialRule& special,
                        std::vector<TextPart>* parts) const {
  // A token that the rule forbids, here or everywhere, is not even a candidate and consumes no
  // text. Otherwise a client's text could consume the start of a token that the template writes.
  const auto accepts = [&](size_t begin, size_t end, TokenId id) {
    const AddedToken& token = *by_id_.find(id)->second;
    if (!special.by_place()) return !token.trusted_only;
    return special.Allows(begin, end) || !special_.contains(token.content);
  };
  // As in Hugging Face's library, a match that is rejected below still consumes its text, and the
  // next token can match white space again that the rstrip of a token before it consumed.
  size_t covered = 0;
  size_t match_begin = 0;
  size_t match_end = 0;
  TokenId id = -1;
  for (; matcher.Next(text, accepts, &match_begin, &match_end, &id); match_begin = match_end) {
    const AddedToken& token = *by_id_.find(id)->second;
    if (!special.by_place() && !special.everywhere() && special_.contains(token.content)) continue;
    if (token.single_word &&
        (EndsWithWord(text.substr(0, match_begin)) || StartsWithWord(text.substr(match_end)))) {
      continue;
    }
    size_t begin = match_begin;
    size_t end = match_end;
    // No white space is passed that the token before has consumed.
    if (token.lstrip) {
      begin = begin <= covered
                  ? covered
                  : covered + SkipWhiteSpaceBackwards(text.substr(covered), begin - covered);
    }
    if (token.rstrip) end = SkipWhiteSpace(text, std::max(end, covered));
    if (covered < begin) parts->push_back({text.substr(covered, begin - covered), std::nullopt});
    // Skips a token that consists of white space which the previous token has consumed.
    if (begin < end) parts->push_back({text.substr(begin, end - begin), id});
    covered = end;
  }
  if (covered != text.size()) parts->push_back({text.substr(covered), std::nullopt});
}

bool AddedTokens::EndsWithWord(std::string_view text) const {
  return !text.empty() && StartsWithWord(text.substr(CharacterBefore(text, text.size())));
}

bool AddedTokens::StartsWithWord(std::string_view text) const {
  if (text.empty()) return false;
  size_t size = 0;
  NextCodePoint(text, &size);
  Regex::Match match;
  return Regex::Finder(&*word_, text.substr(0, size)).Next(&match);
}

const AddedToken* AddedTokens::Find(TokenId id) const {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : it->second;
}

std::optional<TokenId> AddedTokens::TokenToId(std::string_view content) const {
  const auto it = by_content_.find(content);
  if (it == by_content_.end()) return std::nullopt;
  return it->second;
}

std::string_view AddedTokens::DecodedForm(const AddedToken& token) const {
  const auto it = normalized_forms_.find(token.id);
  return it == normalized_forms_.end() ? std::string_view(token.content)
                                       : std::string_view(it->second);
}

}  // namespace moeserve
