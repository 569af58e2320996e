// Strings that record for each byte whether it comes from a trusted source.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve::chat {

class Budget;

// UTF-8 text with the spans of it that are trusted: those written by the template or the server,
// not by a client. Immutable once shared.
class Text {
 public:
  Text() = default;
  Text(std::string bytes, bool trusted) : bytes_(std::move(bytes)) {
    if (trusted && !bytes_.empty()) spans_.push_back({0, bytes_.size()});
  }

  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  // Returns the trusted spans: ascending, not empty, with gaps between them.
  const std::vector<TextSpan>& spans() const { return spans_; }
  bool IsTrusted(size_t begin, size_t end) const;

  void Append(std::string_view bytes, bool trusted);
  void Append(const Text& other) { Append(other, 0, other.size()); }
  // Appends the bytes [begin, end) of `other`, which stay trusted or untrusted.
  void Append(const Text& other, size_t begin, size_t end);
  Text Slice(size_t begin, size_t end) const;
  Text Slice(size_t begin) const { return Slice(begin, size()); }

 private:
  void Trust(size_t begin, size_t end);

  std::string bytes_;
  std::vector<TextSpan> spans_;
};

// Returns whether Python's str.strip() and str.split() treat the code point as white space.
bool IsPythonSpace(char32_t code_point);

// Returns the part of `text` that is left after the characters in `set` (white space if null) are
// stripped from the chosen ends. Charges `budget`, which may be null, for the characters that it
// visits.
TextSpan StripBounds(std::string_view text, const std::u32string* set, bool left, bool right,
                     Budget* budget = nullptr);

std::u32string CodePoints(std::string_view text);
size_t CodePointCount(std::string_view text);
// Returns the byte at which code point `index` starts; text.size() if `index` is the number of code
// points.
size_t ByteOffset(std::string_view text, size_t index);

// Appends the case mapping of one code point to `out` as UTF-8; up to three characters.
enum class CaseMap { kUpper, kLower, kTitle };
void AppendMapped(char32_t code_point, CaseMap map, std::string& out);
// Returns whether a code point has case, which str.title() uses to find words.
bool IsCased(char32_t code_point);

// Implements str.upper() and str.lower(), and for kTitle str.title(). A mapped character stays
// trusted or untrusted. Charges `budget`.
Text MapCase(const Text& text, CaseMap map, Budget& budget);
// Implements str.capitalize(): the first character in title case, the remaining ones in lower case.
Text Capitalize(const Text& text, Budget& budget);

}  // namespace moeserve::chat
