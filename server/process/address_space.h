// The limit on the address space of the process (RLIMIT_AS, `ulimit -v`).
#pragma once

#include "absl/status/status.h"

namespace moeserve::server {

// Returns ResourceExhausted, with the limit and what is needed, if the address space is limited and
// has no room for the server's threads: those of the listeners and of the work pools, and `threads`
// that compute. A thread takes its stack and, from glibc's allocator, an arena; it uses little of
// either, but the limit counts all. Beyond the limit threads cannot be started, and gRPC ends the
// process. Must be called before threads are started.
absl::Status CheckAddressSpace(int threads);

}  // namespace moeserve::server
