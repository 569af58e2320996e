// Messages over TCP connections, without any library.
#pragma once

#include <memory>
#include <vector>

#include "base/descriptor.h"
#include "kernels/exchange/transport.h"

namespace moeserve {

// Returns the transport of a rank that is connected with each other one: `peers` [ranks] are
// connections that do not wait, such as those of MeetRanks(); the own one is not used. A message is
// preceded by its size in 8 bytes, so that one of another size than its receiver expects is an
// error. Unlike with other transports, the end of a rank is an error once something is sent to it
// or expected from it.
std::unique_ptr<Transport> TcpTransport(int rank, std::vector<Descriptor> peers);

}  // namespace moeserve
