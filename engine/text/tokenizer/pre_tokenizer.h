// Pre-tokenizers split a text into pieces, which the model tokenizes one by one.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/text/tokenizer/regex.h"
#include "engine/text/tokenizer/text_arena.h"
#include "engine/text/tokenizer/unicode/code_point_set.h"

namespace moeserve {

struct Pieces {
  std::vector<std::string_view> texts;  // valid UTF-8, not empty
  // The first piece starts with the first character of the whole text that is encoded.
  bool at_start = false;
};

// Immutable after construction; any number of threads may use one object.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;

  // Splits each of `pieces` into pieces, which replace the old ones in order. The new pieces point
  // into the text of the old ones or into `arena`. InvalidArgument if a pattern search exceeds
  // its limits.
  virtual absl::Status Apply(Pieces* pieces, TextArena* arena) const = 0;
};

// What happens to the text that a pattern matches.
enum class SplitBehavior {
  kRemoved,             // it is dropped
  kIsolated,            // it becomes a separate piece
  kMergedWithPrevious,  // it is appended to the previous piece
  kMergedWithNext,      // it is prepended to the next piece
  kContiguous,          // adjacent matches become one separate piece
};

// A part of a piece: one match, or the text between two matches.
struct MatchSpan {
  size_t begin;
  size_t end;
  bool matched;
};

// Finds matches in each piece and splits there.
class MatchingPreTokenizer : public PreTokenizer {
 public:
  explicit MatchingPreTokenizer(SplitBehavior behavior) : behavior_(behavior) {}

  absl::Status Apply(Pieces* pieces, TextArena* arena) const override;

 private:
  // Appends spans that cover `piece` in order.
  virtual absl::Status Find(std::string_view piece, std::vector<MatchSpan>* spans) const = 0;

  SplitBehavior behavior_;
};

// Splits at the matches of a pattern.
class SplitPreTokenizer : public MatchingPreTokenizer {
 public:
  // If `inverted`, text that the pattern does not match counts as matched, and vice versa.
  SplitPreTokenizer(Regex regex, SplitBehavior behavior, bool inverted)
      : MatchingPreTokenizer(behavior), regex_(std::move(regex)), inverted_(inverted) {}

 private:
  absl::Status Find(std::string_view piece, std::vector<MatchSpan>* spans) const override;

  Regex regex_;
  bool inverted_;
};

// Cuts each match of a pattern into groups of `size` > 0 characters; the first group may be
// shorter, as groups of digits in numbers are.
class GroupPreTokenizer : public MatchingPreTokenizer {
 public:
  GroupPreTokenizer(Regex regex, size_t size)
      : MatchingPreTokenizer(SplitBehavior::kIsolated), regex_(std::move(regex)), size_(size) {}

 private:
  absl::Status Find(std::string_view piece, std::vector<MatchSpan>* spans) const override;

  Regex regex_;
  size_t size_;
};

// Returns a stage for which each match of the pattern becomes a separate piece; the error of
// `pattern`, if it has one.
absl::StatusOr<std::unique_ptr<PreTokenizer>> SplitAt(const absl::StatusOr<std::string>& pattern);

// Splits at each character of a set.
class CharacterPreTokenizer : public MatchingPreTokenizer {
 public:
  CharacterPreTokenizer(const CodePointSet* set, SplitBehavior behavior)
      : MatchingPreTokenizer(behavior), set_(set) {}
  CharacterPreTokenizer(std::unique_ptr<CodePointSet> set, SplitBehavior behavior)
      : MatchingPreTokenizer(behavior), set_(set.get()), owned_(std::move(set)) {}

 private:
  absl::Status Find(std::string_view piece, std::vector<MatchSpan>* spans) const override;

  const CodePointSet* set_;
  std::unique_ptr<CodePointSet> owned_;  // null: the set is static
};

// The characters that BertPreTokenizer and Punctuation take for punctuation, and white space.
const CodePointSet& PunctuationSet();
const CodePointSet& WhiteSpaceSet();

// Replaces spaces by a character, puts it in front of pieces, and splits before it.
class MetaspacePreTokenizer : public PreTokenizer {
 public:
  enum class Prepend {
    kNever,
    kFirst,   // only at the start of the whole text
    kAlways,  // in front of every piece
  };
  MetaspacePreTokenizer(std::string replacement, Prepend prepend, bool split)
      : replacement_(std::move(replacement)), prepend_(prepend), split_(split) {}

  absl::Status Apply(Pieces* pieces, TextArena* arena) const override;

 private:
  std::string replacement_;  // one character
  Prepend prepend_;
  bool split_;
};

// Cuts pieces of `length` > 0 characters; the last one may be shorter.
class FixedLengthPreTokenizer : public PreTokenizer {
 public:
  explicit FixedLengthPreTokenizer(size_t length) : length_(length) {}

  absl::Status Apply(Pieces* pieces, TextArena* arena) const override;

 private:
  size_t length_;
};

// The splitting part of Hugging Face's ByteLevel pre-tokenizer. Its other part, which replaces
// bytes by characters, is not needed, because the model reads bytes (BpeConfig::byte_level).
class ByteLevelPreTokenizer : public PreTokenizer {
 public:
  // With `use_regex`, splits by GPT-2's pattern. With `add_prefix_space`, first prepends a space to
  // every piece that does not start with one.
  static absl::StatusOr<std::unique_ptr<PreTokenizer>> Create(bool add_prefix_space,
                                                              bool use_regex);

  absl::Status Apply(Pieces* pieces, TextArena* arena) const override;

 private:
  ByteLevelPreTokenizer(bool add_prefix_space, std::unique_ptr<PreTokenizer> split)
      : add_prefix_space_(add_prefix_space), split_(std::move(split)) {}

  bool add_prefix_space_;
  std::unique_ptr<PreTokenizer> split_;  // null: does not split
};

// Applies its stages in order.
class SequencePreTokenizer : public PreTokenizer {
 public:
  explicit SequencePreTokenizer(std::vector<std::unique_ptr<PreTokenizer>> stages)
      : stages_(std::move(stages)) {}

  absl::Status Apply(Pieces* pieces, TextArena* arena) const override;

 private:
  std::vector<std::unique_ptr<PreTokenizer>> stages_;
};

}  // namespace moeserve
