#include "engine/text/chat/text.h"

#include <algorithm>

#include "engine/text/chat/budget.h"
#include "engine/text/chat/case_tables.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::chat {
namespace {

const CaseRange* FindCase(std::span<const CaseRange> ranges, char32_t c) {
  const auto it = std::upper_bound(ranges.begin(), ranges.end(), c,
                                   [](char32_t v, const CaseRange& r) { return v < r.first; });
  if (it == ranges.begin()) return nullptr;
  const CaseRange& range = *std::prev(it);
  if (c > range.last || (c - range.first) % range.step != 0) return nullptr;
  return &range;
}

// Returns whether the Greek sigma at index `at` takes its word-final form.
bool IsFinalSigma(std::u32string_view text, size_t at) {
  size_t before = at;
  while (before > 0 && IsCaseIgnorable(text[before - 1])) --before;
  if (before == 0 || !IsCased(text[before - 1])) return false;
  size_t after = at + 1;
  while (after < text.size() && IsCaseIgnorable(text[after])) ++after;
  return after == text.size() || !IsCased(text[after]);
}

// Maps each character; `map_of` chooses the mapping from the character's index and whether a
// character with case precedes it.
template <typename MapOf>
Text MapEach(const Text& text, MapOf map_of, Budget& budget) {
  budget.Step(static_cast<int64_t>(text.size()));
  budget.Bytes(6 * text.size() + text.spans().size() * sizeof(TextSpan));
  const std::u32string points = CodePoints(text.bytes());
  Text out;
  std::string mapped;
  size_t pos = 0;
  bool previous_cased = false;
  for (size_t i = 0; i < points.size(); ++i) {
    const size_t begin = pos;
    NextCodePoint(text.bytes(), &pos);
    mapped.clear();
    const CaseMap map = map_of(i, previous_cased);
    if (points[i] == U'\u03A3' && map == CaseMap::kLower && IsFinalSigma(points, i)) {
      mapped = "\u03C2";
    } else {
      AppendMapped(points[i], map, mapped);
    }
    out.Append(mapped, text.IsTrusted(begin, pos));
    previous_cased = IsCased(points[i]);
  }
  return out;
}

}  // namespace

bool Text::IsTrusted(size_t begin, size_t end) const {
  const auto it = std::upper_bound(spans_.begin(), spans_.end(), begin,
                                   [](size_t v, const TextSpan& s) { return v < s.begin; });
  return it != spans_.begin() && end <= std::prev(it)->end;
}

void Text::Trust(size_t begin, size_t end) {
  if (begin == end) return;
  if (!spans_.empty() && spans_.back().end == begin) {
    spans_.back().end = end;
  } else {
    spans_.push_back({begin, end});
  }
}

void Text::Append(std::string_view bytes, bool trusted) {
  const size_t begin = size();
  bytes_ += bytes;
  if (trusted) Trust(begin, size());
}

void Text::Append(const Text& other, size_t begin, size_t end) {
  if (begin >= end) return;
  const size_t base = size();
  bytes_.append(other.bytes_, begin, end - begin);
  auto it = std::upper_bound(other.spans_.begin(), other.spans_.end(), begin,
                             [](size_t v, const TextSpan& s) { return v < s.end; });
  for (; it != other.spans_.end() && it->begin < end; ++it) {
    Trust(base + std::max(it->begin, begin) - begin, base + std::min(it->end, end) - begin);
  }
}

Text Text::Slice(size_t begin, size_t end) const {
  Text out;
  out.Append(*this, begin, end);
  return out;
}

bool IsPythonSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

TextSpan StripBounds(std::string_view text, const std::u32string* set, bool left, bool right,
                     Budget* budget) {
  const auto cost = static_cast<int64_t>(set == nullptr ? 1 : 1 + set->size() / 8);
  uint32_t visited = 0;
  const auto strips = [&, set](char32_t c) {
    if (++visited % 4 == 0 && budget != nullptr) budget->Step(cost);
    return set == nullptr ? IsPythonSpace(c) : set->find(c) != std::u32string::npos;
  };
  TextSpan span{0, text.size()};
  while (left && span.begin < span.end) {
    size_t pos = span.begin;
    if (!strips(NextCodePoint(text, &pos))) break;
    span.begin = pos;
  }
  while (right && span.begin < span.end) {
    const size_t begin = CharacterBefore(text, span.end);
    size_t pos = begin;
    if (!strips(NextCodePoint(text, &pos))) break;
    span.end = begin;
  }
  return span;
}

std::u32string CodePoints(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) out.push_back(NextCodePoint(text, &pos));
  return out;
}

size_t CodePointCount(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

size_t ByteOffset(std::string_view text, size_t index) {
  for (size_t pos = 0; pos < text.size(); ++pos) {
    if ((text[pos] & 0xC0) == 0x80) continue;
    if (index-- == 0) return pos;
  }
  return text.size();
}

void AppendMapped(char32_t c, CaseMap map, std::string& out) {
  if (c < 0x80) {
    const bool to_lower = map == CaseMap::kLower;
    const bool changes = to_lower ? c >= 'A' && c <= 'Z' : c >= 'a' && c <= 'z';
    out.push_back(static_cast<char>(changes ? c ^ 0x20 : c));
    return;
  }
  const auto specials = SpecialCases();
  const auto special =
      std::lower_bound(specials.begin(), specials.end(), c,
                       [](const SpecialCase& s, char32_t v) { return s.code_point < v; });
  if (special != specials.end() && special->code_point == c) {
    out += map == CaseMap::kUpper   ? special->upper
           : map == CaseMap::kTitle ? special->title
                                    : special->lower;
    return;
  }
  const CaseRange* range = map == CaseMap::kTitle ? FindCase(TitleRanges(), c) : nullptr;
  if (range == nullptr) range = FindCase(map == CaseMap::kLower ? LowerRanges() : UpperRanges(), c);
  AppendUtf8(range == nullptr ? c : static_cast<char32_t>(static_cast<int32_t>(c) + range->delta),
             &out);
}

bool IsCased(char32_t c) { return InRanges(CasedRanges(), c); }

Text MapCase(const Text& text, CaseMap map, Budget& budget) {
  return MapEach(
      text,
      [map](size_t, bool previous_cased) {
        return map == CaseMap::kTitle && previous_cased ? CaseMap::kLower : map;
      },
      budget);
}

Text Capitalize(const Text& text, Budget& budget) {
  return MapEach(
      text, [](size_t i, bool) { return i == 0 ? CaseMap::kTitle : CaseMap::kLower; }, budget);
}

}  // namespace moeserve::chat
