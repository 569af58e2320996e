// Where spans are sent, as the command line says it.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace moeserve::server {

// Where the collector is.
struct OtlpEndpoint {
  std::string host;  // a name or an address, an IPv6 address without brackets
  int port = 4318;
  std::string path = "/v1/traces";
};

// Parses "http://HOST[:PORT][/PATH]"; "/v1/traces" is added to the path. InvalidArgument for
// anything else, also for https.
Result<OtlpEndpoint> ParseOtlpEndpoint(std::string_view url);

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

// Parses "NAME=VALUE,NAME=VALUE". InvalidArgument for names and values that cannot stand in an HTTP
// header; the message contains no value, because values can be secret.
Result<HttpHeaders> ParseOtlpHeaders(std::string_view text);

}  // namespace moeserve::server
