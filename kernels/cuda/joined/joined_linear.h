// A small dense layer of few rows in one launch with the operation that makes its rows.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/rows/rows.h"

namespace moeserve::cuda {

// The most rows of such a launch.
inline constexpr int kMostJoinedRows = 8;

struct JoinedLinear {
  LinearArgs linear;
  // One of these is not null, and comes first. Its output are the rows of linear.input, or their
  // sub-tokens.
  const NormLaunch* norm = nullptr;
  const CombineArgs* sum = nullptr;
};

// Returns whether LaunchJoinedLinear() can compute this on the current device, and is expected to
// be faster than two launches: the rows and weights are bf16, and a cluster of blocks has the
// weights in its shared memory.
bool CanJoin(const JoinedLinear& joined);

// Has the bits of LaunchNorm() or LaunchCombine(), then LaunchLinear(). CanJoin() must allow it.
void LaunchJoinedLinear(const JoinedLinear& joined, cudaStream_t stream);

}  // namespace moeserve::cuda
