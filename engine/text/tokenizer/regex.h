// A compiled pattern of PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// PCRE2's own type; its header stays out of ours.
struct pcre2_real_code_8;

namespace moeserve {

// Immutable after construction, for any number of threads. A search that exceeds PCRE2's limits
// returns an error, not a wrong result.
class Regex {
 public:
  // `pattern` is a result of TranslateRegex(). InvalidArgument: PCRE2 rejects it.
  static absl::StatusOr<Regex> Compile(const std::string& pattern);

  struct Match {
    size_t begin;
    size_t end;
  };

  // Iterates over the matches in `text` as Oniguruma's Rust wrapper does: skips an empty match that
  // directly follows another match. `text` must be valid UTF-8 and outlive the iterator.
  class Finder {
   public:
    Finder(const Regex* regex, std::string_view text) : regex_(regex), text_(text) {}
    // True and the next match; false at the end or on an error, see status().
    bool Next(Match* match);
    const absl::Status& status() const { return status_; }

   private:
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
  explicit Regex(pcre2_real_code_8* code) : code_(code) {}

  std::unique_ptr<pcre2_real_code_8, CodeDeleter> code_;
};

}  // namespace moeserve
