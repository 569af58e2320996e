// What the shared object for MPI exports.
#pragma once

#include "kernels/exchange/transport.h"

namespace moeserve {

// Returns the kTransportVersion that the object was compiled with.
using MpiTransportVersion = int();
// Initializes MPI and returns a transport, which the caller owns; if that fails, null, and `reason`
// points to text that stays valid.
using NewMpiTransport = Transport*(const char** reason);

inline constexpr char kMpiVersionName[] = "moeserve_mpi_transport_version";
inline constexpr char kNewMpiTransportName[] = "moeserve_new_mpi_transport";

}  // namespace moeserve
