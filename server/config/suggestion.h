// Finds what a misspelled word may mean.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moeserve::server {

// Returns "; did you mean "NAME"?" for the most similar of `names`, or an empty string if none is
// similar. '_' and '-' count as equal. Looks at the first 64 characters of `word` only.
std::string Suggestion(std::string_view word, const std::vector<std::string>& names);

}  // namespace moeserve::server
