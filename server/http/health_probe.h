// Checks whether a server is ready.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/text_values.h"

namespace moeserve::server {

// Sends GET /health/ready to the server on `address`; if the server listens on every interface
// (0.0.0.0 or ::), over loopback. Returns OK if the status is 200. Returns Unavailable, with the
// reason, for another status, for no response within `timeout`, or without a connection. Reads at
// most a few KiB of the response. Blocks. `timeout` does not limit resolving a host name.
//
// With TLS if `certificate`, a file in PEM, is not empty. The server must show the first
// certificate of this file, whatever its names and times are. The probe has no certificate of its
// own.
absl::Status ProbeReadiness(const HostPort& address, absl::Duration timeout,
                            const std::string& certificate = "");

}  // namespace moeserve::server
