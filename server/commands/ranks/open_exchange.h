// How a process becomes a rank: by MPI, or by addresses on its command line.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/status.h"
#include "kernels/exchange/message_exchange.h"
#include "server/commands/ranks/rank_options.h"
#include "server/commands/ranks/start_facts.h"

namespace moeserve::server {

struct OpenedExchange {
  std::unique_ptr<MessageExchange> exchange = {};
  std::string link_host = {};  // the address of the leader's machine for its link; empty: all
  // What keeps this rank from computing, which the others must be told; then `exchange` has
  // messages only.
  absl::Status status = {};
  StartFacts facts = {};  // which the transport adds
};

// Connects this process with the other ranks as `options.transport` says, which is not "off".
// `device` is that of the backend. Errors are those that other ranks know or cannot be told:
// InvalidArgument for options that do not fit each other, those of MeetRanks() and
// OpenMpiTransport().
Result<OpenedExchange> OpenExchange(const RankOptions& options, const std::string& device);

// Returns the name of this machine.
std::string HostName();

}  // namespace moeserve::server
