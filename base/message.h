// Pieces of error messages. Whatever comes out of a file passes through Quoted(), so a hostile name
// can neither break a log line nor flood it.
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

// `text` as printable ASCII between double quotes; what exceeds `max_bytes` is cut and marked.
std::string Quoted(std::string_view text, size_t max_bytes = 80);

// The same without the quotes.
std::string Printable(std::string_view text, size_t max_bytes = 80);

// "[8, 16]"; at most eight dimensions are shown.
std::string ShapeText(const std::vector<int64_t>& shape);

// A Status of `code` (not OK) with the text `prefix` before the message of `status`.
absl::Status Prefixed(std::string_view prefix, const absl::Status& status);

// Collects what is wrong so that one run reports several faults; keeps the first few and counts the
// rest.
class Problems {
 public:
  static constexpr size_t kShown = 5;

  void Add(std::string message);
  bool empty() const { return count_ == 0; }
  size_t count() const { return count_; }

  // OK if empty. One problem is a single line; several are listed one to a line after a headline.
  // `subject` and a colon come first unless it is empty.
  absl::Status ToStatus(std::string_view subject) const;

 private:
  std::vector<std::string> shown_;
  size_t count_ = 0;
};

}  // namespace moeserve
