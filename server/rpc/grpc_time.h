// Deadlines in the form that gRPC takes.
#pragma once

#include <grpc/support/time.h>

#include "absl/time/time.h"

namespace moeserve::server::rpc {

// Returns the time after `delay`, which must be finite, on gRPC's monotonic clock.
inline gpr_timespec GrpcDeadline(absl::Duration delay) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_millis(absl::ToInt64Milliseconds(delay), GPR_TIMESPAN));
}

}  // namespace moeserve::server::rpc
