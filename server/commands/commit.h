// What this program was built from.
#pragma once

#include <string_view>

namespace moeserve::server {

// The commit, with "-dirty" behind it where files had been changed; empty where it is not known.
std::string_view Commit();

}  // namespace moeserve::server
