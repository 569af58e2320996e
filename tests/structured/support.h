// A synthetic vocabulary for tests, and functions that feed text to constraints.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/structured/compile_constraint.h"
#include "engine/text/structured/compiled.h"
#include "tests/support/random.h"

namespace moeserve::testing {

// A tokenizer whose token i is the i-th text. Implements only the functions that an index of the
// vocabulary needs.
class ListTokenizer : public Tokenizer {
 public:
  ListTokenizer(std::vector<std::string> tokens, int num_special)
      : tokens_(std::move(tokens)), num_special_(num_special) {}

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view, bool, bool) const override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view, std::span<const TextSpan>,
                                                     bool) const override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<std::string> Decode(std::span<const TokenId>, bool) const override {
    return absl::UnimplementedError("");
  }
  std::string TokenBytes(TokenId id) const override {
    return id >= 0 && id < vocab_size() ? tokens_[id] : "";
  }
  std::string_view TokenString(TokenId id) const override { return tokens_[id]; }
  std::optional<TokenId> TokenToId(std::string_view) const override { return std::nullopt; }
  bool IsSpecial(TokenId id) const override { return id < num_special_; }
  int vocab_size() const override { return static_cast<int>(tokens_.size()); }

 private:
  std::vector<std::string> tokens_;
  int num_special_;
};

inline constexpr TokenId kEos = 1;

// Returns two special tokens (the second one is EOS), the given bytes as single tokens, and random
// pieces of texts that resemble completions.
inline std::vector<std::string> MakeTokens(int count, std::string_view single_bytes,
                                           uint64_t seed = 1) {
  static constexpr std::string_view kTexts[] = {
      "{\"name\": \"value\", \"x\": [1, 2.5, -3e-07, true, false, null]}",
      "{\n  \"a\": {\n    \"b\": [\n      {},\n      []\n    ]\n  }\n}",
      "aabbccab abc \"quoted \\\"text\\\"\" \\u00e9\\ud83d\\ude00 été 漢字 😀",
      "{\"a\":{\"b\":\"c\",\"id\":0},\"kind\":\"k1\"},\"\":\"\"}]}]}",
      "2024-02-29T12:30:00Z 00000 1000 -12.75 0.001 1.5e+300",
      "the quick brown fox jumps over the lazy dog and does it again"};
  std::vector<std::string> tokens = {"<pad>", "<eos>"};
  for (const char c : single_bytes) tokens.emplace_back(1, c);
  Random random(seed);
  while (static_cast<int>(tokens.size()) < count) {
    const std::string_view text = kTexts[random.Below(std::size(kTexts))];
    const size_t begin = random.Below(static_cast<int>(text.size()));
    std::string token(text.substr(begin, 1 + random.Below(10)));
    if (count > 5000) token += static_cast<char>('a' + random.Below(26));
    tokens.push_back(std::move(token));
  }
  return tokens;
}

inline std::string AllBytes() {
  std::string bytes;
  for (int b = 0; b < 256; ++b) bytes += static_cast<char>(b);
  return bytes;
}

inline std::shared_ptr<const VocabularyIndex> MakeVocabulary(std::vector<std::string> tokens) {
  // The model has more logits than the vocabulary has tokens.
  const int size = static_cast<int>(tokens.size()) + 5;
  auto index = VocabularyIndex::Build(ListTokenizer(std::move(tokens), 2), {kEos}, size);
  EXPECT_TRUE(index.ok()) << index.status();
  return *index;
}

inline std::shared_ptr<const VocabularyIndex> SmallVocabulary() {
  static const auto vocabulary = MakeVocabulary(MakeTokens(1200, AllBytes()));
  return vocabulary;
}

inline ConstraintSpec Schema(std::string text, bool strict = true) {
  ConstraintSpec spec;
  spec.kind = ConstraintSpec::Kind::kJsonSchema;
  spec.text = std::move(text);
  spec.strict = strict;
  return spec;
}

inline ConstraintSpec Pattern(std::string text) {
  ConstraintSpec spec;
  spec.kind = ConstraintSpec::Kind::kRegex;
  spec.text = std::move(text);
  return spec;
}

inline ConstraintSpec ContextFree(std::string text) {
  ConstraintSpec spec;
  spec.kind = ConstraintSpec::Kind::kGrammar;
  spec.text = std::move(text);
  return spec;
}

inline ConstraintSpec Choices(std::vector<std::string> choices) {
  ConstraintSpec spec;
  spec.kind = ConstraintSpec::Kind::kChoice;
  spec.choices = std::move(choices);
  return spec;
}

inline std::shared_ptr<const CompiledConstraint> Compile(
    const ConstraintSpec& spec,
    std::shared_ptr<const VocabularyIndex> vocabulary = SmallVocabulary()) {
  // The server's limit is elapsed time, which depends on what else the machine runs.
  const ConstraintLimits limits{.compile_time = std::chrono::minutes(2)};
  auto compiled = CompileConstraint(spec, std::move(vocabulary), limits);
  EXPECT_TRUE(compiled.ok()) << compiled.status() << "\n" << spec.text;
  return compiled.ok() ? *compiled : nullptr;
}

// Feeds `text` in tokens of one byte each. Returns whether every token was accepted and the text
// was then complete.
inline bool Accepts(const CompiledConstraint& constraint, std::string_view text) {
  const auto state = constraint.NewState();
  for (const char c : text) {
    // The single-byte tokens follow the two special tokens.
    if (!state->Accept(2 + static_cast<uint8_t>(c))) return false;
  }
  return state->complete();
}

inline bool IsSet(const std::vector<uint32_t>& mask, TokenId id) {
  return (mask[id / 32] >> (id % 32)) & 1;
}

inline std::vector<uint32_t> MaskOf(ConstraintState* state, const VocabularyIndex& vocabulary,
                                    int64_t left = int64_t{1} << 40) {
  // The previous contents of the mask must not matter.
  std::vector<uint32_t> mask(vocabulary.mask_words(), 0xA5A5A5A5);
  state->AllowedTokens(mask, left);
  return mask;
}

inline std::vector<TokenId> TokensOf(const std::vector<uint32_t>& mask) {
  std::vector<TokenId> tokens;
  for (size_t id = 0; id < 32 * mask.size(); ++id) {
    if (IsSet(mask, static_cast<TokenId>(id))) tokens.push_back(static_cast<TokenId>(id));
  }
  return tokens;
}

// Whether a text can have free text, which the limit cuts off anywhere.
inline bool HasFreeText(const TextFormat& format) {
  const auto any = [](const std::vector<TextFormat>& parts) {
    return std::any_of(parts.begin(), parts.end(), HasFreeText);
  };
  if (format.tags == nullptr) {
    return format.kind == TextFormat::Kind::kAnyText || any(format.parts);
  }
  if (format.tags->free_text) return true;
  std::vector<TextFormat> contents;
  for (const StructuralTag& tag : format.tags->tags) contents.push_back(tag.content);
  return any(contents);
}

// Returns the length of the shortest completion in tokens of one byte.
inline int64_t ShortestAnswer(const CompiledConstraint& constraint) {
  const auto& compiled = dynamic_cast<const structured::Compiled&>(constraint);
  const structured::StackPool pool;
  return compiled.matcher().Distance(compiled.matcher().Start(), pool);
}

}  // namespace moeserve::testing
