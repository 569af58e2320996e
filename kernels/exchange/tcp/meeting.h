// Connects processes that were started one by one, so that they become the ranks of a model.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/descriptor.h"
#include "base/status.h"

namespace moeserve {

struct MeetingOptions {
  int rank = 0;
  int ranks = 1;
  // Where rank 0 listens, and others connect to: a name or address that all can reach. Others
  // listen on the addresses of their machines by which they reach rank 0, on free ports.
  std::string host;
  int port = 0;
  // What all ranks have in common and nobody else knows. It is not sent, but proven.
  std::string key;
  std::string name;  // of this machine
  absl::Duration timeout = absl::Minutes(30);
};

// Connects each rank with each other one. Returns [ranks] connections; the own one has no
// descriptor. They are neither encrypted nor, after this function, authenticated.
//
// Rank 0 decides. If two processes have one number, a number is out of range, or processes expect
// different numbers of ranks, rank 0 and all that have connected or connect within two seconds
// return the same InvalidArgument, which names number and hosts; FailedPrecondition if programs
// speak different protocols; Unavailable, with the missing numbers, if not all have connected
// within `timeout`. A process with another key is refused (PermissionDenied), and others go on
// waiting. Unavailable without rank 0.
Result<std::vector<Descriptor>> MeetRanks(const MeetingOptions& options);

}  // namespace moeserve
