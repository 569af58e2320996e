#include "server/base/json_text.h"

#include <algorithm>
#include <cstddef>

namespace moeserve::server {
namespace {

// Finds the end of a JSON value that starts at `begin`.
size_t ValueEnd(std::string_view text, size_t begin) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = begin; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
        if (depth == 0) return i + 1;
      }
      continue;
    }
    if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      if (depth == 0) return i;  // the end of the object around a number or a word
      if (--depth == 0) return i + 1;
    } else if (depth == 0 && (c == ',' || c == ' ' || c == '\t' || c == '\r' || c == '\n')) {
      return i;
    }
  }
  return text.size();
}

size_t SkipSpace(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(" \t\r\n", at), text.size());
}

}  // namespace

std::optional<std::string_view> MemberText(std::string_view text, std::string_view name) {
  size_t at = SkipSpace(text, 0);
  if (at >= text.size() || text[at] != '{') return std::nullopt;
  at = SkipSpace(text, at + 1);
  while (at < text.size() && text[at] == '"') {
    const size_t key_end = ValueEnd(text, at);
    const std::string_view key = text.substr(at + 1, key_end - at - 2);
    const size_t value = SkipSpace(text, SkipSpace(text, key_end) + 1);  // after the colon
    const size_t end = ValueEnd(text, value);
    if (key == name) return text.substr(value, end - value);
    at = SkipSpace(text, SkipSpace(text, end) + 1);  // after the comma
  }
  return std::nullopt;
}

std::vector<std::string_view> ElementTexts(std::string_view text) {
  std::vector<std::string_view> elements;
  size_t at = SkipSpace(text, 0);
  if (at >= text.size() || text[at] != '[') return elements;
  at = SkipSpace(text, at + 1);
  while (at < text.size() && text[at] != ']') {
    const size_t end = ValueEnd(text, at);
    elements.push_back(text.substr(at, end - at));
    at = SkipSpace(text, end);
    if (at < text.size() && text[at] == ',') at = SkipSpace(text, at + 1);
  }
  return elements;
}

}  // namespace moeserve::server
