// The git commit that the program was built from.
#pragma once

#include <string_view>

namespace moeserve::server {

// Returns the commit, followed by "-dirty" if the sources had uncommitted changes; empty if
// unknown.
std::string_view Commit();

}  // namespace moeserve::server
