// A compiled PCRE2 pattern.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Forward declaration of PCRE2's type, so that this header need not include PCRE2's.
struct pcre2_real_code_8;

namespace moeserve {

// Limits the work of all pattern searches that this thread makes while the object exists. Patterns
// come from checkpoints, and a search can take exponential time. An object inside the life of
// another one has no effect: the outer one counts.
class SearchLimit {
 public:
  // `text_bytes` is the size of the text to be searched. Allows some tens of milliseconds for a
  // small text, and for a large one many times what the patterns of known tokenizers need.
  explicit SearchLimit(size_t text_bytes);
  ~SearchLimit();
  SearchLimit(const SearchLimit&) = delete;
  SearchLimit& operator=(const SearchLimit&) = delete;

  // InvalidArgument once a search has been refused: the searches' results are then incomplete.
  absl::Status status() const;

 private:
  friend class Regex;
  // Charges backtracking steps. Returns false, and will always do so, if there are not enough left.
  bool Take(int64_t steps);
  bool HasTime();
  bool HasTimeMostly();  // looks at the clock only sometimes

  SearchLimit* outer_;
  int64_t steps_left_;
  int64_t cpu_end_ns_;  // of this thread's CPU time
  uint32_t calls_ = 0;
  bool exceeded_ = false;
};

// Immutable after construction; any number of threads may use one object. A search that exceeds the
// limits (SearchLimit, PCRE2's memory) returns an error, not a wrong result.
class Regex {
 public:
  // `pattern` must be a result of TranslateRegex(). InvalidArgument if PCRE2 rejects it.
  static absl::StatusOr<Regex> Compile(const std::string& pattern);

  struct Match {
    size_t begin;
    size_t end;
  };

  // Iterates over the matches in `text` as Oniguruma's Rust wrapper does: an empty match that
  // directly follows another match is skipped. `text` must be valid UTF-8 and outlive the iterator.
  class Finder {
   public:
    Finder(const Regex* regex, std::string_view text)
        : limit_(text.size()), regex_(regex), text_(text) {}
    // Stores the next match and returns true. Returns false at the end, and on an error, which
    // status() then reports.
    bool Next(Match* match);
    const absl::Status& status() const { return status_; }

   private:
    // Return PCRE2's result for the first match at or after position_; SearchByPosition() is slow
    // and takes more than a few steps for a position.
    int Search();
    int SearchByPosition(SearchLimit& limit);
    // Returns PCRE2's result for a match at `at`; raises `needed` to the steps that it may take.
    int SearchAt(SearchLimit& limit, size_t at, uint32_t& needed);

    SearchLimit limit_;
    const Regex* regex_;
    std::string_view text_;
    size_t position_ = 0;
    size_t last_end_ = std::string_view::npos;
    absl::Status status_;
  };

 private:
  struct CodeDeleter {
    void operator()(pcre2_real_code_8* code) const;
  };
  using Code = std::unique_ptr<pcre2_real_code_8, CodeDeleter>;
  Regex(Code code, Code anchored) : code_(std::move(code)), anchored_(std::move(anchored)) {}
  static absl::StatusOr<Code> CompileCode(const std::string& pattern, uint32_t options);

  Code code_;
  Code anchored_;  // matches only where the search begins
};

}  // namespace moeserve
