// Messages by MPI, without linking to it: a shared object that is opened when it is asked for.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "kernels/exchange/transport.h"

namespace moeserve {

// Opens the shared object `path` and initializes MPI. Called at most once in a process, by the
// thread that uses the transport. Returns NotFound if there is no such file, FailedPrecondition if
// it belongs to another build or a library that it needs is missing, Unavailable if MPI fails to
// start; the messages have the reasons. If no message is unfinished and no function has failed, the
// transport's destructor finalizes MPI, which waits for all ranks.
Result<std::unique_ptr<Transport>> OpenMpiTransport(const std::string& path);

// Returns the path of the shared object that was installed or built with the running program.
std::string MpiTransportPath();

}  // namespace moeserve
