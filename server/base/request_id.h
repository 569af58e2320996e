// Identifiers of requests.
#pragma once

#include <string>
#include <string_view>

namespace moeserve::server {

// 1 to 128 characters of [A-Za-z0-9._-].
bool IsValidRequestId(std::string_view id);

// 24 random hexadecimal digits; unique in practice. Thread-safe.
std::string NewRequestId();

// `from_client` where it is valid, else a new one: nothing else is ever reflected.
std::string ChooseRequestId(std::string_view from_client);

}  // namespace moeserve::server
