// Owns the intermediate texts of encoding one input.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "engine/text/tokenizer/byte_sources.h"
#include "engine/text/tokenizer/text_span.h"

namespace moeserve {

class TextArena {
 public:
  TextArena() = default;
  // Also remembers which bytes of `input`, which must be valid UTF-8 of less than 2 GiB and outlive
  // the arena, the bytes of its texts come from. That takes 4 bytes for each of their bytes.
  explicit TextArena(std::string_view input) : input_(input), traces_(true) {}

  bool traces() const { return traces_; }

  // Stores `text` and returns a view that is valid until the arena is destroyed. If the arena
  // traces, `sources` relate `text` to `old_text`, a part of the input or of a text of the arena.
  std::string_view Keep(std::string text, std::string_view old_text, const ByteSources& sources);

  // Returns the part of the input, in whole characters, from which a part, not empty, of the input
  // or of a text of the arena comes. The arena must trace.
  TextSpan Origin(std::string_view part) const;

 private:
  // Returns the byte of the input from which a byte comes; ~at for one that was inserted at `at`.
  int32_t SourceOf(const char* byte) const;

  std::deque<std::string> texts_;  // never moves its elements
  std::string_view input_;
  bool traces_ = false;
  std::map<const char*, ByteSources, std::less<>> sources_;  // by the begin of a text
};

}  // namespace moeserve
