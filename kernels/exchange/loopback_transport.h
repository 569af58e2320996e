// Messages between threads of one process, for tests.
#pragma once

#include <memory>
#include <vector>

#include "kernels/exchange/transport.h"

namespace moeserve {

// Returns the transports of `ranks` ranks that are connected to each other; each is used by a
// thread of its own. A message is copied when both sides have started it. A transport that is
// destroyed withdraws its unfinished messages; its peers then wait for them forever.
std::vector<std::unique_ptr<Transport>> LoopbackTransports(int ranks);

}  // namespace moeserve
