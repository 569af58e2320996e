// An exchange that gathers the memory of GPUs by NCCL, without linking to it: the library is opened
// when it is asked for. The headers of nccl.h are needed only where this is compiled.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "kernels/exchange/message_exchange.h"
#include "kernels/exchange/stream_query.h"
#include "kernels/exchange/transport.h"

namespace moeserve {

// The functions of an opened library.
class NcclLibrary {
 public:
  virtual ~NcclLibrary() = default;
  // Returns the version, such as "2.28.9".
  virtual std::string version() const = 0;
  // Returns an exchange whose messages in host memory go through `transport`, and whose gathers of
  // device memory go through NCCL, once ConnectDevices() has connected the devices that each rank's
  // thread has chosen. `query` asks the device.
  //
  // Every wait for the device ends: with a loss after MessageExchange::Options::timeout, after an
  // error of NCCL, or after Lose(), whoever calls it; NCCL's operations are then aborted. The
  // exchange has a thread for that. A gather's time-out begins with its start, so it includes the
  // work that was queued before it. ExchangeCounts::wait_seconds stay as they are for gathers of
  // device memory: NCCL does not tell which part came when.
  virtual std::unique_ptr<MessageExchange> NewExchange(std::unique_ptr<Transport> transport,
                                                       MessageExchange::Options options,
                                                       StreamQuery query) const = 0;
};

// Opens libnccl.so.2, where the dynamic linker finds it. NotFound if there is none,
// FailedPrecondition if it is too old or lacks a function, Unimplemented if this program was built
// without the headers of NCCL.
Result<std::unique_ptr<NcclLibrary>> OpenNccl();

}  // namespace moeserve
