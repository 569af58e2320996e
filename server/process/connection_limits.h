// How many connections the listeners may have, by the descriptors and the memory of the process.
#pragma once

#include <cstddef>

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

// Reduces both limits, to at least 8, so that connections that take `bytes_each` take at most
// `bytes_of_port` on each port.
ConnectionLimits LimitMemory(ConnectionLimits limits, size_t bytes_each, size_t bytes_of_port);

}  // namespace moeserve::server
