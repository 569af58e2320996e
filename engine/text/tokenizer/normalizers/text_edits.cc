#include "engine/text/tokenizer/normalizers/text_edits.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/text/tokenizer/normalizers/unicode_form.h"
#include "engine/text/tokenizer/regex_syntax.h"
#include "engine/text/tokenizer/unicode/code_point_set.h"
#include "engine/text/tokenizer/unicode/library_tables.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

constexpr char32_t kRemoved = CharacterRuleNormalizer::kRemoved;
constexpr char32_t kCapitalIWithDot = 0x130;

char32_t WithoutMarks(char32_t c) {
  static const CodePointSet marks(CombiningMarkRanges());
  return marks.Contains(c) ? kRemoved : c;
}

char32_t WithoutNonspacingMarks(char32_t c) {
  static const CodePointSet marks(NonspacingMarkRanges());
  return marks.Contains(c) ? kRemoved : c;
}

char32_t CleanForBert(char32_t c) {
  static const CodePointSet removed(OtherRanges());
  if (removed.Contains(c)) return kRemoved;
  return IsWhiteSpace(c) ? U' ' : c;
}

char32_t CleanForNmt(char32_t c) {
  if ((c >= 0x01 && c <= 0x08) || c == 0x0B || (c >= 0x0E && c <= 0x1F) || c == 0x7F || c == 0x8F ||
      c == 0x9F) {
    return kRemoved;
  }
  const bool space = c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
                     (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
                     c == 0xFEFF || c == 0xFFFD;
  return space ? U' ' : c;
}

bool IsCjkIdeograph(char32_t c) {
  constexpr CodePointRange kRanges[] = {{0x3400, 0x4DBF},   {0x4E00, 0x9FFF},   {0xF900, 0xFAFF},
                                        {0x20000, 0x2A6DF}, {0x2A700, 0x2B73F}, {0x2B740, 0x2B81F},
                                        {0x2B920, 0x2CEAF}, {0x2F800, 0x2FA1F}};
  return c >= 0x3400 && std::any_of(std::begin(kRanges), std::end(kRanges),
                                    [&](const auto& r) { return c >= r.first && c <= r.last; });
}

class CjkSpacesNormalizer : public Normalizer {
 public:
  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override {
    std::string out;
    out.reserve(text.size());
    SourceCursor cursor(text, context->sources);
    for (size_t pos = 0; pos < text.size();) {
      const size_t begin = pos;
      const bool spaced = IsCjkIdeograph(NextCodePoint(text, &pos));
      if (spaced) out.push_back(' ');
      out.append(text.substr(begin, pos - begin));
      if (!spaced) {
        cursor.Keep(pos - begin);
        continue;
      }
      out.push_back(' ');
      cursor.Replace(1);
      cursor.Insert(pos - begin + 1);
    }
    return out;
  }
  bool IsUnchanged(std::string_view text) const override {
    return std::all_of(text.begin(), text.end(),
                       [](char byte) { return static_cast<uint8_t>(byte) < 0xE3; });
  }
};

class LowerCaseMap {
 public:
  LowerCaseMap() {
    for (const LowerCase& range : LowerCaseRanges()) {
      for (char32_t c = range.first; c <= range.last; c += range.step) map_[c] = c + range.delta;
    }
  }
  char32_t Lower(char32_t c) const {
    const auto it = map_.find(c);
    return it == map_.end() ? c : it->second;
  }

 private:
  absl::flat_hash_map<char32_t, char32_t> map_;
};

size_t CountOf(std::string_view text, std::string_view literal) {
  size_t count = 0;
  for (size_t at = text.find(literal); at != std::string_view::npos;
       at = text.find(literal, at + literal.size())) {
    ++count;
  }
  return count;
}

size_t FirstCharacterSize(std::string_view text) {
  size_t pos = 0;
  if (!text.empty()) NextCodePoint(text, &pos);
  return pos;
}

}  // namespace

absl::StatusOr<std::string> LowercaseNormalizer::Apply(std::string_view text,
                                                       NormalizeContext* context) const {
  static const LowerCaseMap map;
  std::string out;
  out.reserve(text.size());
  SourceCursor cursor(text, context->sources);
  for (size_t pos = 0; pos < text.size();) {
    const size_t old_size = out.size();
    const char32_t c = NextCodePoint(text, &pos);
    if (c < 0x80) {
      out.push_back(static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c));
    } else if (c == kCapitalIWithDot) {
      out += "i\u0307";
    } else {
      AppendUtf8(map.Lower(c), &out);
    }
    cursor.Replace(out.size() - old_size);
  }
  return out;
}

bool LowercaseNormalizer::IsUnchanged(std::string_view text) const {
  return std::all_of(text.begin(), text.end(), [](char byte) {
    return static_cast<uint8_t>(byte) < 0x80 && !(byte >= 'A' && byte <= 'Z');
  });
}

absl::StatusOr<std::string> CharacterRuleNormalizer::Apply(std::string_view text,
                                                           NormalizeContext* context) const {
  std::string out;
  out.reserve(text.size());
  SourceCursor cursor(text, context->sources);
  for (size_t pos = 0; pos < text.size();) {
    const bool first = pos == 0;
    const char32_t c = rule_(NextCodePoint(text, &pos));
    if (c != kRemoved) {
      const size_t old_size = out.size();
      AppendUtf8(c, &out);
      cursor.Replace(out.size() - old_size);
    } else {
      cursor.Remove(1);
      if (first) context->start_moved = true;
    }
  }
  return out;
}

std::unique_ptr<Normalizer> StripAccentsNormalizer() {
  return std::make_unique<CharacterRuleNormalizer>(WithoutMarks);
}

std::unique_ptr<Normalizer> NmtNormalizer() {
  return std::make_unique<CharacterRuleNormalizer>(CleanForNmt);
}

std::unique_ptr<Normalizer> BertNormalizer(const BertNormalizerOptions& options) {
  std::vector<std::unique_ptr<Normalizer>> stages;
  if (options.clean_text) stages.push_back(std::make_unique<CharacterRuleNormalizer>(CleanForBert));
  if (options.handle_chinese_chars) stages.push_back(std::make_unique<CjkSpacesNormalizer>());
  if (options.strip_accents) {
    stages.push_back(
        std::make_unique<UnicodeFormNormalizer>(/*composes=*/false, /*compatible=*/false));
    stages.push_back(std::make_unique<CharacterRuleNormalizer>(WithoutNonspacingMarks));
  }
  if (options.lowercase) stages.push_back(std::make_unique<LowercaseNormalizer>());
  return std::make_unique<SequenceNormalizer>(std::move(stages));
}

absl::StatusOr<std::string> StripNormalizer::Apply(std::string_view text,
                                                   NormalizeContext* context) const {
  SourceCursor cursor(text, context->sources);
  if (left_) {
    const size_t begin = SkipWhiteSpace(text, 0);
    if (begin > 0) context->start_moved = true;
    cursor.Remove(CountCharacters(text.substr(0, begin)));
    text.remove_prefix(begin);
  }
  if (right_) text = text.substr(0, SkipWhiteSpaceBackwards(text, text.size()));
  cursor.Keep(text.size());
  return std::string(text);
}

bool StripNormalizer::IsUnchanged(std::string_view text) const {
  return !(left_ && SkipWhiteSpace(text, 0) > 0) &&
         !(right_ && SkipWhiteSpaceBackwards(text, text.size()) < text.size());
}

absl::StatusOr<std::string> PrependNormalizer::Apply(std::string_view text,
                                                     NormalizeContext* context) const {
  SourceCursor cursor(text, context->sources);
  if (!text.empty() && !context->continued) {
    cursor.Prepend(prefix_.size());
    return prefix_ + std::string(text);
  }
  cursor.Keep(text.size());
  return std::string(text);
}

absl::StatusOr<std::string> ReplaceNormalizer::Apply(std::string_view text,
                                                     NormalizeContext* context) const {
  // As in Hugging Face's library, `content` stems from the last character that it replaces.
  const auto note_first = [&](size_t end) {
    if (end > 0 && (content_.empty() || end > FirstCharacterSize(text))) {
      context->start_moved = true;
    }
  };
  if (!regex_.has_value()) {
    if (text.starts_with(literal_)) note_first(literal_.size());
    if (content_.size() > literal_.size()) {
      // Each occurrence needs literal_.size() bytes of the text.
      const size_t most = text.size() / literal_.size() * (content_.size() - literal_.size());
      if (most > context->max_bytes &&
          CountOf(text, literal_) * content_.size() > context->max_bytes) {
        return NormalizedTooLong();
      }
    }
    return ReplaceAll(text, literal_, content_, context->sources);
  }
  std::string out;
  SourceCursor cursor(text, context->sources);
  size_t covered = 0;
  Regex::Finder finder(&*regex_, text);
  for (Regex::Match match; finder.Next(&match); covered = match.end) {
    if (match.begin == 0) note_first(match.end);
    out.append(text.substr(covered, match.begin - covered)).append(content_);
    cursor.Keep(match.begin - covered);
    cursor.Remove(CountCharacters(text.substr(match.begin, match.end - match.begin)));
    cursor.Insert(content_.size());
    if (out.size() > context->max_bytes) return NormalizedTooLong();
  }
  if (!finder.status().ok()) return finder.status();
  out.append(text.substr(covered));
  cursor.Keep(text.size() - covered);
  return out;
}

bool ReplaceNormalizer::IsUnchanged(std::string_view text) const {
  return !regex_.has_value() && text.find(literal_) == std::string_view::npos;
}

std::string ReplaceAll(std::string_view text, std::string_view literal, std::string_view content,
                       ByteSources* sources) {
  std::string out;
  out.reserve(text.size());
  SourceCursor cursor(text, sources);
  size_t covered = 0;
  for (size_t at; (at = text.find(literal, covered)) != std::string_view::npos;) {
    out.append(text.substr(covered, at - covered)).append(content);
    cursor.Keep(at - covered);
    cursor.Remove(CountCharacters(literal));
    cursor.Insert(content.size());
    covered = at + literal.size();
  }
  out.append(text.substr(covered));
  cursor.Keep(text.size() - covered);
  return out;
}

}  // namespace moeserve
