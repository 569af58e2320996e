// A dense layer of few rows by all multiprocessors, in one launch with the norm that makes its
// rows.
#pragma once

#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/joined/joined_linear.h"

namespace moeserve::cuda::internal {

// Returns whether LaunchJoinedStream() can compute this on the current device. `joined` is what
// CanJoin() allows for every form.
bool JoinedStreamFits(const JoinedLinear& joined, cudaStream_t stream);
void LaunchJoinedStream(const JoinedLinear& joined, cudaStream_t stream);

}  // namespace moeserve::cuda::internal
