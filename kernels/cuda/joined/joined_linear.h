// A small dense layer of few rows in one launch with the operation that makes its rows.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/rows/rows.h"

namespace moeserve::cuda {

// The most rows of such a launch.
inline constexpr int kMostJoinedRows = 8;

// Who computes it. kCluster: one cluster of blocks that has the weights in shared memory. kStream:
// all multiprocessors, through which the weights stream; with a norm and without an activation.
// kAuto: the first of these that fits.
enum class JoinedForm : uint8_t { kAuto, kCluster, kStream };

struct JoinedLinear {
  LinearArgs linear;
  // One of these is not null, and comes first. Its output are the rows of linear.input, or their
  // sub-tokens.
  const NormLaunch* norm = nullptr;
  const CombineArgs* sum = nullptr;
  JoinedForm form = JoinedForm::kAuto;
};

// Returns whether LaunchJoinedLinear() can compute this on the current device and is expected to
// take no longer than two launches. The rows and weights must be bf16. With kStream, the output
// must not overlap anything that is read.
bool CanJoin(const JoinedLinear& joined, cudaStream_t stream);

// Has the bits of LaunchNorm() or LaunchCombine(), then LaunchLinear(). CanJoin() must allow it.
void LaunchJoinedLinear(const JoinedLinear& joined, cudaStream_t stream);

}  // namespace moeserve::cuda
