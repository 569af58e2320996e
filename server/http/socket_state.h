// What the kernel knows about a TCP connection's output.
#pragma once

#include <cstdint>
#include <optional>

namespace moeserve::server::http {

// Returns the number of bytes that were written to the socket and that the client's kernel has not
// acknowledged; 0 if that is unknown.
int UnsentBytes(int socket);

// Returns the number of bytes that the client's kernel has acknowledged since the connection began;
// nullopt if that is unknown.
std::optional<uint64_t> AcknowledgedBytes(int socket);

// Returns whether the connection has ended, for example because the client has reset it. A
// connection of which only one side has said that it sends nothing more has not.
bool HasEnded(int socket);

}  // namespace moeserve::server::http
