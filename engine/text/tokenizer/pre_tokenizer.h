// Pre-tokenizers split a text into pieces, which the model tokenizes one by one.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/text/tokenizer/regex.h"
#include "engine/text/tokenizer/text_arena.h"

namespace moeserve {

// Immutable after construction; any number of threads may use one object.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;

  // Splits each of `pieces` (valid UTF-8, not empty) into non-empty pieces, which replace the old
  // ones in order. The new pieces point into the text of the old ones or into `arena`.
  // ResourceExhausted if a pattern search exceeds its limits.
  virtual absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const = 0;
};

// What happens to the text that a pattern matches.
enum class SplitBehavior {
  kRemoved,             // it is dropped
  kIsolated,            // it becomes a separate piece
  kMergedWithPrevious,  // it is appended to the previous piece
  kMergedWithNext,      // it is prepended to the next piece
  kContiguous,          // adjacent matches become one separate piece
};

class SplitPreTokenizer : public PreTokenizer {
 public:
  // If `inverted`, text that the pattern does not match counts as matched, and vice versa.
  SplitPreTokenizer(Regex regex, SplitBehavior behavior, bool inverted)
      : regex_(std::move(regex)), behavior_(behavior), inverted_(inverted) {}

  absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const override;

 private:
  Regex regex_;
  SplitBehavior behavior_;
  bool inverted_;
};

// The splitting part of Hugging Face's ByteLevel pre-tokenizer. Its other part, which replaces
// bytes by characters, is not needed, because the model reads bytes (BpeConfig::byte_level).
class ByteLevelPreTokenizer : public PreTokenizer {
 public:
  // With `use_regex`, splits by GPT-2's pattern. With `add_prefix_space`, first prepends a space to
  // every piece that does not start with one.
  static absl::StatusOr<std::unique_ptr<PreTokenizer>> Create(bool add_prefix_space,
                                                              bool use_regex);

  absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const override;

 private:
  ByteLevelPreTokenizer(bool add_prefix_space, std::unique_ptr<PreTokenizer> split)
      : add_prefix_space_(add_prefix_space), split_(std::move(split)) {}

  bool add_prefix_space_;
  std::unique_ptr<PreTokenizer> split_;  // null: does not split
};

// Applies its steps in order.
class SequencePreTokenizer : public PreTokenizer {
 public:
  explicit SequencePreTokenizer(std::vector<std::unique_ptr<PreTokenizer>> steps)
      : steps_(std::move(steps)) {}

  absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const override;

 private:
  std::vector<std::unique_ptr<PreTokenizer>> steps_;
};

}  // namespace moeserve
