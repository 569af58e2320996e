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

// Immutable after construction, for any number of threads.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;

  // Splits each of `pieces` (valid UTF-8, not empty) into pieces that are not empty, in order. They
  // point into the text of the old ones or into `arena`. ResourceExhausted: a pattern exceeded the
  // limits of a search.
  virtual absl::Status Apply(std::vector<std::string_view>* pieces, TextArena* arena) const = 0;
};

// The treatment of text that a pattern matches.
enum class SplitBehavior {
  kRemoved,             // dropped
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

// The splitting part of Hugging Face's ByteLevel. Its other part, replacing bytes by characters, is
// not needed: the model reads bytes (BpeConfig::byte_level).
class ByteLevelPreTokenizer : public PreTokenizer {
 public:
  // `use_regex`: splits by GPT-2's pattern. `add_prefix_space`: prepends a space to every input
  // piece that does not start with one.
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
