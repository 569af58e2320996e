// Strings with the origin of their bytes: the template or the client.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve::chat {

// UTF-8 with the spans of it that are trusted: written by the template or by the server, as opposed
// to by a client. Immutable once shared.
class Text {
 public:
  Text() = default;
  Text(std::string bytes, bool trusted) : bytes_(std::move(bytes)) {
    if (trusted && !bytes_.empty()) spans_.push_back({0, bytes_.size()});
  }

  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  // Ascending, disjoint, not empty, none touching the next.
  const std::vector<TextSpan>& spans() const { return spans_; }
  bool IsTrusted(size_t begin, size_t end) const;

  void Append(std::string_view bytes, bool trusted);
  void Append(const Text& other) { Append(other, 0, other.size()); }
  // Bytes [begin, end) of `other`, which keep their trust.
  void Append(const Text& other, size_t begin, size_t end);
  Text Slice(size_t begin, size_t end) const;
  Text Slice(size_t begin) const { return Slice(begin, size()); }

 private:
  void Trust(size_t begin, size_t end);

  std::string bytes_;
  std::vector<TextSpan> spans_;
};

// White space of Python's str.strip() and str.split().
bool IsPythonSpace(char32_t code_point);

// The part of `text` that is left when the characters of `set` (white space if null) are stripped
// from the chosen ends.
TextSpan StripBounds(std::string_view text, const std::u32string* set, bool left, bool right);

std::u32string CodePoints(std::string_view text);
size_t CodePointCount(std::string_view text);
// Where code point `index` starts; the size of `text` for the one after the last.
size_t ByteOffset(std::string_view text, size_t index);

// Case mapping of one code point, appended to `out` as UTF-8; up to three characters.
enum class CaseMap { kUpper, kLower, kTitle };
void AppendMapped(char32_t code_point, CaseMap map, std::string& out);
// Whether a code point has a case, which str.title() uses to find words.
bool IsCased(char32_t code_point);

// str.upper(), str.lower(), and for kTitle str.title(). Mapped characters keep their trust.
Text MapCase(const Text& text, CaseMap map);
// First character in title case, the others in lower case.
Text Capitalize(const Text& text);

}  // namespace moeserve::chat
