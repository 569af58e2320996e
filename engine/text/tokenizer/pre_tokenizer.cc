#include "engine/text/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/text/tokenizer/regex_syntax.h"
#include "engine/text/tokenizer/unicode/library_tables.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

using Span = MatchSpan;

// Joins or drops `spans`, which cover the text in order, as `behavior` says, and appends the rest
// to `out`.
void Combine(const std::vector<Span>& spans, SplitBehavior behavior, std::vector<Span>* out) {
  const auto merge_matches = [&](auto begin, auto end, auto extend) {
    const size_t start = out->size();
    bool previous_matched = false;
    for (auto it = begin; it != end; ++it) {
      if (it->matched && !previous_matched && out->size() > start) {
        extend(&out->back(), *it);
      } else {
        out->push_back(*it);
      }
      previous_matched = it->matched;
    }
  };
  switch (behavior) {
    case SplitBehavior::kIsolated:
      out->insert(out->end(), spans.begin(), spans.end());
      break;
    case SplitBehavior::kRemoved:
      for (const Span& span : spans) {
        if (!span.matched) out->push_back(span);
      }
      break;
    case SplitBehavior::kContiguous: {
      const size_t start = out->size();
      bool previous_matched = false;
      for (const Span& span : spans) {
        if (span.matched == previous_matched && out->size() > start) {
          out->back().end = span.end;
        } else {
          out->push_back(span);
        }
        previous_matched = span.matched;
      }
      break;
    }
    case SplitBehavior::kMergedWithPrevious:
      merge_matches(spans.begin(), spans.end(),
                    [](Span* last, const Span& span) { last->end = span.end; });
      break;
    case SplitBehavior::kMergedWithNext: {
      const size_t start = out->size();
      merge_matches(spans.rbegin(), spans.rend(),
                    [](Span* last, const Span& span) { last->begin = span.begin; });
      std::reverse(out->begin() + start, out->end());
      break;
    }
  }
}

}  // namespace

absl::Status MatchingPreTokenizer::Apply(Pieces* pieces, TextArena*) const {
  std::vector<std::string_view> result;
  result.reserve(pieces->texts.size());
  std::vector<Span> spans;
  std::vector<Span> combined;
  for (const std::string_view piece : pieces->texts) {
    spans.clear();
    if (absl::Status status = Find(piece, &spans); !status.ok()) return status;
    const std::vector<Span>* kept = &spans;
    if (behavior_ != SplitBehavior::kIsolated) {
      combined.clear();
      Combine(spans, behavior_, &combined);
      kept = &combined;
    }
    for (const Span& span : *kept) {
      if (span.begin < span.end) result.push_back(piece.substr(span.begin, span.end - span.begin));
    }
  }
  pieces->at_start = pieces->at_start && !result.empty() && !pieces->texts.empty() &&
                     result[0].data() == pieces->texts[0].data();
  pieces->texts = std::move(result);
  return absl::OkStatus();
}

absl::Status SplitPreTokenizer::Find(std::string_view piece, std::vector<Span>* spans) const {
  size_t covered = 0;
  Regex::Finder finder(&regex_, piece);
  for (Regex::Match match; finder.Next(&match); covered = match.end) {
    if (covered != match.begin) spans->push_back({covered, match.begin, inverted_});
    spans->push_back({match.begin, match.end, !inverted_});
  }
  if (covered != piece.size()) spans->push_back({covered, piece.size(), inverted_});
  return finder.status();
}

absl::Status GroupPreTokenizer::Find(std::string_view piece, std::vector<Span>* spans) const {
  size_t covered = 0;
  Regex::Finder finder(&regex_, piece);
  for (Regex::Match match; finder.Next(&match); covered = match.end) {
    if (covered != match.begin) spans->push_back({covered, match.begin, false});
    size_t characters = 0;
    for (size_t pos = match.begin; pos < match.end; ++characters) NextCodePoint(piece, &pos);
    size_t begin = match.begin;
    for (size_t pos = begin; pos < match.end;) {
      NextCodePoint(piece, &pos);
      if (--characters % size_ != 0) continue;
      spans->push_back({begin, pos, true});
      begin = pos;
    }
  }
  if (covered != piece.size()) spans->push_back({covered, piece.size(), false});
  return finder.status();
}

absl::StatusOr<std::unique_ptr<PreTokenizer>> SplitAt(const absl::StatusOr<std::string>& pattern) {
  MOESERVE_RETURN_IF_ERROR(pattern.status());
  MOESERVE_ASSIGN_OR_RETURN(Regex regex, Regex::Compile(*pattern));
  return std::make_unique<SplitPreTokenizer>(std::move(regex), SplitBehavior::kIsolated,
                                             /*inverted=*/false);
}

absl::Status CharacterPreTokenizer::Find(std::string_view piece, std::vector<Span>* spans) const {
  size_t covered = 0;
  for (size_t pos = 0; pos < piece.size();) {
    const size_t begin = pos;
    if (!set_->Contains(NextCodePoint(piece, &pos))) continue;
    if (covered != begin) spans->push_back({covered, begin, false});
    spans->push_back({begin, pos, true});
    covered = pos;
  }
  if (covered != piece.size()) spans->push_back({covered, piece.size(), false});
  return absl::OkStatus();
}

const CodePointSet& PunctuationSet() {
  static const CodePointSet set(PunctuationRanges());
  return set;
}

const CodePointSet& WhiteSpaceSet() {
  static const CodePointSet* const set = [] {
    auto* made = new CodePointSet({});
    for (char32_t c = 0; c < 0x10000; ++c) {  // none is above
      if (IsWhiteSpace(c)) made->Add(c);
    }
    return made;
  }();
  return *set;
}

absl::Status MetaspacePreTokenizer::Apply(Pieces* pieces, TextArena* arena) const {
  std::vector<std::string_view> result;
  for (size_t i = 0; i < pieces->texts.size(); ++i) {
    std::string_view piece = pieces->texts[i];
    const bool prepends = !piece.starts_with(' ') && !piece.starts_with(replacement_) &&
                          (prepend_ == Prepend::kAlways ||
                           (prepend_ == Prepend::kFirst && i == 0 && pieces->at_start));
    if (prepends || piece.find(' ') != std::string_view::npos) {
      std::string text = prepends ? replacement_ : "";
      ByteSources sources;
      SourceCursor cursor(piece, arena->traces() ? &sources : nullptr);
      cursor.InsertBefore(text.size());
      for (const char byte : piece) {
        if (byte == ' ') {
          text += replacement_;
          cursor.Replace(replacement_.size());
        } else {
          text.push_back(byte);
          cursor.Keep(1);
        }
      }
      piece = arena->Keep(std::move(text), piece, sources);
    }
    // Splits before each replacement character but one at the start.
    while (split_) {
      const size_t from = piece.starts_with(replacement_) ? replacement_.size() : 0;
      const size_t end = piece.find(replacement_, from);
      if (end == std::string_view::npos) break;
      result.push_back(piece.substr(0, end));
      piece.remove_prefix(end);
    }
    result.push_back(piece);
  }
  pieces->texts = std::move(result);
  return absl::OkStatus();
}

absl::Status FixedLengthPreTokenizer::Apply(Pieces* pieces, TextArena*) const {
  std::vector<std::string_view> result;
  for (const std::string_view piece : pieces->texts) {
    size_t begin = 0;
    size_t count = 0;
    for (size_t pos = 0; pos < piece.size();) {
      NextCodePoint(piece, &pos);
      if (++count % length_ != 0 && pos < piece.size()) continue;
      result.push_back(piece.substr(begin, pos - begin));
      begin = pos;
    }
  }
  pieces->texts = std::move(result);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PreTokenizer>> ByteLevelPreTokenizer::Create(bool add_prefix_space,
                                                                            bool use_regex) {
  std::unique_ptr<PreTokenizer> split;
  if (use_regex) {
    MOESERVE_ASSIGN_OR_RETURN(split, SplitAt(TranslateRegex(kGpt2Pattern)));
  }
  return std::unique_ptr<PreTokenizer>(
      new ByteLevelPreTokenizer(add_prefix_space, std::move(split)));
}

absl::Status ByteLevelPreTokenizer::Apply(Pieces* pieces, TextArena* arena) const {
  if (add_prefix_space_) {
    for (std::string_view& piece : pieces->texts) {
      if (piece.starts_with(' ')) continue;
      ByteSources sources;
      SourceCursor(piece, arena->traces() ? &sources : nullptr).Prepend(1);
      std::string spaced = " ";
      spaced += piece;
      piece = arena->Keep(std::move(spaced), piece, sources);
    }
  }
  return split_ == nullptr ? absl::OkStatus() : split_->Apply(pieces, arena);
}

absl::Status SequencePreTokenizer::Apply(Pieces* pieces, TextArena* arena) const {
  const auto bytes_of = [&] {
    size_t bytes = 0;
    for (const std::string_view piece : pieces->texts) bytes += piece.size();
    return bytes;
  };
  // Stages that insert a character before each piece can multiply the text.
  const size_t most = 64 * bytes_of() + (64 << 10);
  for (const auto& stage : stages_) {
    MOESERVE_RETURN_IF_ERROR(stage->Apply(pieces, arena));
    if (bytes_of() > most) {
      return absl::ResourceExhaustedError("the pre-tokenizer makes the text too long");
    }
  }
  return absl::OkStatus();
}

}  // namespace moeserve
