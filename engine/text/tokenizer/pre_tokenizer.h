// Pre-tokenizers cut a text into the pieces that the model then tokenizes one by one.
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

// Immutable after construction, for any number of threads.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;

  // Replaces `pieces` (valid UTF-8, not empty) by smaller ones, also not empty, in order. The new
  // ones point into the old ones' text or into `arena`. ResourceExhausted: a pattern ran out of
  // limits.
  virtual absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const = 0;
};

// What becomes of the text that a pattern matches.
enum class SplitBehavior {
  kRemoved,             // it is dropped
  kIsolated,            // a piece of its own
  kMergedWithPrevious,  // the end of the piece before
  kMergedWithNext,      // the start of the piece after
  kContiguous,          // matches that touch become one piece
};

class SplitPreTokenizer : public PreTokenizer {
 public:
  // `inverted`: what the pattern does not match counts as matched, and the reverse.
  SplitPreTokenizer(Regex regex, SplitBehavior behavior, bool inverted)
      : regex_(std::move(regex)), behavior_(behavior), inverted_(inverted) {}

  absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const override;

 private:
  Regex regex_;
  SplitBehavior behavior_;
  bool inverted_;
};

// The cutting half of Hugging Face's ByteLevel. The other half, writing bytes as characters, needs
// no work here: the model looks at bytes directly (BpeConfig::byte_level).
class ByteLevelPreTokenizer : public PreTokenizer {
 public:
  // `use_regex`: cut with GPT-2's pattern. `add_prefix_space`: every piece that comes in gets a
  // leading space unless it has one.
  static absl::StatusOr<std::unique_ptr<PreTokenizer>> Create(bool add_prefix_space,
                                                              bool use_regex);

  absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const override;

 private:
  ByteLevelPreTokenizer(bool add_prefix_space, std::unique_ptr<PreTokenizer> split)
      : add_prefix_space_(add_prefix_space), split_(std::move(split)) {}

  bool add_prefix_space_;
  std::unique_ptr<PreTokenizer> split_;  // null: no cutting
};

// One after the other.
class SequencePreTokenizer : public PreTokenizer {
 public:
  explicit SequencePreTokenizer(std::vector<std::unique_ptr<PreTokenizer>> steps)
      : steps_(std::move(steps)) {}

  absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const override;

 private:
  std::vector<std::unique_ptr<PreTokenizer>> steps_;
};

}  // namespace moeserve
