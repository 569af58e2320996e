// Asks a running server whether it can serve.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/text_values.h"

namespace moeserve::server {

// GET /health/ready of the server that listens on `address`; one that listens on every interface
// (0.0.0.0 or ::) is asked over loopback. OK for an answer of 200. Unavailable with what was found
// instead for any other answer, for none within `timeout`, and if nothing can be reached. Reads at
// most a few KiB, whoever answers. Blocks; resolving a host name is not bound by `timeout`.
absl::Status ProbeReadiness(const HostPort& address, absl::Duration timeout);

}  // namespace moeserve::server
