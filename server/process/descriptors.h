// File descriptors: how many the process may have, and how the listeners share them.
#pragma once

namespace moeserve::server {

// Raises the soft limit on open files to the hard limit, at most to 65536. Returns the soft limit.
int RaiseDescriptorLimit();

// Limits on open connections.
struct ConnectionLimits {
  int http = 0;
  int grpc = 0;
};

// Returns limits with which the process never runs out of `descriptors`: accepting a connection
// without a free descriptor fails, and other parts of the process need some, too. A connection of
// gRPC takes three descriptors. Both limits are at least 8.
ConnectionLimits ShareDescriptors(int descriptors);

}  // namespace moeserve::server
