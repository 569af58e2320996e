// TCP connections with deadlines.
#pragma once

#include <netdb.h>

#include <functional>
#include <string>

#include "absl/time/time.h"
#include "base/descriptor.h"

namespace moeserve {

// Returns what errno says.
std::string SystemError();

// Returns a time-out for poll(): at least 0 and at most a minute.
int PollMilliseconds(absl::Duration duration);

// Waits until the descriptor has one of `events`. False after `timeout`.
bool WaitForEvent(int fd, short events, absl::Duration timeout);

// Sets a connection or listening socket to send at once, to never wait and not to be inherited.
void SetSocketOptions(int fd);

// Calls `use` with each address of a name until it returns true. Returns the reason if there is no
// address, or if `use` has returned false for all, the last errno; else an empty text. An empty
// `host` and AI_PASSIVE in `flags` mean all addresses of this machine.
std::string EachAddress(const std::string& host, int port, int flags,
                        const std::function<bool(const addrinfo&)>& use);

// Returns a socket that listens on an address, or one without a descriptor, with the reason in
// errno. `port` is the port, 0 for any that is free, and becomes the one that was found.
Descriptor ListenAt(const addrinfo& address, int& port);

// Returns a connection, or one without a descriptor, with the reason in errno.
Descriptor ConnectTo(const addrinfo& address, absl::Duration timeout);

}  // namespace moeserve
