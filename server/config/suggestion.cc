#include "server/config/suggestion.h"

#include <algorithm>
#include <cstddef>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

constexpr size_t kMaxWord = 64;

char Folded(char c) {
  if (c >= 'A' && c <= 'Z') return static_cast<char>(c - 'A' + 'a');
  return c == '_' ? '-' : c;
}

// Returns the number of characters to insert, delete, replace or swap with their neighbour to get
// from `a` to `b`.
size_t Distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1);
  std::vector<size_t> last(b.size() + 1);
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = Folded(a[i - 1]) == Folded(b[j - 1]);
      row[j] = std::min({last[j - 1] + (same ? 0 : 1), last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

}  // namespace

std::string Suggestion(std::string_view word, const std::vector<std::string>& names) {
  word = word.substr(0, kMaxWord);
  const std::string* best = nullptr;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    const size_t distance = Distance(word, std::string_view(name).substr(0, kMaxWord));
    if (distance >= best_distance) continue;
    best_distance = distance;
    best = &name;
  }
  return best == nullptr ? std::string() : Concat("; did you mean ", Quoted(*best), '?');
}

}  // namespace moeserve::server
