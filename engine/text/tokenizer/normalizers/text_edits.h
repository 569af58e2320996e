// Normalizers that change, insert or remove single characters or pieces of text.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/text/tokenizer/normalizers/normalizer.h"
#include "engine/text/tokenizer/regex.h"

namespace moeserve {

// Replaces each character by its lower-case form, whatever its neighbours are.
class LowercaseNormalizer : public Normalizer {
 public:
  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override;
  bool IsUnchanged(std::string_view text) const override;
};

// Removes or replaces single characters by a rule.
class CharacterRuleNormalizer : public Normalizer {
 public:
  // Returns the replacement of a character, or kRemoved.
  using Rule = char32_t (*)(char32_t);
  static constexpr char32_t kRemoved = 0xFFFFFFFF;

  explicit CharacterRuleNormalizer(Rule rule) : rule_(rule) {}

  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override;
  bool IsUnchanged(std::string_view) const override { return false; }

 private:
  Rule rule_;
};

// Removes combining marks.
std::unique_ptr<Normalizer> StripAccentsNormalizer();
// The cleaning of Google's NMT models: removes control characters, unifies white space.
std::unique_ptr<Normalizer> NmtNormalizer();

struct BertNormalizerOptions {
  bool clean_text = true;            // removes control characters, unifies white space
  bool handle_chinese_chars = true;  // puts spaces around CJK ideographs
  bool strip_accents = true;
  bool lowercase = true;
};
std::unique_ptr<Normalizer> BertNormalizer(const BertNormalizerOptions& options);

// Removes white space from the ends of the text.
class StripNormalizer : public Normalizer {
 public:
  StripNormalizer(bool left, bool right) : left_(left), right_(right) {}

  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override;
  bool IsUnchanged(std::string_view text) const override;

 private:
  bool left_;
  bool right_;
};

// Inserts `prefix` in front of a text that is not empty.
class PrependNormalizer : public Normalizer {
 public:
  explicit PrependNormalizer(std::string prefix) : prefix_(std::move(prefix)) {}

  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override;
  bool IsUnchanged(std::string_view text) const override { return text.empty(); }

 private:
  std::string prefix_;
};

// Replaces every occurrence of a text or pattern by `content`.
class ReplaceNormalizer : public Normalizer {
 public:
  // `literal` must not be empty.
  ReplaceNormalizer(std::string literal, std::string content)
      : literal_(std::move(literal)), content_(std::move(content)) {}
  ReplaceNormalizer(Regex regex, std::string content)
      : regex_(std::move(regex)), content_(std::move(content)) {}

  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override;
  bool IsUnchanged(std::string_view text) const override;

 private:
  std::string literal_;
  std::optional<Regex> regex_;  // set: literal_ is not used
  std::string content_;
};

// Returns `text` with every occurrence of `literal`, which must not be empty, replaced. `sources`
// may be null.
std::string ReplaceAll(std::string_view text, std::string_view literal, std::string_view content,
                       ByteSources* sources = nullptr);

}  // namespace moeserve
