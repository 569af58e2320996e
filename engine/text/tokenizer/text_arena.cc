#include "engine/text/tokenizer/text_arena.h"

#include <algorithm>
#include <functional>
#include <iterator>

namespace moeserve {

std::string_view TextArena::Keep(std::string text, std::string_view old_text,
                                 const ByteSources& sources) {
  const std::string_view kept = texts_.emplace_back(std::move(text));
  if (!traces_ || kept.empty()) return kept;
  ByteSources traced;
  traced.reserve(kept.size());
  const TextSpan start = old_text.empty() ? TextSpan() : Origin(old_text.substr(0, 1));
  for (const int32_t source : sources) {
    traced.push_back(source < 0 ? ~static_cast<int32_t>(start.begin)
                                : SourceOf(old_text.data() + source));
  }
  sources_.emplace(kept.data(), std::move(traced));
  return kept;
}

int32_t TextArena::SourceOf(const char* byte) const {
  const std::less<> before;
  if (!before(byte, input_.data()) && before(byte, input_.data() + input_.size())) {
    return static_cast<int32_t>(byte - input_.data());
  }
  const auto after = sources_.upper_bound(byte);
  return std::prev(after)->second[static_cast<size_t>(byte - std::prev(after)->first)];
}

TextSpan TextArena::Origin(std::string_view part) const {
  const int32_t first = SourceOf(part.data());
  const int32_t last = SourceOf(part.data() + part.size() - 1);
  const size_t begin = first < 0 ? static_cast<size_t>(~first)
                                 : CharacterBefore(input_, static_cast<size_t>(first) + 1);
  size_t end = static_cast<size_t>(last < 0 ? ~last : last);
  if (last >= 0) {
    end = CharacterBefore(input_, end + 1);
    NextCodePoint(input_, &end);
  }
  return {begin, std::max(begin, end)};
}

}  // namespace moeserve
