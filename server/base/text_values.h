// Parses and formats sizes and addresses as the command line writes them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moeserve::server {

// "4096", "512MiB", "2GB": a whole number and optionally B, KB, MB, GB, TB (powers of 1000) or KiB,
// MiB, GiB, TiB (powers of 1024), in any case.
Result<int64_t> ParseBytes(std::string_view text);

// "512.0 MiB"
std::string ShowBytes(int64_t bytes);

struct HostPort {
  std::string host;  // without brackets
  int port = 0;

  // 127.0.0.0/8, ::1 or localhost.
  bool IsLoopback() const;
};

// "127.0.0.1:8080", "[::1]:0", "localhost:80".
Result<HostPort> ParseHostPort(std::string_view text);

}  // namespace moeserve::server
