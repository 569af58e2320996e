// Trims text and converts it to lower case; parses and formats byte sizes and network addresses.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moeserve::server {

// Returns the text with A to Z in lower case; other bytes stay as they are.
std::string LowerCase(std::string_view text);

// Returns the text without characters of `blanks` at its ends.
std::string_view Trimmed(std::string_view text, std::string_view blanks = " \t");

// Parses a size in bytes such as "4096", "512MiB" or "2GB": a whole number, optionally followed by
// B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), in upper or lower
// case.
Result<int64_t> ParseBytes(std::string_view text);

// Formats a size in bytes, for example "512.0 MiB".
std::string ShowBytes(int64_t bytes);

struct HostPort {
  std::string host;  // an IPv6 address is stored without brackets
  int port = 0;

  // Returns true for 127.0.0.0/8, ::1 and localhost.
  bool IsLoopback() const;
};

// Parses an address such as "127.0.0.1:8080", "[::1]:0" or "localhost:80".
Result<HostPort> ParseHostPort(std::string_view text);

}  // namespace moeserve::server
