// SHA-256, where a short name must stand for long content that comes from outside.
#pragma once

#include <string>
#include <string_view>

namespace moeserve {

// 32 bytes.
std::string Sha256(std::string_view bytes);

}  // namespace moeserve
