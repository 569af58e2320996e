// SHA-256: collision-resistant keys for long untrusted content.
#pragma once

#include <string>
#include <string_view>

namespace moeserve {

// Returns the digest, 32 bytes.
std::string Sha256(std::string_view bytes);

}  // namespace moeserve
