// Where the bytes of a rewritten text come from, so that a token can be traced to the text that a
// client sent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/text/tokenizer/utf8.h"

namespace moeserve {

// For each byte of the new text a byte of the old one; -1 if it was inserted before all of them.
using ByteSources = std::vector<int32_t>;

// Records the sources of a text that is written from left to right, with the rules of Hugging
// Face's library: a character that replaces another one has its source, and an inserted one has the
// source of the old character before it. Sizes of new text are in bytes.
class SourceCursor {
 public:
  // Does nothing if `sources` is null. `old_text` must be valid UTF-8 and outlive the cursor.
  SourceCursor(std::string_view old_text, ByteSources* sources) : old_(old_text), out_(sources) {}

  void Insert(size_t size) {
    if (out_ == nullptr) return;
    out_->insert(out_->end(), size, static_cast<int32_t>(at_) - 1);
    inserted_ = size;
  }
  // Inserts text that has the source of the old character after it.
  void InsertBefore(size_t size) {
    if (out_ == nullptr) return;
    const size_t last = old_.empty() ? 0 : old_.size() - 1;
    out_->insert(out_->end(), size, static_cast<int32_t>(std::min(at_, last)));
  }
  // Replaces the next character of the old text.
  void Replace(size_t size) {
    InsertBefore(size);
    inserted_ = 0;
    Remove(1);
  }
  // Puts new text in front of all of the old text, which must not be empty.
  void Prepend(size_t size) {
    if (out_ == nullptr) return;
    InsertBefore(size);
    Keep(old_.size());
  }
  // Leaves out characters of the old text.
  void Remove(size_t characters) {
    if (out_ == nullptr) return;
    for (; characters > 0 && at_ < old_.size(); --characters) NextCodePoint(old_, &at_);
  }
  // Takes over the next bytes of the old text, whole characters.
  void Keep(size_t size) {
    if (out_ == nullptr) return;
    for (; size > 0; --size) out_->push_back(static_cast<int32_t>(at_++));
    inserted_ = 0;
  }
  // Replaces a part of the old text, character by character; if the parts differ in length, the
  // last characters are inserted or left out.
  void ReplaceText(std::string_view old_part, std::string_view new_part);

 private:
  std::string_view old_;
  ByteSources* out_;
  size_t at_ = 0;        // the next byte of the old text
  size_t inserted_ = 0;  // the size of the last character if it was inserted
};

// Returns the number of characters of `text`, which must be valid UTF-8.
inline size_t CountCharacters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xC0) != 0x80; }));
}

inline void SourceCursor::ReplaceText(std::string_view old_part, std::string_view new_part) {
  if (out_ == nullptr) return;
  size_t left = CountCharacters(old_part);
  for (size_t pos = 0; pos < new_part.size();) {
    const size_t begin = pos;
    NextCodePoint(new_part, &pos);
    if (left == 0) {
      Insert(pos - begin);
    } else {
      Replace(pos - begin);
      --left;
    }
  }
  if (new_part.empty()) {
    // As in Hugging Face's library: an inserted character before a part that becomes nothing takes
    // the place of that part, and without any character before it, the part is not left out.
    if (out_->empty()) return;
    std::fill(out_->end() - static_cast<ptrdiff_t>(inserted_), out_->end(),
              static_cast<int32_t>(at_));
    inserted_ = 0;
  }
  Remove(left);
}

}  // namespace moeserve
