// The source revision of this build.
#pragma once

#include <string_view>

namespace moeserve::server {

// Returns the commit, followed by "-dirty" if files had been changed; empty if unknown.
std::string_view Commit();

}  // namespace moeserve::server
