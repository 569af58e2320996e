// SentencePiece's precompiled character maps: rules that replace a text by another one, stored as a
// double-array trie. The maps are untrusted; a damaged one can yield wrong replacements but no
// access outside of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/normalizers/normalizer.h"

namespace moeserve {

class CharacterMap {
 public:
  // Reads the binary form: the size of the trie in bytes, the trie (both as little-endian 32-bit
  // numbers), and the replacements, each of which ends with a zero byte. InvalidArgument if it is
  // damaged or a replacement is not UTF-8.
  static absl::StatusOr<CharacterMap> Create(std::string_view data);

  // Both functions find a rule for a prefix of `text` that is not empty. They return the size of
  // the prefix, 0 if there is no rule, and store the replacement, which lives as long as the map.
  size_t FindShortest(std::string_view text, std::string_view* replacement) const {
    return Find(text, /*longest=*/false, replacement);
  }
  size_t FindLongest(std::string_view text, std::string_view* replacement) const {
    return Find(text, /*longest=*/true, replacement);
  }

 private:
  size_t Find(std::string_view text, bool longest, std::string_view* replacement) const;

  std::vector<uint32_t> units_;
  std::string replacements_;
};

// Applies a character map as Hugging Face's library does, which differs from SentencePiece: a
// grapheme cluster of less than 6 bytes is replaced if a prefix of it has a rule.
class PrecompiledNormalizer : public Normalizer {
 public:
  explicit PrecompiledNormalizer(CharacterMap map) : map_(std::move(map)) {}

  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override;
  bool IsUnchanged(std::string_view) const override { return false; }

 private:
  CharacterMap map_;
};

}  // namespace moeserve
