// A compiled PCRE2 pattern.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Forward declaration of PCRE2's type, so that this header need not include PCRE2's.
struct pcre2_real_code_8;

namespace moeserve {

// Immutable after construction; any number of threads may use one object. A search that exceeds
// PCRE2's limits returns an error, not a wrong result.
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
    Finder(const Regex* regex, std::string_view text) : regex_(regex), text_(text) {}
    // Stores the next match and returns true. Returns false at the end, and on an error, which
    // status() then reports.
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
