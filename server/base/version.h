// The version of this build.
#pragma once

#include <string_view>

namespace moeserve::server {

inline constexpr std::string_view kVersion = MOESERVE_VERSION;

}  // namespace moeserve::server
