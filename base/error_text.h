// Helpers that build error messages. Every string read from a file passes through Quoted(), so a
// hostile name can neither break a log line nor flood the log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"

namespace moeserve {

namespace internal {
inline void AppendPiece(std::string& out, std::string_view piece) { out.append(piece); }
inline void AppendPiece(std::string& out, char piece) { out.push_back(piece); }
template <typename Int>
requires std::is_integral_v<Int>
void AppendPiece(std::string& out, Int piece) { out.append(std::to_string(piece)); }
}  // namespace internal

// Joins strings, characters and integers. (absl::StrCat of Debian 12 does not take
// std::string_view.)
template <typename... Pieces>
std::string Concat(const Pieces&... pieces) {
  std::string out;
  (internal::AppendPiece(out, pieces), ...);
  return out;
}

// Returns the first `max_bytes` bytes of `text` as printable ASCII between double quotes. All other
// bytes are escaped, and so are double quotes and backslashes. "..." follows if text was cut.
std::string Quoted(std::string_view text, size_t max_bytes = 80);

// Like Quoted(), but without the surrounding double quotes; double quotes and backslashes in the
// text are not escaped.
std::string Printable(std::string_view text, size_t max_bytes = 80);

// Returns a shape as text such as "[8, 16]". At most eight dimensions are shown.
std::string ShapeText(const std::vector<int64_t>& shape);

// Returns `status` with `prefix` put before its message. An OK status is returned as it is.
absl::Status Prefixed(std::string_view prefix, const absl::Status& status);

// Collects error messages so that one run reports several errors. Keeps the first kShown messages
// and counts the rest.
class Problems {
 public:
  static constexpr size_t kShown = 5;

  void Add(std::string message);
  bool empty() const { return count_ == 0; }
  size_t count() const { return count_; }

  // Returns OK if there are no messages, else InvalidArgument. A single message takes one line;
  // several follow a headline, one per line. `subject` and a colon come first unless `subject` is
  // empty.
  absl::Status ToStatus(std::string_view subject) const;

 private:
  std::vector<std::string> shown_;
  size_t count_ = 0;
};

}  // namespace moeserve
