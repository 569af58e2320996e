// What tests tell the stand-in for NCCL in their process. The symbols are found by dlsym().
#pragma once

namespace moeserve::testing {

struct NcclLoopbackControl {
  // The rank to which the others refer; -1: none.
  int rank = -1;
  bool refuses_to_connect = false;  // ncclCommInitRankConfig() fails
  bool fails_to_connect = false;    // and later, by an asynchronous error
  bool never_connects = false;
  bool fails = false;  // the next group ends with an asynchronous error
  bool hangs = false;  // groups never end
};

// Sets what communicators of this process do. To be called by one thread while none is in use.
using SetNcclLoopback = void(const NcclLoopbackControl& control);
inline constexpr char kSetNcclLoopbackName[] = "moeserve_set_nccl_loopback";
// Returns how many communicators of this process were aborted.
using NcclLoopbackAborts = int();
inline constexpr char kNcclLoopbackAbortsName[] = "moeserve_nccl_loopback_aborts";

}  // namespace moeserve::testing
