// Checks whether a server is ready.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/text_values.h"

namespace moeserve::server {

// Sends GET /health/ready to the server on `address`, over loopback if it listens on every
// interface (0.0.0.0 or ::). OK if the answer is 200. Unavailable, with the reason, for another
// answer, for no answer within `timeout`, and if there is no connection. Reads at most a few KiB of
// the answer. Blocks; `timeout` does not limit resolving a host name.
absl::Status ProbeReadiness(const HostPort& address, absl::Duration timeout);

}  // namespace moeserve::server
