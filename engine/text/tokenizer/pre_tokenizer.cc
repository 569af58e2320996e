#include "engine/text/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "engine/text/tokenizer/regex_syntax.h"

namespace moeserve {
namespace {

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// A part of the text: one match, or the text between two matches.
struct Span {
  size_t begin;
  size_t end;
  bool matched;
};

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

absl::Status SplitPreTokenizer::Apply(std::vector<std::string_view>* pieces, TextArena*) const {
  std::vector<std::string_view> result;
  result.reserve(pieces->size());
  std::vector<Span> spans;
  std::vector<Span> combined;
  for (const std::string_view piece : *pieces) {
    spans.clear();
    size_t covered = 0;
    Regex::Finder finder(&regex_, piece);
    for (Regex::Match match; finder.Next(&match); covered = match.end) {
      if (covered != match.begin) spans.push_back({covered, match.begin, inverted_});
      spans.push_back({match.begin, match.end, !inverted_});
    }
    if (!finder.status().ok()) return finder.status();
    if (covered != piece.size()) spans.push_back({covered, piece.size(), inverted_});

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
  *pieces = std::move(result);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PreTokenizer>> ByteLevelPreTokenizer::Create(bool add_prefix_space,
                                                                            bool use_regex) {
  std::unique_ptr<PreTokenizer> split;
  if (use_regex) {
    absl::StatusOr<std::string> pattern = TranslateRegex(kGpt2Pattern);
    if (!pattern.ok()) return pattern.status();
    absl::StatusOr<Regex> regex = Regex::Compile(*pattern);
    if (!regex.ok()) return regex.status();
    split = std::make_unique<SplitPreTokenizer>(std::move(*regex), SplitBehavior::kIsolated,
                                                /*inverted=*/false);
  }
  return std::unique_ptr<PreTokenizer>(
      new ByteLevelPreTokenizer(add_prefix_space, std::move(split)));
}

absl::Status ByteLevelPreTokenizer::Apply(std::vector<std::string_view>* pieces,
                                          TextArena* arena) const {
  if (add_prefix_space_) {
    for (std::string_view& piece : *pieces) {
      if (piece.starts_with(' ')) continue;
      std::string spaced = " ";
      spaced += piece;
      piece = arena->Keep(std::move(spaced));
    }
  }
  return split_ == nullptr ? absl::OkStatus() : split_->Apply(pieces, arena);
}

absl::Status SequencePreTokenizer::Apply(std::vector<std::string_view>* pieces,
                                         TextArena* arena) const {
  for (const auto& step : steps_) {
    if (absl::Status status = step->Apply(pieces, arena); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace moeserve
