// Request ids.
#pragma once

#include <string>
#include <string_view>

namespace moeserve::server {

// Returns whether `id` consists of 1 to 128 characters of [A-Za-z0-9._-].
bool IsValidRequestId(std::string_view id);

// Returns 24 random hexadecimal digits, unique in practice. Thread-safe.
std::string NewRequestId();

// Returns `from_client` if it is valid, else a new id, so that responses never repeat invalid text.
std::string ChooseRequestId(std::string_view from_client);

}  // namespace moeserve::server
