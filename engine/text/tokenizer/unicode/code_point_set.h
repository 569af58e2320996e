// A set of code points with fast membership tests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/text/tokenizer/unicode/unicode_tables.h"

namespace moeserve {

class CodePointSet {
 public:
  explicit CodePointSet(std::span<const CodePointRange> ranges) : bits_(0x110000 / 64) {
    for (const CodePointRange& range : ranges) {
      for (char32_t c = range.first; c <= range.last; ++c) Add(c);
    }
  }

  void Add(char32_t c) { bits_[c / 64] |= uint64_t{1} << c % 64; }
  // `c` must be at most U+10FFFF.
  bool Contains(char32_t c) const { return bits_[c / 64] >> c % 64 & 1; }

 private:
  std::vector<uint64_t> bits_;
};

}  // namespace moeserve
