// What the splitters of answers share: finding tags in text that arrives in pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace moeserve::server {

// Returns the size of the longest end of `text` that is a proper start of `tag`: the bytes that may
// turn out to be the tag.
inline size_t HeldBack(std::string_view text, std::string_view tag) {
  if (tag.empty()) return 0;
  for (size_t size = std::min(text.size(), tag.size() - 1); size > 0; --size) {
    if (tag.starts_with(text.substr(text.size() - size))) return size;
  }
  return 0;
}

// Finds the end of a JSON object or list in text that arrives in pieces. Does not check the JSON.
class JsonScanner {
 public:
  // Returns how many bytes of `text`, the next piece, belong to the value.
  size_t Scan(std::string_view text) {
    for (size_t i = 0; i < text.size() && !complete_; ++i) {
      const char c = text[i];
      if (escaped_) {
        escaped_ = false;
      } else if (quoted_) {
        escaped_ = c == '\\';
        quoted_ = c != '"';
      } else if (c == '"') {
        quoted_ = true;
      } else if (c == '{' || c == '[') {
        ++depth_;
      } else if ((c == '}' || c == ']') && --depth_ <= 0) {
        complete_ = true;
        return i + 1;
      }
    }
    return complete_ ? 0 : text.size();
  }
  bool complete() const { return complete_; }

 private:
  int depth_ = 0;
  bool quoted_ = false;
  bool escaped_ = false;
  bool complete_ = false;
};

}  // namespace moeserve::server
